"""The table of checks: their names, functions, causes and metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from cohort.report.diagnosis import lengths, movement, signal, sources
from cohort.report.diagnosis.case import Case
from cohort.report.diagnosis.finding import Verdict


@dataclass(frozen=True, slots=True)
class Check:
    """A named check."""

    name: str
    verdict: Callable[[Case], Verdict | None]
    """What it says of the metrics so far; None: nothing."""
    metrics: tuple[str, ...]
    """The metrics that it is about, as patterns (``fnmatch``) of their keys. Without the first it has nothing to look
    at."""
    unless: tuple[str, ...] = ()
    """Checks whose warning or alarm explains what this one would say: until they are silent it is not asked."""


NO_REWARD = ("failing_rewards", "unscored")
NO_SIGNAL = (*NO_REWARD, "all_right", "entropy_collapse", "identical", "all_wrong", "dead_groups")
DEAD = ("groups/dead_share", "groups/dead_*_share", "reward/mean")
CLIPPED = ("tokens/clipped_low_share", "tokens/clipped_high_share")
CHECKS = (
    Check("sampling_errors", sources.sampling_errors, ("completions/errors",)),
    Check("nonfinite", movement.nonfinite, ("updates_nonfinite",)),
    Check("failing_rewards", sources.failing_rewards, ("rewards/*/failed", "rewards/*/timeouts")),
    Check("unscored", signal.unscored, ("reward/unscored",), ("failing_rewards",)),
    Check("reward_falls", movement.reward_falls, ("reward/mean",)),
    Check("all_right", signal.all_right, DEAD, NO_REWARD),
    Check(
        "entropy_collapse", movement.entropy_collapse, ("entropy", "groups/identical_share", "reward/mean"), NO_REWARD
    ),
    Check(
        "identical", signal.identical, ("groups/dead_share", "groups/identical_share"), (*NO_REWARD, "entropy_collapse")
    ),
    Check("all_wrong", signal.all_wrong, DEAD, (*NO_REWARD, "entropy_collapse")),
    Check("dead_groups", signal.dead_groups, DEAD, (*NO_REWARD, "entropy_collapse")),
    Check("zero_gradient", signal.zero_gradient, ("updates_skipped", "grad_norm", "tokens/active_share"), NO_SIGNAL),
    Check("value_zero", signal.value_zero, ("policy_value",)),
    Check("sampler_mismatch", sources.sampler_mismatch, ("sampler/gap", "sampler/mean_ratio", "tokens/mismatch_share")),
    Check("stale_logps", movement.stale_logps, ("update_kl", "ratio/log_min", "ratio/log_max")),
    Check("learning_rate_high", movement.learning_rate_high, ("update_kl", "learning_rate")),
    Check(
        "learning_rate_low",
        movement.learning_rate_low,
        ("update_kl", "learning_rate"),
        (*NO_SIGNAL, "zero_gradient"),
    ),
    Check("kl_fast", movement.kl_fast, ("kl/k3",), ("learning_rate_high",)),
    Check("clipped", movement.clipped, CLIPPED, ("learning_rate_high",)),
    Check("few_tokens", movement.few_tokens, ("gradient/effective_tokens",), (*NO_SIGNAL, "zero_gradient")),
    Check("entropy_explosion", movement.entropy_explosion, ("entropy", "reward/mean")),
    Check("end_token", lengths.end_token, ("length/cut_share", "length/ended_share")),
    Check("truncation", lengths.truncation, ("length/cut_share",), ("end_token",)),
    Check("length_drift", lengths.length_drift, ("length/mean", "reward/mean")),
    Check("duplicates", lengths.duplicates, ("completions/distinct_share",), ("identical", "entropy_collapse")),
    Check("repetition", lengths.repetition, ("completions/repetition",)),
    Check("drowned_reward", sources.drowned_reward, ("rewards/*/within_group_std",)),
    Check("evaluation_falls", sources.evaluation_falls, ("eval/*reward/mean", "reward/mean")),
)
"""Every check, causes before their consequences."""
NAMES = tuple(check.name for check in CHECKS)


def not_run(keys: Iterable[str]) -> tuple[str, ...]:
    """The checks that have nothing to look at in a run with metrics of these keys.

    >>> "learning_rate_low" in not_run(["reward/mean", "groups/dead_share"])
    True
    """
    known = list(keys)
    return tuple(check.name for check in CHECKS if not any(fnmatchcase(key, check.metrics[0]) for key in known))
