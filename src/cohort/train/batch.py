"""From scored groups to the tensors of an update."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from cohort.objective import Objective, group_advantages
from cohort.policy import Policy
from cohort.types import Group, Scores, TokenBatch


def assemble(groups: Sequence[Group], scores: Scores, objective: Objective, device: torch.device) -> TokenBatch:
    """A rollout as flat tensors, with its advantages and the sampler's log-probs. Old and reference come after."""
    completions = [completion for group in groups for completion in group.completions]
    group_S = torch.tensor([index for index, group in enumerate(groups) for _ in group.completions])
    lengths_S = torch.tensor([len(completion.token_ids) for completion in completions])
    advantages_S = group_advantages(
        scores.rewards_S,
        group_S,
        scale=objective.scale,
        ddof=objective.std_ddof,
        epsilon=objective.std_epsilon,
    )
    return TokenBatch(
        prompt_ids=tuple(group.prompt.token_ids for group in groups for _ in group.completions),
        completion_ids=tuple(completion.token_ids for completion in completions),
        group_S=group_S.to(device),
        advantages_S=advantages_S.to(device),
        sequence_N=torch.repeat_interleave(torch.arange(len(completions)), lengths_S).to(device),
        sampler_logps_N=torch.tensor([lp for c in completions for lp in c.sampler_logps]).to(device),
    )


def select(batch: TokenBatch, sequences: Sequence[int]) -> TokenBatch:
    """The given completions of a batch, in the given order, as a batch of its own."""
    tokens_N = token_indices(batch, sequences)
    chosen_S = torch.tensor(sequences, device=batch.group_S.device)
    completion_ids = tuple(batch.completion_ids[s] for s in sequences)
    numbers = [number for number, ids in enumerate(completion_ids) for _ in ids]
    return TokenBatch(
        prompt_ids=tuple(batch.prompt_ids[s] for s in sequences),
        completion_ids=completion_ids,
        group_S=batch.group_S[chosen_S],
        advantages_S=batch.advantages_S[chosen_S],
        sequence_N=torch.tensor(numbers, device=chosen_S.device),
        sampler_logps_N=batch.sampler_logps_N[tokens_N],
        old_logps_N=None if batch.old_logps_N is None else batch.old_logps_N[tokens_N],
        ref_logps_N=None if batch.ref_logps_N is None else batch.ref_logps_N[tokens_N],
    )


def token_indices(batch: TokenBatch, sequences: Sequence[int]) -> Tensor:
    """Where the tokens of the given completions stand on axis N, completion by completion."""
    ends = list(accumulate(len(ids) for ids in batch.completion_ids))
    indices = [index for s in sequences for index in range(ends[s] - len(batch.completion_ids[s]), ends[s])]
    return torch.tensor(indices, device=batch.sequence_N.device)


def split_minibatches(batch: TokenBatch, minibatches: int) -> list[TokenBatch]:
    """Equal shares of the rollout's groups, in order: what one optimizer step uses. A group is never cut here."""
    if minibatches == 1:
        return [batch]
    num_groups = int(batch.group_S.max()) + 1
    share = num_groups // minibatches
    part_S = (batch.group_S // share).tolist()
    return [select(batch, [s for s, part in enumerate(part_S) if part == i]) for i in range(minibatches)]


def microbatches(batch: TokenBatch, token_budget: int) -> list[list[int]]:
    """Cut a batch into microbatches of at most ``token_budget`` tokens, padding included; completions of like length
    together. A completion longer than the budget stands alone.

    Returns the completions of each microbatch. How a batch is cut never changes its gradient.
    """
    lengths = [len(p) + len(c) for p, c in zip(batch.prompt_ids, batch.completion_ids, strict=True)]
    if batch.num_sequences * max(lengths) <= token_budget:
        return [list(range(batch.num_sequences))]
    longest_first = sorted(range(batch.num_sequences), key=lambda s: -lengths[s])
    cuts: list[list[int]] = []
    for s in longest_first:
        if not cuts or (len(cuts[-1]) + 1) * lengths[cuts[-1][0]] > token_budget:
            cuts.append([])
        cuts[-1].append(s)
    return cuts


@torch.no_grad()
def policy_logps(policy: Policy, batch: TokenBatch, temperature: float, token_budget: int) -> Tensor:
    """Log-probs of a whole rollout under a policy, without gradient, shape ``[N]``: the old or the reference
    policy's."""
    logps_N = torch.empty(batch.num_tokens, dtype=policy.precision.master, device=batch.sequence_N.device)
    for sequences in microbatches(batch, token_budget):
        prompts = [batch.prompt_ids[s] for s in sequences]
        completions = [batch.completion_ids[s] for s in sequences]
        logps_N[token_indices(batch, sequences)] = policy.logps(prompts, completions, temperature)[0]
    return logps_N
