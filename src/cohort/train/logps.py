"""Passes without gradient: what a policy says of a rollout's tokens."""

from __future__ import annotations

import torch
from torch import Tensor

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
from cohort.train.layout import Part
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
