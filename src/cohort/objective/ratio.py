"""Importance ratios of the current policy to an anchor, the old policy or the sampler.

    token                 r_t = exp(l_t - a_t)
    sequence_mean         r   = exp(mean over the sequence of (l - a))      GSPO's geometric mean, one per sequence
    sequence_mean_token   the same number, with a gradient per token        GSPO-token
    sequence_product      r   = exp(sum over the sequence of (l - a))       the probability ratio of the whole sequence
    prefix_product        r_t = exp(sum up to t of (l - a))                 ... and of the sequence up to the token

with l the current log-probs and a the anchor's. ``trust`` has the rules that use the ratio. Tokens outside the loss are
not part of a sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cohort.objective.segments import prefix_sums, segment_count, segment_mean, segment_sum

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20 before ``exp``: float32 overflows at 88.7, and e^20 = 4.9e8 is past any use. The log
has the share of tokens whose own ratio is clamped, ``ratio/held_share``, and of those whose ratio at the objective's
level is, ``tokens/held_share``. Both are 0 in a healthy run."""


def importance_ratio(logps_N: Tensor, old_logps_N: Tensor) -> Tensor:
    """Token ratio of the current to the old policy, ``exp(logps - old_logps)``, shape ``[N]``.

    >>> importance_ratio(torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -1.0]))
    tensor([1.0000, 0.3679])
    """
    return exp_clamped(logps_N - old_logps_N)


def anchored_log_ratio(logps_N: Tensor, anchor_logps_N: Tensor | None) -> Tensor:
    """``logps - anchor_logps``, shape ``[N]``; 0 where the anchor's is NaN (unknown), and without an anchor."""
    if anchor_logps_N is None:
        return torch.zeros_like(logps_N)
    return (logps_N - anchor_logps_N).nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)


def exp_clamped(log_N: Tensor) -> Tensor:
    """``exp`` of a log-ratio clamped to +-``MAX_LOG_RATIO``; always finite."""
    return torch.exp(log_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def leveled_log_ratio(log_ratio_N: Tensor, level: str, sequence_N: Tensor | None = None) -> Tensor:
    """Log of each token's ratio at a level, shape ``[N]``; see the module's header.

    Args:
        log_ratio_N: token log-ratios ``l - a``, shape ``[N]``.
        level: one of those in the module's header.
        sequence_N: which sequence each token belongs to, shape ``[N]``; needed for every level but "token".

    >>> gaps, sequence = torch.tensor([0.2, 0.4, -1.0]), torch.tensor([0, 0, 1])
    >>> leveled_log_ratio(gaps, "sequence_mean", sequence)
    tensor([ 0.3000,  0.3000, -1.0000])
    >>> leveled_log_ratio(gaps, "prefix_product", sequence)
    tensor([ 0.2000,  0.6000, -1.0000])
    """
    if level == "token":
        return log_ratio_N
    if sequence_N is None:
        raise ValueError(f"ratio level {level!r} needs sequence_N: which sequence each token belongs to")
    if level == "prefix_product":
        return prefix_sums(log_ratio_N, sequence_N)
    count = segment_count(sequence_N)
    if level in ("sequence_mean", "sequence_mean_token"):
        return segment_mean(log_ratio_N, sequence_N, count)[sequence_N]
    if level == "sequence_product":
        return segment_sum(log_ratio_N, sequence_N, count)[sequence_N]
    raise ValueError(f"unknown ratio level {level!r}")
