"""The one loop over the passes of a part of a batch, with or without gradients, and the ranks' shares of the part.

Every rank holds the whole batch and computes the same shares: whole prompts with their completions, so that each prompt
is computed on one rank. What comes back is exchanged: gradients are added up by the layout, results of tokens return to
the batch's axis N. Denominators and thresholds are of the whole minibatch before it is shared, so that sums over ranks
are the same as without ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cohort.errors import NonFiniteError, RankError, out_of_memory
from cohort.objective import segment_sum
from cohort.parallel import shares
from cohort.parallel.world import imbalance
from cohort.policy import CompletionStates, PackedRows, Policy, Prefixes
from cohort.train.context import StepContext
from cohort.train.layout import Microbatch, Pack, Part, copies, level, microbatches, packs
from cohort.types import TokenBatch


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
        prefixes, ref_prefixes = policy.passes.read(pack.prompt_ids, attached=attached), None
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
    return policy.states(
        prefixes, micro.rows, context.temperature, context.repetition_penalty, most_tokens=context.budget.piece
    )


def _reference_states(
    context: StepContext, reference: Policy | None, prefixes: Prefixes | None, micro: Microbatch
) -> CompletionStates | None:
    if reference is None or prefixes is None:
        return None
    with torch.no_grad():
        return _states(context, reference, prefixes, micro)


def _idle_states(context: StepContext, policy: Policy, prefixes: Prefixes) -> CompletionStates:
    """The states of a pass of weight 0 after the first prompt of a pack."""
    return policy.states(prefixes, PackedRows.of([0], [(0,)]), context.temperature)


def weightless(states: CompletionStates) -> Tensor:
    """A loss whose gradient is 0 in every weight of the layers: its backward pass exchanges what others do."""
    return torch.mul(states.hidden_NH.sum(), 0)


@contextmanager
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
