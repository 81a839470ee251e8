"""Runs of a model that is a table, through Cohort's own rewards, advantages, updates and metrics.

The policy knows 24 tokens and looks at the last one: its parameters are 24 x 24 logits. A prompt is one token, and a
completion is right if it begins with the token that belongs to the prompt and ends before the limit. Everything after
sampling is the real code, so that the metrics are those of a real run; thirty steps take a second or less.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from transformers import PretrainedConfig

from cohort.config import GRPOConfig, Schedule
from cohort.policy import Policy, Precision
from cohort.rewards import RewardRunner
from cohort.rollout import Sampling
from cohort.train import Optimizer, StepContext, TokenBudget, lay_out, split_minibatches, update
from cohort.train.layout import Rollout
from cohort.train.loop import with_advantages_and_logps
from cohort.train.metrics import policy_movement, step_metrics
from cohort.train.state import Adaptive
from cohort.train.update import NonFinite
from cohort.types import Completion, FinishReason, Group, Prompt

END, WORDS, PROMPTS = 0, 12, 12
VOCABULARY = WORDS + PROMPTS
SETTINGS = {
    "prompts_per_step": 12,
    "num_generations": 8,
    "max_completion_length": 12,
    "learning_rate": 0.05,
    "max_steps": 30,
    "precision": "float32",
    "device": "cpu",
}


class Table(torch.nn.Module):
    """Next-token logits by the last token. ``end`` is the logit of the end token."""

    def __init__(self, end: float = 0.5, known: float = 0.5):
        super().__init__()
        table = torch.zeros(VOCABULARY, VOCABULARY)
        table[:, END] = end
        table[:, WORDS:] = -20.0
        table[WORDS:, END] = -20.0  # a completion has a word
        for prompt in range(WORDS, VOCABULARY):
            table[prompt, right_word(prompt)] = known
        self.table = torch.nn.Parameter(table)
        self.config = PretrainedConfig()

    def rows(self):
        """The logits after each token."""
        return self.table

    def get_output_embeddings(self):
        return SimpleNamespace(weight=self.table)

    get_input_embeddings = get_output_embeddings

    def forward(self, input_ids, use_cache=False, **_):
        return SimpleNamespace(logits=self.rows()[input_ids])


def right_word(prompt: int) -> int:
    return 1 + (prompt - WORDS) % (WORDS - 1)


def right(completion_ids, prompts, finish_reasons, **_):
    """1 for the right first word in a completion that ended."""
    return [
        float(ids[0] == right_word(int(prompt)) and reason == "eos")
        for ids, prompt, reason in zip(completion_ids, prompts, finish_reasons, strict=True)
    ]


def sample(policy, config, step, temperature=1.0):
    """Groups of completions."""
    random = np.random.default_rng((config.run.seed, step))
    count, size, longest = (
        config.rollout.prompts_per_step,
        config.rollout.num_generations,
        config.rollout.max_completion_length,
    )
    log_probs = torch.log_softmax(policy.model.rows().detach() / temperature, -1).double().numpy()
    prompts = WORDS + random.permutation(PROMPTS)[:count]
    last, ids, logps = np.repeat(prompts, size), [], []
    for _ in range(longest):
        rows = log_probs[last]
        drawn = (rows + random.gumbel(size=rows.shape)).argmax(1)
        ids.append(drawn)
        logps.append(rows[np.arange(len(drawn)), drawn])
        last = drawn
    ids_S, logps_S = np.stack(ids, 1), np.stack(logps, 1)
    lengths = np.where((ids_S == END).any(1), (ids_S == END).argmax(1) + 1, longest)
    completions = [
        Completion.of_tokens(
            row[:length],
            scores[:length],
            FinishReason.EOS if row[length - 1] == END else FinishReason.LENGTH,
            weights_version=policy.version,
        )
        for row, scores, length in zip(ids_S, logps_S, lengths, strict=True)
    ]
    return [
        Group(
            Prompt(step * count + p, int(prompt), (int(prompt),), "", str(prompt), {}),
            tuple(completions[p * size : (p + 1) * size]),
        )
        for p, prompt in enumerate(prompts)
    ]


def train(rewards=right, table=None, sampler=sample, each_update=None, seed=0, **settings):
    """The metrics of a run, and its settings.

    Args:
        rewards: one reward function or several.
        table: the model.
        sampler: draws the groups of a step.
        each_update: changes the batch before each update.
        seed: of sampling.
        settings: of the run.
    """
    config = GRPOConfig(**SETTINGS | {"seed": seed} | settings)
    schedule = Schedule.of(config, num_prompts=PROMPTS)
    policy = Policy(table or Table(), Precision(torch.float32, torch.float32))
    optimizer = Optimizer(policy.model, config.optim, schedule.updates)
    reference = policy.copy_frozen() if schedule.objective.beta else None
    runner = RewardRunner(rewards if isinstance(rewards, list) else [rewards], config.reward.weights)
    adaptive = Adaptive.of(schedule.objective)
    lines = []
    for step in range(schedule.steps):
        objective = adaptive.applied_to(schedule.objective)
        context = StepContext(
            policy, optimizer, objective, Sampling.of(config.rollout), TokenBudget(100_000), reference
        )
        rollout_groups = sampler(policy, config, step)
        rollout = Rollout.of(rollout_groups, runner.score(rollout_groups), objective)
        version = policy.version
        batch = lay_out(rollout.used_groups, policy.device)
        batch = with_advantages_and_logps(context, batch, rollout, schedule)
        results, nonfinite = [], 0
        for part in split_minibatches(batch, config.objective.resolved_minibatches) * config.objective.num_iterations:
            changed = each_update(context, batch) if each_update else batch
            outcome = update(context, changed, part, adaptive.applied_entropy_coefficient(objective))
            if isinstance(outcome, NonFinite):
                nonfinite += 1
            else:
                results.append(outcome)
                adaptive = adaptive.after_update(objective, outcome)
        moved = policy_movement(context, batch, results, config.report.update_kl_completions)
        adaptive = adaptive.after_step(objective, results, batch.num_sequences)
        metrics = {"step": step + 1, "updates_nonfinite": nonfinite, **moved}
        lines.append(metrics | step_metrics(rollout, batch, results, objective, version))
    return lines, config
