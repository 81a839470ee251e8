"""Checks of a rollout: whether its groups differ in reward, what each reward function adds, whether completions differ
and end. All take plain numbers, so they serve a rollout of a run as well as one that was sampled for a check.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from cohort.doctor.finding import Check, Finding

# ----------------------------------------
# Checks that policies which must be equal before the first update are: sampler and trainer, policy and reference.


EXPECTED = {"float64": 1e-6, "float32": 1e-3, "bfloat16": 0.05}
"""Mean |difference of log-probs| in nats that rounding explains, by compute precision."""


def check_sampler(gap: float, most: float, precision: str, advice: str) -> list[Finding]:
    """The sampler's log-probs against the trainer's, for the same tokens and weights.

    Args:
        gap: mean |difference| in nats.
        most: the gap at which a run stops.
        precision: "float32", "bfloat16" or "float64".
        advice: what to try.
    """
    check = Check("sampler", {"gap": _known(gap)})
    found = f"sampler and trainer differ by {gap:.2g} nats per token on average"
    if not gap <= most:
        check.fail(f"{found}; a run stops above {most:g}", advice)
    elif gap > EXPECTED[precision]:
        check.warn(f"{found}; {precision} explains {EXPECTED[precision]:g}", advice)
    return check.findings(found)


def check_reference(gap: float | None, precision: str) -> list[Finding]:
    """The reference against the policy that starts as its equal.

    Args:
        gap: the largest |difference of log-probs| in nats; None: the run has no reference.
        precision: see ``check_sampler``.
    """
    check = Check("reference", {"largest_gap": _known(gap)})
    if gap is None:
        return check.findings("no reference: objective.beta is 0")
    if not gap <= 10 * EXPECTED[precision]:
        check.fail(
            f"the KL to the reference is not 0 before the first update: log-probs differ by up to {gap:.2g} nats",
            "set model.dropout to false; if that does not help, this is a bug: report it with the settings",
        )
    return check.findings(f"the KL to the reference is 0 (log-probs differ by at most {gap:.2g} nats)")


def _known(gap: float | None) -> float | None:
    return None if gap is None or not math.isfinite(gap) else gap


MOST_DEAD, MANY_DEAD = 0.8, 0.6
"""Shares of groups with equal rewards above which almost nothing, or little, is learned."""
MANY_CUT, ALL_CUT = 0.25, 0.95
FEW_DISTINCT = 2.0
"""Different completions of a group, on average, below which sampling hardly explores."""
SAME = 1e-9
"""Rewards closer than this are equal."""


def check_signal(
    rewards_PG: Sequence[Sequence[float]],
    most: float,
    *,
    group_relative: bool = True,
    rounds: int = 1,
    by_function: Mapping[str, Sequence[float]] | None = None,
) -> list[Finding]:
    """Whether rewards differ where the objective compares them: the plain verdict.

    Args:
        rewards_PG: rewards of each group's completions, NaN where unscored.
        most: the largest reward that the run has a name for, the sum of the positive weights: with rewards of 0 and 1,
            a group at it is solved.
        group_relative: whether completions are compared with their own group; otherwise with the whole rollout.
        rounds: with dynamic sampling, how often groups with equal rewards are replaced by others.
        by_function: rewards of all completions by each function with a weight, NaN where unscored.
    """
    scored = [[reward for reward in group if not math.isnan(reward)] for group in rewards_PG]
    every = [reward for group in scored for reward in group]
    if not every:
        check = Check("signal")
        check.fail("no completion was scored", "see the check 'rewards'")
        return check.findings("")
    compared = scored if group_relative else [every]
    dead = [group for group in compared if not group or max(group) - min(group) < SAME]
    mean, share = fmean(every), len(dead) / len(compared)
    spread = math.fsum(_deviation(group) for group in compared if group) / len(compared)
    check = Check("signal", {"dead_share": share, "mean_reward": mean, "within_group_std": spread})
    groups = f"{share:.0%} of groups ({len(dead)} of {len(compared)}) have equal rewards"
    if not group_relative:
        groups = "all completions have equal rewards" if dead else "completions have different rewards"
    verdict = f"mean reward {mean:.2f}, standard deviation within groups {spread:.2f}"
    advice = _advice(dead, most, mean)
    if share >= MOST_DEAD and rounds > 1:
        check.warn(f"{groups}: dynamic sampling will use most of its {rounds} rounds; {verdict}", advice)
    elif share >= MOST_DEAD:
        check.fail(f"{groups}: almost nothing will be learned; {verdict}", advice)
    elif share >= MANY_DEAD:
        check.warn(f"{groups}: they teach nothing; {verdict}", advice)
    elif flat := _rewarding_nothing(by_function or {}):
        others = ", ".join(name for name in by_function or {} if name not in flat)
        check.warn(
            f"{groups}; {verdict}. But all of it comes from {others}: {', '.join(flat.values())}",
            f"if {' or '.join(flat)} is what counts, ease the data or warm up first: it is not what will be learned",
        )
    return check.findings(f"{groups}; {verdict}")


def _rewarding_nothing(by_function: Mapping[str, Sequence[float]]) -> dict[str, str]:
    """The functions that give all completions the same reward, at most 0, and a sentence about each; empty if all
    functions do."""
    found = {}
    for name, rewards in by_function.items():
        scored = [reward for reward in rewards if not math.isnan(reward)]
        if scored and max(scored) < SAME and max(scored) - min(scored) < SAME:
            found[name] = f"{name} is {scored[0]:.3g} for all {len(scored)} completions"
    return found if len(found) < len(by_function) else {}


def _deviation(numbers: Sequence[float]) -> float:
    return math.sqrt(fmean((number - fmean(numbers)) ** 2 for number in numbers))


def _advice(dead: Sequence[Sequence[float]], most: float, mean: float) -> str:
    """What helps, by where the equal rewards lie."""
    solved = sum(1 for group in dead if group and group[0] >= most - SAME)
    if dead and solved >= 0.75 * len(dead):
        return "most of these groups have the full reward: use harder prompts, or raise rollout.temperature"
    if mean < 0.1 * most:
        return (
            "hardly any completion is rewarded: ease the data, warm up (fine-tune on solutions first), reward partial "
            "success, or raise rollout.num_generations"
        )
    return "raise rollout.num_generations, ease the data, or warm up (fine-tune on solutions first)"


def check_rewards(by_function: Mapping[str, Sequence[float]], weights: Mapping[str, float]) -> list[Finding]:
    """What each reward function gave over a rollout: the same for all, or nothing.

    Args:
        by_function: rewards of all completions, NaN where unscored.
        weights: the functions' weights.
    """
    check, words = Check("rewards"), []
    for name, rewards in by_function.items():
        scored = [reward for reward in rewards if not math.isnan(reward)]
        unscored = 1 - len(scored) / len(rewards) if rewards else 0.0
        if unscored > 0:
            check.warn(
                f"reward function {name} did not score {unscored:.0%} of {len(rewards)} completions: it returned None "
                "or failed",
                "if that is not intended, look at the tracebacks above",
            )
        if not scored:
            continue
        low, high = min(scored), max(scored)
        if high - low < SAME and len(by_function) > 1:
            check.warn(
                f"reward function {name} gave {low:.3g} to each of {len(scored)} completions: now it teaches nothing",
                "if it never differs, remove it, or show the model what it asks for",
            )
        note = f"{low:.3g} to {high:.3g}" if weights[name] else "weight 0: logged only"
        words.append(f"{name} {fmean(scored):.2f} ({note})")
    return check.findings(f"mean (range): {', '.join(words)}")


def check_distinct(distinct_P: Sequence[int], size: int) -> list[Finding]:
    """Whether the completions of a group differ.

    Args:
        distinct_P: number of different completions of each group.
        size: completions of a group.
    """
    mean = fmean(distinct_P)
    check = Check("duplicates", {"distinct": mean, "duplicate_share": 1 - mean / size})
    found = f"of {size} completions of a prompt, {mean:.1f} differ on average"
    if size > 1 and mean == 1:
        check.fail(
            f"all {size} completions of each prompt are the same: nothing can be learned",
            "raise rollout.temperature; check that rollout.top_k, rollout.top_p and a grammar leave a choice",
        )
    elif size > FEW_DISTINCT and mean < FEW_DISTINCT:
        check.warn(found, "raise rollout.temperature, or use prompts with more than one possible answer")
    return check.findings(found)


def check_cut(cut: int, completions: int, limit: int, *, masked: bool, no_signal: bool = False) -> list[Finding]:
    """The completions that the length limit cut.

    Args:
        cut: how many.
        completions: of how many.
        limit: ``rollout.max_completion_length``.
        masked: whether the objective leaves cut completions out.
        no_signal: whether the check ``signal`` has failed: then completions that are too short may be why.
    """
    share = cut / completions
    check = Check("cut", {"cut_share": share})
    found = f"{share:.0%} of completions are cut at {limit:,} tokens"
    advice = "raise rollout.max_completion_length; see the check 'ends' if completions should have ended"
    if share >= ALL_CUT and masked:
        check.fail(f"{found}, and objective.truncated 'mask' leaves them out: almost nothing is trained on", advice)
    elif share >= ALL_CUT and no_signal:
        check.fail(f"{found}, and their rewards do not differ: they end before an answer", advice)
    elif share >= MANY_CUT:
        check.warn(found, advice)
    return check.findings(found)
