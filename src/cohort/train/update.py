"""The update: one optimizer step on one minibatch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch

from cohort.objective import Objective, coefficients, token_sums, token_weights
from cohort.policy import Policy
from cohort.train.batch import microbatches, select, token_indices
from cohort.train.optim import Optimizer
from cohort.types import TokenBatch


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """What an update was like. ``sums`` add up over updates; see ``objective.token_sums`` for its keys."""

    sums: dict[str, float]
    grad_norm: float
    learning_rate: float


def update(
    policy: Policy,
    optimizer: Optimizer,
    minibatch: TokenBatch,
    objective: Objective,
    *,
    temperature: float,
    token_budget: int,
) -> UpdateResult:
    """One optimizer step.

    Every denominator is counted here, over the whole minibatch, before the first backward pass; a microbatch only takes
    its tokens' share. So ``token_budget`` changes memory and time, never the gradient.
    """
    weights_N = token_weights(minibatch.sequence_N, minibatch.num_sequences, aggregation=objective.aggregation)
    sums: Counter[str] = Counter()
    optimizer.zero_grad()
    with policy.training():
        for sequences in microbatches(minibatch, token_budget):
            micro = select(minibatch, sequences)
            logps_N, entropy_N = policy.logps(micro.prompt_ids, micro.completion_ids, temperature)
            terms = {
                "logps_N": logps_N.detach(),
                "advantages_N": micro.advantages_S[micro.sequence_N],
                "weights_N": weights_N[token_indices(minibatch, sequences)],
                "old_logps_N": micro.old_logps_N,
                "ref_logps_N": micro.ref_logps_N,
            }
            c_N = coefficients(objective, **terms).total_N
            torch.sum(-c_N * logps_N).backward()
            sums.update(
                token_sums(objective, **terms, entropy_N=entropy_N, sampler_logps_N=micro.sampler_logps_N)
            )
    learning_rate = optimizer.learning_rate
    grad_norm = optimizer.step()
    policy.version += 1
    return UpdateResult(dict(sums), grad_norm, learning_rate)
