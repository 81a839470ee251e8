"""A check before the first update: sampler and trainer must compute the same function."""

from __future__ import annotations

from cohort.errors import PolicyMismatchError
from cohort.policy import Policy
from cohort.train.batch import select
from cohort.train.packing import policy_logps
from cohort.types import TokenBatch

CHECKED_COMPLETIONS = 16
"""How many completions are looked at: a wrong cache or a wrong position shows in any of them."""
MAX_SAMPLER_GAP = 0.1
"""Mean |logps - sampler_logps| in nats at which a run stops. float32 gives about 1e-6, bfloat16 about 1e-2; this much
means that sampler and trainer do not compute the same function."""


def check_sampler_gap(policy: Policy, batch: TokenBatch, temperature: float, token_budget: int) -> None:
    """Compare the sampler's log-probs with the trainer's on some of a rollout that the same weights have just drawn.
    Like with like: where a draw was cut and the trainer's log-probs are over the whole vocabulary, with the sampler's
    over the whole vocabulary. Forced tokens were not drawn.

    Raises:
        PolicyMismatchError: they differ; every ratio of this run would be wrong. Nothing has been updated yet.
    """
    checked = select(batch, range(min(CHECKED_COMPLETIONS, batch.num_sequences)))
    logps_N = policy_logps(policy, checked, temperature, token_budget)
    like_N = checked.sampler_logps_N if checked.full_logps_N is None else checked.full_logps_N
    gap_N = (logps_N - like_N).abs()[checked.loss_N]
    gap = float(gap_N.mean()) if gap_N.numel() else 0.0
    if not gap <= MAX_SAMPLER_GAP:
        raise PolicyMismatchError(
            f"the sampler's log-probabilities are {gap:.3g} nats from the trainer's on average, for the same tokens "
            f"and weights (limit {MAX_SAMPLER_GAP}): the model's cached decoding does not compute what its forward "
            "pass computes. Set model.precision to 'float32'; if that does not help, the architecture is not supported"
        )
