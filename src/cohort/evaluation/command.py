"""``cohort eval``: everything checked, then one model after the other loaded and evaluated."""

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
    """Evaluate a model and print the result. Everything but the weights is checked first, the cheapest before all.

    Returns:
        The exit code, 0.

    Raises:
        CohortError: the request cannot be fulfilled.
        KeyboardInterrupt: after Ctrl-C; the message names the files that were written.
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
    # The metric of the run's best model does not matter here.
    check_settings(settings.eval.model_copy(update={"metric_for_best_model": None}), tuple(data), rewards.names)
    resolve_device(settings.model.device)
    names = [request.model] if request.against is None else [request.model, request.against]
    subjects = [_subject(name, settings, rewards, data) for name in names]
    _check_same_prompts(subjects)
    try:
        found = _evaluations(request, settings, subjects)
    finally:
        rewards.close()
    comparisons = compared(found[0], found[1], settings) if len(found) > 1 else {}
    if request.json:
        write_summary(request.json, [subject.path for subject in subjects], found, comparisons, settings)
    show(Console(width=None if Console().is_terminal else 120), found, comparisons, settings)
    return 0


@dataclass(frozen=True, slots=True)
class Subject:
    """A model without its weights."""

    name: str
    """The name in the request."""
    path: str
    note: str
    """Which model of a run was chosen; empty if there was no choice."""
    tokenizer: Any
    config: Any
    """Configuration of the model."""
    evaluator: Evaluator


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
    """Models are compared prompt by prompt, so both must accept the same prompts."""
    first, *others = (subject.evaluator.sets for subject in subjects)
    for other in others:
        for name, prompts in first.items():
            if not np.array_equal(prompts.row_indices, other[name].row_indices):
                raise DataError(
                    f"{prompts.name}: data.overlong_prompts drops {prompts.dropped} prompts of one model and "
                    f"{other[name].dropped} of the other, so they would be compared on different prompts: set "
                    "data.overlong_prompts to 'error' or 'truncate_left', or choose shorter prompts"
                )


def _evaluations(request: Request, settings: GRPOConfig, subjects: Sequence[Subject]) -> list[Mapping[str, Evaluation]]:
    """Evaluate the models, each freed before the next is loaded, and write the completions of the first."""
    found: list[Mapping[str, Evaluation]] = []
    written = "nothing was written"
    try:
        for subject in subjects:
            found.append(_evaluation(subject, settings, quiet=request.quiet))
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            if request.output and len(found) == 1:
                write_rows(request.output, subject.evaluator, found[0])
                written = f"{request.output} is written"
    except KeyboardInterrupt:
        raise KeyboardInterrupt(written) from None
    return found


def _evaluation(subject: Subject, settings: GRPOConfig, *, quiet: bool) -> Mapping[str, Evaluation]:
    """Load a model and evaluate it."""
    plain = {"lora": LoraConfig(), "quantization": "none", "router_aux_loss_coef": 0.0}
    policy = load_policy(subject.path, settings.model.model_copy(update=plain), subject.config)
    engine = local_engine(policy, subject.tokenizer, settings.rollout)
    count = settings.eval.num_generations_eval
    prompts = sum(map(len, subject.evaluator.sets.values()))
    if not quiet:
        print(
            f"evaluating {subject.name}" + (f": {subject.note}" if subject.note else ""),
            f"{engine.describe_model()}\nsampling: {subject.evaluator.describe_sampling()}",
            f"{prompts:,} prompts x {count} = {prompts * count:,} completions, seed {settings.run.seed}",
            sep="\n",
            file=sys.stderr,
            flush=True,
        )
    with _bar(prompts * count, shown=not quiet) as advance:
        found = subject.evaluator.evaluate(engine, on_completion=advance)
    if all(one.counts["errors"] == one.table.num_rows for one in found.values()):
        raise NonFiniteError(f"no completion of {subject.name} could be drawn: its logits are NaN or infinite")
    return found


@contextmanager
def _bar(total: int, *, shown: bool) -> Iterator[Callable[[], None] | None]:
    """A progress bar of completions on standard error, if that is a terminal."""
    if not shown or not sys.stderr.isatty():
        yield None
        return
    columns = (TextColumn("completion"), MofNCompleteColumn(), BarColumn(bar_width=30), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda: progress.advance(task)
