"""One function for the whole family: the gradient coefficient of every token.

Every loss of the family depends on the model only through the sampled tokens' log-probs, so its gradient is a weighted
sum of token scores:

    grad L = - sum_n c_n * grad logps_n
    c_n    = (1/Z_n) * w_n * phi(ratio_n, A_n) * A_n   -   beta * (1/Z'_n) * kappa_n
             \\________ policy term ________________/      \\______ KL term ______/

A variant is its choice of A (``credit``), ratio (``ratio``), phi (``trust``), mismatch weight w (``mismatch``), Z
(``aggregation``), beta and kappa (``kl``): a row of ``cohort.presets.TABLE``. Autograd is not used here; the update
runs ``backward`` on ``-(c.detach() * logps).sum()``. Terms over the whole vocabulary are in ``vocabulary``.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from cohort.objective.kl import kl_correction, kl_multiplier
from cohort.objective.mismatch import mismatch_weights
from cohort.objective.ratio import MAX_LOG_RATIO, anchored_log_ratio, leveled_log_ratio
from cohort.objective.trust import Trusted, trust_region
from cohort.presets.objective import Objective


class Cause(IntEnum):
    """Why a token has no policy gradient: the first cause that applies, in this order. ACTIVE: none applies."""

    ACTIVE = 0
    MASKED = 1
    """Not a loss token, or of a truncated completion that is masked."""
    NO_ADVANTAGE = 2
    """A is 0: a dead group, an unscored completion."""
    LOW_ENTROPY = 3
    """Not among the ``top_entropy`` tokens."""
    MISMATCH = 4
    """Dropped by the mismatch rules."""
    OFF_POLICY = 5
    """Dropped by the off-policy mask."""
    CLIPPED_LOW = 6
    CLIPPED_HIGH = 7
    """Silenced by the trust region."""
    VANISHED = 8
    """The trust region's multiplier is 0 inside its bounds: an underflow, or a user's rule."""
    HELD = 9
    """It has a gradient, but its log-ratio was clamped to +-20."""


class Coefficients(NamedTuple):
    """The terms of c_N, and what the log needs to explain them. Shape ``[N]`` each, but for the last."""

    policy_N: Tensor
    kl_N: Tensor
    """0 without a KL in the loss, and where it is over the vocabulary."""
    cause_N: Tensor
    """int8, a ``Cause``."""
    value_N: Tensor
    """The policy surrogate per token, mismatch weight included; times 1/Z and summed it is the policy term's value."""
    log_ratio_N: Tensor
    """Of the single tokens, current to the ratio's anchor."""
    acted_NM: Tensor
    """Where each of the objective's M mismatch rules acted; see ``mismatch.MismatchResult``."""

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
    sequence_N: Tensor | None = None,
    old_logps_N: Tensor | None = None,
    sampler_logps_N: Tensor | None = None,
    ref_logps_N: Tensor | None = None,
    base_weights_N: Tensor | None = None,
) -> Coefficients:
    """c_N of the module's header, for any part of a minibatch that contains its sequences whole.

    Args:
        objective: the row of the table.
        logps_N: current log-probs of the sampled tokens, shape ``[N]``.
        advantages_N: each token's advantage, shape ``[N]``.
        weights_N: each token's 1/Z in the policy term, from ``token_weights`` of the whole minibatch, shape ``[N]``.
        sequence_N: which sequence each token belongs to, 0..S-1; needed by rules that know sequences.
        old_logps_N: log-probs of the policy that sampled; None when that is the current one: the ratio is 1.
        sampler_logps_N: the engine's own; needed by a ratio or KL anchored there and by mismatch rules.
        ref_logps_N: log-probs of the reference; needed for a KL in the loss, refused without any KL.
        base_weights_N: each token's 1/Z in the KL term; None: ``weights_N``. A token with 0 is not a loss token: its
            log-probs may be anything, even NaN, and it belongs to no sequence.

    Returns:
        Coefficients in float32, or in float64 when ``logps_N`` is float64. A token with advantage 0 has a policy term
        of exactly 0.

    Raises:
        ValueError: the objective needs log-probs that are None.

    >>> from cohort.presets import PRESETS
    >>> lp, a, w = torch.tensor([-1.0, -2.0]), torch.tensor([1.0, -1.0]), torch.tensor([0.5, 0.5])
    >>> coefficients(PRESETS["default"], lp, a, w).total_N
    tensor([ 0.5000, -0.5000])
    """
    base_N = weights_N if base_weights_N is None else base_weights_N
    tokens = _Tokens(logps_N, advantages_N, weights_N, base_N, sequence_N, old_logps_N, sampler_logps_N, ref_logps_N)
    tokens.check(objective)
    dtype = torch.float64 if logps_N.dtype == torch.float64 else torch.float32
    loss_N = base_N > 0
    if bool(loss_N.all()):
        return _coefficients(objective, tokens.to(dtype))
    kept = _coefficients(objective, tokens.each(lambda value: value[loss_N]).to(dtype))
    full = Coefficients(*(_scattered(values, loss_N) for values in kept))
    full.cause_N[~loss_N] = int(Cause.MASKED)
    return full


def _scattered(values: Tensor, where_N: Tensor) -> Tensor:
    """The values of the chosen tokens at their positions among all, and 0 elsewhere."""
    full = values.new_zeros(len(where_N), *values.shape[1:])
    full[where_N] = values
    return full


class _Tokens(NamedTuple):
    """The arguments of ``coefficients`` together, so that they can be cast and selected together."""

    logps_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor
    base_weights_N: Tensor
    sequence_N: Tensor | None
    old_logps_N: Tensor | None
    sampler_logps_N: Tensor | None
    ref_logps_N: Tensor | None

    def check(self, objective: Objective) -> None:
        kl = objective.kl
        in_loss = objective.beta != 0 and kl.place == "loss"
        if in_loss and kl.estimator == "sampled" and self.ref_logps_N is None:
            raise ValueError(f"a KL in the loss needs ref_logps_N; beta={objective.beta}")
        if objective.beta == 0 and self.ref_logps_N is not None:
            raise ValueError("ref_logps_N was given, but there is no KL: beta=0")
        of_sampler = objective.ratio_anchor == "sampler" or objective.mismatch or (in_loss and kl.anchor == "sampler")
        if of_sampler and self.sampler_logps_N is None:
            raise ValueError(
                "the objective compares with the sampler (ratio_anchor, kl.anchor or mismatch) and needs "
                "sampler_logps_N; an engine without them needs ratio_anchor 'old', kl.anchor 'old' and mismatch 'none'"
            )

    def each(self, change: Callable[[Tensor], Tensor]) -> _Tokens:
        """The tokens with every tensor changed."""
        return _Tokens(*(None if value is None else change(value) for value in self))  # type: ignore[arg-type]

    def to(self, dtype: torch.dtype) -> _Tokens:
        """The tokens with log-probs, advantages and weights in a dtype."""
        return self.each(lambda value: value.to(dtype))._replace(sequence_N=self.sequence_N)

    def log_ratio_to(self, anchor: str) -> Tensor:
        """Token log-ratios of the current policy to an anchor; 0 where the anchor's log-prob is NaN (unknown)."""
        anchors = {"self": None, "old": self.old_logps_N, "sampler": self.sampler_logps_N}
        return anchored_log_ratio(self.logps_N, anchors[anchor])


def _coefficients(objective: Objective, tokens: _Tokens) -> Coefficients:
    """``coefficients`` of loss tokens only."""
    rule, a_N, sequence_N = objective.trust_region, tokens.advantages_N, tokens.sequence_N
    token_log_ratio_N = tokens.log_ratio_to(objective.ratio_anchor)
    log_ratio_N = leveled_log_ratio(token_log_ratio_N, objective.ratio_level, sequence_N)
    trusted = trust_region(
        rule, log_ratio_N, a_N, tokens.logps_N, token_log_ratio_N=token_log_ratio_N, sequence_N=sequence_N
    )
    value_N = surrogate_value(objective, trusted, tokens.logps_N, a_N, sequence_N)
    policy_N = tokens.weights_N * trusted.phi_N * a_N
    dropped_N = off_policy_N = torch.zeros_like(a_N, dtype=torch.bool)
    acted_NM = dropped_N.new_zeros(len(dropped_N), 0)
    if objective.mismatch:
        assert tokens.sampler_logps_N is not None
        if sequence_N is None:
            raise ValueError("mismatch rules need sequence_N: which sequence each token belongs to")
        old_N = tokens.logps_N if tokens.old_logps_N is None else tokens.old_logps_N
        found = mismatch_weights(objective.mismatch, old_N, tokens.sampler_logps_N, tokens.logps_N, a_N, sequence_N)
        policy_N, value_N = policy_N * found.weight_N, value_N * found.weight_N
        dropped_N, off_policy_N, acted_NM = found.dropped_N, found.off_policy_N, found.acted_NM
    # An advantage of 0 is no gradient, whatever the ratio.
    policy_N = policy_N.masked_fill(a_N == 0, 0)
    cause_N = torch.zeros_like(a_N, dtype=torch.int8)
    for cause, where_N in (  # the later ones have precedence
        (Cause.HELD, log_ratio_N.abs() > MAX_LOG_RATIO),
        (Cause.VANISHED, trusted.phi_N == 0),
        (Cause.CLIPPED_HIGH, (trusted.phi_N == 0) & (trusted.side_N > 0)),
        (Cause.CLIPPED_LOW, (trusted.phi_N == 0) & (trusted.side_N < 0)),
        (Cause.OFF_POLICY, off_policy_N),
        (Cause.MISMATCH, dropped_N),
        (Cause.LOW_ENTROPY, tokens.weights_N == 0),
        (Cause.NO_ADVANTAGE, a_N == 0),
    ):
        cause_N = cause_N.masked_fill(where_N, int(cause))
    return Coefficients(policy_N, _kl_term(objective, tokens), cause_N, value_N, token_log_ratio_N, acted_NM)


def surrogate_value(
    objective: Objective, trusted: Trusted, logps_N: Tensor, advantages_N: Tensor, sequence_N: Tensor | None
) -> Tensor:
    """The surrogate per token: weighted by 1/Z and summed it has the coefficients as its gradient, where factors that
    are weights (a capped ratio, earlier ratios of a prefix, phi of a user's rule) count as constants."""
    if objective.ratio_anchor == "self":
        return advantages_N * logps_N
    rule = objective.trust_region
    if objective.ratio_level == "sequence_product" and not (rule is not None and rule.constant_weight):
        assert sequence_N is not None
        return trusted.value_N / torch.bincount(sequence_N)[sequence_N]  # one W_i A_i per sequence, not per token
    return trusted.value_N


def _kl_term(objective: Objective, tokens: _Tokens) -> Tensor:
    kl = objective.kl
    if objective.beta == 0 or kl.place != "loss" or kl.estimator == "full":
        return torch.zeros_like(tokens.logps_N)
    assert tokens.ref_logps_N is not None
    kappa_N = kl_multiplier(
        tokens.logps_N,
        tokens.ref_logps_N,
        direction=kl.direction,
        scope=kl.scope,
        weight_N=kl_correction(kl, tokens.log_ratio_to(kl.anchor), tokens.sequence_N),
        sequence_N=tokens.sequence_N,
    )
    return -objective.beta * tokens.base_weights_N * kappa_N
