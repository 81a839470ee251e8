"""Checks of the learning signal: whether rewards differ within groups, and if not, why; and whether there is a
gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cohort.report.diagnosis.case import RECENT, Case, Metrics, differs, number
from cohort.report.diagnosis.finding import Level, Verdict

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


def why_no_gradient(metrics: Mapping[str, Any]) -> str:
    """Why a step's updates had no gradient, from its metrics; and which functions failed, which may be behind it."""
    failed = [key for key in metrics if key.startswith("rewards/") and key.endswith("/failed") and metrics[key]]
    if not failed or metrics.get("reward/mean", 0) is None:
        return _why(metrics)
    names = [key.removeprefix("rewards/").removesuffix("/failed") for key in failed]
    counts = [f"{name} failed on {metrics[f'rewards/{name}/failed']:,} completions" for name in names]
    shares = [number(metrics, f"rewards/{name}/unscored_share") for name in names]
    of = [f" ({share:.0%})" if share else "" for share in shares]
    causes = " and ".join(map("".join, zip(counts, of, strict=True)))
    return f"{causes}, which are unscored (the log has the traceback). Without them, {_why(metrics)}"


def _why(metrics: Mapping[str, Any]) -> str:
    left_out = number(metrics, "groups/left_out")
    if left_out and left_out == number(metrics, "groups/sampled"):
        return "no update was made: every group has equal rewards, and objective.group_filter dropped them all"
    if "reward/mean" in metrics and metrics["reward/mean"] is None:
        begin, end = "rewards/", "/unscored_share"
        keys = [key for key, value in metrics.items() if key.startswith(begin) and key.endswith(end) and value == 1]
        names = [key.removeprefix(begin).removesuffix(end) for key in keys]
        verbs = ["failed on" if metrics.get(f"rewards/{name}/failed") else "returned None for" for name in names]
        reasons = [f"{name} {verb} every one" for name, verb in zip(names, verbs, strict=True)]
        if (errors := number(metrics, "completions/errors")) and not reasons:
            return f"no update had a gradient: no completion was scored; {errors:.0f} could not be sampled"
        if not reasons:
            return "no update had a gradient: no completion was scored (reward/unscored)"
        return f"no update had a gradient: no completion was scored, because {' and '.join(reasons)}"
    shares = {cause: number(metrics, f"tokens/{cause}_share") or 0.0 for cause in CAUSES}
    if not any(shares.values()):
        return "no update had a gradient ('cohort docs metrics': tokens/..._share)"
    cause = max(shares, key=lambda name: shares[name])
    if cause == "no_advantage" and metrics.get("groups/dead_share") == 1:
        return "no update had a gradient: every group has equal rewards, so there is nothing to learn"
    return f"no update had a gradient: {shares[cause]:.0%} of the tokens {CAUSES[cause]} (tokens/{cause}_share)"


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


# ----------------------------------------
# Checks of lengths and texts: cut completions, end tokens, drift of the length, duplicates, repetition.


MOST_CUT = 0.8
"""Share of cut completions above which most of the run is lost: an alarm."""
NEVER = 3
"""Steps, and tens of completions, in which no completion ended."""
FEWEST_COMPLETIONS = 32
CERTAIN = 4.0
"""Standard errors between the means of two windows that are called different."""
SHORT = 8.0
"""Mean length, in tokens, below which completions of a prompt are often equal without anything being wrong."""
CORRELATED = 0.2
NEAR = 0.1
"""How near the highest reward is to be called reached, as a share of all rewards' range."""
RISEN = 0.2
"""How much the share of repeated spans has to rise over its start."""
MOST_REPEATED = 0.8


def end_token(case: Case) -> Verdict | None:
    """Every completion reaches the length limit."""
    cut, ended = (case.values(f"length/{name}_share", NEVER) for name in ("cut", "ended"))
    completions = case.groups(NEVER) * case.facts.generations
    if len(cut) < NEVER or min(cut) < 1 or any(ended) or completions < FEWEST_COMPLETIONS or case.facts.fixed_length:
        return None
    lost = any(case.start("length/ended_share"))
    advice = (
        "compare the run's end tokens with the token that ends a turn in the chat template ('cohort doctor', check "
        "'ends'). A base model may need rollout.stop, or a larger rollout.max_completion_length"
    )
    return Verdict(
        Level.ALARM,
        f"no end token is {'drawn any more' if lost else 'ever drawn'}: each of the last {completions:.0f} completions "
        f"reached {case.facts.max_length:,} tokens",
        "start again from an earlier checkpoint (model.path) with a lower optim.learning_rate" if lost else advice,
        {"completions": completions, "max_completion_length": case.facts.max_length},
    )


def truncation(case: Case) -> Verdict | None:
    """Completions that the length limit cuts."""
    share, low, high = case.share("length/cut_share")
    if len(case.recent(RECENT)) < FEWEST_STEPS or low <= case.limits.truncated or case.facts.fixed_length:
        return None
    masked = case.facts.objective.truncated == "mask"
    effect = ", and objective.truncated 'mask' leaves them out" if masked else ": their rewards are of unfinished texts"
    return Verdict(
        Level.ALARM if low > MOST_CUT else Level.WARNING,
        f"{share:.0%} of completions are cut at {case.facts.max_length:,} tokens{effect}",
        "raise rollout.max_completion_length; if answers could be shorter, set objective.soft_overlong",
        {"cut_share": share, "cut_share_low": low, "cut_share_high": high},
    )


def length_drift(case: Case) -> Verdict | None:
    """Lengths that have changed much since the start although the reward has not risen."""
    before, after, certainty = case.since_start("length/mean")
    if before is None or after is None or abs(certainty) < CERTAIN or min(before, after) <= 0:
        return None
    factor, limit = after / before, case.limits.length_change
    if 1 / limit < factor < limit or case.risen("length/mean"):
        return None
    correlation = case.mean("advantage/length_correlation") or 0.0
    reward = case.mean("reward/mean", RECENT)
    if factor < 1 and reward is not None and case.highest - reward <= NEAR * (case.highest - case.lowest):
        return None  # nothing is left to gain but brevity
    cause = "the advantage does not follow the length, so objective.aggregation may favour it"
    advice = "try objective.aggregation 'constant' or 'token_mean'; look at the longest completions in rollouts/"
    if abs(correlation) > CORRELATED and (correlation > 0) == (factor > 1):
        longer = "longer" if correlation > 0 else "shorter"
        cause = f"{longer} completions get higher advantages (correlation {correlation:+.2f})"
        advice = "look at what the reward functions pay for; objective.soft_overlong limits long completions"
    return Verdict(
        Level.WARNING,
        f"completions went from {before:.0f} to {after:.0f} tokens while the reward did not rise (now "
        f"{reward or 0:.2f}): " + cause,
        advice,
        {"length_before": before, "length": after, "length_correlation": correlation, "reward": reward},
    )


def duplicates(case: Case) -> Verdict | None:
    """Completions of a prompt that are the same text, although the prompts are not learned."""
    shares = case.values("completions/distinct_share", FEWEST_STEPS)
    length = case.mean("length/mean", RECENT) or 0.0
    if len(shares) < FEWEST_STEPS or length < SHORT or max(shares) >= case.limits.distinct:
        return None
    learned, dead = case.ends_of_dead()[0], case.mean("groups/dead_share", RECENT) or 0.0
    if learned > 0.5 * dead:
        return None
    share = sum(shares) / len(shares)
    size = case.facts.generations
    return Verdict(
        Level.WARNING,
        f"of {size} completions of a prompt only {share * size:.1f} differ: the others add nothing to the comparison",
        "raise rollout.temperature; check rollout.top_k, rollout.top_p and rollout.min_p; or lower "
        "rollout.num_generations and use more prompts",
        {"distinct_share": share},
    )


def repetition(case: Case) -> Verdict | None:
    """Completions that repeat themselves."""
    before, after, certainty = case.since_start("completions/repetition", 5)
    if before is None or after is None or after <= case.limits.repetition:
        return None
    grown = after - before > RISEN and certainty > CERTAIN
    if not grown and min(before, after) < MOST_REPEATED:
        return None
    cut = number(case.now, "length/cut_share") or 0.0
    return Verdict(
        Level.ALARM if grown and after > MOST_REPEATED else Level.WARNING,
        f"{after:.0%} of all spans of 4 tokens occurred earlier in the same completion"
        + (f" ({before:.0%} at the start)" if grown else "")
        + f"; {cut:.0%} of completions reach the length limit",
        "read a few completions in rollouts/. If they repeat themselves, start again from an earlier checkpoint "
        "(RUN/checkpoints/step-N as model.path) with a lower optim.learning_rate; mask cut "
        "completions (objective.truncated 'mask') or penalize them",
        {"repetition": after, "repetition_before": before, "cut_share": cut},
    )
