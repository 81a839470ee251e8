"""Checks that policies which must be equal before the first update are: sampler and trainer, policy and reference."""

from __future__ import annotations

import math

from cohort.doctor.finding import Check, Finding

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
