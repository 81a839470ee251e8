"""What the log says about an update, from the same tensors as the coefficients but apart from them.

Everything is a sum over tokens with its count or weight beside it, so that microbatches and minibatches add up exactly:
a mean of means is never taken.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cohort.objective.kl import k1, k3
from cohort.objective.presets import Objective
from cohort.objective.ratio import MAX_LOG_RATIO, importance_ratio, ppo_clip_sides, ppo_clip_value


@torch.no_grad()
def token_sums(
    objective: Objective,
    logps_N: Tensor,
    advantages_N: Tensor,
    weights_N: Tensor,
    entropy_N: Tensor,
    sampler_logps_N: Tensor,
    *,
    old_logps_N: Tensor | None = None,
    ref_logps_N: Tensor | None = None,
) -> dict[str, float]:
    """Sums over the tokens of one microbatch. Keys and what a sum becomes:

    - ``policy_value``, ``kl_value``: weighted by 1/Z, so the sum over a minibatch is the value. The policy value is the
      clipped surrogate; it is 0 when every ratio is 1 (advantages of a group sum to 0) while its gradient is not.
    - ``tokens``: the count that the others below are divided by.
    - ``entropy``, ``k1``, ``k3``, ``clip_low``, ``clip_high``, ``ratio_held``, ``sampler_gap``: sums over tokens.
      ``sampler_gap`` is \\|logps - sampler_logps\\|, which before the first update of a rollout measures how far the
      sampler's numerics are from the trainer's.
    """
    logps_N, old = logps_N.double(), logps_N if old_logps_N is None else old_logps_N
    advantages_N, weights_N = advantages_N.double(), weights_N.double()
    ratio_N = importance_ratio(logps_N, old.double())
    low_N, high_N = ppo_clip_sides(ratio_N, advantages_N, objective.ratio_low, objective.ratio_high)
    value_N = ppo_clip_value(ratio_N, advantages_N, objective.ratio_low, objective.ratio_high)
    sums = {
        "tokens": torch.tensor(logps_N.numel(), device=logps_N.device),
        "policy_value": (weights_N * value_N).sum(),
        "entropy": entropy_N.double().sum(),
        "clip_low": low_N.sum(),
        "clip_high": high_N.sum(),
        "ratio_held": ((logps_N - old).abs() > MAX_LOG_RATIO).sum(),
        "sampler_gap": (logps_N - sampler_logps_N).abs().sum(),
    }
    if ref_logps_N is not None:
        k3_N = k3(logps_N, ref_logps_N.double())
        sums |= {
            "k1": k1(logps_N, ref_logps_N.double()).sum(),
            "k3": k3_N.sum(),
            "kl_value": (weights_N * k3_N).sum(),
        }
    values = torch.stack([value.double() for value in sums.values()]).tolist()  # one transfer from the device
    return dict(zip(sums, values, strict=True))
