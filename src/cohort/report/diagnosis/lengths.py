"""Checks of lengths and texts: cut completions, end tokens, drift of the length, duplicates, repetition."""

from __future__ import annotations

from cohort.report.diagnosis.case import RECENT, Case
from cohort.report.diagnosis.finding import Level, Verdict
from cohort.report.diagnosis.numbers import number

FEWEST_STEPS = 5
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
