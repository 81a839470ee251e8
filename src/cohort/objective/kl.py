"""The KL term against the reference policy: its estimators (values) and its gradient multipliers, kept apart.

Per token, with D = ref_logps - logps at the sampled token:

    k1 = -D                       unbiased for KL(policy || reference), may be negative, high variance
    k2 = D^2 / 2                  biased, never negative; its gradient is the reverse KL's
    k3 = e^D - D - 1              unbiased when the tokens come from the policy, never negative

Value and gradient are two questions. All three estimate the value of the *reverse* KL, KL(policy || reference). But
using k3 as a loss, as DeepSeekMath does, gives the gradient of the *forward* KL, KL(reference || policy), state by
state: d k3 / d logp = 1 - e^D, whose mean over the policy is the forward KL's gradient. The reverse KL's is k1. So a
configuration names the gradient's direction, and the log shows the k1 and k3 means.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

KLGradient = Literal["reverse", "forward"]
MAX_LOG_GAP = 20.0
"""D is held to +-20 before ``exp`` (e^20 = 4.9e8): beyond, e^D only overflows."""


def k1(logps_N: Tensor, ref_logps_N: Tensor) -> Tensor:
    """``logps - ref_logps``, shape ``[N]``.

    >>> k1(torch.tensor([-1.0]), torch.tensor([-1.5]))
    tensor([0.5000])
    """
    return logps_N - ref_logps_N


def k2(logps_N: Tensor, ref_logps_N: Tensor) -> Tensor:
    """``(logps - ref_logps)^2 / 2``, shape ``[N]``.

    >>> k2(torch.tensor([-1.0]), torch.tensor([-1.5]))
    tensor([0.1250])
    """
    return 0.5 * (logps_N - ref_logps_N) ** 2


def k3(logps_N: Tensor, ref_logps_N: Tensor) -> Tensor:
    """``expm1(D) - D`` with D = ref_logps - logps, shape ``[N]``. ``exp(D) - D - 1`` loses all its digits in float32
    when \\|D\\| < 1e-4; ``expm1`` keeps them.

    Source: J. Schulman, "Approximating KL divergence" (2020); DeepSeekMath (arXiv 2402.03300) eq. 4.

    >>> k3(torch.tensor([-1.0]), torch.tensor([-1.5]))
    tensor([0.1065])
    """
    gap_N = (ref_logps_N - logps_N).clamp(-MAX_LOG_GAP, MAX_LOG_GAP)
    return torch.expm1(gap_N) - gap_N


def kl_multiplier(
    logps_N: Tensor, ref_logps_N: Tensor, *, gradient: KLGradient, ratio_N: Tensor | None = None
) -> Tensor:
    """kappa: the factor of ``-beta / Z`` in a token's gradient coefficient. Shape ``[N]``.

        forward:  kappa = 1 - e^D           the k3 loss of the paper, without an importance ratio
        reverse:  kappa = ratio * k1        the reverse KL's gradient; the ratio (current to old) makes it exact for the
                                            conditional KL when the tokens come from the old policy

    Args:
        logps_N, ref_logps_N: current and reference log-probs of the sampled tokens, shape ``[N]``.
        gradient: whose gradient.
        ratio_N: current to old; None when they are the same policy (ratio 1). Used by "reverse" only.

    Both vanish at logps == ref_logps and agree to first order there. Far away they do not: where the policy is much
    less likely than the reference, forward grows like e^D and reverse like D.

    >>> lp, ref = torch.tensor([-1.0, -3.0]), torch.tensor([-1.5, -1.0])
    >>> kl_multiplier(lp, ref, gradient="reverse")
    tensor([ 0.5000, -2.0000])
    >>> kl_multiplier(lp, ref, gradient="forward")
    tensor([ 0.3935, -6.3891])
    """
    if gradient == "forward":
        return -torch.expm1((ref_logps_N - logps_N).clamp(-MAX_LOG_GAP, MAX_LOG_GAP))
    if gradient == "reverse":
        kappa_N = k1(logps_N, ref_logps_N)
        return kappa_N if ratio_N is None else ratio_N * kappa_N
    raise ValueError(f"gradient must be 'reverse' or 'forward', got {gradient!r}")
