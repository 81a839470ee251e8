"""What is wrong with a run, in words, from its metrics alone. Imports no torch.

The checks are named functions over the metrics so far, causes before their consequences. A check looks at the first
steps, the last ones, and what ``Case`` keeps, so a step costs the same however long the run. To add one, write a
function with ``@check`` that returns what is wrong now, or None. ``Diagnosis`` feeds them a run, and keeps each finding
from the step at which it begins to the one at which it ceases.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import partial
from statistics import NormalDist, fmean, median
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Self, TypeVar

from cohort.config.schema import ObjectiveConfig, RewardConfig, RolloutConfig, Section, ThresholdsConfig
from cohort.errors import ConfigError
from cohort.presets.parts import DynamicSampling
from cohort.report.words import one_line

if TYPE_CHECKING:
    from cohort.runs.reader import Run

__all__ = ["CAUSES", "NAMES", "Diagnosis", "Finding", "Level", "clipped_share", "diagnose", "health_line"]
__all__ += ["not_run", "why_no_gradient", "worst"]
Metrics = Mapping[str, Any]
Numbers = Mapping[str, float | int | str | None]
S = TypeVar("S", bound=Section)


class Level(StrEnum):
    """How bad a finding is."""

    NOTE = "note"
    """Worth knowing; nothing is wrong. Said once a run."""
    WARNING = "warning"
    """The run goes on, and something in it is rarely intended."""
    ALARM = "alarm"
    """The run learns nothing, or is about to be lost."""

    @property
    def rank(self) -> int:
        """0, 1 or 2."""
        return list(Level).index(self)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a check says of the metrics up to a step."""

    level: Level
    found: str
    advice: str
    numbers: Numbers = field(default_factory=dict)


note, warning, alarm = (partial(Verdict, level) for level in Level)


def ill(is_alarm: bool, found: str, advice: str, numbers: Numbers) -> Verdict:
    """An alarm, or a warning."""
    return alarm(found, advice, numbers) if is_alarm else warning(found, advice, numbers)


# ----------------------------------------
# Numbers of untrusted metrics, and what the checks compute from a few of them.


CONFIDENCE = 2.576
"""Standard errors of a two-sided interval of 99%: with a looser one, some run of thousands would look ill by chance."""
LARGEST = 1e100
"""Numbers beyond are no measurement, and their squares would overflow."""


def number(metrics: Metrics, key: str) -> float | None:
    """A number within ``LARGEST``; None for whatever else a line of ``metrics.jsonl`` has under the key."""
    value = metrics.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= LARGEST:
        return None
    return float(value)


def mean(values: Sequence[float]) -> float | None:
    """The mean; None of nothing."""
    return math.fsum(values) / len(values) if values else None


def share_interval(count: float, total: float) -> tuple[float, float]:
    """Wilson's score interval of a share of ``count`` in ``total``, (0, 1) of nothing. E. B. Wilson, 1927.

    >>> [round(end, 3) for end in share_interval(10, 10)]
    [0.601, 1.0]
    """
    if total <= 0:
        return 0.0, 1.0
    share, squared = min(1.0, max(0.0, count / total)), CONFIDENCE**2 / total
    centre = share + squared / 2
    spread = CONFIDENCE * math.sqrt(share * (1 - share) / total + squared / (4 * total))
    return max(0.0, (centre - spread) / (1 + squared)), min(1.0, (centre + spread) / (1 + squared))


def differs(before: Sequence[float], after: Sequence[float]) -> float:
    """The difference of two means in standard errors (Welch). 0 with fewer than two numbers on a side; infinite if
    neither side varies.

    >>> differs([1, 2, 3], [1, 2, 3]), differs([0, 0], [1, 1])
    (0.0, inf)
    """
    if len(before) < 2 or len(after) < 2:
        return 0.0
    difference = math.fsum(after) / len(after) - math.fsum(before) / len(before)
    error = math.sqrt(variance(before) / len(before) + variance(after) / len(after))
    return difference / error if error else math.copysign(math.inf, difference) if difference else 0.0


def variance(values: Sequence[float]) -> float:
    """Divided by n - 1."""
    centre = math.fsum(values) / len(values)
    return math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1)


def clipped_share(metrics: Metrics) -> float | None:
    """The share of tokens that the trust region has silenced, among those that could have a gradient."""
    low, high, active = (number(metrics, f"tokens/{name}_share") for name in ("clipped_low", "clipped_high", "active"))
    if low is None or high is None or active is None or low + high + active <= 0:
        return None
    return (low + high) / (low + high + active)


# ----------------------------------------
# A run as the checks see it.


START = 5
"""Steps that the start of a run is measured by."""
RECENT = 10
"""Last steps that most checks look at."""
WINDOW = 20
"""Steps that are remembered besides: no check looks further back."""
FEWEST = 5
"""Steps that most checks need at least."""
CERTAIN = 4.0
"""Standard errors between the means of two windows that are called different."""
RISES = 2.0
"""Standard errors that the reward has to rise by."""
FALLS = 5.0
"""Standard errors that the reward has to fall by. The variance of the last window is taken as no smaller than that of
the best one, since that one was chosen among many."""
STILL = {"entropy": 0.17, "length/mean": 0.1}
"""Metrics that may move away from their start, and by how much (in logarithms) they still count as there: a quarter of
the factor that is an illness."""
EVALUATIONS = 50
"""Evaluations that are remembered."""
TINY = 1e-6
"""A fall of the reward below this is one of rounding."""


@dataclass(frozen=True, slots=True)
class Window:
    """``RECENT`` steps."""

    step: int
    """The last of them."""
    rewards: list[float]
    """Their mean rewards."""


class Case:
    """What the checks need of a run's settings, and the metrics so far: the first steps of the run, its last steps, and
    its evaluations.

    Args:
        settings: as a file has them. Nothing in it is trusted, and no file that it names is read; what is absent or
            invalid has its default, so that a run folder of another version can be looked at.
        limits: the thresholds; None: those of the settings.
    """

    def __init__(self, settings: Mapping[str, Any], limits: ThresholdsConfig | None = None) -> None:
        report, optim = _table(settings, "report"), _table(settings, "optim")
        self.limits = limits or _section(ThresholdsConfig, report, "thresholds")
        skip = report.get("skip_checks")
        self.skip = frozenset(map(str, skip if isinstance(skip, list | tuple) else ()))
        """Checks that are left out."""
        self.rollout = rollout = _section(RolloutConfig, settings, "rollout")
        self.fixed_length = rollout.min_completion_length >= rollout.max_completion_length
        """Whether every completion is to reach the length limit."""
        grammar = rollout.regex or _table(settings, "rollout").get("json_schema")
        all_tokens = {"top_k": 0, "min_p": 0, "min_completion_length": 0, "top_p": 1, "repetition_penalty": 1}
        cut = any(getattr(rollout, name) != value for name, value in all_tokens.items())
        self.truncates = not rollout.replay_sampling and (cut or bool(grammar))
        """Whether sampling leaves tokens out that the update does not (docs/metrics.md, "Sampler and trainer")."""
        objective = _section(ObjectiveConfig, settings, "objective")
        self.updates = objective.updates_per_rollout
        try:
            self.objective = objective.resolve()
        except (ConfigError, ValueError, TypeError):  # this version does not know it
            self.objective = ObjectiveConfig().resolve()
        self.learning_rate = number(optim, "learning_rate") or 0.0
        """Its highest value."""
        self.weights = _section(RewardConfig, settings, "reward").weights
        """Of the reward functions. None: all 1."""
        confidence = number(_table(settings, "eval"), "confidence") or 0.0
        self.confidence = confidence if 0 < confidence < 1 else 0.95
        """Of the intervals of evaluations."""
        self.first: list[Metrics] = []
        self.last: deque[Metrics] = deque(maxlen=WINDOW)
        self.evaluations: deque[tuple[Window, Metrics]] = deque(maxlen=EVALUATIONS)
        """The steps before (with its rewards, if there were any), and the metrics."""
        self.best: Window | None = None
        """The steps with the highest mean reward."""
        self.still: dict[str, list[float]] = {}
        """The rewards when a metric was last where it started."""
        self.binary = True
        """Whether every reward so far can have been 0 or 1."""
        self.steps = 0
        """Steps with metrics of updates."""
        self.highest, self.lowest = float("-inf"), float("inf")
        """Of the mean rewards of groups (10% and 90% quantiles) and of steps."""

    def add(self, metrics: Metrics) -> None:
        """Take a line of ``metrics.jsonl``."""
        if "updates" in metrics:  # not the evaluation before the first step
            self.steps += 1
            self.last.append(metrics)
            if len(self.first) < START:
                self.first.append(metrics)
            for key in ("groups/mean_reward_q90", "groups/mean_reward_q10", "reward/mean"):
                if (value := number(metrics, key)) is not None:
                    self.highest, self.lowest = max(self.highest, value), min(self.lowest, value)
            self._remember(metrics)
        if any(key.startswith("eval/") for key in metrics):
            self.evaluations.append((Window(int(metrics["step"]), self.values("reward/mean", RECENT)), metrics))

    def _remember(self, metrics: Metrics) -> None:
        """Keep what later steps are compared with."""
        rewards = self.values("reward/mean", RECENT)
        if len(rewards) == RECENT and (self.best is None or fmean(rewards) > fmean(self.best.rewards)):
            self.best = Window(int(metrics["step"]), rewards)
        for key, near in STILL.items():
            before, after = mean(self.start(key)), mean(self.values(key)[-START:])
            if before and after and before * after > 0 and abs(math.log(after / before)) <= near:
                self.still[key] = rewards
        reward, spread = number(metrics, "reward/mean"), number(metrics, "reward/std")
        if reward is not None:  # the variance of 0s and 1s follows from their mean
            self.binary &= 0 <= reward <= 1 and (spread is None or abs(spread**2 - reward * (1 - reward)) < 1e-6)

    @property
    def groups_compared(self) -> bool:
        """Whether a group of equal rewards teaches nothing."""
        return self.objective.group_relative and self.objective.credit in ("outcome", "return_to_go")

    @property
    def now(self) -> Metrics:
        """The metrics of this step."""
        return self.last[-1]

    def get(self, key: str) -> float:
        """A number of this step; 0 if there is none."""
        return number(self.now, key) or 0.0

    def recent(self, count: int = WINDOW) -> list[Metrics]:
        """The last steps, at most ``count``, in order."""
        return list(self.last)[-count:]

    def values(self, key: str, count: int = WINDOW) -> list[float]:
        """The numbers of the last steps under a key; steps without one are left out."""
        return [value for one in self.recent(count) if (value := number(one, key)) is not None]

    def start(self, key: str) -> list[float]:
        """The numbers of the first steps under a key."""
        return [value for one in self.first if (value := number(one, key)) is not None]

    def each(self, key: str, count: int) -> list[float]:
        """The numbers of the last ``count`` steps; empty if there are fewer."""
        found = self.values(key, count)
        return found if len(found) == count else []

    def mean(self, key: str, count: int = RECENT) -> float | None:
        """The mean over the last steps."""
        return mean(self.values(key, count))

    def since_start(self, key: str, count: int = RECENT) -> tuple[float, float, float]:
        """Mean over the first steps, mean over the last ``count`` numbers, and their difference in standard errors. All
        are 0 where the two windows would overlap, or one has no number."""
        before, after = self.start(key), self.values(key)[-count:]
        if self.steps < START + count or not before or not after:
            return 0.0, 0.0, 0.0
        return mean(before) or 0.0, mean(after) or 0.0, differs(before, after)

    def risen(self, key: str) -> bool:
        """Whether the reward is higher than when a metric began to move, and has not fallen since."""
        before = self.still.get(key) or self.start("reward/mean")
        return differs(before, self.values("reward/mean", RECENT)) > RISES and not self.fallen(0.1)

    def fallen(self, share: float) -> bool:
        """Whether the reward is below its best, by a share of what that is above the lowest reward known. The best is
        the highest of many windows, which one low window would often be far below by chance: it takes two in a row."""
        rewards = self.values("reward/mean")
        if self.best is None or len(rewards) < 2 * RECENT:
            return False
        high, spread = fmean(self.best.rewards), variance(self.best.rewards)
        least = max(share * (high - self.lowest), TINY * max(1.0, abs(high)))
        for window in (rewards[-2 * RECENT : -RECENT], rewards[-RECENT:]):
            error = math.sqrt((max(variance(window), spread) + spread) / RECENT)
            if high - fmean(window) <= max(least, FALLS * error):
                return False
        return True

    def groups(self, count: int = RECENT) -> float:
        """Groups sampled in the last steps."""
        return sum(self.values("groups/sampled", count))

    def completions(self, count: int = RECENT) -> float:
        """Completions sampled in the last steps."""
        return self.groups(count) * self.rollout.num_generations

    def share(self, key: str, count: int = RECENT) -> tuple[float, float, float]:
        """The share of the last steps under a key, weighted by their groups, with its confidence interval.

        The completions of a prompt resemble each other, so the interval counts prompts: of shares of completions it is
        wider than necessary.
        """
        pairs = [(number(one, key), number(one, "groups/sampled") or 1.0) for one in self.recent(count)]
        known = [(value, groups) for value, groups in pairs if value is not None]
        total = sum(groups for _, groups in known)
        found = sum(value * groups for value, groups in known)
        return found / total if total else 0.0, *share_interval(found, total)

    def dead_share(self) -> tuple[float, dict[str, float]]:
        """The share of groups with equal rewards, and what a verdict says of it."""
        share, low, high = self.share("groups/dead_share")
        return share, {"dead_share": share, "dead_share_low": low, "dead_share_high": high}

    def ends_of_dead(self, count: int = RECENT) -> tuple[float, float]:
        """The shares of the last steps' groups whose equal rewards are the highest, and the lowest, that are known."""
        ends = [(self._ends(one), number(one, "groups/sampled") or 1.0) for one in self.recent(count)]
        total = sum(groups for _, groups in ends)
        right, wrong = (sum(end[side] * groups for end, groups in ends) for side in (0, 1))
        return (right / total, wrong / total) if total else (0.0, 0.0)

    def _ends(self, metrics: Metrics) -> tuple[float, float]:
        high, low = (number(metrics, f"groups/dead_{end}_share") for end in ("high", "low"))
        if high is not None and low is not None:
            return high, low
        dead, reward = number(metrics, "groups/dead_share"), number(metrics, "reward/mean")
        if dead is None or reward is None or dead < 1:
            return 0.0, 0.0
        if not self.binary and self.highest == self.lowest:
            return 0.0, 0.0  # every reward of the run is equal: nothing says whether it is a good one
        middle = 0.5 if self.binary else (self.highest + self.lowest) / 2
        return (dead, 0.0) if reward > middle else (0.0, dead)


def _table(settings: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = settings.get(key)
    return value if isinstance(value, Mapping) else {}


def _section(kind: type[S], settings: Mapping[str, Any], name: str) -> S:
    """A section of settings as a file has them. An entry that is invalid, or an integer beyond ``LARGEST``, has its
    default."""
    known, found = kind.model_fields.keys() - {"json_schema"}, dict[str, Any]()  # which may name a file
    for key, value in _table(settings, name).items():
        with suppress(ConfigError, ValueError, TypeError):
            if key in known and not (isinstance(value, int) and abs(value) > LARGEST):
                kind(**{key: value})
                found[key] = value
    return kind(**found)


# ----------------------------------------
# Why a step's updates had no gradient, from its metrics alone.


CAUSES = {
    "masked": "belong to completions cut by the length limit, which objective.truncated masks",
    "no_advantage": "have an advantage of 0",
    "low_entropy": "are not among the objective.top_entropy tokens",
    "mismatch": "are dropped by objective.mismatch",
    "off_policy": "are dropped by the off-policy mask",
    "clipped_low": "are silenced by the trust region",
    "clipped_high": "are silenced by the trust region",
    "vanished": "have a multiplier of 0 in the trust region",
}
"""Why a token has no gradient (``tokens/CAUSE_share``), as what follows "90% of the tokens"."""


def why_no_gradient(metrics: Metrics) -> str:
    """Why a step's updates had no gradient, from its metrics; and which functions failed, which may be behind it."""
    failed = [name for name in reward_functions(metrics, "failed") if metrics[f"rewards/{name}/failed"]]
    if not failed or metrics.get("reward/mean", 0) is None:
        return _why(metrics)
    shares = [number(metrics, f"rewards/{name}/unscored_share") for name in failed]
    causes = " and ".join(
        f"{name} failed on {metrics[f'rewards/{name}/failed']:,} completions" + (f" ({share:.0%})" if share else "")
        for name, share in zip(failed, shares, strict=True)
    )
    return f"{causes}, which are unscored (the log has the traceback). Without them, {_why(metrics)}"


def _why(metrics: Metrics) -> str:
    left_out = number(metrics, "groups/left_out")
    if left_out and left_out == number(metrics, "groups/sampled"):
        return "no update was made: every group has equal rewards, and objective.group_filter dropped them all"
    if "reward/mean" in metrics and metrics["reward/mean"] is None:
        return f"no update had a gradient: no completion was scored{_why_unscored(metrics)}"
    cause, shares = _causes(metrics)
    if not any(shares.values()):
        return "no update had a gradient ('cohort docs metrics': tokens/..._share)"
    if cause == "no_advantage" and metrics.get("groups/dead_share") == 1:
        return "no update had a gradient: every group has equal rewards, so there is nothing to learn"
    return f"no update had a gradient: {shares[cause]:.0%} of the tokens {CAUSES[cause]} (tokens/{cause}_share)"


def _why_unscored(metrics: Metrics) -> str:
    reasons = [
        f"{name} {'failed on' if metrics.get(f'rewards/{name}/failed') else 'returned None for'} every one"
        for name in reward_functions(metrics, "unscored_share")
        if metrics[f"rewards/{name}/unscored_share"] == 1
    ]
    if reasons:
        return f", because {' and '.join(reasons)}"
    errors = number(metrics, "completions/errors")
    return f"; {errors:.0f} could not be sampled" if errors else " (reward/unscored)"


def _causes(metrics: Metrics) -> tuple[str, dict[str, float]]:
    """The main cause, and the shares of tokens with each."""
    shares = {cause: number(metrics, f"tokens/{cause}_share") or 0.0 for cause in CAUSES}
    return max(shares, key=lambda cause: shares[cause]) if any(shares.values()) else "no_advantage", shares


def reward_functions(metrics: Metrics, last: str = "within_group_std") -> list[str]:
    """Names of the reward functions with a metric ``rewards/NAME/last``, in their order."""
    begin, end = "rewards/", f"/{last}"
    return [key[len(begin) : -len(end)] for key in metrics if key.startswith(begin) and key.endswith(end)]


# ----------------------------------------
# The checks.


@dataclass(frozen=True, slots=True)
class Check:
    """A named check."""

    name: str
    verdict: Callable[[Case], Verdict | None]
    """What it says of the metrics so far; None: nothing."""
    metrics: tuple[str, ...]
    """The metrics that it is about, as patterns (``fnmatch``) of their keys. Without the first it has nothing to look
    at."""
    unless: tuple[str, ...]
    """Checks whose warning or alarm explains what this one would say: until they are silent it is not asked."""


CHECKS: list[Check] = []
"""Every check, causes before their consequences."""
Says = Callable[[Case], Verdict | None]


def check(*metrics: str, unless: tuple[str, ...] = ()) -> Callable[[Says], Says]:
    """Make a function the next check, named after it: see ``Check``."""

    def register(function: Says) -> Says:
        CHECKS.append(Check(function.__name__, function, metrics, unless))
        return function

    return register


NO_REWARD = ("failing_rewards", "unscored")
NO_SIGNAL = (*NO_REWARD, "all_right", "entropy_collapse", "identical", "all_wrong", "dead_groups")
NO_GRADIENT = (*NO_SIGNAL, "zero_gradient")
HIDES_DEAD = (*NO_REWARD, "entropy_collapse")
DEAD = ("groups/dead_share", "groups/dead_*_share", "reward/mean")


@check("completions/errors")
def sampling_errors(case: Case) -> Verdict | None:
    """Completions that could not be drawn."""
    if not (count := sum(case.values("completions/errors", FEWEST))):
        return None
    return alarm(
        f"{count:.0f} completions of the last {min(FEWEST, len(case.last))} steps could not be sampled, because "
        "logits were NaN or infinite: weights have diverged, or soon will",
        "start again from an earlier checkpoint (RUN/checkpoints/step-N as model.path) with a lower "
        "optim.learning_rate; set model.precision to 'float32'",
        {"errors": count},
    )


@check("updates_nonfinite")
def nonfinite(case: Case) -> Verdict | None:
    """Updates that were skipped because a value was NaN or infinite."""
    skipped, made = (sum(case.values(key, RECENT)) for key in ("updates_nonfinite", "updates"))
    if not skipped:
        return None
    return ill(
        skipped >= made,
        f"{skipped:.0f} of the last {skipped + made:.0f} updates were skipped, because a value was NaN or infinite",
        "lower optim.learning_rate; set model.precision to 'float32'. The batch is in nonfinite/ of the run folder",
        {"skipped": skipped, "updates": made},
    )


MANY_FAILED = 0.3


@check("rewards/*/failed", "rewards/*/timeouts")
def failing_rewards(case: Case) -> Verdict | None:
    """A reward function that fails."""
    completions = case.completions()
    counts = {name: sum(case.values(f"rewards/{name}/failed", RECENT)) for name in reward_functions(case.now)}
    shares = [(share_interval(failed, completions)[0], name, failed) for name, failed in counts.items()]
    low, name, failed = max(shares, default=(0.0, "", 0.0))
    if not completions or low <= case.limits.failed_rewards:
        return None
    slow = sum(case.values(f"rewards/{name}/timeouts", RECENT))
    return ill(
        low > MANY_FAILED,
        f"reward function {name} failed on {failed / completions:.0%} of {completions:.0f} completions"
        + (f", {slow:.0f} of them by its time limit" if slow else ""),
        "raise reward.timeout, or make it faster"
        if slow > failed / 2
        else "read the log, which has the first traceback of each step, and the column reward_error of rollouts/",
        {"failed": failed, "completions": completions, "timeouts": slow},
    )


MOST = 0.9
"""Share of completions without a reward, or of groups with equal rewards, above which hardly anything is learned: an
alarm."""
MANY_UNSCORED = 0.5


@check("reward/unscored", unless=("failing_rewards",))
def unscored(case: Case) -> Verdict | None:
    """Completions without a reward."""
    completions = case.completions()
    count = sum(case.values("reward/unscored", RECENT)) - sum(case.values("completions/errors", RECENT))
    share = count / completions if completions else 0.0
    if case.steps < 3 or share < MANY_UNSCORED:
        return None
    return ill(
        share >= MOST,
        f"{share:.0%} of completions have no reward: the reward functions returned None or failed",
        "return None only for what cannot be scored, and 0 for a wrong answer. The log has the first traceback of each "
        "step",
        {"unscored_share": share, "steps": len(case.recent(RECENT))},
    )


@check("reward/mean")
def reward_falls(case: Case) -> Verdict | None:
    """A reward that is well below what it was."""
    best, now = case.best, case.mean("reward/mean")
    if best is None or now is None or not case.fallen(case.limits.reward_fall):
        return None
    high, step = mean(best.rewards) or 0.0, best.step
    return alarm(
        f"the mean reward fell from {high:.2f} (the {RECENT} steps up to step {step}) to {now:.2f} (the last {RECENT})",
        f"start again from a checkpoint of about step {step} (RUN/checkpoints/step-{step} as model.path) with a lower "
        "optim.learning_rate, or objective.beta above 0. If the later prompts are harder, compare evaluations instead",
        {"reward_best": high, "best_step": step, "reward": now},
    )


@check(*DEAD, unless=NO_REWARD)
def all_right(case: Case) -> Verdict | None:
    """Groups in which every completion is right: rewards are 0 or 1, and these are 1."""
    if _cause(case) != "right":
        return None
    dead, reward = case.dead_share()[0], case.mean("reward/mean")
    learned = differs(case.start("reward/mean"), case.values("reward/mean", RECENT)) > 2
    found = (
        f"{dead:.0%} of groups have equal rewards, nearly all of them because every completion is right "
        f"(mean reward {reward:.2f}): "
    )
    return Verdict(
        Level.NOTE if learned else Level.WARNING,
        found
        + ("the policy has learned these prompts" if learned else "they are too easy for this model and teach nothing"),
        "stop here, or go on with harder prompts"
        if learned
        else "use harder prompts, or set objective.group_filter to 'dynamic_sampling' to sample others in their place",
        {"dead_share": dead, "reward": reward},
    )


STUCK = 0.15
"""Share of groups of wrong, or of equal, completions from which a collapse of the entropy does harm."""


@check("entropy", "groups/identical_share", "reward/mean", unless=NO_REWARD)
def entropy_collapse(case: Case) -> Verdict | None:
    """Entropy that has fallen far while there was still something to find."""
    before, after, certainty = case.since_start("entropy", 5)
    if certainty > -CERTAIN or after * case.limits.entropy_fall > before:
        return None
    right, wrong = case.ends_of_dead()
    stuck = max(wrong, case.share("groups/identical_share")[0] - right)
    rewards = case.values("reward/mean", RECENT)
    is_rising = differs(rewards[: len(rewards) // 2], rewards[len(rewards) // 2 :]) > RISES
    if is_rising or share_interval(stuck * case.groups(), case.groups())[0] < STUCK:
        return None
    return ill(
        (before / after if after else math.inf) > case.limits.entropy_fall**2,
        f"entropy fell from {before:.2g} to {after:.2g} nats and the reward no longer rises: the policy has stopped "
        f"trying other answers, and {stuck:.0%} of groups are all wrong or all the same",
        ("raise objective.epsilon_high (0.28), " if case.updates > 1 else "")
        + "add an entropy bonus (objective.entropy), raise rollout.temperature, or start again from an earlier "
        "checkpoint (RUN/checkpoints/step-N as model.path) with a lower optim.learning_rate",
        {"entropy_before": before, "entropy": after, "stuck_share": stuck},
    )


@check("groups/dead_share", "groups/identical_share", unless=HIDES_DEAD)
def identical(case: Case) -> Verdict | None:
    """Groups whose completions are the same text."""
    return _dead(
        case,
        "identical",
        "nearly all of them because their completions are the same text",
        "raise rollout.temperature; check that rollout.top_k, rollout.top_p and a grammar leave a choice. If it came "
        "during training, entropy has collapsed: a lower optim.learning_rate, or an entropy bonus",
    )


@check(*DEAD, unless=HIDES_DEAD)
def all_wrong(case: Case) -> Verdict | None:
    """Groups in which every completion has the lowest reward."""
    return _dead(
        case,
        "wrong",
        "nearly all of them because no completion is right"
        if case.binary
        else f"nearly all of them near the lowest of the run so far ({case.lowest:.2g})",
        "ease the prompts, warm up (fine-tune on solutions first), reward partial success, or raise "
        "rollout.num_generations; 'cohort doctor' tries the reward functions on right answers",
    )


@check(*DEAD, unless=HIDES_DEAD)
def dead_groups(case: Case) -> Verdict | None:
    """Groups of equal rewards without one main cause, or near the highest known reward, which may not be the best."""
    if _cause(case) == "highest":
        share, numbers = case.dead_share()
        return warning(
            f"{share:.0%} of groups have equal rewards, nearly all of them near the highest of the run so far "
            f"({case.highest:.2g}), and teach nothing",
            f"if {case.highest:.2g} is the best possible reward, take harder prompts, or stop; if not, no completion "
            "earns more: ease the prompts, reward partial success, or raise rollout.num_generations",
            {**numbers, "reward": case.highest},
        )
    return _dead(
        case,
        "mixed",
        "and not mainly because all is right or all is wrong",
        "raise rollout.num_generations, choose prompts of middle difficulty, or set objective.group_filter to "
        "'dynamic_sampling'",
    )


MAIN = 0.8
"""Share of the groups with equal rewards that has to have one cause for it to be named."""


def _dead(case: Case, cause: str, why: str, advice: str) -> Verdict | None:
    """Groups of equal rewards, if this is their main cause."""
    if _cause(case) != cause:
        return None
    share, numbers = case.dead_share()
    reward, almost_all = case.mean("reward/mean"), numbers["dead_share_low"] > MOST
    verdict = "almost nothing is learned" if almost_all else "they teach nothing"
    found = f"{share:.0%} of groups have equal rewards, {why}: {verdict}; mean reward {reward or 0.0:.2f}"
    return ill(almost_all, found, advice, {**numbers, "reward": reward})


def _cause(case: Case) -> str:
    """The main cause of equal rewards; empty if few groups have them, or if it does not matter."""
    if not case.groups_compared or len(case.recent(RECENT)) < FEWEST or unscored(case):
        return ""
    dead, low, _ = case.share("groups/dead_share")
    others_are_sampled = isinstance(case.objective.group_filter, DynamicSampling) and not _starved(case)
    if low <= case.limits.dead_groups or others_are_sampled:
        return ""
    right, wrong = case.ends_of_dead()
    if right >= MAIN * dead or (not case.binary and case.highest == case.lowest):
        return "right" if case.binary else "highest"
    if case.share("groups/identical_share")[0] >= MAIN * dead:
        return "identical"
    return "wrong" if wrong >= MAIN * dead else "mixed"


def _starved(case: Case) -> bool:
    """Whether dynamic sampling finds fewer than half of the groups that a step is to have."""
    used = case.groups() - sum(case.values("groups/left_out", RECENT))
    return used < 0.5 * case.rollout.prompts_per_step * len(case.recent(RECENT))


NO_GRADIENT_STEPS = 3
LESS_MOVEMENT = "lower optim.learning_rate, or make fewer updates per rollout"
ADVICE = {
    "masked": "raise rollout.max_completion_length, or set objective.truncated to 'keep'",
    "mismatch": "compare sampler/gap with the rules of objective.mismatch: sampler and trainer disagree",
    "off_policy": "make fewer updates per rollout, or lower rollout.lag",
    "clipped_low": LESS_MOVEMENT,
    "clipped_high": LESS_MOVEMENT,
    "no_advantage": "look at reward/within_group_std and at the advantages in rollouts/",
}
"""What to try against a cause of ``CAUSES``."""


@check("updates_skipped", "grad_norm", "tokens/active_share", unless=NO_SIGNAL)
def zero_gradient(case: Case) -> Verdict | None:
    """Updates with a gradient of exactly 0 for another reason than equal rewards."""
    last = case.recent(NO_GRADIENT_STEPS)
    if len(last) < NO_GRADIENT_STEPS or not all(map(_without_gradient, last)):
        return None
    cause, shares = _causes(case.now)
    if case.groups_compared and cause == "no_advantage" and case.get("groups/dead_share") >= MOST:
        return None  # the checks of equal rewards
    by_design = cause == "no_advantage" and case.objective.baseline == "second_best"  # a single best completion
    why = why_no_gradient(case.now)
    return Verdict(
        Level.NOTE if by_design else Level.ALARM,
        f"the gradient was exactly 0 for {NO_GRADIENT_STEPS} steps: {why}. (A loss of 0 can be "
        "normal; a gradient of 0 is not.)"
        if _skipped(case.now)
        else f"no token had a gradient of the reward for {NO_GRADIENT_STEPS} steps, only of the KL or entropy term: "
        + why,
        "raise rollout.prompts_per_step: no group had a single best completion, and this objective learns from nothing "
        "else"
        if by_design
        else ADVICE.get(cause, "see the table of tokens/..._share in 'cohort docs metrics'"),
        {f"tokens/{cause}_share": share for cause, share in shares.items() if share},
    )


def _without_gradient(metrics: Metrics) -> bool:
    """Whether no token had a gradient of the reward, whatever a KL or entropy term did."""
    if not number(metrics, "updates") or number(metrics, "updates_nonfinite"):
        return False
    return _skipped(metrics) or number(metrics, "tokens/active_share") == 0


def _skipped(metrics: Metrics) -> bool:
    """Whether every update's gradient was exactly 0."""
    updates = number(metrics, "updates")
    return updates is not None and updates == number(metrics, "updates_skipped")


ZERO = 1e-6
"""|policy_value| below this is the 0 of the identity with float32's rounding."""


@check("policy_value")
def value_zero(case: Case) -> Verdict | None:
    """The value of the objective is 0 by identity although the gradient is not."""
    value, norm = number(case.now, "policy_value"), case.get("grad_norm")
    if value is None or not norm or abs(value) > ZERO or case.get("updates") != 1:
        return None
    return Verdict(
        Level.NOTE,
        f"policy_value is {value:.1g}, which is normal on the first update after sampling; the gradient is not 0 "
        f"(norm {norm:.2g}). Watch reward/mean instead (see 'cohort docs grpo')",
        "",
        {"policy_value": value, "grad_norm": norm},
    )


WORSE = 4.0
"""Factor over the threshold of ``sampler/gap`` from which updates follow another policy than the one that drew: an
alarm. With older weights in the sampler (``rollout.lag``), a gap of this factor is no bug."""
GREW, LEAST = 10.0, 0.1
"""Factor over the start of the run, and share of the threshold, from which a gap of the same weights has grown."""
SAME_WEIGHTS = " for the same weights"
BIAS = 0.02
"""How far the mean ratio to the sampler has to be from 1."""
DROPPED = 0.2
"""Share of tokens that mismatch rules drop."""


@check("sampler/gap", "sampler/mean_ratio", "tokens/mismatch_share")
def sampler_mismatch(case: Case) -> Verdict | None:
    """A sampler and a trainer that disagree."""
    gap, limit = case.each("sampler/gap", FEWEST), case.limits.sampler_gap
    if not gap:
        return None
    lagging = case.get("sampler/version_lag_mean") > 0
    if min(gap) > limit * (WORSE if lagging else 1.0):
        return ill(
            min(gap) > WORSE * limit,
            f"log-probs of sampler and trainer differ by {mean(gap):.2g} nats per token (sampler/gap)"
            + (", with weights in the sampler that are older than the trainer's" if lagging else SAME_WEIGHTS),
            "lower rollout.lag"
            if lagging
            else "set model.precision to 'float32', or add a mismatch weight "
            "(objective.mismatch); with vLLM see 'cohort docs scale'",
            {"gap": mean(gap)},
        )
    before = mean(case.start("sampler/gap")) if case.steps >= START + FEWEST and not lagging else None
    if before is not None and min(gap) > max(GREW * before, LEAST * limit):
        return warning(
            f"log-probs of sampler and trainer differ by {mean(gap):.2g} nats per token{SAME_WEIGHTS}, and by "
            f"{before:.2g} at the start of the run (sampler/gap)",
            "run 'cohort doctor' on the newest checkpoint (check sampler). Something changed the model or its weights "
            "for one of the two: a callback, a hook, a server that missed an update; or set model.precision to "
            "'float32', if logits have grown so large that bfloat16 rounds them",
            {"gap": mean(gap), "start": before},
        )
    return _bias(case) or _dropped(case)


def _bias(case: Case) -> Verdict | None:
    """A mean ratio to the sampler that is not 1."""
    pairs = [(number(one, "sampler/mean_ratio"), number(one, "sampler/mean_ratio_se")) for one in case.recent(FEWEST)]
    away = [abs(one - 1) > max(BIAS, CERTAIN * error) for one, error in pairs if one is not None and error is not None]
    ratio, truncates = case.mean("sampler/mean_ratio", FEWEST), case.truncates
    if len(away) < FEWEST or not all(away) or ratio is None:
        return None
    why = "they compute other distributions"
    if truncates:
        why = "tokens are drawn from another distribution than the one that the update takes"
        why = f"sampling leaves out {1 - ratio:.0%} of the probability" if ratio < 1 else why
    return warning(
        f"the mean ratio of trainer to sampler is {ratio:.3f}, where it should be 1: {why}",
        "set rollout.replay_sampling to true" if truncates else "compare temperature and sampling settings of both",
        {"mean_ratio": ratio},
    )


def _dropped(case: Case) -> Verdict | None:
    shares = case.each("tokens/mismatch_share", FEWEST)
    if not shares or min(shares) <= DROPPED:
        return None
    return warning(
        f"the rules of objective.mismatch drop {mean(shares):.0%} of the tokens",
        "see sampler/gap and sampler/log_ratio_...: sampler and trainer differ, or the rule is too strict",
        {"mismatch_share": mean(shares)},
    )


STALE_STEPS = 3


@check("update_kl", "ratio/log_min", "ratio/log_max")
def stale_logps(case: Case) -> Verdict | None:
    """Ratios of exactly 1 where the policy has moved between the updates of a rollout."""
    steps = case.recent(STALE_STEPS)
    if len(steps) < STALE_STEPS or case.updates < 2 or case.objective.ratio_anchor == "self":
        return None
    for one in steps:
        ends = [number(one, f"ratio/log_{end}") for end in ("min", "max")]
        moved = (number(one, "update_kl") or 0.0) > case.limits.update_kl_low
        if ends != [0.0, 0.0] or _steps_made(one) < 2 or not moved:
            return None
    return alarm(
        f"every ratio is exactly 1 and the clip never acts, although each rollout has {case.updates} updates and "
        f"the policy moves (update_kl {case.get('update_kl'):.2g}): the old log-probs are not those from "
        "before the updates",
        "compute old log-probs once, before the first update of a rollout. With a loop of your own, do not "
        "recompute them per update; see 'When log-probs are computed' in 'cohort docs grpo'",
        {"update_kl": case.get("update_kl"), "updates": case.updates},
    )


def _steps_made(metrics: Metrics) -> float:
    """Updates of a step that had a gradient."""
    return (number(metrics, "updates") or 0.0) - (number(metrics, "updates_skipped") or 0.0)


MUCH_WORSE = 10.0
"""Factor over a threshold of ``update_kl`` or of the KL's speed from which the run is about to be lost: an alarm."""
DESTROYS = 1.0
"""Nats per token: a step that moves the policy by more is an alarm by itself."""


@check("update_kl", "learning_rate")
def learning_rate_high(case: Case) -> Verdict | None:
    """Updates that move the policy too far: a single step, or most."""
    worst = max(case.recent(), key=lambda one: number(one, "update_kl") or 0.0)
    if (size := number(worst, "update_kl") or 0.0) > DESTROYS:
        return alarm(
            f"step {worst.get('step')} moved the policy by {size:.2g} nats per token (update_kl): that destroys most "
            "of what a model knows",
            "start again with a tenth of optim.learning_rate",
            {"update_kl": size, "learning_rate": number(worst, "learning_rate")},
        )
    values = case.values("update_kl", RECENT)
    if len(values) < FEWEST or (size := median(values)) <= case.limits.update_kl_high:
        return None
    return ill(
        size > MUCH_WORSE * case.limits.update_kl_high,
        f"a step moves the policy by {size:.2g} nats per token (update_kl, median of {len(values)} steps): more than "
        "the clip assumes",
        "lower optim.learning_rate to a third, or make fewer updates per rollout",
        {"update_kl": size, "learning_rate": number(case.now, "learning_rate")},
    )


@check("update_kl", "learning_rate", unless=NO_GRADIENT)
def learning_rate_low(case: Case) -> Verdict | None:
    """Updates that hardly move the policy although there is a gradient."""
    rates = [number(one, "learning_rate") for one in case.recent(RECENT)]
    # Warm-up is over, and decay has not begun to end the run.
    full = [rate is not None and rate >= 0.5 * case.learning_rate for rate in rates]
    steps = [one for one, is_full in zip(case.recent(RECENT), full, strict=True) if is_full and _steps_made(one)]
    known = [value for one in steps if (value := number(one, "update_kl")) is not None]
    if len(known) < RECENT or max(known) >= case.limits.update_kl_low:
        return None
    size, rate, still = median(known), number(case.now, "learning_rate"), max(known) == 0
    return ill(
        still,
        f"there is a gradient (norm {case.get('grad_norm'):.2g}), but a step moves the policy by only "
        f"{size:.1g} nats per token (update_kl): "
        + (
            "no weight changes in the precision it has"
            if still
            else f"the learning rate of {rate or 0:.1g} is too small"
        ),
        "raise optim.learning_rate tenfold; adapters need about ten times the rate of full weights",
        {"update_kl": size, "learning_rate": rate},
    )


@check("kl/k3", unless=("learning_rate_high",))
def kl_fast(case: Case) -> Verdict | None:
    """A KL to the reference that grows fast."""
    if not (values := case.each("kl/k3", 10)):
        return None
    speed, limit = ((mean(values[5:]) or 0.0) - (mean(values[:5]) or 0.0)) / 5, case.limits.kl_per_step
    if min(values[5:]) < max(values[:5]) or speed < limit:
        return None
    return ill(
        speed > MUCH_WORSE * limit,
        f"the KL to the reference grows by {speed:.2g} nats per token and step (now {values[-1]:.2g}): the policy "
        "moves away from the reference very fast",
        "lower optim.learning_rate, or raise objective.beta",
        {"kl_per_step": speed, "kl": values[-1]},
    )


MOST_CLIPPED = 0.8
NARROW = 0.01
"""A trust region that ends this close to 1 is meant to clip often, as GSPO's."""


@check("tokens/clipped_low_share", "tokens/clipped_high_share", unless=("learning_rate_high",))
def clipped(case: Case) -> Verdict | None:
    """Tokens that the trust region silences."""
    known = [share for one in case.recent(FEWEST) if (share := clipped_share(one)) is not None]
    is_narrow = abs((getattr(case.objective.trust_region, "high", None) or 2.0) - 1) < NARROW
    limit = max(case.limits.clipped, MOST_CLIPPED) if is_narrow else case.limits.clipped
    if len(known) < FEWEST or min(known) <= limit:
        return None
    share = mean(known) or 0.0
    return ill(
        min(known) > max(limit, MOST_CLIPPED),
        f"the trust region silences {share:.0%} of the tokens that could have a gradient: the later updates of a "
        "rollout do little",
        f"{LESS_MOVEMENT} (objective.num_iterations, objective.minibatches)",
        {"clipped_share": share},
    )


MANY_TOKENS = 500


@check("gradient/effective_tokens", unless=NO_GRADIENT)
def few_tokens(case: Case) -> Verdict | None:
    """A gradient that hangs on a few tokens."""
    tokens = case.mean("tokens") or 0.0
    alive = [value for value in case.values("gradient/effective_tokens", RECENT) if value > 0]
    if len(alive) < FEWEST or tokens < MANY_TOKENS or (count := median(alive)) >= case.limits.gradient_tokens:
        return None
    live = (1 - (case.mean("groups/dead_share") or 0.0)) * case.groups() / len(case.recent(RECENT))
    if count >= live:  # few groups are left to learn from, and each of them has its tokens
        return None
    return warning(
        f"the gradient comes from about {count:.0f} of {tokens:,.0f} tokens (gradient/effective_tokens): each "
        "step depends on a few sampled tokens",
        "raise rollout.prompts_per_step; set objective.scale 'none' if rare rewards are scaled up; cap the ratio "
        "(objective.trust_region), or add a mismatch weight",
        {"effective_tokens": count, "tokens": tokens},
    )


MIN_RISE = 0.5
"""Nats that entropy has to rise to be called an explosion: from 0.02 to 0.06 it only has more room."""


@check("entropy", "reward/mean")
def entropy_explosion(case: Case) -> Verdict | None:
    """Entropy that has risen far without a gain in reward."""
    before, after, certainty = case.since_start("entropy", 5)
    limit = case.limits.entropy_rise
    if certainty < CERTAIN or case.risen("entropy") or after < before * limit or after - before < MIN_RISE:
        return None
    return ill(
        after > before * limit**2,
        f"entropy rose from {before:.2g} to {after:.2g} nats and the reward did not: the policy drifts "
        "towards random text",
        "lower optim.learning_rate or the entropy bonus; set objective.beta above 0; check that wrong completions do "
        "not outweigh right ones (length/mean_negative, objective.sign_weights)",
        {"entropy_before": before, "entropy": after},
    )


NEVER = 3
"""Steps in which no completion ended."""
FEWEST_COMPLETIONS = 32


@check("length/cut_share", "length/ended_share")
def end_token(case: Case) -> Verdict | None:
    """Every completion reaches the length limit."""
    cut, ended = case.each("length/cut_share", NEVER), case.values("length/ended_share", NEVER)
    completions, longest = case.completions(NEVER), case.rollout.max_completion_length
    if not cut or min(cut) < 1 or any(ended) or completions < FEWEST_COMPLETIONS or case.fixed_length:
        return None
    lost = any(case.start("length/ended_share"))
    advice = (
        "compare the run's end tokens with the token that ends a turn in the chat template ('cohort doctor', check "
        "'ends'). A base model may need rollout.stop, or a larger rollout.max_completion_length"
    )
    return alarm(
        f"no end token is {'drawn any more' if lost else 'ever drawn'}: each of the last {completions:.0f} completions "
        f"reached {longest:,} tokens",
        "start again from an earlier checkpoint (model.path) with a lower optim.learning_rate" if lost else advice,
        {"completions": completions, "max_completion_length": longest},
    )


MOST_CUT = 0.8
"""Share of cut completions above which most of the run is lost: an alarm."""


@check("length/cut_share", unless=("end_token",))
def truncation(case: Case) -> Verdict | None:
    """Completions that the length limit cuts."""
    share, low, high = case.share("length/cut_share")
    if len(case.recent(RECENT)) < FEWEST or low <= case.limits.truncated or case.fixed_length:
        return None
    masked = case.objective.truncated == "mask"
    effect = ", and objective.truncated 'mask' leaves them out" if masked else ": their rewards are of unfinished texts"
    return ill(
        low > MOST_CUT,
        f"{share:.0%} of completions are cut at {case.rollout.max_completion_length:,} tokens{effect}",
        "raise rollout.max_completion_length; if answers could be shorter, set objective.soft_overlong",
        {"cut_share": share, "cut_share_low": low, "cut_share_high": high},
    )


CORRELATED = 0.2
NEAR = 0.1
"""How near the highest reward is to be called reached, as a share of all rewards' range."""


@check("length/mean", "reward/mean")
def length_drift(case: Case) -> Verdict | None:
    """Lengths that have changed much since the start although the reward has not risen."""
    before, after, certainty = case.since_start("length/mean")
    if abs(certainty) < CERTAIN or min(before, after) <= 0:
        return None
    factor, limit = after / before, case.limits.length_change
    if 1 / limit < factor < limit or case.risen("length/mean"):
        return None
    correlation = case.mean("advantage/length_correlation", WINDOW) or 0.0
    reward = case.mean("reward/mean")
    if factor < 1 and reward is not None and case.highest - reward <= NEAR * (case.highest - case.lowest):
        return None  # nothing is left to gain but brevity
    cause = "the advantage does not follow the length, so objective.aggregation may favour it"
    advice = "try objective.aggregation 'constant' or 'token_mean'; look at the longest completions in rollouts/"
    if abs(correlation) > CORRELATED and (correlation > 0) == (factor > 1):
        longer = "longer" if correlation > 0 else "shorter"
        cause = f"{longer} completions get higher advantages (correlation {correlation:+.2f})"
        advice = "look at what the reward functions pay for; objective.soft_overlong limits long completions"
    return warning(
        f"completions went from {before:.0f} to {after:.0f} tokens while the reward did not rise (now "
        f"{reward or 0:.2f}): {cause}",
        advice,
        {"length_before": before, "length": after, "length_correlation": correlation, "reward": reward},
    )


SHORT = 8.0
"""Mean length, in tokens, below which completions of a prompt are often equal without anything being wrong."""


@check("completions/distinct_share", unless=("identical", "entropy_collapse"))
def duplicates(case: Case) -> Verdict | None:
    """Completions of a prompt that are the same text, although the prompts are not learned."""
    shares, length = case.each("completions/distinct_share", FEWEST), case.mean("length/mean") or 0.0
    if not shares or length < SHORT or max(shares) >= case.limits.distinct:
        return None
    if case.ends_of_dead()[0] > 0.5 * (case.mean("groups/dead_share") or 0.0):  # they are learned
        return None
    share, size = sum(shares) / len(shares), case.rollout.num_generations
    return warning(
        f"of {size} completions of a prompt only {share * size:.1f} differ: the others add nothing to the comparison",
        "raise rollout.temperature; check rollout.top_k, rollout.top_p and rollout.min_p; or lower "
        "rollout.num_generations and use more prompts",
        {"distinct_share": share},
    )


RISEN = 0.2
"""How much the share of repeated spans has to rise over its start."""
MOST_REPEATED = 0.8


@check("completions/repetition")
def repetition(case: Case) -> Verdict | None:
    """Completions that repeat themselves."""
    before, after, certainty = case.since_start("completions/repetition", 5)
    grown = after - before > RISEN and certainty > CERTAIN
    if after <= case.limits.repetition or (not grown and min(before, after) < MOST_REPEATED):
        return None
    cut = case.get("length/cut_share")
    return ill(
        grown and after > MOST_REPEATED,
        f"{after:.0%} of all spans of 4 tokens occurred earlier in the same completion"
        + (f" ({before:.0%} at the start)" if grown else "")
        + f"; {cut:.0%} of completions reach the length limit",
        "read a few completions in rollouts/. If they repeat themselves, start again from an earlier checkpoint "
        "(RUN/checkpoints/step-N as model.path) with a lower optim.learning_rate; mask cut "
        "completions (objective.truncated 'mask') or penalize them",
        {"repetition": after, "repetition_before": before, "cut_share": cut},
    )


@check("rewards/*/within_group_std")
def drowned_reward(case: Case) -> Verdict | None:
    """A reward function whose differences are lost beside those of another, because their scales differ."""
    names = reward_functions(case.now)
    weights = case.weights or (1.0,) * len(names)
    if len(case.last) < WINDOW or len(weights) != len(names) or len(names) < 2:
        return None
    if case.objective.reward_aggregation != "sum_then_normalize":
        return None
    spread = {name: _spread(case, name) for name in names}
    varies = {name: abs(weight) * spread[name] for name, weight in zip(names, weights, strict=True)}
    loud = max(names, key=lambda name: varies[name])
    for name in names:
        own, other = varies[name], varies[loud]
        # A weight that makes a function quiet is meant; a scale is not.
        if 0 < own < case.limits.drowned * other and spread[name] < case.limits.drowned * spread[loud]:
            return warning(
                f"reward function {name} is drowned by {loud}: where it distinguishes completions of a prompt, it "
                f"varies by {own:.2g} and {loud} by {other:.2g}, so advantages follow {loud} almost alone",
                f"set reward.weights so that both vary alike ({name} times {other / own:.0f}), or set "
                "objective.reward_aggregation to 'normalize_then_sum'",
                {"drowned": name, "by": loud, "ratio": own / other},
            )
    return None


def _spread(case: Case, name: str) -> float:
    """The mean standard deviation of a function's rewards within the groups in which they differ: a function that few
    completions earn is rare, not quiet."""
    spread = case.mean(f"rewards/{name}/within_group_std", WINDOW) or 0.0
    alive = 1 - (case.mean(f"rewards/{name}/dead_share", WINDOW) or 0.0)
    return spread / alive if alive > 0 else 0.0


CHANCE = 0.005
"""Chance of an error of each two evaluations, over the number of evaluations."""


@check("eval/*reward/mean", "reward/mean")
def evaluation_falls(case: Case) -> Verdict | None:
    """Evaluations below an earlier one although the reward in training has not fallen."""
    if len(case.evaluations) < 3:
        return None
    now, latest = case.evaluations[-1]
    for key in [key for key in latest if key.startswith("eval/") and key.endswith("reward/mean")]:
        known = [(when, one) for when, line in case.evaluations if (one := _estimate(case, line, key)) is not None]
        if len(known) < 3 or known[-1][0] is not now:
            continue
        best, (high, error) = max(known[:-2], key=lambda one: one[1][0])
        # Each two of them may be compared: the chance of an error is that of all comparisons together.
        certain = NormalDist().inv_cdf(1 - CHANCE / len(known))
        if any(high - value <= certain * math.hypot(error, own) for _, (value, own) in known[-2:]):
            continue
        rewards = best.rewards or case.start("reward/mean")
        before, after, difference = mean(rewards), mean(now.rewards), differs(rewards, now.rewards)
        if difference < -RISES or before is None or after is None:
            continue  # training falls as well: another illness
        risen, latest_value = difference > RISES, known[-1][1][0]
        trained = f"rose from {before:.2f} to" if risen else "did not fall, and is"
        cause = ": the policy games the reward, or overfits the prompts" if risen else ""
        return ill(
            risen,
            f"{key} fell from {high:.2f} (step {best.step}) to {latest_value:.2f} (step {now.step}), beyond chance "
            f"in two evaluations, while the training reward {trained} {after:.2f}{cause}",
            f"keep the model of step {best.step} (eval.metric_for_best_model); read completions of both steps; use "
            "more prompts, or a KL (objective.beta)",
            {"before": high, "now": latest_value, "best_step": best.step, "reward_before": before, "reward": after},
        )
    return None


def _estimate(case: Case, line: Metrics, key: str) -> tuple[float, float] | None:
    """The mean of an evaluation and its standard error."""
    value, low, high = (number(line, f"{key[:-4]}{end}") for end in ("mean", "low", "high"))
    if value is None or low is None or high is None or high < low:
        return None
    return value, (high - low) / 2 / NormalDist().inv_cdf(0.5 + case.confidence / 2)


# ----------------------------------------
# The findings of a run.


NAMES = tuple(check.name for check in CHECKS)
"""Every check, causes before their consequences."""
NAME_WIDTH, TEXT_WIDTH = 19, 80
NARROWEST = 36
"""Columns of text below which it stands under the name of its check, not beside it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding, from the step at which it begins to the one at which it ceases."""

    check: str
    """The check's name, as ``report.skip_checks`` takes it."""
    level: Level
    step: int
    """The step at which it reached this level."""
    found: str
    """What was found, with its number and the cause; of the last step that the check spoke at."""
    advice: str = ""
    """The next thing to try."""
    numbers: Numbers = field(default_factory=dict)
    """The numbers behind the words, by name."""
    begin: int = 0
    """The step at which it began, perhaps at another level."""
    worst: Finding | None = None
    """As it was when it was worse than now. None: it was not."""
    metrics: tuple[str, ...] = ()
    """The metrics that it is about, as patterns (``fnmatch``) of their keys."""
    end: int | None = None
    """The first step at which it was gone. None: it stands."""

    @property
    def stands(self) -> bool:
        """Whether it has not ceased."""
        return self.end is None

    def show(self, width: int = 2 + 18 + NAME_WIDTH + TEXT_WIDTH) -> str:
        """The finding for a terminal of a width: when it begins or changes, or that it has ceased."""
        level = self.level.upper() if self.level is Level.ALARM else str(self.level)
        step, level = (self.step, level) if self.end is None else (self.end, "ended")
        first = f"  {f'step {step}':<10}{level:<8}{self.check:<{NAME_WIDTH}}"
        if self.end is not None:
            count = self.end - self.begin
            return f"{first}after {count} step{'s' * (count != 1)}"
        narrow = width < 20 + NAME_WIDTH + NARROWEST
        indent = " " * (4 if narrow else 20 + NAME_WIDTH)
        room = max(NARROWEST, min(width - len(indent), TEXT_WIDTH))
        words = wrap(self.found, room)
        if self.worst is not None:
            words += wrap(f"(worst: {self.worst.level} at step {self.worst.step})", room)
        words += wrap(self.advice, room, initial_indent="-> ", subsequent_indent="   ")
        lines = [indent + one for one in words]
        return "\n".join([first.rstrip(), *lines] if narrow else [first + words[0], *lines[1:]])

    def as_json(self) -> dict[str, Any]:
        """The finding in types of JSON."""
        plain = {name: getattr(self, name) for name in ("check", "level", "step", "begin", "end", "found", "advice")}
        worst = self.worst and {"level": str(self.worst.level), "step": self.worst.step, "found": self.worst.found}
        numbers, metrics = dict(self.numbers), list(self.metrics)
        return {**plain, "level": str(self.level), "numbers": numbers, "metrics": metrics, "worst": worst}


# ----------------------------------------
# A run's health in one line.


WORDS = {Level.ALARM: "unhealthy", Level.WARNING: "warning"}
FIRST = 5
"""The step before which most checks have nothing to say."""


def standing(findings: Sequence[Finding]) -> list[Finding]:
    """The findings that have not ceased, the worst first."""
    return sorted((one for one in findings if one.stands), key=lambda one: -one.level.rank)


def health_line(metrics: Mapping[str, Any], findings: Sequence[Finding] = (), *, groups_compared: bool = True) -> str:
    """A step in one line: the verdict, the names of the warnings and alarms that stand, and the main numbers. It has no
    loss, whose value means nothing in GRPO.

    >>> metrics = {"groups/dead_share": 0.29, "entropy": 0.83, "updates": 2, "kl/k3": 0.004}
    >>> metrics |= {"tokens/active_share": 0.49, "tokens/clipped_low_share": 0.01, "tokens/clipped_high_share": 0.0}
    >>> health_line(metrics)
    'healthy: 71% of groups teach, entropy 0.83, clip 2%, KL 0.004'
    >>> health_line({"step": 1} | metrics, groups_compared=False)
    'no verdict before step 5: entropy 0.83, clip 2%, KL 0.004'
    >>> health_line(metrics, [Finding("truncation", Level.ALARM, 3, "...")])
    'unhealthy (truncation): 71% of groups teach, entropy 0.83, clip 2%, KL 0.004'

    Args:
        metrics: of the step.
        findings: of the run; those that have ceased, and notes, do not count.
        groups_compared: whether a group of equal rewards teaches nothing (``Diagnosis.groups_compared``).
    """
    ill = [one for one in standing(findings) if one.level is not Level.NOTE]
    step = number(metrics, "step")
    verdict = f"no verdict before step {FIRST}" if step is not None and step < FIRST else "healthy"
    if ill:
        verdict = f"{WORDS[ill[0].level]} ({', '.join(one.check for one in ill)})"
    parts = []
    if groups_compared and (dead := number(metrics, "groups/dead_share")) is not None:
        parts.append(f"{1 - dead:.0%} of groups teach")
    if (entropy := number(metrics, "entropy")) is not None:
        parts.append(f"entropy {entropy:.2g}")
    if (number(metrics, "updates") or 0) > 1 and (clipped := clipped_share(metrics)) is not None:
        parts.append(f"clip {clipped:.0%}")
    if (kl := number(metrics, "kl/k3")) is not None:
        parts.append(f"KL {kl:.2g}")
    return f"{verdict}: {', '.join(parts)}" if parts else verdict


def not_run(keys: Iterable[str]) -> tuple[str, ...]:
    """The checks that have nothing to look at in a run with metrics of these keys.

    >>> "learning_rate_low" in not_run(["reward/mean", "groups/dead_share"])
    True
    """
    known = list(keys)
    return tuple(check.name for check in CHECKS if not any(fnmatchcase(key, check.metrics[0]) for key in known))


log = logging.getLogger("cohort.diagnosis")
MAX_TEXT = 2000
"""Characters of a sentence that are kept: names of reward functions come from the run folder."""
ENDS_AFTER = 5
"""Steps without a verdict, or with milder ones, after which a finding has ceased, or is milder: it does not flicker."""


class Diagnosis:
    """What is wrong with a run, from its metrics alone. Feed it the lines of ``metrics.jsonl`` in order: a resumed run,
    or another process, that feeds it the same lines has the same findings. A step costs the same however long the run.

    >>> diagnosis = Diagnosis()
    >>> metrics = {"updates": 1, "reward/mean": 0.0, "groups/dead_share": 1.0, "groups/sampled": 16}
    >>> said = [finding for step in range(1, 8) for finding in diagnosis.step({"step": step, **metrics})]
    >>> [(finding.check, str(finding.level), finding.step) for finding in said]
    [('all_wrong', 'alarm', 5)]

    Args:
        settings: the run's, as its config.toml has them (``GRPOConfig.model_dump()``); {}: the defaults.
        thresholds: instead of those of the settings.
    """

    def __init__(self, settings: Mapping[str, Any] | None = None, thresholds: ThresholdsConfig | None = None) -> None:
        self._case = Case(settings or {}, thresholds)
        self.findings: list[Finding] = []
        """All so far, each once and as it is now (``Finding.worst``: as it was), in the order in which they began."""
        self._open: dict[str, _Open] = {}
        self._noted: set[str] = set()
        self._has_failed = False

    @classmethod
    def of(cls, history: Run, thresholds: ThresholdsConfig | None = None) -> Self:
        """The diagnosis of a run so far."""
        made = cls(history.settings, thresholds)
        for metrics in history.rows:
            made.step(metrics)
        return made

    @property
    def groups_compared(self) -> bool:
        """Whether a group of equal rewards teaches nothing, so that the others are those that teach."""
        return self._case.groups_compared

    @property
    def health(self) -> str:
        """The latest step in one line (``health_line``); empty before the first."""
        compared = self.groups_compared
        return health_line(self._case.now, self.findings, groups_compared=compared) if self._case.last else ""

    @property
    def standing(self) -> list[Finding]:
        """The findings that have not ceased, the worst first."""
        return standing(self.findings)

    def step(self, metrics: Mapping[str, Any]) -> list[Finding]:
        """Take the metrics of a step; return the findings that begin, worsen, become milder or cease with it."""
        step = metrics.get("step")
        if type(step) is not int:
            return []
        self._case.add(metrics)
        if not self._case.last:
            return []
        said, ill = list[Finding](), set[str]()
        for check in CHECKS:
            if check.name in self._case.skip or ill.intersection(check.unless):
                continue  # a finding waits while its cause hides whether it still holds
            verdict = check.verdict(self._case)
            if verdict is not None and verdict.level is not Level.NOTE:
                ill.add(check.name)
            if (finding := self._said(check, verdict, step)) is not None:
                said.append(finding)
        return said

    def step_or_log(self, metrics: Mapping[str, Any]) -> list[Finding]:
        """As ``step``, for runs and trackers, which an error in a check must not end: the first is logged, and a step
        with an error has no findings."""
        try:
            return self.step(metrics)
        except Exception:
            if not self._has_failed:
                log.exception("the diagnosis failed at step %s: findings are incomplete", metrics.get("step"))
            self._has_failed = True
            return []

    def _said(self, check: Check, verdict: Verdict | None, step: int) -> Finding | None:
        """What is new of a check at this step."""
        at = self._open.get(check.name)
        if verdict is None:
            return self._ended(check.name, step) if at else None
        found, advice = (one_line(text[:MAX_TEXT]) for text in (verdict.found, verdict.advice))
        finding = Finding(check.name, verdict.level, step, found, advice, verdict.numbers, step, metrics=check.metrics)
        if at is None:
            if verdict.level is Level.NOTE and check.name in self._noted:
                return None
            self._open[check.name] = _Open(len(self.findings))
            self.findings.append(finding)
        else:
            at.quiet = 0
            before = self.findings[at.index]
            at.milder = at.milder + 1 if finding.level.rank < before.level.rank else 0
            if 0 < at.milder < ENDS_AFTER:
                return None
            at.milder, was = 0, before.worst or before
            worst = replace(was, worst=None) if was.level.rank > finding.level.rank else None
            since = before.step if finding.level is before.level else step
            self.findings[at.index] = finding = replace(finding, step=since, begin=before.begin, worst=worst)
            if finding.level is before.level:
                return None
        if finding.level is Level.NOTE:
            self._noted.add(check.name)
        return finding

    def _ended(self, check: str, step: int) -> Finding | None:
        """Count a step without a verdict; the finding ceases with the first of ``ENDS_AFTER``."""
        at = self._open[check]
        at.quiet += 1
        if at.quiet < ENDS_AFTER:
            return None
        del self._open[check]
        finding = self.findings[at.index]
        ended = self.findings[at.index] = replace(finding, end=step - ENDS_AFTER + 1)
        return None if finding.level is Level.NOTE else ended


@dataclass(slots=True)
class _Open:
    """A finding that stands."""

    index: int
    """Its place in ``Diagnosis.findings``."""
    quiet: int = 0
    """Steps in a row without a verdict."""
    milder: int = 0
    """Steps in a row with a milder one."""


def diagnose(history: Run, thresholds: ThresholdsConfig | None = None) -> list[Finding]:
    """All findings of a run, each once and as it is at the end, in the order in which they began."""
    return Diagnosis.of(history, thresholds).findings


def worst(findings: Sequence[Finding]) -> Level | None:
    """The worst level of the findings that stand; None without any."""
    return next((one.level for one in standing(findings)), None)
