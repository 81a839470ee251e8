"""An objective explained: its formula in words and its coefficient as a table over ratio and sign of the advantage."""

from __future__ import annotations

import math

import torch

from cohort.errors import ConfigError
from cohort.objective.advantages import outcome_advantages
from cohort.objective.coefficients import coefficients
from cohort.objective.trust import trust_region
from cohort.objective.user_function import loaded
from cohort.presets import describe
from cohort.presets.objective import Objective
from cohort.presets.parts import KL
from cohort.presets.trust_regions import Custom

RATIOS = (0.25, 0.5, 0.8, 0.9, 1.0, 1.1, 1.2, 1.5, 2.0, 4.0, 10.0)
PROBABILITY = 0.08
"""The probability of the shown token under the anchor, for rules that compare probabilities."""


def coefficient_table(objective: Objective) -> list[tuple[float, float, float]]:
    """``(ratio, c for A = +1, c for A = -1)``: the unnormalised policy coefficient of a one-token completion at several
    ratios to the anchor, with the bounds of the rule among them."""
    rule = objective.trust_region
    numbers = [] if _of_probabilities(objective) else [getattr(rule, name, None) for name in ("low", "high", "dual")]
    bounds = [bound for bound in numbers if bound is not None and 0 < bound < 1 / PROBABILITY]
    # A bound itself counts as inside: a little toward 1, so that rounding in exp(log(bound)) does not pass it.
    ratios = sorted({*(r for r in RATIOS if r not in bounds), *(bound + (1 - bound) * 1e-9 for bound in bounds)})
    objective = objective.replace(kl=KL(), mismatch=())
    ones_N = torch.ones(len(ratios), dtype=torch.float64)
    anchor_N = ones_N * math.log(PROBABILITY)
    logps_N = anchor_N + torch.tensor(ratios, dtype=torch.float64).log()
    given = {"sequence_N": torch.arange(len(ratios)), "old_logps_N": anchor_N, "sampler_logps_N": anchor_N}
    columns = (coefficients(objective, logps_N, a_N, ones_N, **given).policy_N.tolist() for a_N in (ones_N, -ones_N))
    return list(zip(ratios, *columns, strict=True))


def _of_probabilities(objective: Objective) -> bool:
    return objective.trust_region is not None and objective.trust_region.of_probabilities


def try_user_functions(objective: Objective, num_generations: int = 8) -> None:
    """Load a user's trust region and baseline again and call each once, to find a broken one before anything expensive
    starts.

    Args:
        objective: may name such functions.
        num_generations: the size of the groups that a baseline is tried on.

    Raises:
        ConfigError: a function is missing, raises, or returns something else than it should.
    """
    rule, baseline = objective.trust_region, objective.baseline
    loaded.cache_clear()
    if isinstance(rule, Custom):
        ratio_N = torch.tensor([0.5, 1.0, 1.0, 1.5, 3.0, 0.9])
        advantages_N = torch.tensor([1.0, 1.0, -1.0, -1.0, 2.0, -0.5])
        whole_N = trust_region(rule, ratio_N.log(), advantages_N, ratio_N.log()).phi_N
        half_N = trust_region(rule, ratio_N[:3].log(), advantages_N[:3], ratio_N[:3].log()).phi_N
        if not torch.equal(whole_N[:3], half_N):
            raise ConfigError(
                f"trust region {rule.function} gives a token another multiplier when other tokens are beside it: it "
                "must be a function of each token alone, or the gradient would depend on optim.microbatch_tokens"
            )
    if isinstance(baseline, str) and ":" in baseline:
        rewards_S = torch.arange(2 * num_generations).double() / 7
        group_S = torch.arange(2 * num_generations) // num_generations
        outcome_advantages(rewards_S, group_S, baseline=baseline, scale=None)


def explain(objective: Objective) -> str:
    """The objective in words, and the table of its coefficient."""
    table = coefficient_table(objective)
    note = f", for a token of probability {PROBABILITY:g} under the {objective.ratio_anchor}"
    title = f"  unnormalised coefficient of a one-token completion{note * _of_probabilities(objective)}:"
    lines = zip(("ratio", "A = +1", "A = -1"), zip(*table, strict=True), strict=True)
    rows = [f"    {name:<7}" + "".join(f"{_short(number):>8}" for number in numbers) for name, numbers in lines]
    if (1.0, 1.0, -1.0) not in table:
        rows.append("    at ratio 1 it is not 1: on-policy gradients are scaled by it")
    return "\n".join([describe(objective), title, *rows])


def _short(number: float) -> str:
    """A number in at most 7 characters; a zero without its sign."""
    size = abs(number)
    if size == 0 or size >= 1:
        return f"{number + 0.0:.5g}"
    return f"{number:.4g}" if size >= 0.1 else f"{number:.2g}" if size >= 1e-3 else f"{number:.0e}"
