"""How a batch is cut for the passes of an update: by memory, never by result."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from cohort.objective import Objective
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
from cohort.train.batch import select, token_indices
from cohort.types import TokenBatch

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Pack:
    """Prompts that are read together, and the microbatches of the completions after them."""

    prompt_ids: tuple[tuple[int, ...], ...]
    microbatches: tuple[tuple[int, ...], ...]
    """Completions of the batch, by their numbers; those of one prompt are neighbours."""


def packs(batch: TokenBatch, token_budget: int, *, shared: bool = True) -> list[Pack]:
    """Cut a batch so that no pass takes more than ``token_budget`` tokens. What is longer stands alone. How a batch is
    cut never changes its gradient.

    Args:
        batch: completions.
        token_budget: tokens of one pass: of prompts, or of completions.
        shared: prompts are read once, and a prompt's completions, however many microbatches they make, are in one pack
            with it. Off: every completion is run with its prompt, and what pads the shorter ones counts too.
    """
    if not batch.num_sequences:
        return []
    of_prompt: dict[tuple[int, ...], list[int]] = {}
    for s, prompt in enumerate(batch.prompt_ids):
        of_prompt.setdefault(prompt, []).append(s)
    if not shared:
        return [Pack(tuple(of_prompt), _padded(batch, token_budget))]
    found = []
    for prompts in _filled(list(of_prompt), [len(prompt) for prompt in of_prompt], token_budget):
        sequences = [s for prompt in prompts for s in of_prompt[prompt]]
        lengths = [len(batch.completion_ids[s]) for s in sequences]
        cuts = _filled(sequences, lengths, _balanced(lengths, token_budget))
        found.append(Pack(tuple(prompts), tuple(map(tuple, cuts))))
    return found


def _filled(items: Sequence[Item], sizes: Sequence[int], budget: int) -> list[list[Item]]:
    """Items in order, cut where the next one would take a part over the budget."""
    parts: list[list[Item]] = []
    filled = 0
    for item, size in zip(items, sizes, strict=True):
        if not parts or filled + size > budget:
            parts.append([])
            filled = 0
        parts[-1].append(item)
        filled += size
    return parts


def _balanced(sizes: Sequence[int], budget: int) -> int:
    """The smallest budget that makes no more parts: about equal ones, instead of a small last one."""
    parts = len(_filled(sizes, sizes, budget))
    return bisect_left(range(budget), True, key=lambda less: len(_filled(sizes, sizes, less)) <= parts)


def _padded(batch: TokenBatch, token_budget: int) -> tuple[tuple[int, ...], ...]:
    """Completions of like length together, as many as fit with their prompts and padding."""
    lengths = [len(p) + len(c) for p, c in zip(batch.prompt_ids, batch.completion_ids, strict=True)]
    cuts: list[list[int]] = []
    for s in sorted(range(batch.num_sequences), key=lambda s: -lengths[s]):
        if not cuts or (len(cuts[-1]) + 1) * lengths[cuts[-1][0]] > token_budget:
            cuts.append([])
        cuts[-1].append(s)
    return tuple(map(tuple, cuts))


def microbatches(batch: TokenBatch, pack: Pack) -> Iterator[tuple[Tensor, TokenBatch]]:
    """Each microbatch of a pack, with the places of its tokens on the batch's axis N."""
    for sequences in pack.microbatches:
        yield token_indices(batch, sequences), select(batch, sequences)


def completion_states(policy: Policy, prefixes: Prefixes, micro: TokenBatch, temperature: float) -> CompletionStates:
    """``Policy.states`` of a microbatch."""
    numbers = {prompt: number for number, prompt in enumerate(prefixes.prompt_ids)}
    rows = PackedRows.of([numbers[prompt] for prompt in micro.prompt_ids], micro.completion_ids, micro.supports)
    return policy.states(prefixes, rows, temperature, micro.repetition_penalty)


def working_sequences(batch: TokenBatch, objective: Objective, other_terms: float = 0.0) -> list[int]:
    """The completions that an update needs a forward pass of: those with an advantage; all, where another term (of a
    weight that is not 0) or the choice of tokens looks at them all."""
    looks_at_all = objective.beta or objective.entropy or other_terms or objective.top_entropy < 1
    if looks_at_all or not batch.num_sequences:
        return list(range(batch.num_sequences))
    works_N = (batch.advantages_N != 0) & batch.loss_N
    return sorted(set(batch.sequence_N[works_N].tolist()))


@torch.no_grad()
def expert_balance(policy: Policy, batch: TokenBatch, temperature: float, token_budget: int) -> ExpertBalance:
    """How the experts of a mixture are taken over a whole minibatch, found by a pass without gradient."""
    per_token, counts, rows = experts_per_token(policy.model.config), [], 0
    passes = policy.passes
    with policy.compute():
        for pack in packs(batch, token_budget, shared=passes.shared):
            prefixes = passes.read(pack.prompt_ids)
            for _, micro in microbatches(batch, pack):
                router_logits = completion_states(policy, prefixes, micro, temperature).router_logits
                counts.append(expert_counts(router_logits, per_token))
                rows += sum(len(logits) for logits in router_logits)
    return ExpertBalance(torch.stack(counts).sum(0), rows, policy.router_aux_loss_coef)


@torch.no_grad()
def policy_logps(
    policy: Policy, batch: TokenBatch, temperature: float, token_budget: int, sequences: Sequence[int] | None = None
) -> Tensor:
    """Log-probs of a rollout under a policy, without gradient, shape ``[N]``: the old or the reference policy's. NaN
    for completions that are not among ``sequences``, where these are given."""
    if sequences is None or len(sequences) == batch.num_sequences:
        return policy_statistics(policy, batch, temperature, token_budget).logps_N
    logps_N = torch.full((batch.num_tokens,), torch.nan, dtype=policy.precision.master, device=batch.loss_N.device)
    some = policy_statistics(policy, select(batch, sequences), temperature, token_budget)
    logps_N[token_indices(batch, sequences)] = some.logps_N
    return logps_N


@torch.no_grad()
def policy_statistics(policy: Policy, batch: TokenBatch, temperature: float, token_budget: int) -> TokenLogps:
    """``Policy.logps`` of a whole batch, a microbatch at a time, without gradient."""
    like = torch.empty(batch.num_tokens, dtype=policy.precision.master, device=batch.sequence_N.device)
    whole = TokenLogps(like, torch.empty_like(like), torch.empty_like(like))
    passes = policy.passes
    with policy.compute():
        for pack in packs(batch, token_budget, shared=passes.shared):
            prefixes = passes.read(pack.prompt_ids)
            for places_N, micro in microbatches(batch, pack):
                values = completion_states(policy, prefixes, micro, temperature).logps()
                for kept_N, values_N in zip(whole, values, strict=True):
                    kept_N[places_N] = values_N
    return whole
