"""A rollout as flat tensors, laid out once, and the index sets that the updates work on.

A minibatch, its active sequences and a microbatch are each a ``Part``: the numbers of some sequences, and where their
tokens lie on axis N. The layout itself is never copied or reordered.

    batch                 lay_out(groups)                    everything that the updates of a rollout share
    minibatches           split_minibatches(batch, count)    one optimizer step each: changes the result
    active sequences      active_part(batch, minibatch)      those that need a forward pass
    packs, microbatches   cuts.packs(batch, part, budget)    one backward pass each: never changes the result
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cohort.objective import Objective, Outcomes, token_advantages
from cohort.rewards import environment_reward
from cohort.rewards.scores import Scores
from cohort.types import Completion, FinishReason, Group, Segment, Support, TokenBatch, Turns

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
    )


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
    return Segment(segment.token_ids[:end], segment.drawn[:end])


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
    if objective.needs_old_logps:
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
