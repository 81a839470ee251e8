"""From a request to completions: everything checked, the model loaded, sampled, shown."""

from __future__ import annotations

import contextlib
import io
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from cohort.data import Row
from cohort.errors import ModelError, NonFiniteError
from cohort.generate.prompts import read_rows, render, with_prefix, within_context
from cohort.generate.request import Request, flags_in_errors
from cohort.generate.show import InOrder, Meter, TextStream, Write, headline, put_out, write_line
from cohort.policy import (
    Policy,
    end_token_ids,
    load_model,
    load_tokenizer,
    read_config,
    resolve_device,
    resolve_precision,
)
from cohort.rollout import LocalEngine, Purpose, RNGKey, Sampling, TokenEvent, Watch
from cohort.types import Completion, FinishReason, Group, Prompt

WINDOW = 4
"""So many full batches go to the engine in one call. It begins with the longest prompts, so what is written in order
can wait for the end of its call; and at the end of a call the batch shrinks."""


def generate(request: Request) -> int:
    """Sample, and show or write what comes. Everything that can be known to be wrong is looked at before the model is
    loaded, the cheapest first.

    Returns:
        The exit code: 0; 130 after Ctrl-C, which lets what has ended be written.

    Raises:
        CohortError: something that was asked for cannot be. ``NonFiniteError``: completions could not be drawn; the
            others are written.
        BrokenPipeError: nobody reads standard output any more.
    """
    with flags_in_errors():
        return Job.prepare(request).run()


@dataclass(frozen=True, slots=True)
class Job:
    """A request with everything checked."""

    request: Request
    tokenizer: Any
    config: Any
    """The model's."""
    rows: Sequence[Row]
    prompts: Sequence[Prompt]
    samplings: Sequence[Sampling]
    """One per prompt."""

    @classmethod
    def prepare(cls, request: Request) -> Job:
        """Look at everything but the model's weights.

        Raises:
            CohortError: something cannot be.
        """
        sampling = request.sampling()
        request.check_output()
        rows = read_rows(request)
        resolve_device(request.device)
        _check_folder(request.model)
        tokenizer = load_tokenizer(request.model, trust_remote_code=request.trust_remote_code)
        prompts = render(request, rows, tokenizer)
        config = read_config(request.model, trust_remote_code=request.trust_remote_code)
        sampling = with_prefix(request, sampling, tokenizer, config)
        samplings = within_context(request, prompts, sampling, config)
        return cls(request, tokenizer, config, rows, prompts, samplings)

    @property
    def total(self) -> int:
        """Completions asked for."""
        return len(self.prompts) * self.request.n

    @property
    def streams(self) -> bool:
        """Whether the text is shown token by token: a single completion, for people."""
        return self.request.output is None and self.total == 1

    def run(self) -> int:
        """Load, sample, show; the exit code.

        Raises:
            ModelError: the model cannot be loaded or sampled from.
            NonFiniteError: some completions could not be drawn.
        """
        if getattr(self.tokenizer, "chat_template", None) and not all(one.is_conversation for one in self.prompts):
            self._say("hint: the model has a chat template; --chat puts a plain prompt through it")
        engine = self._engine()
        self._say(self.describe(engine))
        meter = Meter(self.total, shown=not self.streams and not self.request.quiet)
        with _interruptible() as interrupted, _opened(self.request) as file, meter:
            results = InOrder(self.total, self.request.n, self._writer(file, meter))
            started = time.monotonic()
            try:
                self._sample(engine, results, meter, interrupted)
            finally:
                results.rest()
            seconds = time.monotonic() - started
        self._say(results.summary(seconds))
        if results.count(FinishReason.CANCELLED):
            self._say("interrupted: what had not ended is marked 'cancelled'")
            return 130
        if failed := results.count(FinishReason.ERROR):
            raise NonFiniteError(
                f"{failed} of {self.total} completions could not be drawn to their end (finish reason 'error'): the "
                "model's logits are not numbers, or no token is left that may be drawn"
            )
        return 0

    def _engine(self) -> LocalEngine:
        """The model, loaded as for training, and what samples from it."""
        request = self.request
        device = resolve_device(request.device)
        precision = resolve_precision(request.precision, device, getattr(self.config, "hidden_size", 0))
        model = load_model(request.model, precision, device, trust_remote_code=request.trust_remote_code)
        return LocalEngine(
            Policy(model, precision),
            self.tokenizer,
            end_token_ids(model, self.tokenizer),
            max_batch_size=request.batch_size,
            cache_tokens=request.cache_tokens,
        )

    def _sample(self, engine: LocalEngine, results: InOrder, meter: Meter, interrupted: Callable[[], bool]) -> None:
        count, key = self.request.n, RNGKey(self.request.seed, 0, Purpose.EVAL)
        stream = TextStream(self.tokenizer) if self.streams else None
        if stream:
            put_out("".join(stream.add(token) for token in self.samplings[0].forced_ids))

        def on_token(event: TokenEvent) -> None:
            meter.tokens += 1
            if stream and (new := stream.add(event.token_id)):
                put_out(new)

        def on_completion(first: int, index: int, sample: int, completion: Completion) -> None:
            if stream:
                put_out(stream.rest(completion.text) + "\n")
            meter.advance()
            results.put(first + index, sample, completion)

        size = max(1, WINDOW * self.request.batch_size // count)
        for first in range(0, len(self.prompts), size):
            prompts, samplings = self.prompts[first : first + size], self.samplings[first : first + size]
            if interrupted():
                groups = [_never_begun(prompt, count) for prompt in prompts]
            else:
                watch = Watch(
                    on_token if stream or meter.live else None, partial(on_completion, first), cancelled=interrupted
                )
                groups = engine.generate(prompts, count, samplings, key, watch)
            for index, group in enumerate(groups, first):
                for sample, completion in enumerate(group.completions):
                    results.put(index, sample, completion)  # of those that were never begun nothing was heard yet

    def _writer(self, file: IO[str] | None, meter: Meter) -> Write:
        """What is done with a completion when its turn has come."""

        def show(index: int, sample: int, completion: Completion) -> None:
            prompt = self.prompts[index] if len(self.prompts) > 1 else None
            head = headline(prompt, sample if self.request.n > 1 else None, completion)
            with meter.aside():
                put_out(f"{head}\n{completion.text}\n\n")

        def write(index: int, sample: int, completion: Completion) -> None:
            assert file is not None
            with meter.aside() if file is sys.stdout else contextlib.nullcontext():
                write_line(file, self.rows[index], index, sample, completion)

        if self.streams:
            return lambda *_: None
        return show if file is None else write

    def describe(self, engine: LocalEngine) -> str:
        """Model, way of sampling, end tokens, and every setting that a draw depends on, those that are off too."""
        one = min(self.samplings, key=lambda sampling: sampling.max_completion_length)
        parts = [one.describe()]
        limits = [sampling.max_completion_length for sampling in self.samplings]
        if min(limits) < max(limits):
            parts.append(f"for other prompts up to {max(limits)}, as the context leaves")
        if one.forced_ids:
            parts.append(f"prefix {self.request.prefix!r} ({len(one.forced_ids)} tokens)")
        parts.append(f"seed {self.request.seed}")
        return "\n".join([engine.describe_model(), f"sampling: {', '.join(parts)}", engine.describe_ends()])

    def _say(self, text: str) -> None:
        if not self.request.quiet:
            print(text, file=sys.stderr, flush=True)


def _check_folder(model: str) -> None:
    """A run's folder is no model, but holds some."""
    folder = Path(model).expanduser()
    if (folder / "checkpoints").is_dir() and not (folder / "config.json").exists():
        steps = sorted((folder / "checkpoints").glob("step-*"), key=lambda path: (len(path.name), path.name))
        hint = f"give one of its checkpoints, such as {steps[-1]}" if steps else "it has no checkpoint yet"
        raise ModelError(f"{model} is the folder of a run: {hint}")


def _never_begun(prompt: Prompt, count: int) -> Group:
    return Group(prompt, (Completion((), (), FinishReason.CANCELLED, "", 0),) * count)


@contextlib.contextmanager
def _opened(request: Request) -> Iterator[IO[str] | None]:
    """The file of completions; None where they are shown to people instead."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # rather than fail on what its encoding has not
    if request.output is None:
        yield None
    elif (path := request.output_path) is None:
        yield sys.stdout
    else:
        # What UTF-8 cannot hold, half a surrogate pair from a row, is then escaped just as JSON would have it.
        with path.open("w", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
            yield file


@contextlib.contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Let the first Ctrl-C only be known; the second one interrupts, as the first one does elsewhere.

    Nothing is changed where Ctrl-C does something else already, or outside the main thread.
    """
    asked = threading.Event()
    usual = signal.default_int_handler

    def ask(*_: object) -> None:
        asked.set()
        signal.signal(signal.SIGINT, usual)

    in_charge = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is usual
    if in_charge:
        signal.signal(signal.SIGINT, ask)
    try:
        yield asked.is_set
    finally:
        if in_charge:
            signal.signal(signal.SIGINT, usual)
