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
from cohort.policy import CompletionStates, Policy, Prefixes, TokenLogps, chunked_terms
from cohort.train.batch import select, token_indices
from cohort.train.guard import check_finite
from cohort.train.optim import Optimizer
from cohort.train.packing import (
    Pack,
    completion_states,
    expert_balance,
    microbatches,
    packs,
    policy_statistics,
    working_sequences,
)
from cohort.types import TokenBatch


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """What an update was like. ``statistics`` add up over updates; see ``objective.token_statistics``.

    A ``grad_norm`` of 0 means that no optimizer step was made.
    """

    statistics: TokenStatistics
    logps_N: Tensor
    """The minibatch's log-probs before the step; NaN where none were needed."""
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
        token_budget: tokens of one pass; see ``packs``.
        reference: for a KL over the vocabulary, which needs its logits.
        entropy_coefficient: what the entropy bonus weighs in this update.

    Raises:
        NonFiniteError: a number is NaN or infinite; no step was made.
    """
    weights = minibatch_weights(policy, minibatch, objective, temperature, token_budget)
    # Completions without an advantage teach nothing where no other term wants them: no pass is spent on them.
    working = working_sequences(minibatch, objective, entropy_coefficient or policy.router_aux_loss_coef)
    working_N = token_indices(minibatch, working)
    whole, minibatch, weights = minibatch, select(minibatch, working), weights.at(working_N)
    idle = whole.num_tokens - minibatch.num_tokens
    logps_N = torch.full((whole.num_tokens,), torch.nan, dtype=policy.precision.master, device=working_N.device)
    optimizer.zero_grad()
    if not working:
        return UpdateResult(TokenStatistics.of_idle(idle), logps_N, 0.0, optimizer.learning_rate, entropy_coefficient)
    places, forwards = backward_passes(
        policy, minibatch, weights, objective, temperature, token_budget, reference, entropy_coefficient
    )
    learning_rate = optimizer.learning_rate
    grad_norm = optimizer.step()
    policy.version += grad_norm > 0
    tokens = in_minibatch_order(minibatch, weights, places, forwards)
    statistics = token_statistics(objective, tokens) + TokenStatistics.of_idle(idle)
    logps_N[working_N] = tokens.logps_N
    return UpdateResult(statistics, logps_N, grad_norm, learning_rate, entropy_coefficient)


def backward_passes(
    policy: Policy,
    minibatch: TokenBatch,
    weights: Weights,
    objective: Objective,
    temperature: float,
    token_budget: int,
    reference: Policy | None,
    entropy_coefficient: float,
) -> tuple[list[Tensor], list[Forward]]:
    """Leave the minibatch's gradient in the parameters; the places of each microbatch's tokens, and what its forward
    pass gave."""
    balance = expert_balance(policy, minibatch, temperature, token_budget) if policy.router_aux_loss_coef else None
    places: list[Tensor] = []
    forwards: list[Forward] = []
    passes = policy.passes
    with policy.training(), policy.compute(), policy.gradients_in_place():
        for pack in packs(minibatch, token_budget, shared=passes.shared):
            # Each prompt once forward, then its completions, whose gradients of its keys and values add up, then once
            # backward.
            prefixes = passes.read(pack.prompt_ids)
            ref_prefixes = read_reference(reference, objective, pack)
            for places_N, micro in microbatches(minibatch, pack):
                states = completion_states(policy, prefixes, micro, temperature)
                ref_states = reference_states(reference, ref_prefixes, micro, temperature)
                losses, forward = microbatch_losses(
                    states, ref_states, micro, weights.at(places_N), objective, entropy_coefficient
                )
                if balance is not None:
                    losses["router"] = balance.loss(states.router_logits)
                torch.stack(list(losses.values())).sum().backward()
                places.append(places_N)
                forwards.append(forward)
            prefixes.backward()
    return places, forwards


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


def read_reference(reference: Policy | None, objective: Objective, pack: Pack) -> Prefixes | None:
    """The prompts of a pack for a KL over the vocabulary, which needs the reference's distributions."""
    if not objective.beta or objective.kl.estimator != "full":
        return None
    assert reference is not None
    with torch.no_grad(), reference.compute():
        return reference.passes.read(pack.prompt_ids)


def reference_states(
    reference: Policy | None, prefixes: Prefixes | None, micro: TokenBatch, temperature: float
) -> CompletionStates | None:
    """The reference's states of a microbatch, after the prompts that it has read; None: it has not."""
    if reference is None or prefixes is None:
        return None
    with torch.no_grad():
        return completion_states(reference, prefixes, micro, temperature)


def microbatch_losses(
    states: CompletionStates,
    ref_states: CompletionStates | None,
    micro: TokenBatch,
    weights: Weights,
    objective: Objective,
    entropy_coefficient: float,
) -> tuple[dict[str, Tensor], Forward]:
    """For each term, a scalar with the microbatch's share of its gradient; their values mean nothing."""
    current = states.logps()
    detached = TokenLogps(*(values_N.detach() for values_N in current))
    ref_logps_N = micro.ref_logps_N if ref_states is None else ref_states.logps().logps_N
    read = {"advantage": micro.advantages_N, "old log-probability": micro.old_logps_N}
    check_finite(micro, {"log-probability": detached.logps_N, "reference log-probability": ref_logps_N} | read)
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
    check_finite(micro, {"policy coefficient": terms.policy_N, "KL coefficient": terms.kl_N})
    losses = {"policy": torch.sum(-terms.policy_N * current.logps_N)}
    if ref_states is not None:
        penalty_N = objective.beta * weights.kl_N * prefix_weight(objective, micro, detached.logps_N)
        losses["kl"] = chunked_terms(weighted_kl(objective), [states, ref_states], [penalty_N])
    elif objective.beta and objective.kl.place == "loss":
        losses["kl"] = torch.sum(-terms.kl_N * current.logps_N)
    if entropy_coefficient:
        bonus_N = entropy_coefficient * weights.entropy_N
        losses["entropy"] = -chunked_terms(weighted_entropy, [states], [bonus_N])
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
    working = working_sequences(batch, objective, entropy_coefficient)
    batch, weights = select(batch, working), weights.at(token_indices(batch, working))
    parameters = [p for p in policy.model.parameters() if p.requires_grad]
    sums: dict[str, list[Tensor]] = {}
    passes = policy.passes
    with policy.training(), policy.compute():
        for pack in packs(batch, token_budget, shared=passes.shared):
            prefixes = passes.read(pack.prompt_ids, attached=True)
            ref_prefixes = read_reference(reference, objective, pack)
            for places_N, micro in microbatches(batch, pack):
                states = completion_states(policy, prefixes, micro, temperature)
                ref_states = reference_states(reference, ref_prefixes, micro, temperature)
                losses, _ = microbatch_losses(
                    states, ref_states, micro, weights.at(places_N), objective, entropy_coefficient
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
