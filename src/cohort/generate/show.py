"""The output of ``cohort generate``: streamed text, lines of a file in order, a progress bar."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cohort.data import Row
from cohort.generate.request import shortened
from cohort.rollout.trajectory import REPLACEMENT, decode
from cohort.types import Completion, FinishReason, Prompt, Segment

LOOKBACK = 16
"""Minimum number of tokens that ``TextStream`` decodes together."""
CONTROL_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
"""Control characters and their visible symbols. A model can write escape sequences that a terminal would execute."""


class TextStream:
    """The text of a completion, token by token. Text that was returned never changes.

    Incomplete characters are held back. So is everything after a byte token of a byte-fallback vocabulary (Llama 2,
    Gemma) until another token follows, since the decoder treats consecutive byte tokens as one unit.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []  # the latest
        self._shown = 0  # characters of their text that were returned
        self._total_shown = 0

    def add(self, token_id: int) -> str:
        """The text that has become final with a token."""
        self._tokens.append(token_id)
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if isinstance(token, str) and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return ""
        text = decode(self._tokenizer, self._tokens)
        new = text.rstrip(REPLACEMENT)[self._shown :]
        self._shown += len(new)
        self._total_shown += len(new)
        self._drop_old_tokens(text)
        return new

    def remainder(self, text: str) -> str:
        """The part of the completion's whole text that was not returned yet."""
        return text[self._total_shown :]

    def _drop_old_tokens(self, text: str) -> None:
        """Keep only the latest tokens, if they alone decode to the end of the text: each ``add`` decodes all of
        them."""
        if len(self._tokens) < 2 * LOOKBACK:
            return
        tail = decode(self._tokenizer, self._tokens[-LOOKBACK:])
        before = len(text) - len(tail)
        if tail and text.endswith(tail) and before <= self._shown:
            self._tokens = self._tokens[-LOOKBACK:]
            self._shown -= before


class InOrder:
    """Writes completions in the order of prompts and samples, in whatever order they end.

    Args:
        total: number of completions.
        num_generations: completions per prompt.
        write: called with the prompt's index, the sample's index and the completion.
    """

    def __init__(self, total: int, num_generations: int, write: Callable[[int, int, Completion], None]) -> None:
        self.reasons: Counter[FinishReason] = Counter()
        self._total, self._num_generations, self._write = total, num_generations, write
        self._next = 0
        self._waiting: dict[int, Completion] = {}
        self._tokens = 0

    def add(self, index: int, sample: int, completion: Completion) -> None:
        """Add a completion. Idempotent."""
        position = index * self._num_generations + sample
        if position < self._next or position in self._waiting:
            return
        self._waiting[position] = completion
        self.reasons[completion.finish_reason] += 1
        self._tokens += completion.num_tokens
        while self._next in self._waiting:
            self._write_waiting(self._next)

    def flush(self) -> None:
        """Write all waiting completions, without waiting for the missing ones."""
        for position in sorted(self._waiting):
            self._write_waiting(position)

    def _write_waiting(self, position: int) -> None:
        completion = self._waiting.pop(position)
        self._next = position + 1
        self._write(*divmod(position, self._num_generations), completion)

    def summary(self, seconds: float) -> str:
        """Number of completions, finish reasons and speed, in words."""
        ends = ", ".join(f"{reason} {count}" for reason, count in self.reasons.most_common())
        what = "1 completion" if self._total == 1 else f"{self._total:,} completions"
        return (
            f"{what} ({ends or 'none ended'}), {self._tokens:,} tokens in {seconds:.2f} s: "
            f"{self._tokens / max(seconds, 1e-9):,.0f} tokens/s"
        )


class Meter(Progress):
    """A progress bar on standard error.

    Shown only if standard error is a terminal and standard output is not a pipe: the program at the pipe's other end
    may print to the same terminal.

    Args:
        total: number of completions.
        shown: False shows nothing.
    """

    def __init__(self, total: int, *, shown: bool) -> None:
        self.tokens, self._started = 0, time.monotonic()
        super().__init__(
            TextColumn("completion"),
            MofNCompleteColumn(),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[meter].speed}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
            redirect_stdout=False,  # standard output may be a file
            disable=not shown or not sys.stderr.isatty() or _is_pipe(sys.stdout),
        )
        self._task = self.add_task("", total=total, meter=self)

    @property
    def shown(self) -> bool:
        """Whether the bar is shown and counts every token."""
        return not self.disable

    @property
    def speed(self) -> str:
        """Tokens and tokens per second."""
        seconds = time.monotonic() - self._started
        return f"{self.tokens:,} tokens, {self.tokens / max(seconds, 1e-9):,.0f} tokens/s"

    def count(self) -> None:
        """Count a completion."""
        self.advance(self._task)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Hide the bar while something is printed to the same terminal."""
        if not self.shown or not sys.stdout.isatty():
            yield
            return
        self.stop()
        yield
        self.start()


def _is_pipe(file: IO[str]) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(file.fileno()).st_mode)
    except (OSError, ValueError):  # not a file of the operating system
        return False


def record(row: Row, index: int, sample: int, completion: Completion) -> dict[str, Any]:
    """A completion as a line of the output: the columns of ``OUTPUT_COLUMNS``, then the row's other columns."""
    full_logps, episode = completion.full_logps, completion.episode
    token_ids = [token for segment in completion.segments for token in segment.token_ids.tolist()]
    return {
        "prompt": row["prompt"],
        "prompt_index": index,
        "sample_index": sample,
        "text": completion.text,
        "token_ids": token_ids,
        "logps": _by_token(completion.sampler_logps, completion.segments),
        **({} if full_logps is None else {"full_logps": _by_token(full_logps, completion.segments)}),
        **({} if episode is None else {"messages": episode.messages, "environment_reward": episode.reward}),
        "finish_reason": str(completion.finish_reason),
        **{column: value for column, value in row.items() if column != "prompt"},
    }


def _by_token(logps_N: NDArray[np.float64], segments: Sequence[Segment]) -> list[float | None]:
    """One entry per token of the segments; null for tokens that were not drawn: of a prefix, or of answers."""
    drawn = iter(logps_N.tolist())
    return [next(drawn) if is_drawn else None for segment in segments for is_drawn in segment.is_drawn]


def transcript(completion: Completion) -> str:
    """The text of a completion; of an episode, its messages."""
    if completion.episode is None:
        return completion.text
    lines = []
    for message in completion.episode.messages:
        calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", ())]
        speaker = " ".join(filter(None, [str(message["role"]), message.get("name")]))
        lines.append(f"{speaker}: {' '.join(filter(None, [str(message.get('content') or ''), *calls]))}")
    if completion.episode.error:
        lines.append(f"failed: {completion.episode.error}")
    return "\n".join(lines)


def headline(prompt: Prompt | None, sample: int | None, completion: Completion) -> str:
    """The line above a completion, when there are several.

    Args:
        prompt: None if there is only one prompt.
        sample: None if there is only one completion per prompt.
        completion: the completion below the line.
    """
    parts = []
    if prompt is not None:
        content = prompt.prompt if isinstance(prompt.prompt, str) else str(prompt.prompt[-1]["content"])
        parts.append(f"prompt {prompt.uid} {shortened(content)!r}")
    if sample is not None:
        parts.append(f"completion {sample}")
    return f"--- {', '.join(parts) or 'completion'} ({completion.finish_reason}, {completion.num_tokens} tokens)"


def write_stdout(text: str) -> None:
    """Print to standard output and flush. On a terminal, control characters are replaced by visible symbols."""
    out = sys.stdout
    out.write(text.translate(CONTROL_PICTURES) if out.isatty() else text)
    out.flush()
