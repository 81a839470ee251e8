"""Random off-policy batches for the tests of the objective, and the call that turns one into coefficients."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cohort.objective import Coefficients, Objective, UpdateTokens, coefficients, token_weights

LENGTHS = (3, 1, 5, 0, 2, 4)
"""Of the completions; one is empty."""
GROUPS = (4, 7, 4, 7, 7, 4)
MAX_LENGTH = 11
GAPS = (-1.1, -0.5, -0.1, 0.05, 0.215, 0.32, 0.5, 1.5, 1.8)
"""Token log-ratios, each in another region of the presets' bounds: log of 0.8, 1.2, 1.28, e^-0.4, e^0.4, 4 and 5."""


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def longs(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.long)


@dataclass(frozen=True)
class Batch:
    """A minibatch. The tokens of a sequence are those with its id, in their order on axis N."""

    logps: Tensor
    old: Tensor
    sampler: Tensor
    ref: Tensor
    advantages_S: Tensor
    sequence_N: Tensor
    group_S: Tensor
    length: int = MAX_LENGTH

    @property
    def tokens(self) -> list[list[int]]:
        """Each sequence's places on axis N."""
        return [(self.sequence_N == i).nonzero().flatten().tolist() for i in range(len(self.advantages_S))]

    @property
    def advantages_N(self) -> Tensor:
        return self.advantages_S[self.sequence_N]

    def on_policy(self) -> "Batch":
        return replace(self, old=self.logps, sampler=self.logps)


def random_batch(seed: int) -> Batch:
    """Interleaved sequences of unequal lengths; log-ratios at least 0.01 from every bound of a token rule. Sequence 1
    lies inside GSPO's bounds, sequence 4 outside them and inside LUSPO's."""
    generator = torch.Generator().manual_seed(seed)
    count = sum(LENGTHS)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    def gaps() -> Tensor:
        chosen = torch.randint(len(GAPS), (count,), generator=generator)
        jitter = torch.rand(count, dtype=torch.float64, generator=generator) - 0.5
        return torch.tensor(GAPS, dtype=torch.float64)[chosen] + 0.02 * jitter

    sequence_N = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    sequence_N = sequence_N[torch.randperm(count, generator=generator)]
    to_old, to_sampler = gaps(), gaps()
    to_old[sequence_N == 1] = 1e-4
    to_old[sequence_N == 4] = torch.tensor([0.5, -0.5 + (2e-3 if seed % 2 else -2e-3)], dtype=torch.float64)
    # No probability above 1, under any of the three policies.
    highest = torch.minimum(to_old, to_sampler).clamp(max=0) - 0.05
    logps = highest - 2.5 * torch.rand(count, dtype=torch.float64, generator=generator)
    return Batch(
        logps=logps,
        old=logps - to_old,
        sampler=logps - to_sampler,
        ref=logps + 0.7 * normal(count),
        advantages_S=normal(len(LENGTHS)),
        sequence_N=sequence_N,
        group_S=torch.tensor(GROUPS),
    )


def weights_of(objective: Objective, batch: Batch) -> Tensor:
    """1/Z of each token."""
    return token_weights(
        batch.sequence_N,
        len(batch.advantages_S),
        aggregation=objective.aggregation,
        group_S=batch.group_S,
        length=batch.length,
        count_empty=objective.count_empty,
    )


def coefficients_of(objective: Objective, batch: Batch, weights_N: Tensor | None = None) -> Coefficients:
    """``coefficients`` of the whole batch."""
    return coefficients(
        objective,
        batch.logps,
        batch.advantages_N,
        weights_of(objective, batch) if weights_N is None else weights_N,
        sequence_N=batch.sequence_N,
        old_logps_N=batch.old,
        sampler_logps_N=batch.sampler,
        ref_logps_N=batch.ref if objective.beta else None,
    )


def update_tokens(objective: Objective, batch: Batch) -> UpdateTokens:
    """The batch as the log sees it, with entropies made up."""
    weights_N = weights_of(objective, batch)
    return UpdateTokens(
        logps_N=batch.logps,
        entropy_N=-batch.logps / 2,
        collision_N=batch.logps.exp() ** 2,
        advantages_N=batch.advantages_N,
        weights_N=weights_N,
        base_weights_N=weights_N,
        sequence_N=batch.sequence_N,
        coefficients=coefficients_of(objective, batch),
        sampler_logps_N=batch.sampler,
        old_logps_N=batch.old,
        ref_logps_N=batch.ref if objective.beta else None,
    )
