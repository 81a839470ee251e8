"""From a request to completions: check everything, load the model, sample, and show or write what comes."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO

from cohort.data import unknown_tokens
from cohort.data.chat import use_template
from cohort.environments.turns import TurnFormat
from cohort.errors import ModelError, NonFiniteError
from cohort.generate.request import (
    Request,
    flags_in_errors,
    note_on_template,
    read_rows,
    render,
    with_prefix,
    within_context,
)
from cohort.generate.show import InOrder, Meter, TextStream, headline, record, transcript, write_stdout
from cohort.policy import end_token_ids, load_policy, load_tokenizer, read_config, resolve_device
from cohort.rollout import LocalEngine, Purpose, RNGKey, Sampler, TokenEvent, Watch, local_engine
from cohort.rollout.engine import describe_end_tokens
from cohort.runs.chosen import model_of, run_of
from cohort.runs.lines import as_json
from cohort.types import Completion, FinishReason, Group

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
        sampling = request.sampling()
        self.acting = request.acting()
        self.rows = read_rows(request)
        self.loading, data = request.loading, request.settings.data
        resolve_device(self.loading.device)
        _check_folder(request.model)
        self.model, self.note = model_of(request.model, request.checkpoint)
        remote = self.loading.trust_remote_code
        self.tokenizer = load_tokenizer(self.model, trust_remote_code=remote)
        use_template(self.tokenizer, data.chat_template, data.template_time)
        self.turn_format: TurnFormat | None = None
        if self.acting:
            ends = end_token_ids(self.model, self.tokenizer, trust_remote_code=remote)
            self.turn_format = self.acting.turn_format(self.tokenizer, ends, data.chat_template_kwargs)
        self.prompts = render(request, self.rows, self.tokenizer, self.acting)
        self.config = read_config(self.model, trust_remote_code=remote)
        sampling = with_prefix(request, sampling, self.tokenizer, self.config)
        self.samplings = within_context(request, self.prompts, sampling, self.config)

    @property
    def total(self) -> int:
        """Number of completions."""
        return len(self.prompts) * self.request.count

    @property
    def streams(self) -> bool:
        """Whether the text is printed token by token: a single completion that is not written to a file."""
        return self.request.output is None and self.total == 1 and self.acting is None

    def run(self) -> int:
        """Load the model, sample and show; return the exit code.

        Raises:
            ModelError: the model cannot be loaded or sampled from.
            NonFiniteError: some completions could not be sampled.
        """
        if getattr(self.tokenizer, "chat_template", None) and not all(one.is_conversation for one in self.prompts):
            self._log("hint: the model has a chat template; --chat applies it to plain prompts")
        if unknown := unknown_tokens(self.prompts, self.tokenizer):
            tokens = sum(len(one.token_ids) for one in self.prompts)
            self._log(
                f"warning: {unknown} of {tokens} tokens of the prompts are the unknown token: the model's tokenizer "
                "has no other for this text, and the model cannot read it"
            )
        engine = self._engine()
        if self.request.run:
            self._log(f"{self.note or self.model}, with the settings of the run {self.request.run}")
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
                if self.acting:
                    self.acting.close()
            seconds = time.monotonic() - started
        self._log(results.summary(seconds))
        if results.reasons[FinishReason.CANCELLED]:
            self._log("interrupted: unfinished completions have the finish reason 'cancelled'")
            return 130
        if failed := results.reasons[FinishReason.ERROR]:
            raise NonFiniteError(
                f"{failed} of {self.total} completions could not be sampled to their end (finish reason 'error'): the "
                "model's logits are NaN or infinite, or no token is allowed"
            )
        return 0

    def _engine(self) -> LocalEngine:
        """The sampling engine, with the model loaded as for training."""
        policy = load_policy(self.model, self.loading, self.config)
        return local_engine(policy, self.tokenizer, self.request.limits)

    def _sample(self, engine: LocalEngine, results: InOrder, meter: Meter, interrupted: Callable[[], bool]) -> None:
        count, key = self.request.count, RNGKey(self.request.random_seed, 0, Purpose.EVAL)
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

        sampler: Sampler = engine
        if self.acting and self.turn_format:
            sampler = self.acting.sampler(engine, self.turn_format)
        size = max(1, BATCHES_PER_CALL * self.request.limits.max_batch_size // count)
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

    def describe(self, engine: LocalEngine) -> str:
        """The model, every setting that sampling depends on, and the end tokens."""
        shortest = min(self.samplings, key=lambda sampling: sampling.max_completion_length)
        longest = max(sampling.max_completion_length for sampling in self.samplings)
        parts = [shortest.describe()]
        if shortest.max_completion_length < longest:
            parts.append(f"for other prompts up to {longest}, as the context allows")
        if shortest.forced_ids:
            parts.append(f"prefix {self.request.prefix!r} ({len(shortest.forced_ids)} tokens)")
        parts.append(f"seed {self.request.random_seed}")
        ends = describe_end_tokens(engine.tokenizer, engine.end_token_ids)
        return "\n".join([engine.describe_model(), f"sampling: {', '.join(parts)}", ends])

    def _log(self, text: str) -> None:
        if not self.request.quiet:
            print(text, file=sys.stderr, flush=True)


def _check_folder(model: str) -> None:
    """Refuse a folder of checkpoints that is no run's, and name a checkpoint in it."""
    folder = Path(model).expanduser()
    if run_of(folder) is None and (folder / "checkpoints").is_dir() and not (folder / "config.json").exists():
        steps = sorted((folder / "checkpoints").glob("step-*"), key=lambda path: (len(path.name), path.name))
        hint = f"give one of its checkpoints, such as {steps[-1]}" if steps else "it has no checkpoint yet"
        raise ModelError(f"{model} has checkpoints, and not the config.toml and objective.txt of a run: {hint}")


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
