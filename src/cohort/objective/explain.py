"""An objective explained: its formula in words and its coefficient as a table over ratio and sign of the advantage."""

from __future__ import annotations

import math

import torch

from cohort.errors import ConfigError
from cohort.objective.advantages import custom_baseline, outcome_advantages
from cohort.objective.coefficients import coefficients
from cohort.objective.trust import custom_rule, trust_region
from cohort.presets import describe
from cohort.presets.kl import KL
from cohort.presets.objective import Objective
from cohort.presets.trust_regions import Custom

RATIOS = (0.25, 0.5, 0.8, 0.9, 1.0, 1.1, 1.2, 1.5, 2.0, 4.0, 10.0)
PROBABILITY = 0.08
"""The probability of the shown token under the policy it was drawn from, for rules that look at more than the ratio."""


def coefficient_table(objective: Objective) -> list[tuple[float, float, float]]:
    """``(ratio, c for A = +1, c for A = -1)``: the policy coefficient of the only token of a completion, times Z, at
    ratios to the anchor; the bounds of the rule are among them."""
    bounds = [getattr(objective.trust_region, name, None) for name in ("low", "high", "dual")]
    inside = [bound for bound in bounds if isinstance(bound, float) and 0 < bound < 1 / PROBABILITY]
    if objective.trust_region and objective.trust_region.of_probabilities:  # not bounds of a ratio
        inside = []
    # A bound itself still counts as inside: a hair toward 1, so that exp(log(bound)) is not a hair past it.
    ratios = sorted({*(r for r in RATIOS if r not in inside), *(bound + (1 - bound) * 1e-9 for bound in inside)})
    objective = objective.replace(kl=KL(), mismatch=())
    count = len(ratios)
    anchor_N = torch.full((count,), math.log(PROBABILITY), dtype=torch.float64)
    logps_N = anchor_N + torch.tensor(ratios, dtype=torch.float64).log()
    columns = [
        coefficients(
            objective,
            logps_N,
            torch.full((count,), sign, dtype=torch.float64),
            torch.ones(count, dtype=torch.float64),
            sequence_N=torch.arange(count),
            old_logps_N=anchor_N,
            sampler_logps_N=anchor_N,
        ).policy_N.tolist()
        for sign in (1.0, -1.0)
    ]
    return list(zip(ratios, *columns, strict=True))


def try_user_functions(objective: Objective, num_generations: int = 8) -> None:
    """Load a trust region or baseline of one's own afresh, and call it once, so that a broken one is found before
    anything expensive starts.

    Args:
        objective: what may name them.
        num_generations: the size of the groups that a baseline is tried on.

    Raises:
        ConfigError: it is missing, raises, or does not return what it should.
    """
    rule, baseline = objective.trust_region, objective.baseline
    if isinstance(rule, Custom):
        custom_rule.cache_clear()
        ratio_N = torch.tensor([0.5, 1.0, 1.0, 1.5, 3.0, 0.9])
        advantages_N = torch.tensor([1.0, 1.0, -1.0, -1.0, 2.0, -0.5])
        whole_N = trust_region(rule, ratio_N.log(), advantages_N, ratio_N.log()).phi_N
        half_N = trust_region(rule, ratio_N[:3].log(), advantages_N[:3], ratio_N[:3].log()).phi_N
        if not torch.equal(whole_N[:3], half_N):
            raise ConfigError(
                f"trust region {rule.function} gives a token another multiplier when other tokens are beside it: it "
                "must decide token by token, or the gradient would depend on optim.microbatch_tokens"
            )
    if isinstance(baseline, str) and ":" in baseline:
        custom_baseline.cache_clear()
        rewards_S = torch.arange(2 * num_generations).double() / 7
        group_S = torch.arange(2 * num_generations) // num_generations
        outcome_advantages(rewards_S, group_S, baseline=baseline, scale=None)


def explain(objective: Objective) -> str:
    """The resolved formula, term by term, and the table."""
    note = ""
    if objective.trust_region and objective.trust_region.of_probabilities:
        note = f", for a token of probability {PROBABILITY:g} under the {objective.ratio_anchor}"
    lines = zip(("ratio", "A = +1", "A = -1"), zip(*coefficient_table(objective), strict=True), strict=True)
    at_1 = next((up, down) for ratio, up, down in coefficient_table(objective) if ratio == 1)
    rows = [f"    {name:<7}" + "".join(f"{_short(number):>8}" for number in numbers) for name, numbers in lines]
    if at_1 != (1.0, -1.0):
        rows.append("    at ratio 1 it is not 1: on-policy gradients are scaled by it")
    return "\n".join([describe(objective), f"  coefficient, times Z, of the only token of a completion{note}:", *rows])


def _short(number: float) -> str:
    """At most 7 characters, so that the table is not wider than it must be; without the sign of a zero."""
    size = abs(number)
    if size == 0 or size >= 1:
        return f"{number + 0.0:.5g}"
    return f"{number:.4g}" if size >= 0.1 else f"{number:.2g}" if size >= 1e-3 else f"{number:.0e}"
