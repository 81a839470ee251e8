"""What a policy says of a rollout's tokens, in passes without gradient; the ranks' shares of them."""

from __future__ import annotations

import contextlib
import math

import torch
from torch import Tensor

from cohort.errors import PolicyMismatchError
from cohort.objective import UpdateTokens
from cohort.parallel import agreed
from cohort.parallel.full import released
from cohort.policy import (
    ExpertBalance,
    Policy,
    TokenLogps,
    expert_counts,
    experts_per_token,
)
from cohort.train.context import StepContext
from cohort.train.guard import check_finite
from cohort.train.layout import Part, part_of
from cohort.train.sweep import Shared, share, sweep, unstoppable
from cohort.types import TokenBatch


@torch.no_grad()
def policy_logps(context: StepContext, policy: Policy, batch: TokenBatch, part: Part) -> Tensor:
    """Log-probs under a policy, the old one or the reference, shape ``[N]`` of the batch; NaN outside of ``part``."""
    logps_N = torch.full((batch.num_tokens,), torch.nan, dtype=policy.precision.master, device=batch.loss_N.device)
    logps_N[part.tokens_N] = token_logps(context, policy, batch, part).logps_N
    return logps_N


def token_logps(context: StepContext, policy: Policy, batch: TokenBatch, part: Part) -> TokenLogps:
    """Log-probs, entropies and collision probabilities of a part's tokens, shape ``[N]`` of the part. Each rank
    computes its share."""
    shared = share(context, batch, part)
    each = agreed(context.world, lambda: _own_logps(context, policy, batch, shared))
    like = torch.empty(part.num_tokens, dtype=policy.precision.master, device=batch.loss_N.device)
    found = TokenLogps(like, torch.empty_like(like), torch.empty_like(like))
    for one, values in zip(shared.parts, each, strict=True):
        for whole_N, values_N in zip(found, values, strict=True):
            whole_N[one.positions_N] = values_N.to(whole_N.device)
    return found


@torch.no_grad()
def _own_logps(context: StepContext, policy: Policy, batch: TokenBatch, shared: Shared) -> TokenLogps:
    like = torch.empty(shared.own.num_tokens, dtype=policy.precision.master, device=batch.loss_N.device)
    found = TokenLogps(like, torch.empty_like(like), torch.empty_like(like))
    with policy.compute(), unstoppable(context), released(policy.model):
        for micro, states, _ in sweep(context, policy, batch, shared):
            for whole_N, values_N in zip(found, states.logps(), strict=True):
                whole_N[micro.part.positions_N] = micro.at_tokens(values_N)
    return found


def expert_balance(context: StepContext, batch: TokenBatch, part: Part) -> ExpertBalance:
    """How a minibatch uses the experts of a mixture, over all of its tokens. Each rank counts its share."""
    policy, shared = context.policy, share(context, batch, part)
    each = agreed(context.world, lambda: _own_counts(context, batch, shared))
    counts = [counts_E.to(policy.device) for some, _ in each for counts_E in some]
    return ExpertBalance(torch.stack(counts).sum(0), sum(rows for _, rows in each), policy.router_aux_loss_coef)


@torch.no_grad()
def _own_counts(context: StepContext, batch: TokenBatch, shared: Shared) -> tuple[list[Tensor], int]:
    """Uses of each expert in each microbatch, and the number of rows."""
    policy = context.policy
    per_token, counts, rows = experts_per_token(policy.model.config), [], 0
    with policy.compute(), unstoppable(context), released(policy.model):
        for _, states, _ in sweep(context, policy, batch, shared):
            counts.append(expert_counts(states.router_logits, per_token))
            rows += sum(len(logits) for logits in states.router_logits)
    return counts, rows


# ----------------------------------------
# A check before the first update: sampler and trainer must compute the same function. What it compares is computed
# anyway: log-probs of the update before its step or, with several updates per rollout, the old ones. Only with
# dropout, which changes those of the update, is a pass made for it.


CHECKED_COMPLETIONS = 16
"""Number of completions that ``sampler_gap`` computes. A wrong cache or position shows in any of them."""
MAX_SAMPLER_GAP = {torch.float64: 0.01, torch.float32: 0.01, torch.bfloat16: 0.1, torch.float16: 0.1}
"""Mean |logps - sampler_logps| in nats above which a run stops, by compute dtype: sampler and trainer then do not
compute the same function. float32 gives about 1e-6; bfloat16, which rounds by 65,536 times as much, about 1e-2: more in
a mixture, where it sends some tokens to other experts."""
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


def most_gap(policy: Policy, *, shared_weights: bool = True) -> float:
    """The gap at which a run stops. A server may compute in another dtype, which nothing here knows.

    Args:
        policy: the policy.
        shared_weights: whether the engine samples with the trainer's own parameters.
    """
    return MAX_SAMPLER_GAP[policy.precision.compute if shared_weights else torch.bfloat16]


def check_gap(policy: Policy, logps_N: Tensor, sampler_logps_N: Tensor, *, shared_weights: bool = True) -> None:
    """Compare the sampler's log-probs with the trainer's of the weights that have drawn the tokens. Both are over the
    whole vocabulary when the sampler drew from less and the trainer does not replay that.

    Args:
        policy: the trainer's.
        logps_N, sampler_logps_N: of the same tokens; NaN for the trainer's that were not computed.
        shared_weights: as for ``most_gap``; also decides what the error suggests.

    Raises:
        PolicyMismatchError: they differ, so every ratio of this run would be wrong.
    """
    known_N = ~logps_N.isnan()  # others needed no pass
    if not bool(known_N.any()):
        return
    gap = float((logps_N - sampler_logps_N)[known_N].abs().mean())
    most = most_gap(policy, shared_weights=shared_weights)
    if not gap <= most:
        raise PolicyMismatchError(
            f"the sampler's log-probabilities are {gap:.3g} nats from the trainer's on average, for the same tokens "
            f"and weights (limit {most}): {CACHED if shared_weights else SERVED}"
        )


def like_trainer(batch: TokenBatch | UpdateTokens) -> Tensor:
    """The sampler's log-probs that are to be the trainer's: over the whole vocabulary where the sampler drew from less
    and the trainer does not replay that."""
    return batch.sampler_logps_N if batch.full_logps_N is None else batch.full_logps_N


def sampler_gap(context: StepContext, batch: TokenBatch) -> float:
    """Mean |logps - sampler_logps| in nats over the first completions, in the update's mode unless dropout would change
    every pass; 0 without any.

    Raises:
        NonFiniteError: the trainer's log-probs are NaN, which says nothing of the sampler.
    """
    checked = part_of(batch, range(min(CHECKED_COMPLETIONS, batch.num_sequences)))
    with contextlib.nullcontext() if context.policy.dropout else context.policy.training():
        logps_N = token_logps(context, context.policy, batch, checked).logps_N
    gap_N = (logps_N - like_trainer(batch)[checked.tokens_N]).abs()
    gap = float(gap_N.mean()) if gap_N.numel() else 0.0
    if math.isnan(gap):
        check_finite(batch, checked, {"log-probability": logps_N})
    return gap
