"""A check before the first update: sampler and trainer must compute the same function."""

from __future__ import annotations

import contextlib
import math

from cohort.errors import PolicyMismatchError
from cohort.train.context import StepContext
from cohort.train.guard import check_finite
from cohort.train.layout import part_of
from cohort.train.logps import token_logps
from cohort.types import TokenBatch

CHECKED_COMPLETIONS = 16
"""Number of completions compared. A wrong cache or position shows in any of them."""
MAX_SAMPLER_GAP = 0.1
"""Mean |logps - sampler_logps| in nats above which a run stops. float32 gives about 1e-6 and bfloat16 about 1e-2; more
means that sampler and trainer do not compute the same function."""
CACHED = (
    "set model.precision to 'float32': in bfloat16 rounding may do this, most of all in a mixture, where it sends some "
    "tokens to other experts. If that does not help, the model's cached decoding does not compute what its forward "
    "pass computes, and the architecture is not supported"
)
SERVED = (
    "the vLLM server does not compute what the trainer computes. Start it with --dtype as model.precision, without "
    "quantization; if that does not help, its model lacks weights that were sent, or vLLM implements the architecture "
    "differently"
)


def check_sampler_gap(context: StepContext, batch: TokenBatch, *, shared_weights: bool = True) -> None:
    """Compare the sampler's log-probs with the trainer's on completions that the same weights have just drawn.

    Both are over the whole vocabulary when the sampler drew from less and the trainer does not replay that.

    Args:
        context: the step's policy and sampling settings.
        batch: completions of this step.
        shared_weights: whether the engine samples with the trainer's own parameters; decides what the error suggests.

    Raises:
        PolicyMismatchError: they differ, so every ratio of this run would be wrong. Nothing has been updated yet.
        NonFiniteError: see ``sampler_gap``.
    """
    gap = sampler_gap(context, batch)
    if not gap <= MAX_SAMPLER_GAP:
        raise PolicyMismatchError(
            f"the sampler's log-probabilities are {gap:.3g} nats from the trainer's on average, for the same tokens "
            f"and weights (limit {MAX_SAMPLER_GAP}): {CACHED if shared_weights else SERVED}"
        )


def sampler_gap(context: StepContext, batch: TokenBatch) -> float:
    """Mean |logps - sampler_logps| in nats over the first completions, in the update's mode unless dropout would change
    every pass; 0 without any.

    Raises:
        NonFiniteError: the trainer's log-probs are NaN, which says nothing of the sampler.
    """
    checked = part_of(batch, range(min(CHECKED_COMPLETIONS, batch.num_sequences)))
    with contextlib.nullcontext() if context.policy.dropout else context.policy.training():
        logps_N = token_logps(context, context.policy, batch, checked).logps_N
    sampler_logps_N = batch.sampler_logps_N if batch.full_logps_N is None else batch.full_logps_N
    gap_N = (logps_N - sampler_logps_N[checked.tokens_N]).abs()
    gap = float(gap_N.mean()) if gap_N.numel() else 0.0
    if math.isnan(gap):
        check_finite(batch, checked, {"log-probability": logps_N})
    return gap
