"""Evaluation: fresh samples of held-out prompts, with a sampling of its own and intervals over prompts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Any

import numpy as np

from cohort.config import EvalConfig, GRPOConfig
from cohort.data import Data, LengthLimit, PromptSet
from cohort.errors import ConfigError
from cohort.evaluation.statistics import Estimate, Floats, estimates, majority_at_k, pass_at_k
from cohort.rewards import RewardRunner, TrainerState
from cohort.rollout import Engine, Purpose, RNGKey, Sampling, Watch
from cohort.runs import completion_columns, score_columns, seeded
from cohort.types import Completion, FinishReason, Prompt, Scores

log = logging.getLogger("cohort.train")
WINDOW = 4
"""So many full batches of the engine are sampled and scored at a time: what engine and rewards hold does not grow with
the set. The table of completions does. Completions of a prompt are never parted."""
ANSWER = "answer"
"""The column that reward functions log a completion's answer in, for majority votes."""


NO_SHARES = ("length",)
"""Metrics that are no shares, even where every prompt's number is 0 or 1."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What an evaluation of one set found."""

    values: Mapping[str, Floats]
    """Of each metric one number per prompt, NaN where there is none."""
    estimates: Mapping[str, Estimate]
    """Their means over prompts."""
    counts: Mapping[str, float]
    """Numbers without an interval: completions that are unscored, or could not be drawn; what functions logged."""
    table: Any
    """Every completion with its scores, a ``pyarrow.Table`` with the columns of ``rollouts/``."""

    @property
    def reward(self) -> Estimate:
        """The mean reward."""
        return self.estimates["reward"]

    def metrics(self, name: str = "") -> dict[str, float]:
        """Flat, for ``metrics.jsonl``.

        Args:
            name: the set's, where there are several.
        """
        flat = {
            f"{prefix(name)}{metric}/{kind}": getattr(estimate, kind)
            for metric, estimate in self.estimates.items()
            for kind in ("mean", "low", "high")
        }
        return flat | {f"{prefix(name)}{key}": value for key, value in self.counts.items()}


def prefix(name: str) -> str:
    """What the metrics of a set begin with.

    >>> prefix(""), prefix("gsm8k")
    ('eval/', 'eval/gsm8k/')
    """
    return f"eval/{name}/" if name else "eval/"


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Evaluates a policy on fixed prompts with fixed random numbers: two policies are compared on the same draws.

    Nothing of an evaluation reaches the training: its draws are functions of its own keys, and the global random
    generators, which a reward function may use, begin from the seed and are put back afterwards.
    """

    sets: Mapping[str, PromptSet]
    """By name; a set without one is called ""."""
    rewards: RewardRunner
    sampling: Sampling
    settings: EvalConfig
    seed: int
    batch_size: int
    """Completions that the engine decodes at a time."""

    @classmethod
    def of(
        cls, config: GRPOConfig, sets: Mapping[str, Data], rewards: RewardRunner, tokenizer: Any, context: int | None
    ) -> Evaluator:
        """As the settings say, with the reward functions tried on two rows of each set.

        Args:
            config: the settings.
            sets: the rows.
            rewards: the functions.
            tokenizer: the model's.
            context: the most tokens that the model takes; None: not known.

        Raises:
            ConfigError: majority votes are asked for, and the function that says what is correct logs no answers.
            DataError: a row cannot be a prompt, or leaves no room for a completion in the model's context.
            RewardError: a function failed on a made completion.
        """
        check_votes(config.eval, rewards)
        sampling = eval_sampling(config)
        own = config.eval.max_completion_length_eval is not None
        setting = "eval.max_completion_length_eval" if own else "rollout.max_completion_length"
        limit = LengthLimit.of(config.data, context, sampling.max_completion_length, setting)
        made = {name: PromptSet(data, tokenizer, config.data, limit=limit) for name, data in sets.items()}
        for prompts in made.values():
            with seeded(config.run.seed):
                rewards.dry_run(tried_prompts(prompts), state=TrainerState(evaluating=True))
        return cls(made, rewards, sampling, config.eval, config.run.seed, config.rollout.max_batch_size)

    def evaluate(
        self,
        engine: Engine,
        state: TrainerState | None = None,
        on_completion: Callable[[], None] | None = None,
    ) -> dict[str, Evaluation]:
        """Sample and score every prompt of every set. A prompt's unscored completions are left out of its numbers.

        Args:
            engine: who samples.
            state: how far the run is, for reward functions that ask.
            on_completion: called when a completion has ended.

        Raises:
            RewardError: a reward function failed.
        """
        state = replace(state or TrainerState(), evaluating=True)
        found = {}
        for name, prompts in self.sets.items():
            with seeded(self.seed):  # each anew: what a set gives does not depend on those before it
                found[name] = self._evaluate(engine, prompts, state, on_completion)
        return found

    def fingerprint(self, metric: str) -> str:
        """A hash of the prompts that a metric is measured on."""
        found = [own.fingerprint for name, own in self.sets.items() if metric.startswith(prefix(name))]
        return " ".join(found)

    def describe(self) -> str:
        """What is evaluated, and how it is sampled."""
        sets = ", ".join(f"{name} {len(own):,}".strip() for name, own in self.sets.items())
        count = self.settings.num_generations_eval
        lines = [f"evaluation: {sets} prompts x {count}; {self.describe_sampling()}"]
        for name, own in self.sets.items():
            lines += [f"  {name and f'{name}: '}{line}" for line in own.describe()]
        return "\n".join(lines)

    def _evaluate(
        self, engine: Engine, prompts: PromptSet, state: TrainerState, on_completion: Callable[[], None] | None
    ) -> Evaluation:
        import pyarrow

        count, key = self.settings.num_generations_eval, RNGKey(self.seed, 0, Purpose.EVAL)
        size = max(1, WINDOW * self.batch_size // count)
        tables, scored, completions = [], [], []
        for first in range(0, len(prompts), size):
            some = [prompts.prompt(index, uid=index) for index in range(first, min(first + size, len(prompts)))]
            with self.rewards.begin(some, count, state) as scoring:

                def ended(index: int, sample: int, completion: Completion, take: Any = scoring.on_completion) -> None:
                    take(index, sample, completion)
                    if on_completion:
                        on_completion()

                groups = engine.generate(some, count, self.sampling, key, Watch(on_completion=ended))
                assert all(len(group.completions) == count for group in groups)  # those that failed too
                scored.append(scoring.finish(groups))
            tables.append(pyarrow.table(completion_columns(groups)))
            completions += [(c.num_tokens, c.finish_reason) for group in groups for c in group.completions]
        table, scores = pyarrow.concat_tables(tables, promote_options="default"), reduce(add, scored)
        for name, column in score_columns(scores).items():
            table = table.append_column(name, pyarrow.array(column))
        values = per_prompt(scores, completions, self.settings, self.seed, self._answers(scores))
        found = estimates(
            values,
            confidence=self.settings.confidence,
            resamples=self.settings.bootstrap_samples,
            seed=self.seed,
            no_shares=NO_SHARES,
        )
        counts = {
            "unscored": int(scores.rewards_S.isnan().sum()),
            "errors": sum(reason is FinishReason.ERROR for _, reason in completions),
            **{f"custom/{name}": sum(numbers) / len(numbers) for name, numbers in scores.logged.items()},
        }
        return Evaluation(values, found, counts, table)

    def describe_sampling(self) -> str:
        """How completions are drawn, and that some are for nothing."""
        count = self.settings.num_generations_eval
        same = count > 1 and self.sampling.temperature == 0
        return self.sampling.describe() + f"; at temperature 0 a prompt's {count} completions are the same one" * same

    def _answers(self, scores: Scores) -> Sequence[Any] | None:
        """What the judge logged as answers, None if nothing: those of another function are no matter."""
        judge = judge_of(self.settings, self.rewards.names)
        answers = scores.extras.get(self.rewards.column(ANSWER, judge))
        if self.settings.maj_at_k and answers is None:
            log.warning("reward function %s logged no column %r: maj@k has no value", judge, ANSWER)
        return answers


def per_prompt(
    scores: Scores,
    completions: Sequence[tuple[int, FinishReason]],
    settings: EvalConfig,
    seed: int,
    answers: Sequence[Any] | None = None,
) -> dict[str, Floats]:
    """The metrics, one number per prompt each.

    Args:
        scores: of all completions; every prompt has ``num_generations_eval`` of them, those that failed too.
        completions: tokens and finish reason of each.
        settings: which metrics.
        seed: of drawn subsets for majority votes.
        answers: of all completions, for majority votes; None: no votes, and no number of them.
    """
    count = settings.num_generations_eval

    def of_prompts(column: Any) -> Any:
        return np.asarray(column, dtype=np.float64).reshape(-1, count)

    by_function = {name: of_prompts(scores.by_function_SK[:, k]) for k, name in enumerate(scores.names)}
    lengths = [length if reason.usable else np.nan for length, reason in completions]
    cut = [float(reason is FinishReason.LENGTH) if reason.usable else np.nan for _, reason in completions]
    values = {"reward": _mean(of_prompts(scores.rewards_S))}
    values |= {f"rewards/{name}": _mean(rewards_PG) for name, rewards_PG in by_function.items()}
    values |= {"length": _mean(of_prompts(lengths)), "cut_share": _mean(of_prompts(cut))}

    correct_PG = correct(by_function[judge_of(settings, scores.names)], settings.pass_threshold)
    values |= {f"pass@{k}": pass_at_k(correct_PG, k) for k in settings.pass_at_k}
    if answers is None:
        return values | {f"maj@{k}": np.full(len(correct_PG), np.nan) for k in settings.maj_at_k}
    answers_PG = [answers[first : first + count] for first in range(0, len(answers), count)]
    return values | {f"maj@{k}": majority_at_k(correct_PG, answers_PG, k, seed=seed) for k in settings.maj_at_k}


def correct(rewards_PG: Floats, threshold: float) -> Floats:
    """1 for rewards of at least ``threshold``, 0 for others, NaN for none."""
    return np.where(np.isnan(rewards_PG), np.nan, (rewards_PG >= threshold).astype(np.float64))


def _mean(values_PG: Floats) -> Floats:
    """Over a prompt's completions, without NaN; NaN where there is nothing else."""
    counts_P = (~np.isnan(values_PG)).sum(axis=1)
    return np.where(counts_P > 0, np.nansum(values_PG, axis=1) / np.maximum(counts_P, 1), np.nan)


def eval_sampling(config: GRPOConfig) -> Sampling:
    """What evaluations draw with: as training does, but for what ``[eval]`` sets."""
    settings = config.eval
    own = {
        "temperature": settings.temperature_eval,
        "top_p": settings.top_p_eval,
        "top_k": settings.top_k_eval,
        "min_p": settings.min_p_eval,
        "max_completion_length": settings.max_completion_length_eval,
    }
    given: dict[str, Any] = {name: value for name, value in own.items() if value is not None}
    return replace(Sampling.of(config.rollout), record_support=False, **given)


def judge_of(settings: EvalConfig, functions: Sequence[str]) -> str:
    """The reward function that says whether a completion is correct."""
    return settings.pass_function or functions[0]


def check_votes(settings: EvalConfig, rewards: RewardRunner) -> None:
    """Look whether the judge can log the answers that majority votes count.

    Raises:
        ConfigError: votes are asked for, and it does not take ``log_extra``.
    """
    judge = judge_of(settings, rewards.names)
    logs = {function.name: function.logs for function in rewards.functions}[judge]
    if settings.maj_at_k and "log_extra" not in logs:
        raise ConfigError(
            f"eval.maj_at_k counts the answers that reward function {judge} logs, and it takes no log_extra: let it "
            f"call log_extra({ANSWER!r}, ...), set eval.pass_function to a function that does, or eval.maj_at_k to []"
        )


def check_settings(settings: EvalConfig, sets: Sequence[str], functions: Sequence[str]) -> None:
    """Look for what ``[eval]`` names and there is not.

    Args:
        settings: ``[eval]``.
        sets: names of the evaluation sets; empty: there is no evaluation.
        functions: names of the reward functions.

    Raises:
        ConfigError: no such function, or no evaluation logs that metric.
    """
    if settings.pass_function is not None and settings.pass_function not in functions:
        raise ConfigError(
            f"eval.pass_function is {settings.pass_function!r}, and the reward functions are {', '.join(functions)}"
        )
    metric = settings.metric_for_best_model
    if metric is None:
        return
    if not sets:
        raise ConfigError(f"eval.metric_for_best_model is {metric!r}, and there is no evaluation: set data.eval")
    names = ["reward", *(f"rewards/{name}" for name in functions), "length", "cut_share"]
    names += [f"pass@{k}" for k in settings.pass_at_k] + [f"maj@{k}" for k in settings.maj_at_k]
    known = [f"{prefix(name)}{metric}/{kind}" for name in sets for metric in names for kind in ("mean", "low", "high")]
    known += [f"{prefix(name)}{count}" for name in sets for count in ("unscored", "errors")]
    custom = any(metric.startswith(f"{prefix(name)}custom/") for name in sets)  # what functions log is not known yet
    if metric not in known and not custom:
        listed = "\n  ".join(name for name in known if not name.endswith(("/low", "/high")))
        raise ConfigError(
            f"eval.metric_for_best_model is {metric!r}, which no evaluation will log; there will be\n  {listed}\n"
            "and, of those that end in /mean, the ends of their intervals, /low and /high"
        )


def tried_prompts(prompts: PromptSet) -> list[Prompt]:
    """Those that reward functions are tried on before anything is sampled."""
    return [prompts.prompt(index, uid=index) for index in range(min(2, len(prompts)))]
