"""Checks of what the learning rests on: reward functions, the sampler, evaluations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

from cohort.report.diagnosis.case import (
    RECENT,
    RISES,
    START,
    WINDOW,
    Case,
    Window,
    differs,
    mean,
    number,
    share_interval,
)
from cohort.report.diagnosis.finding import Level, Verdict

MANY_FAILED = 0.3
GAP_STEPS = 5
WORSE = 4.0
"""Factor over the threshold of ``sampler/gap`` from which updates follow another policy than the one that drew: an
alarm. With older weights in the sampler (``rollout.lag``), a gap of this factor is no bug."""
GREW, LEAST = 10.0, 0.1
"""Factor over the start of the run, and share of the threshold, from which a gap of the same weights has grown."""
BIAS, CERTAIN = 0.02, 4.0
"""How far, and how many standard errors, the mean ratio to the sampler has to be from 1."""
CHANCE = 0.005
"""Chance of an error of each two evaluations, over the number of evaluations."""
DROPPED = 0.2
"""Share of tokens that mismatch rules drop."""


def failing_rewards(case: Case) -> Verdict | None:
    """A reward function that fails."""
    completions = case.groups() * case.facts.generations
    worst: tuple[float, str, float] = (0.0, "", 0.0)
    for name in _functions(case.now):
        failed = sum(case.values(f"rewards/{name}/failed", RECENT))
        worst = max(worst, (share_interval(failed, completions)[0], name, failed))
    low, name, failed = worst
    if not completions or low <= case.limits.failed_rewards:
        return None
    slow = sum(case.values(f"rewards/{name}/timeouts", RECENT))
    return Verdict(
        Level.ALARM if low > MANY_FAILED else Level.WARNING,
        f"reward function {name} failed on {failed / completions:.0%} of {completions:.0f} completions"
        + (f", {slow:.0f} of them by its time limit" if slow else ""),
        "raise reward.timeout, or make it faster"
        if slow > failed / 2
        else "read the log, which has the first traceback of each step, and the column reward_error of rollouts/",
        {"failed": failed, "completions": completions, "timeouts": slow},
    )


def drowned_reward(case: Case) -> Verdict | None:
    """A reward function whose differences are lost beside those of another, because their scales differ."""
    names = _functions(case.now)
    weights = case.facts.weights or (1.0,) * len(names)
    if len(case.last) < WINDOW or len(weights) != len(names) or len(names) < 2:
        return None
    if case.facts.objective.reward_aggregation != "sum_then_normalize":
        return None
    spread = {name: _spread(case, name) for name in names}
    weight = dict(zip(names, map(abs, weights), strict=True))
    loud = max(names, key=lambda name: weight[name] * spread[name])
    for name in names:
        own, other = weight[name] * spread[name], weight[loud] * spread[loud]
        # A weight that makes a function quiet is meant; a scale is not.
        if 0 < own < case.limits.drowned * other and spread[name] < case.limits.drowned * spread[loud]:
            return Verdict(
                Level.WARNING,
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
    spread = case.mean(f"rewards/{name}/within_group_std") or 0.0
    alive = 1 - (case.mean(f"rewards/{name}/dead_share") or 0.0)
    return spread / alive if alive > 0 else 0.0


def sampler_mismatch(case: Case) -> Verdict | None:
    """A sampler and a trainer that disagree."""
    gap, limit = case.values("sampler/gap", GAP_STEPS), case.limits.sampler_gap
    if len(gap) < GAP_STEPS:
        return None
    lagging = (number(case.now, "sampler/version_lag_mean") or 0.0) > 0
    if min(gap) > limit * (WORSE if lagging else 1.0):
        return Verdict(
            Level.ALARM if min(gap) > WORSE * limit else Level.WARNING,
            f"log-probs of sampler and trainer differ by {mean(gap):.2g} nats per token (sampler/gap)"
            + (
                ", with weights in the sampler that are older than the trainer's"
                if lagging
                else " for the same weights"
            ),
            "lower rollout.lag"
            if lagging
            else "set model.precision to 'float32', or add a mismatch weight "
            "(objective.mismatch); with vLLM see 'cohort docs scale'",
            {"gap": mean(gap)},
        )
    before = mean(case.start("sampler/gap")) if case.steps >= START + GAP_STEPS and not lagging else None
    if before is not None and min(gap) > max(GREW * before, LEAST * limit):
        return Verdict(
            Level.WARNING,
            f"log-probs of sampler and trainer differ by {mean(gap):.2g} nats per token for the same weights, and by "
            f"{before:.2g} at the start of the run (sampler/gap)",
            "run 'cohort doctor' on the newest checkpoint (check sampler). Something changed the model or its weights "
            "for one of the two: a callback, a hook, a server that missed an update; or set model.precision to "
            "'float32', if logits have grown so large that bfloat16 rounds them",
            {"gap": mean(gap), "start": before},
        )
    return _bias(case) or _dropped(case)


def _bias(case: Case) -> Verdict | None:
    """A mean ratio to the sampler that is not 1."""
    steps = case.recent(GAP_STEPS)
    pairs = [(number(one, "sampler/mean_ratio"), number(one, "sampler/mean_ratio_se")) for one in steps]
    away = [
        abs(ratio - 1) > max(BIAS, CERTAIN * error) for ratio, error in pairs if ratio is not None and error is not None
    ]
    ratio = case.mean("sampler/mean_ratio", GAP_STEPS)
    if len(away) < GAP_STEPS or not all(away) or ratio is None:
        return None
    replayed = not case.facts.truncates
    return Verdict(
        Level.WARNING,
        f"the mean ratio of trainer to sampler is {ratio:.3f}, where it should be 1: "
        + (
            "they compute other distributions"
            if replayed
            else f"sampling leaves out {1 - ratio:.0%} of the probability"
            if ratio < 1
            else "tokens are drawn from another distribution than the one that the update takes"
        ),
        "compare temperature and sampling settings of both" if replayed else "set rollout.replay_sampling to true",
        {"mean_ratio": ratio},
    )


def _dropped(case: Case) -> Verdict | None:
    shares = case.values("tokens/mismatch_share", GAP_STEPS)
    if len(shares) < GAP_STEPS or min(shares) <= DROPPED:
        return None
    return Verdict(
        Level.WARNING,
        f"the rules of objective.mismatch drop {mean(shares):.0%} of the tokens",
        "see sampler/gap and sampler/log_ratio_...: sampler and trainer differ, or the rule is too strict",
        {"mismatch_share": mean(shares)},
    )


def sampling_errors(case: Case) -> Verdict | None:
    """Completions that could not be drawn."""
    count = sum(case.values("completions/errors", GAP_STEPS))
    if not count:
        return None
    return Verdict(
        Level.ALARM,
        f"{count:.0f} completions of the last {min(GAP_STEPS, len(case.last))} steps could not be sampled, because "
        "logits were NaN or infinite: weights have diverged, or soon will",
        "start again from an earlier checkpoint (RUN/checkpoints/step-N as model.path) with a lower "
        "optim.learning_rate; set model.precision to 'float32'",
        {"errors": count},
    )


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
        before = best.rewards or case.start("reward/mean")
        difference = differs(before, now.rewards)
        if difference < -RISES or not before or not now.rewards:
            continue  # training falls as well: another illness
        return _falls(key, best, now, (high, known[-1][1][0]), (mean(before), mean(now.rewards)), difference > RISES)
    return None


def _falls(
    key: str,
    best: Window,
    now: Window,
    evaluated: tuple[float, float],
    rewards: tuple[float | None, float | None],
    risen: bool,
) -> Verdict:
    trained = f"rose from {rewards[0]:.2f} to" if risen else "did not fall, and is"
    cause = ": the policy games the reward, or overfits the prompts" if risen else ""
    return Verdict(
        Level.ALARM if risen else Level.WARNING,
        f"{key} fell from {evaluated[0]:.2f} (step {best.step}) to {evaluated[1]:.2f} (step {now.step}), beyond chance "
        f"in two evaluations, while the training reward {trained} {rewards[1]:.2f}{cause}",
        f"keep the model of step {best.step} (eval.metric_for_best_model); read completions of both steps; use more "
        "prompts, or a KL (objective.beta)",
        {
            "before": evaluated[0],
            "now": evaluated[1],
            "best_step": best.step,
            "reward_before": rewards[0],
            "reward": rewards[1],
        },
    )


def _estimate(case: Case, line: Mapping[str, Any], key: str) -> tuple[float, float] | None:
    """The mean of an evaluation and its standard error."""
    value, low, high = (number(line, f"{key[:-4]}{end}") for end in ("mean", "low", "high"))
    if value is None or low is None or high is None or high < low:
        return None
    return value, (high - low) / 2 / NormalDist().inv_cdf(0.5 + case.facts.confidence / 2)


def _functions(metrics: Mapping[str, Any]) -> list[str]:
    """Names of the reward functions, in their order."""
    return [key[8:-17] for key in metrics if key.startswith("rewards/") and key.endswith("/within_group_std")]
