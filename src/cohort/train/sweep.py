"""The one loop over the passes of a part of a batch, with or without gradients, and the ranks' shares of the part.

Every rank holds the whole batch and computes the same shares: whole prompts with their completions, so that each prompt
is computed on one rank. What comes back is exchanged: gradients are added up by the layout, results of tokens return to
the batch's axis N. Denominators and thresholds are of the whole minibatch before it is shared, so that sums over ranks
are the same as without ranks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from cohort.errors import NonFiniteError, PolicyMismatchError, RankError, out_of_memory
from cohort.objective import UpdateTokens, segment_sum
from cohort.parallel import agreed, imbalance, shares
from cohort.parallel.full import released
from cohort.policy import (
    CompletionStates,
    ExpertBalance,
    PackedRows,
    Policy,
    Prefixes,
    TokenLogps,
    expert_counts,
    experts_per_token,
)
from cohort.train.context import StepContext
from cohort.train.guard import check_finite
from cohort.train.layout import Microbatch, Pack, Part, copies, level, microbatches, packs, part_of
from cohort.types import TokenBatch

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Shared:
    """A part of a batch, divided over the ranks."""

    parts: tuple[Part, ...]
    """Each rank's sequences; some may have none. ``positions_N`` are those among the tokens of the whole."""
    own: Part
    """This rank's."""
    load: float
    """The cost of the largest share over the mean."""


def share(context: StepContext, batch: TokenBatch, part: Part) -> Shared:
    """Divide a part over the ranks, the same on each. One rank has all of it, in order."""
    world = context.world
    if world.size == 1:
        whole = part.select(torch.arange(part.num_sequences))
        return Shared((whole,), whole, 1.0)
    lengths = segment_sum(batch.lengths_B, batch.sequence_B, batch.num_sequences)[part.sequences_S].tolist()
    drawn = part.lengths_S.tolist()
    same = copies(batch, part) if _distinct(context.policy) else {}
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for index, group in enumerate(batch.group_S[part.sequences_S].tolist()):
        by_prompt.setdefault(batch.prompt_ids[group], []).append(index)
    attention, head = relative_costs(context.policy.model.config.get_text_config())
    costs = []
    for prompt, some in by_prompt.items():
        computed = [s for s in some if s not in same]
        costs.append(
            cost(len(prompt), [lengths[s] for s in computed], attention) + head * sum(drawn[s] for s in computed)
        )
    divided, sequences = shares(costs, world.size), list(by_prompt.values())
    parts = tuple(
        part.select(torch.tensor(sorted(s for prompt in prompts for s in sequences[prompt]), dtype=torch.long))
        for prompts in divided
    )
    return Shared(parts, parts[world.rank], imbalance(costs, divided))


def own_packs(context: StepContext, policy: Policy, batch: TokenBatch, shared: Shared) -> list[Pack]:
    """The passes of this rank's share. Where passes exchange weights, every rank knows the packs of all, and adds
    passes of weight 0 until all make the same."""

    def cut(part: Part) -> list[Pack]:
        shared, distinct = policy.passes.shared, _distinct(policy)
        return packs(batch, part, context.budget.tokens, shared=shared, distinct=distinct)

    if not context.layout.passes_exchange:
        return cut(shared.own)
    return level([cut(part) for part in shared.parts])[context.world.rank]


def _distinct(policy: Policy) -> bool:
    """Whether copies of a sequence are computed once. They are not with dropout, which each copy draws for itself, or
    with a router loss, which counts the tokens of each copy."""
    return not (policy.dropout or policy.router_aux_loss_coef)


def sweep(
    context: StepContext,
    policy: Policy,
    batch: TokenBatch,
    shared: Shared,
    *,
    grad: bool = False,
    attached: bool = False,
) -> Iterator[tuple[Microbatch, CompletionStates, CompletionStates | None]]:
    """Each microbatch of this rank's share with the policy's states of it and, for a KL over the vocabulary, the
    reference's. To be iterated inside ``policy.compute()``, to the end.

    Each prompt is read once. With gradients, those of its completions add up in its keys and values, and run backward
    through it once, after the pack's last microbatch. Nothing here keeps the states of a microbatch, so that they are
    freed as soon as the backward pass is done with them.

    Args:
        context: the step's.
        policy: computes.
        batch: the rollout.
        shared: the sequences.
        grad: whether the caller makes a backward pass for each microbatch.
        attached: see ``Prefixes``.
    """
    reference = None
    if grad and context.objective.beta and context.objective.kl.estimator == "full":
        reference = context.reference
        assert reference is not None
    for pack in own_packs(context, policy, batch, shared):
        prefixes = policy.passes.read(pack.prompt_ids, attached=attached, routes=_prompt_routes(policy, batch, pack))
        ref_prefixes = None
        if reference is not None:
            with torch.no_grad(), reference.compute():
                ref_prefixes = reference.passes.read(pack.prompt_ids)
        for micro in microbatches(batch, shared.own, pack):
            yield (
                micro,
                _states(context, policy, prefixes, micro),
                _reference_states(context, reference, ref_prefixes, micro),
            )
        for _ in range(pack.idle):
            if reference is not None and ref_prefixes is not None:
                with torch.no_grad(), reference.compute():
                    _idle_states(context, reference, ref_prefixes)
            idle = _idle_states(context, policy, prefixes)
            if grad:
                weightless(idle).backward()
        if grad:
            prefixes.backward()


def _states(context: StepContext, policy: Policy, prefixes: Prefixes, micro: Microbatch) -> CompletionStates:
    """``Policy.states`` of a microbatch, over the distribution that its tokens were drawn from."""
    rows = micro.rows if policy.routing else replace(micro.rows, routes_T=None)
    return policy.states(
        prefixes, rows, context.sampling.temperature, context.repetition_penalty, most_tokens=context.budget.piece
    )


def _prompt_routes(policy: Policy, batch: TokenBatch, pack: Pack) -> list[Tensor | None] | None:
    """The recorded routes of a pack's prompts, if the policy replays them: a reference does not."""
    if policy.routing is None:
        return None
    routes = [batch.prompt_routes.get(prompt) for prompt in pack.prompt_ids]
    for one in routes:
        if one is not None:
            policy.routing.check(one)
    return routes


def _reference_states(
    context: StepContext, reference: Policy | None, prefixes: Prefixes | None, micro: Microbatch
) -> CompletionStates | None:
    if reference is None or prefixes is None:
        return None
    with torch.no_grad():
        return _states(context, reference, prefixes, micro)


def _idle_states(context: StepContext, policy: Policy, prefixes: Prefixes) -> CompletionStates:
    """The states of a pass of weight 0 after the first prompt of a pack."""
    return policy.states(prefixes, PackedRows.of([0], [(0,)]), context.sampling.temperature)


def weightless(states: CompletionStates) -> Tensor:
    """A loss whose gradient is 0 in every weight of the layers: its backward pass exchanges what others do."""
    return torch.mul(states.hidden_NH.sum(), 0)


@contextlib.contextmanager
def unstoppable(context: StepContext) -> Iterator[None]:
    """Around passes that exchange weights: a rank that fails in one cannot tell the others, which wait for its next
    exchange, so its error ends the run. Around other passes, nothing.

    Raises:
        RankError: instead of an error in the block other than ``NonFiniteError``, which ``forward_passes`` keeps until
            the end.
    """
    try:
        yield
    except (RankError, NonFiniteError):
        raise
    except BaseException as error:  # an interrupt too: the others wait in a pass
        if not context.layout.passes_exchange:
            raise
        world, hint = context.world, ""
        if isinstance(error, Exception) and out_of_memory(error):
            hint = (
                f": set optim.microbatch_tokens to less than {context.budget.tokens:,}, or model.gradient_checkpointing"
            )
        raise RankError(
            f"rank {world.rank} of {world.size} failed in a pass, or lost another rank in it: "
            f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}{hint}"
        ) from error


def cost(prompt: int, completions: list[int], attention: float) -> float:
    """The work of a prompt and its completions, in tokens of the layers' matrices.

    Args:
        prompt: its length; it is computed once.
        completions: lengths.
        attention: cost of attending to one token.
    """
    read = prompt * (1 + attention * prompt / 2)
    return read + sum(length * (1 + attention * (prompt + length / 2)) for length in completions)


def relative_costs(config: Any) -> tuple[float, float]:
    """The cost of attending to one token, and of the head for a drawn token, relative to a token's matrix products in
    the layers: 12 H^2 products per layer, against 2 H and V H / layers."""
    hidden, layers = getattr(config, "hidden_size", 0) or 1024, getattr(config, "num_hidden_layers", 0) or 1
    return 1 / (6 * hidden), getattr(config, "vocab_size", 0) / (12 * hidden * layers)


# ----------------------------------------
# What a policy says of a rollout's tokens, in passes without gradient; the ranks' shares of them.


@torch.no_grad()
def policy_logps(context: StepContext, policy: Policy, batch: TokenBatch, part: Part) -> Tensor:
    """Log-probs under a policy, the old one or the reference, shape ``[N]`` of the batch; NaN outside of ``part``."""
    logps_N = torch.full((batch.num_tokens,), torch.nan, dtype=policy.precision.master, device=batch.loss_N.device)
    logps_N[part.tokens_N] = token_logps(context, policy, batch, part).logps_N
    return logps_N


def token_logps(context: StepContext, policy: Policy, batch: TokenBatch, part: Part) -> TokenLogps:
    """Log-probs, entropies and collision probabilities of a part's tokens, shape ``[N]`` of the part."""

    def values_of(micro: Microbatch, states: CompletionStates) -> tuple[Tensor, ...]:
        return micro.part.positions_N, *map(micro.at_tokens, states.logps())

    shared, each = _in_shares(context, policy, batch, part, values_of)
    like = torch.empty(part.num_tokens, dtype=policy.precision.master, device=batch.loss_N.device)
    found = TokenLogps(like, torch.empty_like(like), torch.empty_like(like))
    for one, pieces in zip(shared.parts, each, strict=True):
        for positions_N, *values in pieces:
            where_N = one.positions_N[positions_N.to(like.device)]
            for whole_N, values_N in zip(found, values, strict=True):
                whole_N[where_N] = values_N.to(whole_N)
    return found


def expert_balance(context: StepContext, batch: TokenBatch, part: Part) -> ExpertBalance:
    """How a minibatch uses the experts of a mixture, over all of its tokens."""
    policy, per_token = context.policy, experts_per_token(context.policy.model.config)

    def uses_of(_: Microbatch, states: CompletionStates) -> tuple[Tensor, int]:
        return expert_counts(states.router_logits, per_token), sum(len(logits) for logits in states.router_logits)

    uses = [one for some in _in_shares(context, policy, batch, part, uses_of)[1] for one in some]
    counts = torch.stack([counts_E.to(policy.device) for counts_E, _ in uses]).sum(0)
    return ExpertBalance(counts, sum(rows for _, rows in uses), policy.router_aux_loss_coef)


def _in_shares(
    context: StepContext, policy: Policy, batch: TokenBatch, part: Part, take: Callable[..., T]
) -> tuple[Shared, list[list[T]]]:
    """The shares of a part, and what ``take`` gives for each microbatch of each: a rank makes the passes of its own."""
    shared = share(context, batch, part)

    @torch.no_grad()
    def own() -> list[T]:
        with policy.compute(), unstoppable(context), released(policy.model):
            return [take(micro, states) for micro, states, _ in sweep(context, policy, batch, shared)]

    return shared, agreed(context.world, own)


# ----------------------------------------
# A check before the first update: sampler and trainer must compute the same function. What it compares is computed
# anyway: log-probs of the update before its step or, with several updates per rollout, the old ones. Only with
# dropout, which changes those of the update, is a pass made for it.


CHECKED_COMPLETIONS = 16
"""Number of completions that ``sampler_gap`` computes. A wrong cache or position shows in any of them."""
MAX_SAMPLER_GAP = {torch.float64: 0.01, torch.float32: 0.01, torch.bfloat16: 0.1, torch.float16: 0.1}
"""Mean |logps - sampler_logps| in nats above which a run stops, by compute dtype: sampler and trainer then do not
compute the same function. float32 gives about 1e-6; bfloat16, which rounds by 65,536 times as much, about 1e-2: more in
a mixture, where it sends some tokens to other experts."""
CACHED = (
    "set model.precision to 'float32': in bfloat16 rounding may do this, most of all in a mixture, where it sends some "
    "tokens to other experts. If that does not help, the model's cached decoding does not compute what its forward "
    "pass computes, and the architecture is not supported"
)
SERVED = (
    "the vLLM server does not compute what the trainer computes. Start it with --dtype as model.precision, without "
    "quantization, and for a mixture of experts set rollout.replay_routing; if that does not help, its model lacks "
    "weights that were sent, or vLLM implements the architecture differently"
)


def most_gap(policy: Policy, *, shared_weights: bool = True) -> float:
    """The gap at which a run stops. A server may compute in another dtype, which nothing here knows.

    Args:
        policy: the policy.
        shared_weights: whether the engine samples with the trainer's own parameters.
    """
    return MAX_SAMPLER_GAP[policy.precision.compute if shared_weights else torch.bfloat16]


def check_gap(policy: Policy, logps_N: Tensor, sampler_logps_N: Tensor, *, shared_weights: bool = True) -> None:
    """Compare the sampler's log-probs with the trainer's of the weights that have drawn the tokens. Both are over the
    whole vocabulary when the sampler drew from less and the trainer does not replay that.

    Args:
        policy: the trainer's.
        logps_N, sampler_logps_N: of the same tokens; NaN for the trainer's that were not computed.
        shared_weights: as for ``most_gap``; also decides what the error suggests.

    Raises:
        PolicyMismatchError: they differ, so every ratio of this run would be wrong.
    """
    known_N = ~logps_N.isnan()  # others needed no pass
    if not bool(known_N.any()):
        return
    gap = float((logps_N - sampler_logps_N)[known_N].abs().mean())
    most = most_gap(policy, shared_weights=shared_weights)
    if not gap <= most:
        raise PolicyMismatchError(
            f"the sampler's log-probabilities are {gap:.3g} nats from the trainer's on average, for the same tokens "
            f"and weights (limit {most}): {CACHED if shared_weights else SERVED}"
        )


def like_trainer(batch: TokenBatch | UpdateTokens) -> Tensor:
    """The sampler's log-probs that are to be the trainer's: over the whole vocabulary where the sampler drew from less
    and the trainer does not replay that."""
    return batch.sampler_logps_N if batch.full_logps_N is None else batch.full_logps_N


def sampler_gap(context: StepContext, batch: TokenBatch) -> float:
    """Mean |logps - sampler_logps| in nats over the first completions, in the update's mode unless dropout would change
    every pass; 0 without any.

    Raises:
        NonFiniteError: the trainer's log-probs are NaN, which says nothing of the sampler.
    """
    checked = part_of(batch, range(min(CHECKED_COMPLETIONS, batch.num_sequences)))
    with contextlib.nullcontext() if context.policy.dropout else context.policy.training():
        logps_N = token_logps(context, context.policy, batch, checked).logps_N
    gap_N = (logps_N - like_trainer(batch)[checked.tokens_N]).abs()
    gap = float(gap_N.mean()) if gap_N.numel() else 0.0
    if math.isnan(gap):
        check_finite(batch, checked, {"log-probability": logps_N})
    return gap
