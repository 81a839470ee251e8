"""The update: one optimizer step on one minibatch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

from cohort.objective import Objective, coefficients, token_sums, token_weights
from cohort.policy import Policy
from cohort.train.batch import microbatches, select, token_indices
from cohort.train.optim import Optimizer
from cohort.types import TokenBatch


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """What an update was like. ``sums`` add up over updates; see ``objective.token_sums`` for its keys.

    A ``grad_norm`` of 0 means that no optimizer step was made.
    """

    sums: dict[str, float]
    grad_norm: float
    learning_rate: float


class _Others(TypedDict):
    """Log-probs of the policies that stand still during an update, as keyword arguments."""

    old_logps_N: Tensor | None
    ref_logps_N: Tensor | None


def update(
    policy: Policy,
    optimizer: Optimizer,
    minibatch: TokenBatch,
    objective: Objective,
    temperature: float,
    token_budget: int,
) -> UpdateResult:
    """One optimizer step.

    Every denominator is counted here, over the whole minibatch, before the first backward pass; a microbatch only takes
    its tokens' share. So ``token_budget`` changes memory and time, never the gradient.
    """
    weights_N = token_weights(minibatch.sequence_N, minibatch.num_sequences, aggregation=objective.aggregation)
    sums: dict[str, float] = {}
    optimizer.zero_grad()
    with policy.training():
        for sequences in microbatches(minibatch, token_budget):
            micro = select(minibatch, sequences)
            logps_N, entropy_N = policy.logps(micro.prompt_ids, micro.completion_ids, temperature)
            advantages_N = micro.advantages_S[micro.sequence_N]
            micro_weights_N = weights_N[token_indices(minibatch, sequences)]
            others = _Others(old_logps_N=micro.old_logps_N, ref_logps_N=micro.ref_logps_N)
            terms = coefficients(objective, logps_N.detach(), advantages_N, micro_weights_N, **others)
            torch.sum(-terms.total_N * logps_N).backward()  # has the loss's gradient; its value means nothing
            micro_sums = token_sums(
                objective,
                logps_N.detach(),
                advantages_N,
                micro_weights_N,
                entropy_N,
                micro.sampler_logps_N,
                **others,
            )
            for name, value in micro_sums.items():
                sums[name] = sums.get(name, 0.0) + value
    learning_rate = optimizer.learning_rate
    grad_norm = optimizer.step()
    policy.version += grad_norm > 0
    return UpdateResult(sums, grad_norm, learning_rate)
