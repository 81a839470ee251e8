"""Checks of the learning signal: whether rewards differ within groups, and if not, why; and whether there is a
gradient."""

from __future__ import annotations

from cohort.report.diagnosis.case import RECENT, Case, Metrics
from cohort.report.diagnosis.causes import CAUSES, why_no_gradient
from cohort.report.diagnosis.finding import Level, Verdict
from cohort.report.diagnosis.numbers import differs, number

FEWEST_STEPS = 5
"""Steps that a share is taken over at least."""
MOST = 0.9
"""Share of groups with equal rewards above which hardly anything is learned: an alarm."""
MAIN = 0.8
"""Share of those groups that has to have one cause for it to be named."""
MANY_UNSCORED = 0.5
NO_GRADIENT_STEPS = 3
ZERO = 1e-6
"""|policy_value| below this is the 0 of the identity with float32's rounding."""


def unscored(case: Case) -> Verdict | None:
    """Completions without a reward."""
    steps = case.recent(RECENT)
    completions = case.groups() * case.facts.generations
    count = sum(case.values("reward/unscored", RECENT)) - sum(case.values("completions/errors", RECENT))
    share = count / completions if completions else 0.0
    if case.steps < 3 or share < MANY_UNSCORED:
        return None
    return Verdict(
        Level.ALARM if share >= MOST else Level.WARNING,
        f"{share:.0%} of completions have no reward: the reward functions returned None or failed",
        "return None only for what cannot be scored, and 0 for a wrong answer. The log has the first traceback of each "
        "step",
        {"unscored_share": share, "steps": len(steps)},
    )


def all_right(case: Case) -> Verdict | None:
    """Groups in which every completion is right: rewards are 0 or 1, and these are 1."""
    if _cause(case) != "right":
        return None
    dead, reward = case.share("groups/dead_share")[0], case.mean("reward/mean", RECENT)
    learned = differs(case.start("reward/mean"), case.values("reward/mean", RECENT)) > 2
    found = (
        f"{dead:.0%} of groups have equal rewards, nearly all of them because every completion is right "
        f"(mean reward {reward:.2f})"
    )
    if learned:
        return Verdict(
            Level.NOTE,
            f"{found}: the policy has learned these prompts",
            "stop here, or go on with harder prompts",
            {"dead_share": dead, "reward": reward},
        )
    return Verdict(
        Level.WARNING,
        f"{found}: they are too easy for this model and teach nothing",
        "use harder prompts, or set objective.group_filter to 'dynamic_sampling' to sample others in their place",
        {"dead_share": dead, "reward": reward},
    )


def all_wrong(case: Case) -> Verdict | None:
    """Groups in which every completion has the lowest reward."""
    if _cause(case) != "wrong":
        return None
    return _dead(
        case,
        "nearly all of them because no completion is right"
        if case.binary
        else f"nearly all of them near the lowest of the run so far ({case.lowest:.2g})",
        "ease the prompts, warm up (fine-tune on solutions first), reward partial success, or raise "
        "rollout.num_generations; 'cohort doctor' tries the reward functions on right answers",
    )


def identical(case: Case) -> Verdict | None:
    """Groups whose completions are the same text."""
    if _cause(case) != "identical":
        return None
    return _dead(
        case,
        "nearly all of them because their completions are the same text",
        "raise rollout.temperature; check that rollout.top_k, rollout.top_p and a grammar leave a choice. If it came "
        "during training, entropy has collapsed: a lower optim.learning_rate, or an entropy bonus",
    )


def dead_groups(case: Case) -> Verdict | None:
    """Groups of equal rewards without one main cause, or of rewards that may be good or bad."""
    if (cause := _cause(case)) == "highest":
        return _highest(case)
    if cause != "mixed":
        return None
    return _dead(
        case,
        "and not mainly because all is right or all is wrong",
        "raise rollout.num_generations, choose prompts of middle difficulty, or set objective.group_filter to "
        "'dynamic_sampling'",
    )


def _highest(case: Case) -> Verdict:
    """Equal rewards that are the highest known, which need not be the best possible."""
    share, low, high = case.share("groups/dead_share")
    return Verdict(
        Level.WARNING,
        f"{share:.0%} of groups have equal rewards, nearly all of them near the highest of the run so far "
        f"({case.highest:.2g}), and teach nothing",
        f"if {case.highest:.2g} is the best possible reward, take harder prompts, or stop; if not, no completion earns "
        "more: ease the prompts, reward partial success, or raise rollout.num_generations",
        {"dead_share": share, "dead_share_low": low, "dead_share_high": high, "reward": case.highest},
    )


def zero_gradient(case: Case) -> Verdict | None:
    """Updates with a gradient of exactly 0 for another reason than equal rewards."""
    last = case.recent(NO_GRADIENT_STEPS)
    if len(last) < NO_GRADIENT_STEPS or not all(_without_gradient(one) for one in last):
        return None
    shares = {cause: number(case.now, f"tokens/{cause}_share") or 0.0 for cause in CAUSES}
    cause = max(shares, key=lambda cause: shares[cause]) if any(shares.values()) else "no_advantage"
    if (
        case.facts.groups_compared
        and cause == "no_advantage"
        and (number(case.now, "groups/dead_share") or 0.0) >= MOST
    ):
        return None  # the other checks of this file
    by_design = cause == "no_advantage" and case.facts.objective.baseline == "second_best"  # a single best completion
    return Verdict(
        Level.NOTE if by_design else Level.ALARM,
        f"the gradient was exactly 0 for {NO_GRADIENT_STEPS} steps: {why_no_gradient(case.now)}. (A loss of 0 can be "
        "normal; a gradient of 0 is not.)"
        if _skipped(case.now)
        else f"no token had a gradient of the reward for {NO_GRADIENT_STEPS} steps, only of the KL or entropy term: "
        + why_no_gradient(case.now),
        "raise rollout.prompts_per_step: no group had a single best completion, and this objective learns from nothing "
        "else"
        if by_design
        else _advice_by_cause(cause),
        {f"tokens/{cause}_share": share for cause, share in shares.items() if share},
    )


def value_zero(case: Case) -> Verdict | None:
    """The value of the objective is 0 by identity although the gradient is not."""
    value, norm = number(case.now, "policy_value"), number(case.now, "grad_norm")
    if value is None or not norm or abs(value) > ZERO or number(case.now, "updates") != 1:
        return None
    return Verdict(
        Level.NOTE,
        f"policy_value is {value:.1g}, which is normal on the first update after sampling; the gradient is not 0 "
        f"(norm {norm:.2g}). Watch reward/mean instead (see 'cohort docs grpo')",
        "",
        {"policy_value": value, "grad_norm": norm},
    )


def _advice_by_cause(cause: str) -> str:
    return {
        "masked": "raise rollout.max_completion_length, or set objective.truncated to 'keep'",
        "mismatch": "compare sampler/gap with the rules of objective.mismatch: sampler and trainer disagree",
        "off_policy": "make fewer updates per rollout, or lower rollout.lag",
        "clipped_low": "lower optim.learning_rate, or make fewer updates per rollout",
        "clipped_high": "lower optim.learning_rate, or make fewer updates per rollout",
        "no_advantage": "look at reward/within_group_std and at the advantages in rollouts/",
    }.get(cause, "see the table of tokens/..._share in 'cohort docs metrics'")


def _without_gradient(metrics: Metrics) -> bool:
    """Whether no token had a gradient of the reward, whatever a KL or entropy term did."""
    if not number(metrics, "updates") or number(metrics, "updates_nonfinite"):
        return False
    return _skipped(metrics) or number(metrics, "tokens/active_share") == 0


def _skipped(metrics: Metrics) -> bool:
    """Whether every update's gradient was exactly 0."""
    updates = number(metrics, "updates")
    return updates is not None and updates == number(metrics, "updates_skipped")


def _dead(case: Case, why: str, advice: str) -> Verdict:
    share, low, high = case.share("groups/dead_share")
    reward = case.mean("reward/mean", RECENT)
    verdict = "almost nothing is learned" if low > MOST else "they teach nothing"
    return Verdict(
        Level.ALARM if low > MOST else Level.WARNING,
        f"{share:.0%} of groups have equal rewards, {why}: {verdict}; mean reward {reward or 0.0:.2f}",
        advice,
        {"dead_share": share, "dead_share_low": low, "dead_share_high": high, "reward": reward},
    )


def _cause(case: Case) -> str:
    """The main cause of equal rewards; empty if few groups have them, or if it does not matter."""
    if not case.facts.groups_compared or len(case.recent(RECENT)) < FEWEST_STEPS or unscored(case):
        return ""
    dead, low, _ = case.share("groups/dead_share")
    if low <= case.limits.dead_groups or (case.facts.resamples and not _starved(case)):
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
    return used < 0.5 * case.facts.prompts * len(case.recent(RECENT))
