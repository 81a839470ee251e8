"""Evaluation: sample held-out prompts, score the completions, estimate with intervals over prompts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Any

import numpy as np
import pyarrow
import torch
from torch import Tensor

from cohort.config import EvalConfig, GRPOConfig
from cohort.data import Data, LengthLimit, PromptSet
from cohort.environments import Acting
from cohort.errors import ConfigError
from cohort.objective import group_statistics
from cohort.rewards import RewardRunner, TrainerState
from cohort.rewards.runner import Scores
from cohort.rollout import Purpose, RNGKey, Sampler, Sampling, Watch
from cohort.runs.checkpoints import seeded
from cohort.runs.tables import completion_columns, score_columns
from cohort.statistics import Estimate, Floats, estimates, majority_at_k, pass_at_k
from cohort.types import FinishReason
from cohort.watchdog import waiting

# ----------------------------------------
# Numbers of all completions of an evaluated set together, beside the means over prompts.


def totals(scores: Scores, completions: Sequence[tuple[int, FinishReason]], group_size: int) -> dict[str, float | None]:
    """Spread of the rewards, extremes of the lengths, and lengths of the completions that ended, with the keys of
    docs/metrics.md. A statistic of an empty set is None.

    Args:
        scores: scores of all completions, failed ones included.
        completions: number of tokens and finish reason of each.
        group_size: completions per prompt.
    """
    group_S = torch.arange(len(completions)) // group_size
    degenerate_P = group_statistics(scores.rewards_S, group_S, ddof=0).degenerate_P
    found: dict[str, float | None] = {**_spread("reward", scores.rewards_S)}
    found["reward/dead_share"] = float(degenerate_P.double().mean())
    for name, column_S in zip(scores.names, scores.by_function_SK.T, strict=True):
        found |= _spread(f"rewards/{name}", column_S)
    lengths = [length for length, reason in completions if reason.usable]
    ended = [length for length, reason in completions if reason is FinishReason.EOS]
    return found | {
        "length/min": min(lengths, default=None),
        "length/max": max(lengths, default=None),
        "length/ended_share": len(ended) / len(lengths) if lengths else None,
        **ended_lengths(ended),
    }


def ended_lengths(lengths: Sequence[int]) -> dict[str, float | None]:
    """Mean and extremes of the lengths of completions that ended by themselves; None without any."""
    return {
        "length/ended_mean": sum(lengths) / len(lengths) if lengths else None,
        "length/ended_min": min(lengths, default=None),
        "length/ended_max": max(lengths, default=None),
    }


def std_of(values: Tensor) -> float | None:
    """The standard deviation, divided by n; None without values."""
    return float(values.std(correction=0)) if values.numel() else None


def _spread(name: str, rewards_S: Tensor) -> dict[str, float | None]:
    scored_S = rewards_S[~rewards_S.isnan()]
    return {f"{name}/std": std_of(scored_S), f"{name}/scored": scored_S.numel()}


log = logging.getLogger("cohort.train")
WINDOW = 4
"""Full engine batches that are sampled and scored at a time, so that the memory of engine and rewards does not grow
with the set. Completions of a prompt are never separated."""
ANSWER = "answer"
"""The column in which reward functions log a completion's answer, for majority votes."""


NOT_PROPORTIONS = ("length",)
"""Metrics that must not be treated as proportions, even if every value is 0 or 1."""


@dataclass(frozen=True, slots=True)
class Success:
    """What decides whether a completion is correct."""

    function: str
    """Name of the reward function."""
    threshold: float

    @classmethod
    def of(cls, settings: EvalConfig, functions: Sequence[str]) -> Success | None:
        """The choice of ``eval.success``, or the only reward function; None with several, as any may be meant."""
        function = settings.success or (functions[0] if len(functions) == 1 else None)
        return cls(function, settings.success_threshold) if function else None

    def of_rewards(self, rewards_PG: Floats) -> Floats:
        """1 for rewards of at least the threshold, 0 for others, NaN for NaN."""
        return np.where(np.isnan(rewards_PG), np.nan, (rewards_PG >= self.threshold).astype(np.float64))

    def __str__(self) -> str:
        """As in "math >= 1"."""
        return f"{self.function} >= {self.threshold:g}"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The evaluation of one set."""

    values: Mapping[str, Floats]
    """For each metric, one number per prompt; NaN if missing."""
    estimates: Mapping[str, Estimate]
    """Means over prompts."""
    counts: Mapping[str, float]
    """Numbers without an interval: unscored and failed completions, and what functions logged."""
    totals: Mapping[str, float | None]
    """Numbers of all completions together."""
    table: Any
    """Every completion with its scores: a ``pyarrow.Table`` with the columns of ``rollouts/``."""
    success: Success | None
    """What pass@k and maj@k count as correct; None: there are none."""
    seconds: float
    """Wall-clock seconds of sampling and scoring."""

    @property
    def reward(self) -> Estimate:
        """The mean reward."""
        return self.estimates["reward"]

    def metrics(self, name: str = "") -> dict[str, float | None]:
        """The metrics, flat, for ``metrics.jsonl``; ``name`` is the set's if there are several."""
        flat: dict[str, float | None] = {
            f"{prefix(name)}{metric}/{kind}": getattr(estimate, kind)
            for metric, estimate in self.estimates.items()
            for kind in ("mean", "low", "high")
        }
        return flat | {f"{prefix(name)}{key}": value for key, value in {**self.counts, **self.totals}.items()}


def prefix(name: str) -> str:
    """Prefix of the metrics of a set.

    >>> prefix(""), prefix("gsm8k")
    ('eval/', 'eval/gsm8k/')
    """
    return f"eval/{name}/" if name else "eval/"


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Evaluates a policy on fixed prompts with fixed random numbers: two policies are compared on the same draws.

    An evaluation does not affect the training: its draws are functions of its own keys, and the global random
    generators, which a reward function may use, are seeded before it and restored afterwards.
    """

    sets: Mapping[str, PromptSet]
    """Sets by name; "" for a set without a name."""
    rewards: RewardRunner
    sampling: Sampling
    settings: EvalConfig
    seed: int
    batch_size: int
    """Completions that the engine decodes at a time."""

    @classmethod
    def of(
        cls,
        config: GRPOConfig,
        sets: Mapping[str, Data],
        rewards: RewardRunner,
        tokenizer: Any,
        context: int | None,
        acting: Acting | None = None,
        tokens: tuple[int | None, Collection[int]] = (None, ()),
        *,
        fits: bool = False,
        flag: str = "",
    ) -> Evaluator:
        """The evaluator of the settings. Tries the reward functions on two rows of each set.

        Args:
            config: the settings.
            sets: rows by name.
            rewards: the reward functions.
            tokenizer: the model's tokenizer.
            context: context length of the model in tokens; None: unknown.
            acting: the tools and environments.
            tokens: the tokens that prompts may hold, as ``PromptSet.check_tokens`` takes them.
            fits: completions are no longer than the context leaves beside the longest prompt.
            flag: what errors say to set in place of the setting, for shorter completions.

        Raises:
            ConfigError: majority votes are requested, but the judging function cannot log answers.
            DataError: a row cannot be a prompt, or leaves no room for a completion in the model's context.
            RewardError: a function failed on an example completion.
        """
        check_votes(config.eval, rewards)
        sampling = eval_sampling(config)
        own = config.eval.max_completion_length_eval is not None
        setting = "eval.max_completion_length_eval" if own else "rollout.max_completion_length"
        least = max(1, sampling.min_completion_length) if fits else sampling.max_completion_length
        limit = LengthLimit.of(config.data, context, least, setting, flag)
        tools = acting.schemas_of if acting else None
        made = {name: PromptSet(data, tokenizer, config.data, limit=limit, tools=tools) for name, data in sets.items()}
        for prompts in made.values():
            prompts.check_tokens(*tokens)
            with seeded(config.run.seed):
                state = TrainerState(evaluating=True)
                rewards.dry_run(prompts[:2], state=state, episodes=acting is not None)
        if fits and context is not None:
            room = context - max(prompts.longest for prompts in made.values())
            sampling = replace(sampling, max_completion_length=min(sampling.max_completion_length, room))
        return cls(made, rewards, sampling, config.eval, config.run.seed, config.rollout.max_batch_size)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its completion."""
        return max(prompts.longest for prompts in self.sets.values()) + self.sampling.max_completion_length

    @waiting("evaluation")
    def evaluate(
        self,
        sampler: Sampler,
        state: TrainerState | None = None,
        on_completion: Callable[[], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> dict[str, Evaluation]:
        """Sample and score every prompt of every set. Unscored completions are left out of a prompt's numbers.

        Args:
            sampler: samples the completions.
            state: progress of the run, for reward functions.
            on_completion: called when a completion has ended.
            cancelled: asked now and then whether the evaluation is not wanted any more.

        Raises:
            RewardError: a reward function failed.
            CancelledError: the evaluation is not wanted any more, on some rank.
        """
        state = replace(state or TrainerState(), evaluating=True)
        found = {}
        for name, prompts in self.sets.items():
            with seeded(self.seed):  # per set, so that a set does not depend on those before it
                found[name] = self._evaluate(sampler, prompts, state, on_completion, cancelled)
        return found

    def fingerprint(self, metric: str) -> str:
        """Hash of the prompts that a metric is measured on, and of the columns of their rows."""
        sets = (one for name, one in self.sets.items() if metric.startswith(prefix(name)))
        return " ".join(f"{one.fingerprint} {' '.join(one.contents.values())}" for one in sets)

    def describe(self) -> str:
        """The sets and the sampling in words."""
        sets = ", ".join(f"{name} {len(prompts):,}".strip() for name, prompts in self.sets.items())
        count = self.settings.num_generations_eval
        lines = [f"evaluation: {sets} prompts x {count}; {self.describe_sampling()}", f"  {self.describe_success()}"]
        for name, prompts in self.sets.items():
            lines += [f"  {name and f'{name}: '}{line}" for line in prompts.describe()]
        return "\n".join(lines)

    def _evaluate(
        self,
        sampler: Sampler,
        prompts: PromptSet,
        state: TrainerState,
        on_completion: Callable[[], None] | None,
        cancelled: Callable[[], bool] | None,
    ) -> Evaluation:
        settings, count, started = self.settings, self.settings.num_generations_eval, time.perf_counter()
        key, size = RNGKey(self.seed, 0, Purpose.EVAL), max(1, WINDOW * self.batch_size // count)
        tables, scored, completions = [], [], []
        for first in range(0, len(prompts), size):
            some = prompts[first : first + size]
            with self.rewards.begin(some, count, state, cancelled=cancelled) as scoring:

                def ended(*completion: Any, scored: Callable[..., None] = scoring.on_completion) -> None:
                    scored(*completion)
                    if on_completion:
                        on_completion()

                watch = Watch(on_completion=ended, on_prompt=scoring.on_prompt, cancelled=cancelled)
                groups = sampler.generate(some, count, self.sampling, key, watch)
                if cancelled and any(self.rewards.world.gather(cancelled())):
                    raise CancelledError
                assert all(len(group.completions) == count for group in groups)  # those that failed too
                scored.append(scoring.finish(groups))
            tables.append(pyarrow.table(completion_columns(groups)))
            completions += [(c.num_tokens, c.finish_reason) for group in groups for c in group.completions]
        table, scores = pyarrow.concat_tables(tables, promote_options="default"), reduce(add, scored)
        for name, column in score_columns(scores).items():
            table = table.append_column(name, pyarrow.array(column))
        values = per_prompt(scores, completions, settings, self.success, self.seed, self._answers(scores))
        confidence, resamples = settings.confidence, settings.bootstrap_samples
        found = estimates(values, confidence, resamples, self.seed, NOT_PROPORTIONS)
        counts = {
            "unscored": int(scores.rewards_S.isnan().sum()),
            "errors": sum(reason is FinishReason.ERROR for _, reason in completions),
            **{f"custom/{name}": sum(numbers) / len(numbers) for name, numbers in scores.logged.items()},
        }
        together, seconds = totals(scores, completions, count), time.perf_counter() - started
        return Evaluation(values, found, counts, together, table, self.success, seconds)

    def describe_sampling(self) -> str:
        """The sampling in words, with a warning if all completions of a prompt are the same."""
        count = self.settings.num_generations_eval
        same = count > 1 and self.sampling.temperature == 0
        return self.sampling.describe() + f"; at temperature 0 a prompt's {count} completions are the same one" * same

    @property
    def success(self) -> Success | None:
        """What decides whether a completion is correct."""
        return Success.of(self.settings, self.rewards.names)

    def describe_success(self) -> str:
        """In words, what pass@k and maj@k are of, or why there are none."""
        if self.success:
            return f"correct: {self.success}"
        names = ", ".join(self.rewards.names)
        return f"no pass@k: set eval.success to the function that decides what is correct ({names})"

    def _answers(self, scores: Scores) -> Sequence[Any] | None:
        """The answers that the judging function logged; None without any."""
        if self.success is None:
            return None
        answers = scores.extras.get(self.rewards.column(ANSWER, self.success.function))
        if self.settings.maj_at_k and answers is None:
            log.warning("reward function %s logged no column %r: maj@k has no value", self.success.function, ANSWER)
        return answers


def per_prompt(
    scores: Scores,
    completions: Sequence[tuple[int, FinishReason]],
    settings: EvalConfig,
    success: Success | None,
    seed: int,
    answers: Sequence[Any] | None = None,
) -> dict[str, Floats]:
    """For each metric, one number per prompt.

    Args:
        scores: scores of all completions, ``num_generations_eval`` per prompt, failed ones included.
        completions: number of tokens and finish reason of each.
        settings: the metrics.
        success: what decides whether a completion is correct; None: no pass@k.
        seed: seed of random subsets for majority votes.
        answers: answer of each completion, for majority votes; None: votes are NaN.
    """
    count = settings.num_generations_eval

    columns: dict[str, Any] = {"reward": scores.rewards_S}
    columns |= {f"rewards/{name}": scores.by_function_SK[:, k] for k, name in enumerate(scores.names)}
    columns |= {
        "length": [length if reason.usable else np.nan for length, reason in completions],
        "cut_share": [reason is FinishReason.LENGTH if reason.usable else np.nan for _, reason in completions],
    }
    by_prompt = {name: np.asarray(column, np.float64).reshape(-1, count) for name, column in columns.items()}
    values = {name: _mean(values_PG) for name, values_PG in by_prompt.items()}
    if success is None:
        return values
    correct_PG = success.of_rewards(by_prompt[f"rewards/{success.function}"])
    values |= {f"pass@{k}": pass_at_k(correct_PG, k) for k in ks_of(settings, success)}
    if answers is None:
        return values | {f"maj@{k}": np.full(len(correct_PG), np.nan) for k in settings.maj_at_k}
    answers_PG = [answers[first : first + count] for first in range(0, len(answers), count)]
    return values | {f"maj@{k}": majority_at_k(correct_PG, answers_PG, k, seed=seed) for k in settings.maj_at_k}


def ks_of(settings: EvalConfig, success: Success | None) -> Sequence[int]:
    """The k of pass@k: those of the settings, or 1 if something decides what is correct."""
    return settings.pass_at_k if settings.pass_at_k is not None else (1,) * (success is not None)


def _mean(values_PG: Floats) -> Floats:
    """Mean over a prompt's completions, ignoring NaN; NaN if all are NaN."""
    counts_P = (~np.isnan(values_PG)).sum(axis=1)
    return np.where(counts_P > 0, np.nansum(values_PG, axis=1) / np.maximum(counts_P, 1), np.nan)


def eval_sampling(config: GRPOConfig) -> Sampling:
    """Sampling of evaluations: that of training, with the settings of ``[eval]`` over it."""
    overrides: dict[str, Any] = {
        name: value
        for name in ("temperature", "top_p", "top_k", "min_p", "max_completion_length")
        if (value := getattr(config.eval, f"{name}_eval")) is not None
    }
    return replace(Sampling.of(config.rollout), record_support=False, **overrides)


def check_votes(settings: EvalConfig, rewards: RewardRunner) -> None:
    """Check that the judging function can log the answers that majority votes count.

    Raises:
        ConfigError: votes are requested, but the function does not take ``log_extra``.
    """
    success = Success.of(settings, rewards.names)
    if not settings.maj_at_k or success is None:
        return
    logs = {function.name: function.logs for function in rewards.functions}[success.function]
    if "log_extra" not in logs:
        raise ConfigError(
            f"eval.maj_at_k counts the answers that reward function {success.function} logs, but it takes no "
            f"log_extra: let it call log_extra({ANSWER!r}, ...), set eval.success to a function that does, or "
            "eval.maj_at_k to []"
        )


def check_settings(settings: EvalConfig, sets: Sequence[str], functions: Sequence[str]) -> None:
    """Check that the names in ``[eval]`` exist.

    Args:
        settings: ``[eval]``.
        sets: names of the evaluation sets; empty: no evaluation.
        functions: names of the reward functions.

    Raises:
        ConfigError: a function or metric does not exist.
    """
    if settings.success is not None and settings.success not in functions:
        raise ConfigError(f"eval.success is {settings.success!r}, but the reward functions are {', '.join(functions)}")
    success = Success.of(settings, functions)
    for name in ("pass_at_k", "maj_at_k"):
        if getattr(settings, name) and success is None:
            raise ConfigError(
                f"eval.{name} is set, but not which of the reward functions {', '.join(functions)} decides whether a "
                "completion is correct: set eval.success to its name, and eval.success_threshold to the least reward "
                "of a correct completion"
            )
    metric = settings.metric_for_best_model
    if metric is None:
        return
    if not sets:
        raise ConfigError(f"eval.metric_for_best_model is {metric!r}, but there is no evaluation: set data.eval")
    names = ["reward", *(f"rewards/{name}" for name in functions), "length", "cut_share"]
    names += [f"pass@{k}" for k in ks_of(settings, success)] + [f"maj@{k}" for k in settings.maj_at_k]
    known = [f"{prefix(name)}{metric}/{kind}" for name in sets for metric in names for kind in ("mean", "low", "high")]
    known += [f"{prefix(name)}{count}" for name in sets for count in ("unscored", "errors")]
    custom = any(metric.startswith(f"{prefix(name)}custom/") for name in sets)  # what functions log
    if metric not in known and not custom:
        listed = "\n  ".join(name for name in known if not name.endswith(("/low", "/high")))
        raise ConfigError(
            f"eval.metric_for_best_model is {metric!r}, which no evaluation logs; there are\n  {listed}\n"
            "and, for those that end in /mean, the bounds /low and /high of their intervals"
        )
