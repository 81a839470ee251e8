"""Denominators of the sum over tokens. Computed once per minibatch, never per microbatch."""

from __future__ import annotations

import torch
from torch import Tensor

from cohort.objective.segments import segment_count, segment_sum


def token_weights(
    sequence_N: Tensor,
    num_sequences: int,
    *,
    aggregation: str = "seq_mean_token_mean",
    group_S: Tensor | None = None,
    length: int | None = None,
    counted_N: Tensor | None = None,
    count_empty: bool = True,
) -> Tensor:
    """1/Z of every token of a minibatch, float64, shape ``[N]``.

        seq_mean_token_mean   1 / (B |o_i|)                  mean over tokens, then over completions: GRPO
        token_mean            1 / sum_j |o_j|                mean over all tokens: DAPO
        prompt_mean           1 / (P sum_{group} |o_j|)      mean over a group's tokens, then over prompts: ScaleRL
        constant              1 / (B L)                      a constant length: Dr. GRPO
        seq_sum               1 / B                          sum over a completion's tokens, mean over completions: RLOO
        token_sum             1

    Args:
        sequence_N: which completion each token belongs to, 0..S-1, shape ``[N]``.
        num_sequences: S, all completions of the minibatch, with those of degenerate groups and unscored ones.
        aggregation: one of those above.
        group_S: group id of each completion; for "prompt_mean".
        length: L of "constant".
        counted_N: which tokens count, boolean, shape ``[N]``; None: all. The others have weight 0: ``|o_i|`` is the
            number of a completion's tokens that count.
        count_empty: whether a completion without a token that counts counts in B (and a group without one in P). It
            contributes nothing either way.

    Counts are exact 64-bit integers. The weights of a minibatch without a token that counts are 0. A microbatch uses
    its tokens' entries of this vector, so the result does not depend on how a minibatch is cut.

    >>> token_weights(torch.tensor([0, 0, 0, 1]), 2)
    tensor([0.1667, 0.1667, 0.1667, 0.5000], dtype=torch.float64)
    >>> token_weights(torch.tensor([0, 0, 0, 1]), 2, aggregation="token_mean")
    tensor([0.2500, 0.2500, 0.2500, 0.2500], dtype=torch.float64)
    """
    counted_N = torch.ones_like(sequence_N, dtype=torch.bool) if counted_N is None else counted_N.bool()
    lengths_S = torch.bincount(sequence_N[counted_N], minlength=num_sequences)
    completions = num_sequences if count_empty else int((lengths_S > 0).sum())
    weights_N = counted_N.double()
    match aggregation:
        case "seq_mean_token_mean":
            divisor_N = (completions * lengths_S.clamp(min=1))[sequence_N]
        case "token_mean":
            divisor_N = lengths_S.sum().clamp(min=1)
        case "prompt_mean":
            divisor_N = _prompt_divisor(lengths_S, group_S, count_empty)[sequence_N]
        case "constant":
            if length is None:
                raise ValueError("aggregation 'constant' needs its length")
            divisor_N = torch.tensor(max(completions, 1) * length, device=sequence_N.device)
        case "seq_sum":
            divisor_N = torch.tensor(max(completions, 1), device=sequence_N.device)
        case "token_sum":
            return weights_N
        case _:
            raise ValueError(f"unknown aggregation {aggregation!r}")
    return weights_N / divisor_N.clamp(min=1)


def _prompt_divisor(lengths_S: Tensor, group_S: Tensor | None, count_empty: bool) -> Tensor:
    if group_S is None:
        raise ValueError("aggregation 'prompt_mean' needs group_S: the group of each completion")
    _, index_S = torch.unique(group_S, return_inverse=True)
    num_groups = segment_count(index_S)
    tokens_P = segment_sum(lengths_S, index_S, num_groups)
    prompts = num_groups if count_empty else int((tokens_P > 0).sum())
    return (prompts * tokens_P.clamp(min=1))[index_S]
