"""Rollouts, step contexts and real updates on a tiny model, for tests."""

import dataclasses
import math

import torch

from cohort.config import OptimConfig
from cohort.policy import Policy, Precision
from cohort.rewards.runner import Scores
from cohort.rollout import Sampling
from cohort.train import (
    Optimizer,
    StepContext,
    TokenBudget,
    assign_advantages,
    lay_out,
    part_of,
    policy_logps,
    update,
)
from cohort.types import Completion, FinishReason, Group, Prompt
from tests.conftest import tiny_llama

CPU = torch.device("cpu")
DOUBLE = Precision(torch.float64, torch.float64)


def context_for(policy, objective, budget=10_000, *, temperature=1.0, penalty=1.0, reference=None, learning_rate=0.0):
    """A step context. With a learning rate of 0 an update does not change the weights."""
    optimizer = Optimizer(policy.model, OptimConfig(learning_rate=learning_rate, max_grad_norm=1e9), 1)
    sampling = Sampling(8, temperature=temperature, repetition_penalty=penalty)
    return StepContext(policy, optimizer, objective, sampling, TokenBudget(budget), reference)


def all_sequences(batch):
    """All sequences of a batch."""
    return part_of(batch, range(batch.num_sequences))


def segments_of(batch):
    """The prompt and the token ids of each segment."""
    groups = batch.group_S[batch.sequence_B].tolist()
    ids = batch.ids_T.split(batch.lengths_B.tolist())
    return [(batch.prompt_ids[group], tuple(one.tolist())) for group, one in zip(groups, ids, strict=True)]


def logps_of(policy, batch, part=None, budget=10_000, **settings):
    """Log-probs of a batch, or of some of its sequences, under a policy."""
    part = all_sequences(batch) if part is None else part
    return policy_logps(context_for(policy, None, budget, **settings), policy, batch, part)


def rollout(seed=0, truncated=()):
    """Four groups of three completions of different lengths. One group has equal rewards, one completion is unscored,
    and the completions in ``truncated`` reached the length limit."""
    generator = torch.Generator().manual_seed(seed)
    groups = []
    for p in range(4):
        prompt = tuple(torch.randint(2, 37, (p * 2 + 1,), generator=generator).tolist())
        completions = []
        for c in range(3):
            reason = FinishReason.LENGTH if 3 * p + c in truncated else FinishReason.EOS
            length = int(torch.randint(1, 9, (1,), generator=generator))
            ids = torch.randint(2, 37, (length,), generator=generator).tolist()
            completions.append(Completion.of_tokens(ids, [-1.0] * length, reason))
        groups.append(Group(Prompt(p, p, prompt, "", "", {}), tuple(completions)))
    rewards = torch.rand(12, generator=generator, dtype=torch.float64)
    rewards[3:6] = 0.25
    rewards[7] = math.nan
    return groups, Scores(rewards, rewards[:, None], ("r",))


def shifted_policy():
    """A policy with slightly different weights."""
    shifted = Policy(tiny_llama().double(), DOUBLE)
    with torch.no_grad():
        for index, parameter in enumerate(shifted.model.parameters()):
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)))
    return shifted


def batch_for(policy, objective, *, old=True, truncated=()):
    """A batch whose old, sampler and reference policies differ from the current one."""
    groups, scores = rollout(truncated=truncated)
    batch = lay_out(groups, CPU)
    logps = logps_of(shifted_policy(), batch)
    noise = torch.randn(logps.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    batch = dataclasses.replace(
        batch,
        sampler_logps_N=logps + 0.02 * noise,
        old_logps_N=logps if old or objective.advantages_need_logps else None,
        ref_logps_N=logps - 0.1 if objective.beta else None,
    )
    return assign_advantages(batch, scores, objective, max_completion_length=8)


def gradient(policy, batch, objective, token_budget, *, entropy_coefficient=0.0, order=None, **settings):
    """The gradient after an update with a learning rate of 0, and the result of the update."""
    context = context_for(policy, objective, token_budget, **settings)
    part = all_sequences(batch) if order is None else part_of(batch, order)
    result = update(context, batch, part, entropy_coefficient)
    return [p.grad.clone() for p in policy.model.parameters()], result
