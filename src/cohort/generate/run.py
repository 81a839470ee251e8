"""From a request to completions: check everything, load the model, sample, and show or write what comes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cohort.data import Row, unknown_tokens
from cohort.errors import NonFiniteError
from cohort.evaluation.endpoint import NO_TOKEN, EndpointModel, EndpointSampler, check_request
from cohort.evaluation.evaluate import eval_sampling
from cohort.evaluation.model import ChosenModel
from cohort.generate.request import (
    Request,
    flags_in_errors,
    note_on_template,
    read_rows,
    render,
    shortened,
    with_prefix,
    within_context,
)
from cohort.policy import resolve_device
from cohort.rollout import LocalEngine, Purpose, RNGKey, ServedEngine, TokenEvent, Watch
from cohort.rollout.checks import describe_end_tokens
from cohort.rollout.trajectory import REPLACEMENT, decode
from cohort.runs.chosen import model_of
from cohort.runs.durable import as_json
from cohort.types import Completion, FinishReason, Group, Prompt, Segment

# ----------------------------------------
# The output of ``cohort generate``: streamed text, lines of a file in order, a progress bar.


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
    """A completion as a line of the output: the columns of ``OUTPUT_COLUMNS``, then the row's other columns. Token ids
    and log-probs that an endpoint does not return are null."""
    full_logps, episode = completion.full_logps, completion.episode
    token_ids = [token for segment in completion.segments for token in segment.token_ids.tolist()]
    known = NO_TOKEN not in token_ids
    return {
        "prompt": row["prompt"],
        "prompt_index": index,
        "sample_index": sample,
        "text": completion.text,
        "token_ids": token_ids if known else None,
        "logps": _by_token(completion.sampler_logps, completion.segments) if known else None,
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


AnyEngine = LocalEngine | ServedEngine | EndpointSampler
BATCHES_PER_CALL = 4
"""Full batches per call of the engine. A call begins with the longest prompts, so output in order may wait until its
end; and at the end of a call the batch shrinks."""


def generate(request: Request) -> int:
    """Sample, and show or write the completions. All arguments are checked before the model is loaded.

    Returns:
        The exit code: 0; 130 after Ctrl-C, which still writes the completions that have ended.

    Raises:
        CohortError: an argument is wrong. ``NonFiniteError``: some completions could not be sampled; the others are
            written.
        BrokenPipeError: standard output was closed.
    """
    with flags_in_errors():
        return Job(request).run()


class Job:
    """A checked request: everything but the model's weights is checked, the cheapest first.

    Raises:
        CohortError: an argument is wrong.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        request.check()
        sampling = eval_sampling(request.settings)
        self.acting = request.acting()
        self.rows = read_rows(request)
        self.model = self._model()
        self.tokenizer = self.model.tokenizer
        self.prompts = render(request, self.rows, self.tokenizer, self.acting)
        self.samplings = [sampling] * len(self.prompts)
        if isinstance(self.model, ChosenModel):
            config = self.model.config.get_text_config()
            sampling = with_prefix(request, sampling, self.tokenizer, config)
            self.samplings = within_context(request, self.prompts, sampling, config)
        self.total = len(self.prompts) * request.count
        """Number of completions."""
        self.streams = request.output is None and self.total == 1 and self.acting is None
        """Whether the text is printed token by token: a single completion that is not written to a file."""

    def _model(self) -> ChosenModel | EndpointModel:
        request = self.request
        if request.endpoint:
            check_request(request, request.settings, acts=self.acting is not None)
            return EndpointModel(request.endpoint, request.model)
        resolve_device(request.settings.model.device)
        chosen = model_of(request.model, request.checkpoint)
        return ChosenModel.of(*chosen, request.settings.model, request.settings.data, self.acting)

    def run(self) -> int:
        """Load the model, sample and show; return the exit code.

        Raises:
            ModelError: the model cannot be loaded or sampled from.
            NonFiniteError: some completions could not be sampled.
        """
        if getattr(self.tokenizer, "chat_template", None) and not all(one.is_conversation for one in self.prompts):
            self._log(
                "hint: --chat sends plain prompts as messages"
                if self.request.endpoint
                else "hint: the model has a chat template; --chat applies it to plain prompts"
            )
        if unknown := unknown_tokens(self.prompts, self.tokenizer):
            tokens = sum(len(one.token_ids) for one in self.prompts)
            self._log(
                f"warning: {unknown} of {tokens} tokens of the prompts are the unknown token: the model's tokenizer "
                "has no other for this text, and the model cannot read it"
            )
        longest = max(
            len(prompt.token_ids) + one.max_completion_length
            for prompt, one in zip(self.prompts, self.samplings, strict=True)
        )
        engine = self.model.engine(self.request.settings, longest)
        if self.request.run:
            name = self.model.name if isinstance(self.model, EndpointModel) else self.model.note or self.model.path
            self._log(f"{name}, with the settings of the run {self.request.run}")
        if note := note_on_template(self.request):
            self._log(note)
        self._log(self.describe(engine))
        meter = Meter(self.total, shown=not self.streams and not self.request.quiet)
        with _interruptible() as interrupted, _opened(self.request) as file, meter:
            results = InOrder(self.total, self.request.count, partial(self._write, file, meter))
            started = time.monotonic()
            try:
                self._sample(engine, results, meter, interrupted)
            finally:
                results.flush()
                engine.close()
                if self.acting:
                    self.acting.close()
            seconds = time.monotonic() - started
        self._log(results.summary(seconds))
        if results.reasons[FinishReason.CANCELLED]:
            self._log("interrupted: unfinished completions have the finish reason 'cancelled'")
            return 130
        cause = "model's logits are NaN or infinite, or no token is allowed"
        if self.request.endpoint:
            cause = "server cut them, as by a filter"
        if failed := results.reasons[FinishReason.ERROR]:
            raise NonFiniteError(
                f"{failed} of {self.total} completions could not be sampled to their end (finish reason 'error'): the "
                f"{cause}"
            )
        return 0

    def _sample(self, engine: AnyEngine, results: InOrder, meter: Meter, interrupted: Callable[[], bool]) -> None:
        count, key = self.request.count, RNGKey(self.request.settings.run.seed, 0, Purpose.EVAL)
        stream = TextStream(self.tokenizer) if self.streams else None
        if stream and self.request.prefix:  # its tokens are not drawn, so on_token is not called for them
            write_stdout("".join(map(stream.add, self.samplings[0].forced_ids)))

        def on_token(event: TokenEvent) -> None:
            meter.tokens += 1
            if stream and (new := stream.add(event.token_id)):
                write_stdout(new)

        def on_completion(first: int, index: int, sample: int, completion: Completion) -> None:
            if stream:
                write_stdout(stream.remainder(completion.text) + "\n")
            meter.count()
            results.add(first + index, sample, completion)

        sampler = self.model.sampler(engine)  # type: ignore[arg-type]
        size = max(1, BATCHES_PER_CALL * self.request.settings.rollout.max_batch_size // count)
        for first in range(0, len(self.prompts), size):
            prompts, samplings = self.prompts[first : first + size], self.samplings[first : first + size]
            if interrupted():
                unstarted = Completion.of_tokens((), (), FinishReason.CANCELLED, "", 0)
                groups = [Group(prompt, (unstarted,) * count) for prompt in prompts]
            else:
                each_token = on_token if stream or meter.shown else None
                watch = Watch(each_token, partial(on_completion, first), cancelled=interrupted)
                groups = sampler.generate(prompts, count, samplings, key, watch)
            for index, group in enumerate(groups, first):
                for sample, completion in enumerate(group.completions):
                    results.add(index, sample, completion)  # includes those that were never started

    def _write(self, file: IO[str] | None, meter: Meter, index: int, sample: int, completion: Completion) -> None:
        """Show or write a completion, when its turn has come."""
        if self.streams:
            return
        with meter.paused() if file in (None, sys.stdout) else contextlib.nullcontext():
            if file is None:
                prompt = self.prompts[index] if len(self.prompts) > 1 else None
                head = headline(prompt, sample if self.request.count > 1 else None, completion)
                write_stdout(f"{head}\n{transcript(completion)}\n\n")
            else:
                line = record(self.rows[index], index, sample, completion)
                file.write(as_json(line, ensure_ascii=False, default=str))
                file.flush()

    def describe(self, engine: AnyEngine) -> str:
        """The model, every setting that sampling depends on, and the end tokens."""
        shortest = min(self.samplings, key=lambda sampling: sampling.max_completion_length)
        longest = max(sampling.max_completion_length for sampling in self.samplings)
        parts = [shortest.describe()]
        if shortest.max_completion_length < longest:
            parts.append(f"for other prompts up to {longest}, as the context allows")
        if shortest.forced_ids:
            parts.append(f"prefix {self.request.prefix!r} ({len(shortest.forced_ids)} tokens)")
        parts.append(f"seed {self.request.settings.run.seed}")
        lines = [engine.describe_model(), f"sampling: {', '.join(parts)}"]
        if not isinstance(engine, EndpointSampler):
            lines.append(describe_end_tokens(engine.tokenizer, engine.end_token_ids))
        return "\n".join(lines)

    def _log(self, text: str) -> None:
        if not self.request.quiet:
            print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _opened(request: Request) -> Iterator[IO[str] | None]:
    """The file of completions; None if they are shown on the terminal instead."""
    if request.output is None:
        yield None
    elif (path := request.output_path) is None:
        yield sys.stdout
    else:
        # Unpaired surrogates of a row cannot be encoded as UTF-8; they are escaped as in JSON.
        with path.open("w", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
            yield file


@contextlib.contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Record the first Ctrl-C, and raise ``KeyboardInterrupt`` for the second one.

    Has no effect outside the main thread, or if the program handles Ctrl-C already.
    """
    interrupted = threading.Event()
    default = signal.default_int_handler

    def record(*_: object) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, default)

    active = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is default
    if active:
        signal.signal(signal.SIGINT, record)
    try:
        yield interrupted.is_set
    finally:
        if active:
            signal.signal(signal.SIGINT, default)
