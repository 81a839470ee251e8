"""Denominators: how token terms become one number. Computed once per minibatch, never per microbatch."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal["seq_mean_token_mean"]


def token_weights(
    sequence_N: Tensor, num_sequences: int, *, aggregation: Aggregation = "seq_mean_token_mean"
) -> Tensor:
    """1/Z of every token of a minibatch, float64, shape ``[N]``.

        seq_mean_token_mean:  1 / (S * |o_i|)        mean over a completion's tokens, then over completions (GRPO)

    Args:
        sequence_N: which completion each token belongs to, 0..S-1, shape ``[N]``.
        num_sequences: S, all completions of the minibatch: also those of degenerate groups, and unscored ones.
        aggregation: which denominator.

    The weights of a minibatch sum to 1 (to less if a completion is empty: it counts in S and contributes nothing).
    A microbatch takes its tokens' entries of this vector, so cutting a minibatch differently changes nothing.

    >>> token_weights(torch.tensor([0, 0, 0, 1]), 2)
    tensor([0.1667, 0.1667, 0.1667, 0.5000], dtype=torch.float64)
    """
    if aggregation != "seq_mean_token_mean":
        raise ValueError(f"aggregation must be 'seq_mean_token_mean', got {aggregation!r}")
    lengths_S = torch.bincount(sequence_N, minlength=num_sequences).double()
    return (1.0 / (num_sequences * lengths_S))[sequence_N]
