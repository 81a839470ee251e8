"""The KL term against the reference policy: its estimators (values) and its gradient multipliers, kept apart.

Per token, with D = ref_logps - logps at the sampled token:

    k1 = -D                       unbiased for KL(policy || reference), may be negative, high variance
    k2 = D^2 / 2                  biased, never negative; its gradient is the reverse KL's
    k3 = e^D - D - 1              unbiased when the tokens come from the policy, never negative

All three estimate the value of the *reverse* KL, KL(policy || reference). Their gradients are another matter: k3 used
as a loss, as in DeepSeekMath, has the gradient of the *forward* KL, KL(reference || policy), at each prefix:
``d k3 / d logp = 1 - e^D``, whose mean over the policy is that gradient. The multiplier of the reverse KL is k1. A
configuration therefore names the direction of the gradient, and the log shows the means of k1 and k3. Off-policy,
neither is an estimate without an importance weight, ``kl_correction``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cohort.objective.ratio import exp_clamped, leveled_log_ratio
from cohort.presets.parts import KL, Direction

MAX_LOG_GAP = 20.0
"""D is clamped to +-20 before ``exp`` (e^20 = 4.9e8), so that e^D does not overflow."""
RATIO_LEVELS = {"token_ratio": "token", "prefix_product": "prefix_product", "sequence_weight": "sequence_product"}
"""The corrections as levels of a ratio."""


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
    logps_N: Tensor,
    ref_logps_N: Tensor,
    *,
    direction: Direction = "reverse",
    scope: str = "token",
    weight_N: Tensor | None = None,
    sequence_N: Tensor | None = None,
) -> Tensor:
    """kappa: the factor of ``-beta / Z`` in a token's gradient coefficient. Shape ``[N]``.

        reverse, token      kappa = w k1                     forward, token      kappa = w (1 - e^D)
        reverse, sequence   kappa = w sum of k1              forward, sequence   kappa = w (1 - e^(sum of D))

    Args:
        logps_N, ref_logps_N: current and reference log-probs of the sampled tokens, shape ``[N]``.
        direction: "reverse" for the gradient of KL(policy || reference), "forward" for that of KL(reference || policy).
        scope: "token" for the gradient of the conditional KL at each prefix, with the prefixes as drawn; "sequence" for
            the gradient of the KL between whole sequences, through the prefixes too.
        weight_N: an importance weight; see ``kl_correction``. None: 1.
        sequence_N: sequence ids, for scope "sequence".

    Both directions vanish at logps == ref_logps and agree to first order there. Far away they do not: where the policy
    is much less likely than the reference, forward grows like e^D and reverse like D.

    >>> lp, ref = torch.tensor([-1.0, -3.0]), torch.tensor([-1.5, -1.0])
    >>> kl_multiplier(lp, ref, direction="reverse")
    tensor([ 0.5000, -2.0000])
    >>> kl_multiplier(lp, ref, direction="forward")
    tensor([ 0.3935, -6.3891])
    """
    if direction not in ("reverse", "forward"):
        raise ValueError(f"direction must be 'reverse' or 'forward', got {direction!r}")
    k1_N = k1(logps_N, ref_logps_N)
    if scope == "sequence":
        k1_N = leveled_log_ratio(k1_N, "sequence_product", sequence_N)
    kappa_N = k1_N if direction == "reverse" else -torch.expm1((-k1_N).clamp(-MAX_LOG_GAP, MAX_LOG_GAP))
    return kappa_N if weight_N is None else weight_N * kappa_N


def kl_correction(kl: KL, log_ratio_N: Tensor, sequence_N: Tensor | None = None) -> Tensor | None:
    """The importance weight of a KL on tokens that another policy drew, from the token log-ratios to that policy.

        none  1     token_ratio  r_t     prefix_product  prod_{u <= t} r_u     sequence_weight  prod_u r_u

    The token ratio corrects the conditional KL at each prefix, but keeps the prefixes of the policy that drew them. The
    prefix product corrects the prefixes too. Scope "sequence" needs the sequence weight. Estimator "full" has no
    sampled token to correct for, so its prefix product leaves out the token's own ratio. There is no geometric mean: a
    KL weighted by it is the gradient of nothing. Shape ``[N]``, or None for 1.
    """
    if kl.correction == "none":
        return None
    leveled_N = leveled_log_ratio(log_ratio_N, RATIO_LEVELS[kl.correction], sequence_N)
    if kl.correction == "prefix_product" and kl.estimator == "full":
        leveled_N = leveled_N - log_ratio_N
    return exp_clamped(leveled_N)
