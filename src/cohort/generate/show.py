"""What is seen of the completions: text as it comes, lines of a file in order, a bar."""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import IO, Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from cohort.data import Row
from cohort.rollout.stops import REPLACEMENT
from cohort.rollout.trajectory import decode
from cohort.types import Completion, FinishReason, Prompt

Write = Callable[[int, int, Completion], None]
"""Called with a prompt's index, the completion's number and the completion."""
KEPT = 16
"""Tokens that a stream of text looks back on, at least."""
PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
"""Control characters as pictures of themselves: a terminal would obey them, and a model can write anything."""


class TextStream:
    """The text of a completion while its tokens come. What was given out stays right whatever follows.

    Bytes that are no whole character yet are held back. So is everything after a byte token of a vocabulary that falls
    back to bytes (Llama 2, Gemma), until another token comes: its decoder judges a run of them as a whole.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []  # the newest
        self._shown = 0  # characters of their text that were given out
        self._given = 0  # characters of the whole text that were

    def add(self, token_id: int) -> str:
        """The text that has become certain with a token."""
        self._tokens.append(token_id)
        if self._is_byte(token_id):
            return ""
        text = decode(self._tokenizer, self._tokens)
        new = text.rstrip(REPLACEMENT)[self._shown :]
        self._shown += len(new)
        self._given += len(new)
        self._forget(text)
        return new

    def rest(self, text: str) -> str:
        """What the completion's whole text has after what was given out."""
        return text[self._given :]

    def _is_byte(self, token_id: int) -> bool:
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        return isinstance(token, str) and len(token) == 6 and token.startswith("<0x") and token.endswith(">")

    def _forget(self, text: str) -> None:
        """Keep few tokens, as each new one decodes them all, where the few spell the end of what the many do."""
        if len(self._tokens) < 2 * KEPT:
            return
        tail = decode(self._tokenizer, self._tokens[-KEPT:])
        before = len(text) - len(tail)
        if tail and text.endswith(tail) and before <= self._shown:
            self._tokens = self._tokens[-KEPT:]
            self._shown -= before


class InOrder:
    """Completions come as they end and go out in the order of the prompts, each prompt's together."""

    def __init__(self, total: int, num_generations: int, write: Write) -> None:
        self._total, self._num_generations, self._write = total, num_generations, write
        self._next = 0
        self._held: dict[int, Completion] = {}
        self._reasons: Counter[FinishReason] = Counter()
        self._tokens = 0

    def put(self, index: int, sample: int, completion: Completion) -> None:
        """Take a completion; a second time says nothing new."""
        place = index * self._num_generations + sample
        if place < self._next or place in self._held:
            return
        self._held[place] = completion
        self._reasons[completion.finish_reason] += 1
        self._tokens += len(completion.token_ids)
        while self._next in self._held:
            self._let_go(self._next)

    def rest(self) -> None:
        """Write what still waits for others that will not come."""
        for place in sorted(self._held):
            self._let_go(place)

    def _let_go(self, place: int) -> None:
        completion = self._held.pop(place)
        self._next = place + 1
        self._write(*divmod(place, self._num_generations), completion)

    def count(self, reason: FinishReason) -> int:
        """Completions that ended for a reason."""
        return self._reasons[reason]

    def summary(self, seconds: float) -> str:
        """How many, how they ended, how fast."""
        ends = ", ".join(f"{reason} {count}" for reason, count in self._reasons.most_common())
        what = "1 completion" if self._total == 1 else f"{self._total:,} completions"
        return (
            f"{what} ({ends or 'none ended'}), {self._tokens:,} tokens in {seconds:.2f} s: "
            f"{self._tokens / max(seconds, 1e-9):,.0f} tokens/s"
        )


class Meter:
    """A bar of completions on standard error, where that is a terminal and standard output no pipe: what stands at the
    pipe's other end may print to the same terminal, into the bar.

    Args:
        total: completions.
        shown: False shows nothing.
    """

    def __init__(self, total: int, *, shown: bool) -> None:
        self.tokens = 0
        self._bar: Progress | None = None
        if shown and sys.stderr.isatty() and not _in_a_pipe(sys.stdout):
            columns = (TextColumn("completion"), MofNCompleteColumn(), BarColumn(bar_width=30), _Speed(self))
            # Standard output is left alone: what goes there may go into a file.
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False)
            self._task = self._bar.add_task("", total=total)

    @property
    def live(self) -> bool:
        """Whether there is a bar, which wants to know of every token."""
        return self._bar is not None

    def __enter__(self) -> Self:
        self.started = time.monotonic()
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def advance(self) -> None:
        """One more completion has ended."""
        if self._bar:
            self._bar.advance(self._task)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Take the bar away while something is printed to the same terminal."""
        if self._bar is None or not sys.stdout.isatty():
            yield
            return
        self._bar.stop()
        yield
        self._bar.start()


def _in_a_pipe(file: IO[str]) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(file.fileno()).st_mode)
    except (OSError, ValueError):  # not a file of the system's
        return False


class _Speed(ProgressColumn):
    """Tokens, their speed, and the time that is left if the rest takes as long as what is done."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter = meter

    def render(self, task: Task) -> Text:
        """See ``ProgressColumn``."""
        tokens, seconds = self._meter.tokens, time.monotonic() - self._meter.started
        text = f"{tokens:,} tokens, {tokens / max(seconds, 1e-9):,.0f} tokens/s"
        if task.completed and task.total:
            text += f", {timedelta(seconds=round(seconds * (task.total / task.completed - 1)))} left"
        return Text(text)


def write_line(file: IO[str], row: Row, index: int, sample: int, completion: Completion) -> None:
    """Write a completion as a line of JSON; it is in the file when this returns."""
    file.write(json.dumps(record(row, index, sample, completion), ensure_ascii=False) + "\n")
    file.flush()


def record(row: Row, index: int, sample: int, completion: Completion) -> dict[str, Any]:
    """A completion as a line of the output has it: what is ours, then the row's other columns."""
    full_logps = completion.full_logps
    return {
        "prompt": _as_json(row["prompt"]),
        "prompt_index": index,
        "sample_index": sample,
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "logps": list(completion.sampler_logps),
        **({} if full_logps is None else {"full_logps": list(full_logps)}),
        "finish_reason": str(completion.finish_reason),
        **{column: _as_json(value) for column, value in row.items() if column != "prompt"},
    }


def _as_json(value: Any) -> Any:
    """Null for a number that JSON has not; text for what it has no type for, such as the dates of a parquet file."""
    if isinstance(value, Mapping):
        return {str(key): _as_json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(inner) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else str(value)


def headline(prompt: Prompt | None, sample: int | None, completion: Completion) -> str:
    """What stands above a completion that is not alone.

    Args:
        prompt: None where there is one only.
        sample: the same.
        completion: what follows.
    """
    parts = []
    if prompt is not None:
        content = prompt.prompt if isinstance(prompt.prompt, str) else str(prompt.prompt[-1]["content"])
        parts.append(f"prompt {prompt.uid} {content if len(content) <= 60 else content[:57] + '...'!r}")
    if sample is not None:
        parts.append(f"completion {sample}")
    return f"--- {', '.join(parts)} ({completion.finish_reason}, {len(completion.token_ids)} tokens)"


def put_out(text: str) -> None:
    """Print to standard output at once, without what a terminal would take for commands."""
    out = sys.stdout
    out.write(text.translate(PICTURES) if out.isatty() else text)
    out.flush()
