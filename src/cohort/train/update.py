"""The update: one optimizer step on one minibatch.

weights    1/Z of every token, over the whole minibatch, before the first pass
shares     each rank's sequences; one rank has all of them
passes     per pack: read the prompts; per microbatch: forward, coefficients, backward; then the prompts backward
exchange   gradients are added up over the ranks, results of tokens are gathered
statistics of the tokens, so that nothing after the step needs memory
step       clip, step, count, check that the weights are finite
outcome    ``UpdateResult``, or what prevented the step: ``NonFinite``
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from cohort.errors import NonFiniteError, StepError, out_of_memory
from cohort.objective import (
    Coefficients,
    Objective,
    TokenStatistics,
    UpdateTokens,
    anchored_log_ratio,
    coefficients,
    entropy,
    kl_correction,
    token_statistics,
    token_weights,
    top_entropy_tokens,
    vocabulary_kl,
)
from cohort.parallel import agreed, together
from cohort.parallel.full import released
from cohort.policy import CompletionStates, ExpertBalance, TokenLogps, chunked_terms
from cohort.train.context import StepContext
from cohort.train.guard import check_finite
from cohort.train.layout import Microbatch, Part, active_part
from cohort.train.sweep import Shared, expert_balance, share, sweep, token_logps, unstoppable, weightless
from cohort.types import TokenBatch

# ----------------------------------------
# 1/Z of every token of a minibatch, in each term of the objective.


@dataclass(frozen=True, slots=True)
class TermWeights:
    """1/Z of every token in each term, shape ``[N]``."""

    policy_N: Tensor
    base_N: Tensor
    """Of the KL term: without ``top_entropy`` the policy term's too. 0 outside of the loss."""
    entropy_N: Tensor | None
    """Times the coefficient of the entropy bonus, which is a mean over all loss tokens, whatever the policy term's
    denominator. None: there is no bonus."""

    def at(self, positions_N: Tensor) -> TermWeights:
        """The weights of some tokens."""
        entropy_N = at_tokens(self.entropy_N, positions_N)
        return TermWeights(self.policy_N[positions_N], self.base_N[positions_N], entropy_N)


def term_weights(
    objective: Objective, batch: TokenBatch, minibatch: Part, chosen_N: Tensor | None, entropy_coefficient: float = 0.0
) -> TermWeights:
    """1/Z of every token of a minibatch. ``chosen_N``: the tokens that ``top_entropy`` chooses; None: it is 1."""
    loss_N = batch.loss_N[minibatch.tokens_N]

    def weights_of(counted_N: Tensor, aggregation: str) -> Tensor:
        return token_weights(
            minibatch.sequence_N,
            minibatch.num_sequences,
            aggregation=aggregation,
            group_S=batch.group_S[minibatch.sequences_S].to(loss_N.device),
            length=objective.aggregation_length,
            counted_N=counted_N,
            count_empty=objective.count_empty,
        )

    base_N = policy_N = weights_of(loss_N, objective.aggregation)
    if chosen_N is not None:
        after_masks = objective.denominator == "after_masks"
        policy_N = weights_of(chosen_N, objective.aggregation) if after_masks else base_N * chosen_N
    entropy_N = entropy_coefficient * weights_of(loss_N, "token_mean") if entropy_coefficient else None
    return TermWeights(policy_N, base_N, entropy_N)


# ----------------------------------------
# What an update's passes give for its tokens, and the record of it that a step keeps for the store.
#
# passes      ``Forward`` of each microbatch and rank
# update      ``update_tokens``: those of a minibatch in one order, for its statistics
# step        ``Updates``: each token as the first update saw it that made a pass of it


@dataclass(frozen=True, slots=True)
class Forward:
    """A microbatch's forward pass, detached."""

    positions_N: Tensor
    """Where its tokens lie among those of the part."""
    current: TokenLogps
    terms: Coefficients
    ref_logps_N: Tensor | None
    router_loss: Tensor | None = None
    """Its part of the weighted load-balancing loss, if there is one."""


def update_tokens(batch: TokenBatch, part: Part, weights: TermWeights, forwards: Sequence[Forward]) -> UpdateTokens:
    """The part's tokens with what the forward passes gave, in the part's order."""
    positions_N = torch.cat([forward.positions_N for forward in forwards])

    def in_order(pieces: Sequence[Tensor]) -> Tensor:
        joined = torch.cat(list(pieces)).to(positions_N.device)
        ordered = torch.empty_like(joined)
        ordered[positions_N] = joined
        return ordered

    logps_N, entropy_N, collision_N = map(in_order, zip(*(forward.current for forward in forwards), strict=True))
    ref_logps = [forward.ref_logps_N for forward in forwards if forward.ref_logps_N is not None]
    tokens_N = part.tokens_N
    return UpdateTokens(
        logps_N=logps_N,
        entropy_N=entropy_N,
        collision_N=collision_N,
        advantages_N=batch.advantages_N[tokens_N],
        weights_N=weights.policy_N,
        base_weights_N=weights.base_N,
        sequence_N=part.sequence_N,
        coefficients=Coefficients(*map(in_order, zip(*(forward.terms for forward in forwards), strict=True))),
        sampler_logps_N=batch.sampler_logps_N[tokens_N],
        old_logps_N=at_tokens(batch.old_logps_N, tokens_N),
        ref_logps_N=in_order(ref_logps) if ref_logps else None,
        full_logps_N=at_tokens(batch.full_logps_N, tokens_N),
    )


def at_tokens(values_N: Tensor | None, tokens_N: Tensor) -> Tensor | None:
    """The values of some tokens; None for None."""
    return None if values_N is None else values_N[tokens_N]


@dataclass(frozen=True, slots=True)
class Used:
    """What one update used."""

    minibatch: Part
    active: Part
    """The sequences of the minibatch that a pass was made of."""
    tokens: UpdateTokens | None
    """On the axis N of ``active``; None: no pass was made."""


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """One update. ``statistics`` add up over updates; see ``objective.token_statistics``.

    A ``grad_norm`` of 0 means that no optimizer step was made.
    """

    statistics: TokenStatistics
    logps_N: Tensor
    """Log-probs before the step, on the batch's axis N; NaN for tokens that needed no pass."""
    grad_norm: float
    learning_rate: float
    entropy_coefficient: float
    load: float = 1.0
    """The cost of the largest rank's share over the mean."""
    used: Used | None = None
    """What it used, until ``Updates`` has it."""


@dataclass(frozen=True, slots=True)
class NonFinite:
    """A value was NaN or infinite. No step was made, and the weights are unchanged."""

    message: str


@dataclass(slots=True)
class Updates:
    """The updates of a step so far, numbered from 0, and what they saw of each token of the batch: the values of the
    first update that made a pass of it."""

    version_before: int
    """``Policy.version`` before the first of them."""
    update_S: Tensor
    """Number of the first update that made a pass of the sequence; if none did, of the first whose minibatch had it;
    -1: no minibatch had it. On the CPU."""
    passed_S: Tensor
    """Whether a pass was made of the sequence, boolean. On the CPU."""
    values: dict[str, Tensor] = field(default_factory=dict)
    """By name, each of shape ``[N]`` in the dtype of the update; 0 where no pass was made."""
    outcomes: list[UpdateResult | None] = field(default_factory=list)
    """What each has made; None: it was skipped because a value was not finite."""

    @classmethod
    def none(cls, batch: TokenBatch, version_before: int) -> Updates:
        """Before the first update."""
        none_S = torch.full((batch.num_sequences,), -1, dtype=torch.long)
        return cls(version_before, none_S, torch.zeros_like(none_S, dtype=torch.bool))

    @property
    def results(self) -> list[UpdateResult]:
        """What those that were not skipped have made."""
        return [one for one in self.outcomes if one is not None]

    def add(self, outcome: UpdateResult | NonFinite) -> None:
        """Record an update. The tensors in its ``used`` are not kept."""
        if isinstance(outcome, UpdateResult) and outcome.used is not None:
            self._see(outcome.used, len(outcome.logps_N))
        self.outcomes.append(None if isinstance(outcome, NonFinite) else replace(outcome, used=None))

    def _see(self, used: Used, num_tokens: int) -> None:
        number = len(self.outcomes)
        of_minibatch_S, of_active_S = used.minibatch.sequences_S, used.active.sequences_S
        first_S = self.update_S[of_minibatch_S] < 0
        self.update_S[of_minibatch_S[first_S]] = number
        new_S = ~self.passed_S[of_active_S]
        if used.tokens is None or not bool(new_S.any()):
            return
        self.update_S[of_active_S[new_S]], self.passed_S[of_active_S] = number, True
        where_N = new_S.to(used.active.sequence_N.device)[used.active.sequence_N]
        tokens_N = used.active.tokens_N[where_N]
        tokens, terms = used.tokens, used.tokens.coefficients
        seen = {"logps": tokens.logps_N, "entropy": tokens.entropy_N, "collision": tokens.collision_N}
        seen |= {"log_ratio": terms.log_ratio_N, "policy_coefficient": terms.policy_N, "kl_coefficient": terms.kl_N}
        seen |= {"cause": terms.cause_N, "weight": tokens.weights_N, "kl_weight": tokens.base_weights_N}
        seen |= {} if tokens.ref_logps_N is None else {"ref_logps": tokens.ref_logps_N}
        for name, values_N in seen.items():
            if name not in self.values:
                self.values[name] = values_N.new_zeros(num_tokens)
            self.values[name][tokens_N] = values_N[where_N].to(self.values[name])


Check: TypeAlias = Callable[[UpdateTokens], None] | None
"""Looks at the tokens of an update before its step; may raise."""


@torch.enable_grad()
def update(
    context: StepContext, batch: TokenBatch, minibatch: Part, entropy_coefficient: float = 0.0, check: Check = None
) -> UpdateResult | NonFinite:
    """Make one optimizer step.

    Every denominator and threshold is computed over the whole minibatch before the first backward pass, and a
    microbatch takes its tokens' share. So neither the token budget nor the number of ranks changes the gradient. What
    prevents the step on one rank prevents it on all. When memory runs out, nothing has changed yet, and the update may
    be repeated (``StepContext.within_memory``).

    Args:
        context: policy, optimizer, objective and the rest of the step.
        batch: the rollout, with advantages.
        minibatch: its sequences that this step uses.
        entropy_coefficient: weight of the entropy bonus in this update.
        check: what looks at the tokens, of all ranks, before the step.

    Raises:
        StepError: memory ran out in the optimizer's step, so that the update cannot be repeated.
        NonFiniteError: the step has made a weight NaN or infinite.
    """
    policy, optimizer = context.policy, context.optimizer
    optimizer.zero_grad()
    logps_N = torch.full((batch.num_tokens,), torch.nan, dtype=policy.precision.master, device=batch.loss_N.device)
    learning_rate = optimizer.learning_rate
    try:
        weights = minibatch_weights(context, batch, minibatch, entropy_coefficient)
        # Sequences without an advantage teach nothing unless another term uses them: no pass is spent on them.
        active = active_part(batch, minibatch, context.objective, entropy_coefficient or policy.router_aux_loss_coef)
        masked_N = ~batch.loss_N
        masked = int(masked_N[minibatch.tokens_N].sum()) - int(masked_N[active.tokens_N].sum())
        idle = TokenStatistics.of_idle(
            minibatch.num_tokens - active.num_tokens, masked, minibatch.num_sequences - active.num_sequences
        )
        if not active.num_tokens:
            used = Used(minibatch, active, None)
            return UpdateResult(idle, logps_N, 0.0, learning_rate, entropy_coefficient, used=used)
        weights = weights.at(active.positions_N)
        balance = expert_balance(context, batch, active) if policy.router_aux_loss_coef else None
        shared = share(context, batch, active)
        own = weights.at(shared.own.positions_N)
        passes = partial(backward_passes, context, batch, shared, own, balance)
        forwards = [
            replace(forward, positions_N=part.positions_N[forward.positions_N.to(part.positions_N.device)])
            for part, some in zip(shared.parts, agreed(context.world, passes), strict=True)
            for forward in some
        ]

        def collected() -> tuple[UpdateTokens, TokenStatistics]:
            tokens = update_tokens(batch, active, weights, forwards)
            logps_N[active.tokens_N] = tokens.logps_N
            if check is not None:
                check(tokens)
            statistics = token_statistics(context.objective, tokens) + idle
            if balance is not None:
                parts = [forward.router_loss for forward in forwards if forward.router_loss is not None]
                statistics.sums["router_loss"] = float(torch.stack(parts).sum()) / balance.coefficient
            return tokens, statistics

        tokens, statistics = together(context.world, collected)
        grad_norm = optimizer_step(context)
    except NonFiniteError as error:
        return NonFinite(str(error))
    together(context.world, optimizer.check_weights)
    used = Used(minibatch, active, tokens)
    return UpdateResult(statistics, logps_N, grad_norm, learning_rate, entropy_coefficient, shared.load, used)


def optimizer_step(context: StepContext) -> float:
    """Add up the ranks' gradients, clip and step. Returns the gradient's norm; 0: no step was made.

    Raises:
        NonFiniteError: the gradient is not finite; the weights are unchanged.
        StepError: memory ran out, so that some weights may be stepped and others not, or other ranks wait for this
            one's part of the sum: they see this one end.
    """
    layout, optimizer = context.layout, context.optimizer
    try:
        layout.sum_gradients(optimizer.parameters)  # from here on, no rank can repeat the update alone
        grad_norm = optimizer.step(layout.clip_gradients)
        layout.stepped()
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        raise StepError(
            "out of memory in the optimizer's step or in the sum of gradients, which cannot be repeated: some weights "
            "may be stepped and others not. Resume from the newest checkpoint with more free memory, or set "
            "optim.microbatch_tokens lower, or start a new run from it (model.path) with optim.optimizer 'adamw_8bit' "
            "or [model.lora]"
        ) from error
    context.policy.version += grad_norm > 0
    return grad_norm


def minibatch_weights(
    context: StepContext, batch: TokenBatch, minibatch: Part, entropy_coefficient: float
) -> TermWeights:
    """1/Z of every token. With ``top_entropy``, a pass without gradient finds the threshold first."""
    objective, chosen_N = context.objective, None
    if objective.top_entropy < 1:
        entropy_N = token_logps(context, context.policy, batch, minibatch).entropy_N
        chosen_N = top_entropy_tokens(entropy_N, objective.top_entropy, batch.loss_N[minibatch.tokens_N])
    return term_weights(objective, batch, minibatch, chosen_N, entropy_coefficient)


def backward_passes(
    context: StepContext, batch: TokenBatch, shared: Shared, weights: TermWeights, balance: ExpertBalance | None = None
) -> list[Forward]:
    """Leave the gradient of this rank's share in the parameters; return the forward passes.

    Where passes exchange weights, a value that is not finite ends them after the last.

    Args:
        context: as ``update`` takes it.
        batch: as ``update`` takes it.
        shared: the sequences.
        weights: of the tokens of this rank's share.
        balance: of the minibatch, for the load-balancing loss of a mixture of experts; None: there is none.
    """
    policy, forwards, failed = context.policy, [], None
    reference = released((context.reference or policy).model)
    with reference, policy.training(), policy.compute(), policy.gradients_in_place(), unstoppable(context):
        for micro, states, ref_states in sweep(context, policy, batch, shared, grad=True):
            try:
                losses, forward = microbatch_losses(context.objective, batch, micro, weights, states, ref_states)
            except NonFiniteError as error:
                if not context.layout.passes_exchange:
                    raise
                failed = failed or error
                weightless(states).backward()
                continue
            if balance is not None:
                losses["router"] = balance.loss(states.router_logits)
                forward = replace(forward, router_loss=losses["router"].detach())
            del states, ref_states  # the hidden states are freed as soon as the backward pass is done with them
            torch.stack(list(losses.values())).sum().backward()
            forwards.append(forward)
    if failed is not None:
        raise failed
    return forwards


def microbatch_losses(
    objective: Objective,
    batch: TokenBatch,
    micro: Microbatch,
    weights: TermWeights,
    states: CompletionStates,
    ref_states: CompletionStates | None,
) -> tuple[dict[str, Tensor], Forward]:
    """For each term, a scalar with the microbatch's share of its gradient; the scalar's value has no meaning.

    The coefficients are detached: the gradient of ``-sum(c logps)`` is that of the objective.
    """
    tokens_N, sequence_N, weights = micro.part.tokens_N, micro.part.sequence_N, weights.at(micro.part.positions_N)
    advantages_N, sampler_logps_N = batch.advantages_N[tokens_N], batch.sampler_logps_N[tokens_N]
    old_logps_N, ref_logps_N = at_tokens(batch.old_logps_N, tokens_N), at_tokens(batch.ref_logps_N, tokens_N)
    current = TokenLogps(*map(micro.at_tokens, states.logps()))
    detached = TokenLogps(*(values_N.detach() for values_N in current))
    if ref_states is not None:
        ref_logps_N = micro.at_tokens(ref_states.logps().logps_N)
    read = {"advantage": advantages_N, "old log-probability": old_logps_N}
    computed = {"log-probability": detached.logps_N, "reference log-probability": ref_logps_N}
    check_finite(batch, micro.part, computed | read)
    terms = coefficients(
        objective,
        detached.logps_N,
        advantages_N,
        weights.policy_N,
        sequence_N=sequence_N,
        old_logps_N=old_logps_N,
        sampler_logps_N=sampler_logps_N,
        ref_logps_N=ref_logps_N,
        base_weights_N=weights.base_N,
    )
    check_finite(batch, micro.part, {"policy coefficient": terms.policy_N, "KL coefficient": terms.kl_N})
    losses = {"policy": torch.sum(-terms.policy_N * current.logps_N)}
    if ref_states is not None:
        anchor_N = sampler_logps_N if objective.kl.anchor == "sampler" else old_logps_N
        log_ratio_N = anchored_log_ratio(detached.logps_N, anchor_N).masked_fill(~batch.loss_N[tokens_N], 0)
        prefix_N = kl_correction(objective.kl, log_ratio_N, sequence_N)
        penalty_N = objective.beta * weights.base_N * (1.0 if prefix_N is None else prefix_N)
        losses["kl"] = chunked_terms(weighted_kl(objective), [states, ref_states], [micro.summed(penalty_N)])
    elif objective.beta and objective.kl.place == "loss":
        losses["kl"] = torch.sum(-terms.kl_N * current.logps_N)
    if weights.entropy_N is not None:
        losses["entropy"] = -chunked_terms(weighted_entropy, [states], [micro.summed(weights.entropy_N)])
    return losses, Forward(micro.part.positions_N, detached, terms, ref_logps_N)


def weighted_entropy(log_probs_NV: Tensor, weights_N: Tensor) -> Tensor:
    """``sum_n weights_n H_n``."""
    return (weights_N * entropy(log_probs_NV)).sum()


def weighted_kl(objective: Objective) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The function ``sum_n weights_n KL_n`` of two models' log-probs, in the objective's direction."""
    kl = objective.kl
    return lambda log_probs_NV, ref_NV, weights_N: (
        weights_N * vocabulary_kl(log_probs_NV, ref_NV, kl.direction, kl.top_k)
    ).sum()
