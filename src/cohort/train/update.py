"""The update: one optimizer step on one minibatch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from cohort.objective import (
    Coefficients,
    Objective,
    TokenStatistics,
    UpdateTokens,
    coefficients,
    entropy,
    kl_correction,
    token_statistics,
    token_weights,
    top_entropy_tokens,
    vocabulary_kl,
)
from cohort.policy import Policy, TokenLogps, chunked_logps, chunked_terms
from cohort.train.batch import batch_logits, cut, policy_statistics
from cohort.train.optim import Optimizer
from cohort.types import TokenBatch


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """What an update was like. ``statistics`` add up over updates; see ``objective.token_statistics``.

    A ``grad_norm`` of 0 means that no optimizer step was made.
    """

    statistics: TokenStatistics
    logps_N: Tensor
    """The minibatch's log-probs before the step."""
    grad_norm: float
    learning_rate: float
    entropy_coefficient: float


def update(
    policy: Policy,
    optimizer: Optimizer,
    minibatch: TokenBatch,
    objective: Objective,
    temperature: float,
    token_budget: int,
    reference: Policy | None = None,
    entropy_coefficient: float = 0.0,
) -> UpdateResult:
    """One optimizer step.

    Every denominator and threshold is worked out here, over the whole minibatch, before the first backward pass; a
    microbatch only takes its tokens' share. So ``token_budget`` changes memory and time, never the gradient.

    Args:
        policy, optimizer: what is trained.
        minibatch: scored completions with their advantages.
        objective: the row of the table.
        temperature: divides the logits.
        token_budget: tokens of one backward pass, padding included.
        reference: for a KL over the vocabulary, which needs its logits.
        entropy_coefficient: what the entropy bonus weighs in this update.
    """
    weights = minibatch_weights(policy, minibatch, objective, temperature, token_budget)
    places: list[Tensor] = []
    forwards: list[Forward] = []
    optimizer.zero_grad()
    with policy.training():
        for places_N, micro in cut(minibatch, token_budget):
            losses, forward = microbatch_losses(
                policy, micro, weights.at(places_N), objective, temperature, reference, entropy_coefficient
            )
            torch.stack(list(losses.values())).sum().backward()
            places.append(places_N)
            forwards.append(forward)
    learning_rate = optimizer.learning_rate
    grad_norm = optimizer.step()
    policy.version += grad_norm > 0
    tokens = in_minibatch_order(minibatch, weights, places, forwards)
    statistics = token_statistics(objective, tokens)
    return UpdateResult(statistics, tokens.logps_N, grad_norm, learning_rate, entropy_coefficient)


@dataclass(frozen=True, slots=True)
class Weights:
    """1/Z of every token, in each term. Shape ``[N]``."""

    policy_N: Tensor
    kl_N: Tensor
    entropy_N: Tensor
    """The entropy bonus is a mean over all loss tokens, whatever the policy term's denominator."""

    def at(self, places_N: Tensor) -> Weights:
        """Those of some tokens."""
        return Weights(self.policy_N[places_N], self.kl_N[places_N], self.entropy_N[places_N])


@dataclass(frozen=True, slots=True)
class Forward:
    """What a microbatch's forward pass gave, detached."""

    current: TokenLogps
    terms: Coefficients
    ref_logps_N: Tensor | None


def minibatch_weights(
    policy: Policy, minibatch: TokenBatch, objective: Objective, temperature: float, token_budget: int
) -> Weights:
    """The denominators; with ``top_entropy``, after a pass without gradient that finds the threshold."""
    loss_N = minibatch.loss_N

    def weights_of(counted_N: Tensor) -> Tensor:
        return token_weights(
            minibatch.sequence_N,
            minibatch.num_sequences,
            aggregation=objective.aggregation,
            group_S=minibatch.group_S,
            length=objective.aggregation_length,
            counted_N=counted_N,
            count_empty=objective.count_empty,
        )

    base_N = policy_N = weights_of(loss_N)
    if objective.top_entropy < 1:
        entropy_N = policy_statistics(policy, minibatch, temperature, token_budget).entropy_N
        chosen_N = top_entropy_tokens(entropy_N, objective.top_entropy, loss_N)
        policy_N = weights_of(chosen_N) if objective.denominator == "after_masks" else base_N * chosen_N
    mean_N = token_weights(minibatch.sequence_N, minibatch.num_sequences, aggregation="token_mean", counted_N=loss_N)
    return Weights(policy_N, base_N, mean_N)


def microbatch_losses(
    policy: Policy,
    micro: TokenBatch,
    weights: Weights,
    objective: Objective,
    temperature: float,
    reference: Policy | None,
    entropy_coefficient: float,
) -> tuple[dict[str, Tensor], Forward]:
    """For each term, a scalar with the microbatch's share of its gradient; their values mean nothing."""
    logits_NV, targets_N = batch_logits(policy, micro)
    current = chunked_logps(logits_NV, targets_N, temperature)
    detached = TokenLogps(*(values_N.detach() for values_N in current))
    ref_logits_NV, ref_logps_N = None, micro.ref_logps_N
    if objective.beta and objective.kl.estimator == "full":
        assert reference is not None
        with torch.no_grad():
            ref_logits_NV, _ = batch_logits(reference, micro)
            ref_logps_N = chunked_logps(ref_logits_NV, targets_N, temperature).logps_N
    terms = coefficients(
        objective,
        detached.logps_N,
        micro.advantages_N,
        weights.policy_N,
        sequence_N=micro.sequence_N,
        old_logps_N=micro.old_logps_N,
        sampler_logps_N=micro.sampler_logps_N,
        ref_logps_N=ref_logps_N,
        base_weights_N=weights.kl_N,
    )
    losses = {"policy": torch.sum(-terms.policy_N * current.logps_N)}
    if ref_logits_NV is not None:
        penalty_N = objective.beta * weights.kl_N * prefix_weight(objective, micro, detached.logps_N)
        losses["kl"] = chunked_terms(weighted_kl(objective), temperature, [logits_NV, ref_logits_NV], [penalty_N])
    elif objective.beta and objective.kl.place == "loss":
        losses["kl"] = torch.sum(-terms.kl_N * current.logps_N)
    if entropy_coefficient:
        bonus_N = entropy_coefficient * weights.entropy_N
        losses["entropy"] = -chunked_terms(weighted_entropy, temperature, [logits_NV], [bonus_N])
    return losses, Forward(detached, terms, ref_logps_N)


def term_norms(
    policy: Policy,
    batch: TokenBatch,
    objective: Objective,
    temperature: float,
    token_budget: int,
    reference: Policy | None = None,
    entropy_coefficient: float = 0.0,
) -> dict[str, float]:
    """The gradient's norm of each term, and the cosine between the policy's and the KL's, over a batch as it stands:
    what ``gradient/..._energy`` estimates without a backward pass. Costs a backward pass per term; changes nothing.
    """
    weights = minibatch_weights(policy, batch, objective, temperature, token_budget)
    parameters = [p for p in policy.model.parameters() if p.requires_grad]
    sums: dict[str, list[Tensor]] = {}
    with policy.training():
        for places_N, micro in cut(batch, token_budget):
            losses, _ = microbatch_losses(
                policy, micro, weights.at(places_N), objective, temperature, reference, entropy_coefficient
            )
            for name, loss in losses.items():
                parts = torch.autograd.grad(loss, parameters, retain_graph=True, materialize_grads=True)
                before = sums.get(name)
                sums[name] = list(parts) if before is None else [a + b for a, b in zip(before, parts, strict=True)]
    flat = {name: torch.cat([part.flatten() for part in parts]) for name, parts in sums.items()}
    metrics = {f"gradient/{name}_norm": float(vector.norm()) for name, vector in flat.items()}
    if "kl" in flat and metrics["gradient/policy_norm"] and metrics["gradient/kl_norm"]:
        product = metrics["gradient/policy_norm"] * metrics["gradient/kl_norm"]
        metrics["gradient/exact_cosine"] = float(flat["policy"] @ flat["kl"]) / product
    return metrics


def weighted_entropy(log_probs_NV: Tensor, weights_N: Tensor) -> Tensor:
    """``sum_n weights_n H_n``."""
    return (weights_N * entropy(log_probs_NV)).sum()


def weighted_kl(objective: Objective) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The function ``sum_n weights_n KL_n`` of two models' log-probs, in the objective's direction."""
    kl = objective.kl
    return lambda log_probs_NV, ref_NV, weights_N: (
        weights_N * vocabulary_kl(log_probs_NV, ref_NV, kl.direction, kl.top_k)
    ).sum()


def prefix_weight(objective: Objective, micro: TokenBatch, logps_N: Tensor) -> Tensor:
    """The importance weight of each token's prefix, for a KL over the vocabulary; 1 without a correction."""
    anchor_N = micro.sampler_logps_N if objective.kl.anchor == "sampler" else micro.old_logps_N
    if anchor_N is None:
        return torch.ones_like(logps_N)
    log_ratio_N = torch.where(micro.loss_N, logps_N - anchor_N, 0.0).nan_to_num(nan=0.0)
    weight_N = kl_correction(objective.kl, log_ratio_N, micro.sequence_N)
    return torch.ones_like(logps_N) if weight_N is None else weight_N


def in_minibatch_order(
    minibatch: TokenBatch, weights: Weights, places: Sequence[Tensor], forwards: Sequence[Forward]
) -> UpdateTokens:
    """The microbatches' tokens put together again."""
    order_N = torch.argsort(torch.cat(list(places)))

    def whole(pieces: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(pieces))[order_N]

    terms = Coefficients(*(whole([getattr(f.terms, field.name) for f in forwards]) for field in fields(Coefficients)))
    ref_logps = [f.ref_logps_N for f in forwards if f.ref_logps_N is not None]
    return UpdateTokens(
        logps_N=whole([f.current.logps_N for f in forwards]),
        entropy_N=whole([f.current.entropy_N for f in forwards]),
        collision_N=whole([f.current.collision_N for f in forwards]),
        advantages_N=minibatch.advantages_N,
        weights_N=weights.policy_N,
        base_weights_N=weights.kl_N,
        sequence_N=minibatch.sequence_N,
        coefficients=terms,
        sampler_logps_N=minibatch.sampler_logps_N,
        old_logps_N=minibatch.old_logps_N,
        ref_logps_N=whole(ref_logps) if ref_logps else None,
        full_logps_N=minibatch.full_logps_N,
    )
