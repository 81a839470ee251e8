"""The rollout of a step: scored groups; as flat tensors, laid out once; and the index sets that the updates work on.

A minibatch, its active sequences and a microbatch are each a ``Part``: the numbers of some sequences, and where their
tokens lie on axis N. The layout itself is never copied or reordered.

    batch                 lay_out(groups)                    everything that the updates of a rollout share
    minibatches           split_minibatches(batch, count)    one optimizer step each: changes the result
    active sequences      active_part(batch, minibatch)      those that need a forward pass
    packs, microbatches   cuts.packs(batch, part, budget)    one backward pass each: never changes the result
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cohort.errors import NonFiniteError
from cohort.objective import Objective, Outcomes, live_groups, segment_sum, token_advantages
from cohort.policy import PackedRows
from cohort.presets.parts import DropDead, DynamicSampling
from cohort.rewards import environment_reward
from cohort.rewards.runner import Scores
from cohort.types import Completion, FinishReason, Group, Segment, Support, TokenBatch, Turns, joined_routes

# The scored groups of one step ---------------------------------------------------------------------------------------


def uses_rounds(objective: Objective) -> bool:
    """Whether a rollout may take several rounds, so that its rewards decide when it is complete."""
    return isinstance(objective.group_filter, DynamicSampling)


@dataclass(frozen=True, slots=True)
class Rollout:
    """Scored groups in the order in which they were sampled."""

    sampled: list[Group]
    """Every group with every completion, including those that no update uses."""
    sampled_scores: Scores
    is_used_P: tuple[bool, ...]
    """Whether the updates use the group's usable completions."""
    rounds: int = 1
    """Calls of the engine: more than one with dynamic sampling."""

    @classmethod
    def of(cls, groups: Sequence[Group], scores: Scores, objective: Objective) -> Rollout:
        """One round. A group is unused when the objective's filter drops it or it has no usable completion."""
        if not isinstance(objective.group_filter, DropDead | DynamicSampling):
            return cls(list(groups), scores, tuple(bool(group.usable.completions) for group in groups))
        one_reward = objective.reward_aggregation == "sum_then_normalize"
        rewards_SK = scores.rewards_S[:, None] if one_reward else scores.by_function_SK
        return cls(list(groups), scores, tuple(live_groups(rewards_SK, group_numbers(groups)).tolist()))

    def __add__(self, other: Rollout) -> Rollout:
        """Concatenate two rounds."""
        scores = self.sampled_scores + other.sampled_scores
        return Rollout(
            self.sampled + other.sampled, scores, self.is_used_P + other.is_used_P, self.rounds + other.rounds
        )

    def check_drawn(self) -> None:
        """Check that there is something to score.

        Raises:
            NonFiniteError: no completion could be drawn.
        """
        if not any(completion.finish_reason.usable for completion in self.completions):
            raise NonFiniteError(
                f"none of the step's {len(self.completions)} completions could be drawn: the model's logits are NaN or "
                "infinite. Look at the run's newest checkpoint or, if there is none, at the initial model"
            )

    @property
    def completions(self) -> list[Completion]:
        """All sampled completions, group after group."""
        return [completion for group in self.sampled for completion in group.completions]

    @property
    def mean_rewards(self) -> dict[int, float]:
        """Mean reward of each group's scored completions, by the prompt's uid; NaN when none was scored."""
        pieces = self.sampled_scores.rewards_S.split([len(group.completions) for group in self.sampled])
        return {group.prompt.uid: float(rewards.nanmean()) for group, rewards in zip(self.sampled, pieces, strict=True)}

    @property
    def num_tokens(self) -> int:
        """Drawn tokens of all sampled completions."""
        return sum(completion.num_tokens for completion in self.completions)

    @property
    def usable_groups(self) -> list[Group]:
        """All groups without their unusable completions. Some may be empty."""
        return [group.usable for group in self.sampled]

    @property
    def used_groups(self) -> list[Group]:
        """The usable groups that the updates use."""
        return [group for group, used in zip(self.usable_groups, self.is_used_P, strict=True) if used]

    @property
    def used_S(self) -> list[int]:
        """Indices of the used completions among all sampled ones."""
        pairs = zip(self.sampled, self.is_used_P, strict=True)
        candidates = [(is_used, completion) for group, is_used in pairs for completion in group.completions]
        return [s for s, (is_used, completion) in enumerate(candidates) if is_used and completion.finish_reason.usable]

    @property
    def used_scores(self) -> Scores:
        """Scores of the used completions."""
        used_S = self.used_S
        if len(used_S) == len(self.completions):
            return self.sampled_scores
        scores = self.sampled_scores.select(used_S)
        if scores.token_rewards_N is None:
            return scores
        pieces = scores.token_rewards_N.split([completion.num_tokens for completion in self.completions])
        return replace(scores, token_rewards_N=torch.cat([pieces[s] for s in used_S]))

    def advantages(self, batch: TokenBatch) -> list[list[float] | None]:
        """For each sampled completion, the advantages of its tokens in ``batch``; None if no update uses it."""
        found: list[list[float] | None] = [None] * len(self.completions)
        for s, tokens in zip(self.used_S, batch.advantages_N.cpu().split(batch.lengths_S.tolist()), strict=True):
            found[s] = tokens.tolist()
        return found


# The layout -----------------------------------------------------------------------------------------------------------


def lay_out(groups: Sequence[Group], device: torch.device, repetition_penalty: float = 1.0) -> TokenBatch:
    """Lay out a rollout's usable completions with the sampler's log-probs. Old and reference log-probs are added later,
    and then the advantages, which may need them.

    Given tokens after a segment's last drawn token are left out: nothing is predicted from them.

    Args:
        groups: groups with usable completions only. A group may have none.
        device: device of the tensors on axis N.
        repetition_penalty: the penalty with which every policy's log-probs are computed; 1: none.
    """
    completions = [completion for group in groups for completion in group.completions]
    segments = [[_trimmed(segment) for segment in completion.segments] for completion in completions]
    segments = [[segment for segment in some if len(segment.token_ids)] for some in segments]
    flat = [segment for some in segments for segment in some]
    lengths_S = torch.tensor([completion.num_tokens for completion in completions], dtype=torch.long)
    counts_S = torch.tensor([len(some) for some in segments], dtype=torch.long)
    support = Support.join([completion.support for completion in completions], lengths_S.tolist())
    full_logps_N = None
    if support is None and repetition_penalty == 1 and any(c.full_logps is not None for c in completions):
        full_logps_N = _joined([c.sampler_logps if c.full_logps is None else c.full_logps for c in completions], device)
    drawn_T = None
    if any(segment.drawn is not None for segment in flat):
        flags = [segment.is_drawn for segment in flat]
        drawn_T = torch.from_numpy(np.concatenate(flags))
    num_tokens = int(lengths_S.sum())
    return TokenBatch(
        prompt_ids=tuple(group.prompt.token_ids for group in groups),
        group_S=group_numbers(groups),
        lengths_S=lengths_S,
        truncated_S=torch.tensor([c.finish_reason is FinishReason.LENGTH for c in completions], dtype=torch.bool),
        sequence_B=numbers(counts_S),
        lengths_B=torch.tensor([len(segment.token_ids) for segment in flat], dtype=torch.long),
        ids_T=torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *(segment.token_ids for segment in flat)])),
        drawn_T=drawn_T,
        sequence_N=numbers(lengths_S).to(device),
        sampler_logps_N=_joined([completion.sampler_logps for completion in completions], device),
        advantages_N=torch.zeros(num_tokens, dtype=torch.float64, device=device),
        loss_N=torch.ones(num_tokens, dtype=torch.bool, device=device),
        support=support,
        full_logps_N=full_logps_N,
        turns=_turns(completions),
        routes_T=_routes(flat),
        prompt_routes=_prompt_routes(groups),
    )


def _routes(segments: Sequence[Segment]) -> Tensor | None:
    routes = joined_routes([(segment.routes, len(segment.token_ids)) for segment in segments])
    return None if routes is None else torch.from_numpy(routes)


def _prompt_routes(groups: Sequence[Group]) -> dict[tuple[int, ...], Tensor]:
    """Those of the first completion of each prompt that has some."""
    found: dict[tuple[int, ...], Tensor] = {}
    for group in groups:
        for routes in (one.prompt_routes for one in group.completions if one.prompt_routes is not None):
            found.setdefault(group.prompt.token_ids, torch.from_numpy(routes))
    return found


def _turns(completions: Sequence[Completion]) -> Turns | None:
    """The turns of the completions; None where every completion is one turn."""
    if not any(completion.episode for completion in completions):
        return None
    turns = [
        [(turn.num_drawn, turn.reward or 0.0) for turn in c.episode.turns] if c.episode else [(c.num_tokens, 0.0)]
        for c in completions
    ]
    drawn = [sum(count for count, _ in some) for some in turns]
    assert drawn == [completion.num_tokens for completion in completions], "every drawn token belongs to a turn"
    return Turns(
        sequence_Y=numbers(torch.tensor([len(some) for some in turns])),
        turn_N=numbers(torch.tensor([count for some in turns for count, _ in some], dtype=torch.long)),
        rewards_Y=torch.tensor([reward for some in turns for _, reward in some], dtype=torch.float64),
    )


def group_numbers(groups: Sequence[Group]) -> Tensor:
    """Group of each completion, counted from 0, shape ``[S]``."""
    return numbers(torch.tensor([len(group.completions) for group in groups], dtype=torch.long))


def numbers(lengths: Tensor) -> Tensor:
    """0, 1, 2, ..., each repeated as often as its length says.

    >>> numbers(torch.tensor([2, 0, 1]))
    tensor([0, 0, 2])
    """
    return torch.repeat_interleave(torch.arange(len(lengths)), lengths)


def span_positions(lengths: Tensor, chosen: Tensor) -> Tensor:
    """Positions of the entries of some runs, when runs of these lengths lie end to end.

    >>> span_positions(torch.tensor([3, 2, 4]), torch.tensor([2, 0]))
    tensor([5, 6, 7, 8, 0, 1, 2])
    """
    starts, counts = lengths.cumsum(0) - lengths, lengths[chosen]
    shifts = starts[chosen] - (counts.cumsum(0) - counts)
    return torch.repeat_interleave(shifts, counts) + torch.arange(int(counts.sum()))


def _trimmed(segment: Segment) -> Segment:
    """The segment up to its last drawn token."""
    if segment.drawn is None or (len(segment.drawn) and segment.drawn[-1]):
        return segment
    drawn = np.flatnonzero(segment.drawn)
    end = int(drawn[-1]) + 1 if len(drawn) else 0
    routes = None if segment.routes is None else segment.routes[:end]
    return Segment(segment.token_ids[:end], segment.drawn[:end], routes)


def _joined(arrays: Sequence[NDArray[np.float64]], device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate([np.zeros(0), *arrays])).to(device)


def assign_advantages(
    batch: TokenBatch, scores: Scores, objective: Objective, max_completion_length: int
) -> TokenBatch:
    """The batch with each token's advantage. Advantages are of the whole group; then, if the objective masks truncated
    completions, their tokens leave the loss."""
    if not batch.num_sequences:
        return batch
    kl_N = None
    if objective.advantages_need_logps:
        assert batch.old_logps_N is not None
        assert batch.ref_logps_N is not None
        kl_N = (batch.old_logps_N - batch.ref_logps_N).cpu()
    outcomes = Outcomes(
        rewards_S=scores.rewards_S,
        group_S=batch.group_S,
        sequence_N=batch.sequence_N.cpu(),
        max_length=max_completion_length,
        by_function_SK=scores.by_function_SK,
        weights_K=None if scores.weights is None else torch.tensor(scores.weights, dtype=torch.float64),
        token_rewards_N=scores.token_rewards_N,
        truncated_S=batch.truncated_S,
        sampler_logps_N=batch.sampler_logps_N.cpu(),
        kl_N=kl_N,
        turns=batch.turns and _weighted(batch.turns, scores),
    )
    loss_N = batch.loss_N
    if objective.truncated == "mask":
        loss_N = loss_N & ~batch.truncated_S.to(loss_N.device)[batch.sequence_N]
    advantages_N = token_advantages(objective, outcomes).to(loss_N.device)
    return replace(batch, advantages_N=advantages_N, loss_N=loss_N)


def _weighted(turns: Turns, scores: Scores) -> Turns:
    """The turns with what each adds to the score: nothing unless `environment_reward` is a reward function."""
    weights = dict(zip(scores.names, scores.weights or (1.0,) * len(scores.names), strict=True))
    return replace(turns, rewards_Y=turns.rewards_Y * weights.get(environment_reward.__name__, 0.0))


# Parts of it ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Some sequences of a batch, in any order."""

    sequences_S: Tensor
    """Their numbers in the batch, on the CPU."""
    lengths_S: Tensor
    """Number of drawn tokens of each, on the CPU."""
    tokens_N: Tensor
    """Where their tokens lie on the batch's axis N."""
    sequence_N: Tensor
    """Which of them, 0..S-1, each token belongs to."""
    positions_N: Tensor
    """Where their tokens lie among those of the part that this one was cut from; ``tokens_N`` if cut from the batch."""

    def select(self, chosen_S: Tensor) -> Part:
        """Some of the sequences, by their numbers in this part."""
        lengths_S, device = self.lengths_S[chosen_S], self.tokens_N.device
        positions_N = span_positions(self.lengths_S, chosen_S).to(device)
        sequence_N = numbers(lengths_S).to(device)
        return Part(self.sequences_S[chosen_S], lengths_S, self.tokens_N[positions_N], sequence_N, positions_N)

    @property
    def num_sequences(self) -> int:
        """S, the number of sequences."""
        return len(self.sequences_S)

    @property
    def num_tokens(self) -> int:
        """N, the number of drawn tokens."""
        return len(self.tokens_N)


def part_of(batch: TokenBatch, sequences: Sequence[int] | Tensor) -> Part:
    """The given sequences of a batch."""
    sequences_S = torch.as_tensor(sequences, dtype=torch.long)
    lengths_S, device = batch.lengths_S[sequences_S], batch.sequence_N.device
    tokens_N = span_positions(batch.lengths_S, sequences_S).to(device)
    return Part(sequences_S, lengths_S, tokens_N, numbers(lengths_S).to(device), tokens_N)


def split_minibatches(batch: TokenBatch, count: int) -> list[Part]:
    """Shares of the batch's groups, in order and as equal as possible: one optimizer step each.

    A group is never divided. There are fewer shares than ``count`` when there are fewer groups with completions.
    """
    group_S = torch.unique_consecutive(batch.group_S, return_inverse=True)[1]
    num_groups = int(group_S[-1]) + 1 if len(group_S) else 0
    count = min(count, num_groups)
    if not count:
        return []
    share_S = group_S * count // num_groups
    return [part_of(batch, (share_S == share).nonzero()[:, 0]) for share in range(count)]


def active_part(batch: TokenBatch, part: Part, objective: Objective, other_terms: float = 0.0) -> Part:
    """The sequences that an update needs a forward pass of: those with an advantage that is not 0, or all of them when
    another term of the loss or the choice of tokens uses every sequence."""
    active_S = torch.ones(part.num_sequences, dtype=torch.bool)
    if not (objective.beta or objective.entropy or other_terms or objective.top_entropy < 1):
        active_N = ((batch.advantages_N != 0) & batch.loss_N)[part.tokens_N]
        active_S = torch.zeros_like(active_S)
        active_S[part.sequence_N[active_N].cpu()] = True
    return part.select(active_S.nonzero()[:, 0])


# ----------------------------------------
# How a part of a batch is cut into forward and backward passes. Memory decides; the result never depends on it.
#
# Sequences of one prompt share a pass over it. Sequences with the same tokens after the same prompt are computed
# once: the gradient of a sum over tokens is that of the sum of their coefficients. Copies are frequent where a policy
# has learned a format or answers in few tokens.


Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Pack:
    """Prompts that are read together, and the microbatches of the sequences after them."""

    prompt_ids: tuple[tuple[int, ...], ...]
    microbatches: tuple[tuple[int, ...], ...]
    """Sequences, by their numbers in the part that was cut. With shared prompts, those of one prompt are neighbours."""
    idle: int = 0
    """Passes of weight 0 after the microbatches; see ``level``."""
    copies: Mapping[int, int] = field(default_factory=dict)
    """See ``copies``. A pass computes a sequence and its copies once."""


@dataclass(frozen=True, slots=True, eq=False)
class Microbatch:
    """One backward pass."""

    part: Part
    rows: PackedRows
    """Its segments, as the model reads them; those of copies once."""
    index_N: Tensor | None = None
    """The index of each of the part's tokens among the drawn tokens of ``rows``. None: they are the same."""

    def at_tokens(self, values: Tensor) -> Tensor:
        """The part's tokens' values, from those of the drawn tokens of ``rows``. Differentiable."""
        return values if self.index_N is None else values.index_select(0, self.index_N)

    def summed(self, values_N: Tensor) -> Tensor:
        """The inverse for weights of a sum: for each drawn token of ``rows``, the sum over its copies."""
        if self.index_N is None:
            return values_N
        return values_N.new_zeros(len(self.rows.targets_N)).index_add(0, self.index_N, values_N)


def copies(batch: TokenBatch, part: Part) -> dict[int, int]:
    """Maps each sequence that repeats an earlier one to the first of its kind, both by their numbers in the part.
    Copies have the same prompt, tokens, routes and supports: their log-probs are equal, whatever their advantages."""
    rows_S = torch.bincount(batch.sequence_B, minlength=batch.num_sequences)
    tokens_S = segment_sum(batch.lengths_B, batch.sequence_B, batch.num_sequences)
    columns: list[tuple[Any, Any]] = [(batch.ids_T, tokens_S), (batch.lengths_B, rows_S)]
    if batch.drawn_T is not None:
        columns.append((batch.drawn_T, tokens_S))
    if batch.routes_T is not None:
        columns.append((batch.routes_T, tokens_S))
    if batch.support is not None:
        counts_N = batch.support.counts_N
        counts_S = segment_sum(torch.from_numpy(counts_N).long(), numbers(batch.lengths_S), batch.num_sequences)
        columns += [(counts_N, batch.lengths_S), (batch.support.excluded_N, batch.lengths_S)]
        columns.append((batch.support.token_ids_U, counts_S))
    arrays = [(np.asarray(values), np.append(0, counts_S.cumsum(0))) for values, counts_S in columns]
    first: dict[Any, int] = {}
    found = {}
    for index, sequence in enumerate(part.sequences_S.tolist()):
        prompt = batch.prompt_ids[int(batch.group_S[sequence])]
        own = (values[starts_S[sequence] : starts_S[sequence + 1]].tobytes() for values, starts_S in arrays)
        same = first.setdefault((prompt, *own), index)
        if same != index:
            found[index] = same
    return found


def packs(
    batch: TokenBatch, part: Part, token_budget: int, *, shared: bool = True, distinct: bool = True
) -> list[Pack]:
    """Cut a part so that no pass takes more than ``token_budget`` tokens. A longer sequence stands alone. The gradient
    does not depend on the cut.

    Args:
        batch: the layout.
        part: the sequences to cut.
        token_budget: tokens of one pass: of prompts, or of segments after them.
        shared: each prompt is read once, in one pack with all of its sequences. Off: every segment is read with its
            prompt, padded to the longest of the pass.
        distinct: sequences that are copies of another one are computed with it. Off: each is computed by itself.
    """
    same = copies(batch, part) if distinct else {}
    sizes = segment_sum(batch.lengths_B, batch.sequence_B, batch.num_sequences)[part.sequences_S].tolist()
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for index, group in enumerate(batch.group_S[part.sequences_S].tolist()):
        if sizes[index]:
            by_prompt.setdefault(batch.prompt_ids[group], []).append(index)
    if not shared:
        cuts = _padded_cuts(batch, part, token_budget)
        return [Pack(tuple(by_prompt), cuts, copies=same)] if by_prompt else []
    found = []
    for prompts in _filled(list(by_prompt), [len(prompt) for prompt in by_prompt], token_budget):
        together: dict[int, list[int]] = {}
        for index in chain.from_iterable(by_prompt[prompt] for prompt in prompts):
            together.setdefault(same.get(index, index), []).append(index)
        lengths = [sizes[index] for index in together]
        filled = _filled(list(together.values()), lengths, _balanced(lengths, token_budget))
        cuts = tuple(tuple(chain.from_iterable(cut)) for cut in filled)
        found.append(Pack(tuple(prompts), cuts, copies=same))
    return found


IDLE_PROMPT = (0, 0)
"""A prompt of weight 0 that has keys and values."""


def level(plans: Sequence[Sequence[Pack]]) -> list[list[Pack]]:
    """The packs of every rank, extended by passes of weight 0 until all ranks make the same passes: as many packs, as
    many microbatches in each, and prompts with keys and values in every pack.

    >>> level([[Pack(((5, 6),), ((0,), (1,)))], []])[1]
    [Pack(prompt_ids=((0, 0),), microbatches=(), idle=2, copies={})]
    """
    count = max(map(len, plans), default=0)
    full = [[*plan, *[Pack((), ())] * (count - len(plan))] for plan in plans]
    passes = [max(len(pack.microbatches) for pack in packs) for packs in zip(*full, strict=True)]

    def filled(pack: Pack, passes: int) -> Pack:
        none_read = all(len(prompt) < 2 for prompt in pack.prompt_ids)
        prompts = pack.prompt_ids + (IDLE_PROMPT,) * none_read
        return replace(pack, prompt_ids=prompts, idle=passes - len(pack.microbatches))

    return [[filled(pack, number) for pack, number in zip(plan, passes, strict=True)] for plan in full]


def microbatches(batch: TokenBatch, part: Part, pack: Pack) -> Iterator[Microbatch]:
    """The microbatches of a pack that was cut from a part."""
    number = {prompt: number for number, prompt in enumerate(pack.prompt_ids)}
    prompt_P = torch.tensor([number.get(prompt, -1) for prompt in batch.prompt_ids])
    segments_S = torch.bincount(batch.sequence_B, minlength=batch.num_sequences)
    for cut in pack.microbatches:
        micro = part.select(torch.tensor(cut))
        computed, index_N = micro, None
        firsts = [pack.copies.get(index, index) for index in cut]
        if len(distinct := list(dict.fromkeys(firsts))) < len(cut):
            computed = part.select(torch.tensor(distinct))
            place = {first: number for number, first in enumerate(distinct)}
            chosen = torch.tensor([place[first] for first in firsts])
            index_N = span_positions(computed.lengths_S, chosen).to(micro.tokens_N.device)
        rows_B = span_positions(segments_S, computed.sequences_S)
        tokens_T = span_positions(batch.lengths_B, rows_B)
        rows = PackedRows(
            prompt_B=prompt_P[batch.group_S[batch.sequence_B[rows_B]]],
            ids_T=batch.ids_T[tokens_T],
            lengths_B=batch.lengths_B[rows_B],
            drawn_T=None if batch.drawn_T is None else batch.drawn_T[tokens_T],
            support=None if batch.support is None else batch.support.select(computed.tokens_N.cpu().numpy()),
            routes_T=None if batch.routes_T is None else batch.routes_T[tokens_T],
        )
        yield Microbatch(micro, rows, index_N)


def _filled(items: Sequence[Item], sizes: Sequence[int], budget: int) -> list[list[Item]]:
    """Items in order, cut where the next one would take a share over the budget."""
    shares: list[list[Item]] = []
    filled = 0
    for item, size in zip(items, sizes, strict=True):
        if not shares or filled + size > budget:
            shares.append([])
            filled = 0
        shares[-1].append(item)
        filled += size
    return shares


def _balanced(sizes: Sequence[int], budget: int) -> int:
    """The smallest budget that makes no more shares, by bisection: about equal shares, instead of a small last one."""
    shares = len(_filled(sizes, sizes, budget))
    return bisect_left(range(budget), True, key=lambda less: len(_filled(sizes, sizes, less)) <= shares)


def _padded_cuts(batch: TokenBatch, part: Part, token_budget: int) -> tuple[tuple[int, ...], ...]:
    """Sequences of similar length together, as many as fit with their prompts and padding."""
    longest_S = torch.zeros(batch.num_sequences, dtype=torch.long)
    longest_S = longest_S.scatter_reduce(0, batch.sequence_B, batch.lengths_B, "amax")
    prompt_S = torch.tensor([len(prompt) for prompt in batch.prompt_ids])[batch.group_S]
    widths = (prompt_S + longest_S)[part.sequences_S].tolist()
    rows = torch.bincount(batch.sequence_B, minlength=batch.num_sequences)[part.sequences_S].tolist()
    cuts: list[list[int]] = []
    filled = 0
    for index in sorted((index for index, count in enumerate(rows) if count), key=lambda index: -widths[index]):
        if not cuts or (filled + rows[index]) * widths[cuts[-1][0]] > token_budget:
            cuts.append([])
            filled = 0
        cuts[-1].append(index)
        filled += rows[index]
    return tuple(map(tuple, cuts))
