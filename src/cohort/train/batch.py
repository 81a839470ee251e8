"""From scored groups to the tensors of an update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from cohort.objective import Objective, Outcomes, segment_count, token_advantages
from cohort.types import FinishReason, Group, Scores, TokenBatch


def assemble(groups: Sequence[Group], device: torch.device, repetition_penalty: float = 1.0) -> TokenBatch:
    """A rollout as flat tensors, with the sampler's log-probs. Old and reference log-probs come after, and then the
    advantages, which may need them.

    Args:
        groups: whole completions only.
        device: where the tensors go.
        repetition_penalty: what the log-probs of every policy are to be computed with.
    """
    completions = [completion for group in groups for completion in group.completions]
    lengths_S = torch.tensor([len(completion.token_ids) for completion in completions], dtype=torch.long)
    sampler_logps = [logp for completion in completions for logp in completion.sampler_logps]
    drawn = [n >= completion.num_forced for completion in completions for n in range(len(completion.token_ids))]
    truncated = [completion.finish_reason is FinishReason.LENGTH for completion in completions]
    num_tokens = int(lengths_S.sum())
    truncates = any(completion.support is not None for completion in completions)
    full_logps_N = None
    if not truncates and repetition_penalty == 1 and any(c.full_logps is not None for c in completions):
        full_logps = [logp for completion in completions for logp in completion.full_logps or completion.sampler_logps]
        full_logps_N = torch.tensor(full_logps, dtype=torch.float64).to(device)
    return TokenBatch(
        prompt_ids=tuple(group.prompt.token_ids for group in groups for _ in group.completions),
        completion_ids=tuple(completion.token_ids for completion in completions),
        group_S=group_numbers(groups).to(device),
        sequence_N=torch.repeat_interleave(torch.arange(len(completions)), lengths_S).to(device),
        sampler_logps_N=torch.tensor(sampler_logps, dtype=torch.float64).to(device),
        truncated_S=torch.tensor(truncated, dtype=torch.bool).to(device),
        advantages_N=torch.zeros(num_tokens, dtype=torch.float64, device=device),
        loss_N=torch.tensor(drawn, dtype=torch.bool).to(device),
        supports=tuple(completion.support for completion in completions) if truncates else (),
        repetition_penalty=repetition_penalty,
        full_logps_N=full_logps_N,
    )


def group_numbers(groups: Sequence[Group]) -> Tensor:
    """Which of the groups, counted from 0, each completion belongs to. Shape ``[S]``."""
    return torch.tensor([number for number, group in enumerate(groups) for _ in group.completions], dtype=torch.long)


def assign_advantages(
    batch: TokenBatch, scores: Scores, objective: Objective, max_completion_length: int
) -> TokenBatch:
    """The batch with each token's advantage, and with truncated completions out of the loss where the objective masks
    them: after the advantages, which are those of the whole group."""
    if not batch.num_sequences:
        return batch
    # A forced token says nothing of the policy that was made to write it.
    drawn_N = batch.loss_N.cpu()
    kl_N = None
    if objective.needs_old_logps:
        assert batch.old_logps_N is not None
        assert batch.ref_logps_N is not None
        kl_N = (batch.old_logps_N - batch.ref_logps_N).cpu().masked_fill(~drawn_N, 0.0)
    outcomes = Outcomes(
        rewards_S=scores.rewards_S,
        group_S=batch.group_S.cpu(),
        sequence_N=batch.sequence_N.cpu(),
        max_length=max_completion_length,
        by_function_SK=scores.by_function_SK,
        weights_K=None if scores.weights is None else torch.tensor(scores.weights, dtype=torch.float64),
        token_rewards_N=scores.token_rewards_N,
        truncated_S=batch.truncated_S.cpu(),
        sampler_logps_N=batch.sampler_logps_N.cpu().masked_fill(~drawn_N, torch.nan),
        kl_N=kl_N,
    )
    loss_N = batch.loss_N
    if objective.truncated == "mask":
        loss_N = loss_N & ~batch.truncated_S[batch.sequence_N]
    advantages_N = token_advantages(objective, outcomes).to(loss_N.device)
    return replace(batch, advantages_N=advantages_N, loss_N=loss_N)


def select(batch: TokenBatch, sequences: Sequence[int]) -> TokenBatch:
    """The given completions of a batch, in the given order, as a batch of its own."""
    tokens_N = token_indices(batch, sequences)
    chosen_S = torch.tensor(list(sequences), dtype=torch.long, device=batch.group_S.device)
    completion_ids = tuple(batch.completion_ids[s] for s in sequences)
    numbers = [number for number, ids in enumerate(completion_ids) for _ in ids]
    return TokenBatch(
        prompt_ids=tuple(batch.prompt_ids[s] for s in sequences),
        completion_ids=completion_ids,
        group_S=batch.group_S[chosen_S],
        sequence_N=torch.tensor(numbers, dtype=torch.long, device=chosen_S.device),
        sampler_logps_N=batch.sampler_logps_N[tokens_N],
        truncated_S=batch.truncated_S[chosen_S],
        advantages_N=batch.advantages_N[tokens_N],
        loss_N=batch.loss_N[tokens_N],
        old_logps_N=None if batch.old_logps_N is None else batch.old_logps_N[tokens_N],
        ref_logps_N=None if batch.ref_logps_N is None else batch.ref_logps_N[tokens_N],
        supports=tuple(batch.supports[s] for s in sequences) if batch.supports else (),
        repetition_penalty=batch.repetition_penalty,
        full_logps_N=None if batch.full_logps_N is None else batch.full_logps_N[tokens_N],
    )


def token_indices(batch: TokenBatch, sequences: Sequence[int]) -> Tensor:
    """Where the tokens of the given completions stand on axis N, completion by completion."""
    ends = list(accumulate(len(ids) for ids in batch.completion_ids))
    indices = [index for s in sequences for index in range(ends[s] - len(batch.completion_ids[s]), ends[s])]
    return torch.tensor(indices, dtype=torch.long, device=batch.sequence_N.device)


def split_minibatches(batch: TokenBatch, minibatches: int) -> list[TokenBatch]:
    """Shares of the rollout's groups, in order, as equal as they can be: what one optimizer step uses. A group is never
    cut here; where groups were left out there may be fewer shares than asked for."""
    num_groups = segment_count(batch.group_S)
    count = min(minibatches, num_groups)
    if count <= 1:
        return [batch] if num_groups else []
    part_S = (batch.group_S * count // num_groups).tolist()
    return [select(batch, [s for s, part in enumerate(part_S) if part == i]) for i in range(count)]
