"""One function for the whole family: the gradient coefficient of every token.

Every loss of the family depends on the model only through the sampled tokens' log-probs, so its gradient is a weighted
sum of token scores:

    grad L = - sum_n c_n * grad logps_n
    c_n    = (1/Z_n) * phi(ratio_n, A_n) * A_n   -   beta * (1/Z_n) * kappa_n
             \\______ policy term _____________/      \\______ KL term ______/

A variant is its choice of A, phi, Z, beta and kappa: a row of ``presets.PRESETS``. Nothing here needs autograd; the
update runs ``backward`` on ``-(c.detach() * logps).sum()``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cohort.objective.kl import kl_multiplier
from cohort.objective.presets import Objective
from cohort.objective.ratio import importance_ratio, ppo_clip_multiplier


@dataclass(frozen=True, slots=True)
class Coefficients:
    """The two terms of c_N, apart, so that the log can show each. Shape ``[N]`` each; ``kl_N`` is 0 without a KL
    term."""

    policy_N: Tensor
    kl_N: Tensor

    @property
    def total_N(self) -> Tensor:
        """c_N: what multiplies the tokens' log-probs in the backward pass."""
        return self.policy_N + self.kl_N


@torch.no_grad()
def coefficients(
    objective: Objective,
    logps_N: Tensor,
    advantages_N: Tensor,
    weights_N: Tensor,
    *,
    old_logps_N: Tensor | None = None,
    ref_logps_N: Tensor | None = None,
) -> Coefficients:
    """c_N of the module's header, for any part of a minibatch.

    Args:
        objective: the row of the table.
        logps_N: current log-probs of the sampled tokens, shape ``[N]``.
        advantages_N: each token's advantage, shape ``[N]``.
        weights_N: each token's 1/Z, from ``token_weights`` of the whole minibatch, shape ``[N]``.
        old_logps_N: log-probs of the policy that sampled; None when that is the current one: the ratio is 1.
        ref_logps_N: log-probs of the reference; needed exactly when ``objective.beta`` is not 0.

    Returns:
        Coefficients in float32, or in float64 when ``logps_N`` is float64. A token with advantage 0 has a policy term
        of exactly 0.

    >>> from cohort.objective import PRESETS
    >>> lp, a, w = torch.tensor([-1.0, -2.0]), torch.tensor([1.0, -1.0]), torch.tensor([0.5, 0.5])
    >>> coefficients(PRESETS["grpo"].replace(beta=0.0), lp, a, w).total_N
    tensor([ 0.5000, -0.5000])
    """
    if (objective.beta != 0) != (ref_logps_N is not None):
        raise ValueError(f"ref_logps_N is needed exactly when beta != 0; beta={objective.beta}")
    dtype = torch.float64 if logps_N.dtype == torch.float64 else torch.float32
    logps_N, advantages_N, weights_N = logps_N.to(dtype), advantages_N.to(dtype), weights_N.to(dtype)
    ratio_N = torch.ones_like(logps_N) if old_logps_N is None else importance_ratio(logps_N, old_logps_N.to(dtype))
    phi_N = ppo_clip_multiplier(ratio_N, advantages_N, objective.ratio_low, objective.ratio_high)
    policy_N = weights_N * phi_N * advantages_N
    if ref_logps_N is None:
        return Coefficients(policy_N, torch.zeros_like(policy_N))
    kappa_N = kl_multiplier(logps_N, ref_logps_N.to(dtype), gradient=objective.kl_gradient, ratio_N=ratio_N)
    return Coefficients(policy_N, -objective.beta * weights_N * kappa_N)
