"""From a request to numbers: everything checked, then one model after the other loaded and evaluated."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cohort.config import GRPOConfig, LoraConfig
from cohort.data import Data, load_sets
from cohort.errors import DataError, NonFiniteError
from cohort.evaluation.evaluate import Evaluation, Evaluator, check_settings
from cohort.evaluation.request import Request, model_of
from cohort.evaluation.show import compared, show, write_rows, write_summary
from cohort.policy import context_length, load_policy, load_tokenizer, read_config, resolve_device
from cohort.rewards import RewardRunner, as_reward_function
from cohort.rollout import local_engine


def evaluate(request: Request) -> int:
    """Evaluate and say what was found. Everything that can be known to be wrong is looked at before a model is loaded.

    Returns:
        The exit code, 0.

    Raises:
        CohortError: something that was asked for cannot be.
        KeyboardInterrupt: after Ctrl-C; it says what is written.
    """
    job = Job.prepare(request)
    try:
        job.run()
    finally:
        job.rewards.close()
    return 0


@dataclass(frozen=True, slots=True)
class Subject:
    """A model with everything but its weights."""

    name: str
    """As it was asked for."""
    path: str
    note: str
    """Which model of a run it is; empty where there was no choice."""
    tokenizer: Any
    config: Any
    """The model's."""
    evaluator: Evaluator


@dataclass(frozen=True, slots=True)
class Job:
    """A request with everything checked."""

    request: Request
    settings: GRPOConfig
    rewards: RewardRunner
    subjects: Sequence[Subject]
    """The model, and the one that it is compared with."""

    @classmethod
    def prepare(cls, request: Request) -> Job:
        """Look at everything but the weights, the cheapest first.

        Raises:
            CohortError: something cannot be.
        """
        settings = request.settings()
        request.check_files(settings)
        rewards = RewardRunner(
            [as_reward_function(name) for name in settings.reward.functions],
            settings.reward.weights,
            settings.reward,
            per_token=settings.resolved_objective.credit in ("process", "given"),
        )
        data = load_sets(None, settings.data)
        # What [eval] says of a run's best model is no matter here.
        check_settings(settings.eval.model_copy(update={"metric_for_best_model": None}), tuple(data), rewards.names)
        resolve_device(settings.model.device)
        names = [request.model, *([request.against] if request.against is not None else [])]
        subjects = [_subject(name, settings, rewards, data) for name in names]
        _check_same_prompts(subjects)
        return cls(request, settings, rewards, subjects)

    def run(self) -> None:
        """Evaluate, show, write."""
        found: list[Mapping[str, Evaluation]] = []
        written = "nothing was written"
        try:
            for subject in self.subjects:
                found.append(self._evaluate(subject))
                if self.request.output and len(found) == 1:
                    write_rows(self.request.output, subject.evaluator, found[0])
                    written = f"{self.request.output} is written"
        except KeyboardInterrupt:
            raise KeyboardInterrupt(written) from None
        comparisons = compared(found[0], found[1], self.settings) if len(found) > 1 else {}
        if self.request.json:
            paths = [subject.path for subject in self.subjects]
            write_summary(self.request.json, paths, found, comparisons, self.settings)
        show(Console(width=None if Console().is_terminal else 120), found, comparisons, self.settings)

    def _evaluate(self, subject: Subject) -> Mapping[str, Evaluation]:
        """Load a model, evaluate it and let it go."""
        model = self.settings.model.model_copy(
            update={"lora": LoraConfig(), "quantization": "none", "router_aux_loss_coef": 0.0}
        )
        policy = load_policy(subject.path, model, subject.config)
        engine = local_engine(policy, subject.tokenizer, self.settings.rollout)
        count = self.settings.eval.num_generations_eval
        prompts = sum(len(own) for own in subject.evaluator.sets.values())
        self._say(f"evaluating {subject.name}" + (f": {subject.note}" if subject.note else ""))
        self._say(f"{engine.describe_model()}\nsampling: {subject.evaluator.describe_sampling()}")
        self._say(f"{prompts:,} prompts x {count} = {prompts * count:,} completions, seed {self.settings.run.seed}")
        with _bar(prompts * count, shown=not self.request.quiet) as advance:
            found = subject.evaluator.evaluate(engine, on_completion=advance)
        del policy, engine
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if all(one.counts["errors"] == one.table.num_rows for one in found.values()):
            raise NonFiniteError(f"no completion of {subject.name} could be drawn: its logits are not numbers")
        return found

    def _say(self, text: str) -> None:
        if not self.request.quiet:
            print(text, file=sys.stderr, flush=True)


def _subject(name: str, settings: GRPOConfig, rewards: RewardRunner, data: Mapping[str, Data]) -> Subject:
    path, note = model_of(name)
    trust = settings.model.trust_remote_code
    tokenizer = load_tokenizer(path, trust_remote_code=trust)
    if settings.data.chat_template is not None:
        tokenizer.chat_template = settings.data.chat_template
    config = read_config(path, trust_remote_code=trust)
    evaluator = Evaluator.of(settings, data, rewards, tokenizer, context_length(config))
    return Subject(name, path, note, tokenizer, config, evaluator)


def _check_same_prompts(subjects: Sequence[Subject]) -> None:
    """Models are compared prompt by prompt, so both must take all that either takes."""
    first, *others = (subject.evaluator.sets for subject in subjects)
    for other in others:
        for name, prompts in first.items():
            if not np.array_equal(prompts.row_indices, other[name].row_indices):
                raise DataError(
                    f"{prompts.name}: data.overlong_prompts drops {prompts.dropped} prompts of one model and "
                    f"{other[name].dropped} of the other, which are then not compared on the same: set "
                    "data.overlong_prompts to 'error' or 'truncate_left', or choose shorter prompts"
                )


@contextmanager
def _bar(total: int, *, shown: bool) -> Iterator[Callable[[], None] | None]:
    """A bar of completions on standard error, where that is a terminal."""
    if not shown or not sys.stderr.isatty():
        yield None
        return
    columns = (TextColumn("completion"), MofNCompleteColumn(), BarColumn(bar_width=30), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda: progress.advance(task)
