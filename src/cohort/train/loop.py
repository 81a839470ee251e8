"""GRPO: the loop. Read this file first.

One step samples a group of completions for each prompt, scores them, turns the scores into group-relative advantages,
and updates the policy with a clipped importance ratio and a KL term against a reference. Four policies take part:

    current    ``logps``          the weights being trained, with their graph; computed inside ``update``
    old        ``old_logps``      the weights that sampled, as the trainer computes them; only for several updates
    sampler    ``sampler_logps``  what the engine really drew from, recorded while it drew
    reference  ``ref_logps``      the fixed (or slowly moved) policy of the KL term; only when beta is not 0
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from cohort.config import GRPOConfig, Schedule
from cohort.data import PromptStream
from cohort.objective import Objective
from cohort.policy import Policy
from cohort.rewards import RewardRunner
from cohort.rollout import Draws, Engine, Sampling
from cohort.train.batch import assemble, policy_logps, split_minibatches
from cohort.train.check import check_sampler_gap
from cohort.train.evaluate import Evaluator
from cohort.train.folder import RunFolder, RunState
from cohort.train.metrics import PhaseClock, step_metrics
from cohort.train.optim import Optimizer
from cohort.train.update import UpdateResult, update


@dataclass(frozen=True, slots=True)
class Parts:
    """What a run is made of. Put together by ``GRPOTrainer``; the loop only uses them."""

    policy: Policy
    reference: Policy | None
    engine: Engine
    rewards: RewardRunner
    prompts: PromptStream
    objective: Objective
    optimizer: Optimizer
    evaluator: Evaluator | None
    tokenizer: Any
    identity: dict[str, str]
    """What else makes this run what it is: a hash of its prompts, its rewards' names. A resumed run has the same."""

    def state(self, step: int) -> RunState:
        """What a checkpoint holds."""
        return RunState(step, self.policy, self.reference, self.optimizer, self.tokenizer, self.identity)


def run(
    parts: Parts, schedule: Schedule, config: GRPOConfig, folder: RunFolder, *, first_step: int = 0
) -> Iterator[dict[str, Any]]:
    """Train from ``first_step`` on; yield each step's metrics after they, and what else is due, are on disk."""
    policy, reference, optimizer, objective = parts.policy, parts.reference, parts.optimizer, parts.objective
    temperature, token_budget = config.rollout.temperature, config.optim.microbatch_tokens
    sampling = Sampling.of(config.rollout)

    for step in range(first_step, schedule.steps):
        clock = PhaseClock()

        # Sample: every prompt of the step is computed once for its group of completions.
        prompts = parts.prompts.take(step, schedule.prompts_per_step)
        with clock("generate"):
            groups = parts.engine.generate(prompts, schedule.num_generations, sampling, Draws(config.run.seed, step))

        # Score, and compare each completion with the others of its group.
        with clock("reward"):
            scores = parts.rewards.score(groups)
        batch = assemble(groups, scores, objective, policy.device)
        if step == first_step:
            check_sampler_gap(policy, batch, temperature, token_budget)

        # What the updates hold on to, computed once per rollout and only when they need it. With a single update the
        # old policy is the current one: the ratio is 1 by identity and no pass is spent on it.
        with clock("logps"):
            old_logps_N = policy_logps(policy, batch, temperature, token_budget) if schedule.needs_old_logps else None
            ref_logps_N = policy_logps(reference, batch, temperature, token_budget) if reference else None
            batch = replace(batch, old_logps_N=old_logps_N, ref_logps_N=ref_logps_N)

        # Update: minibatches change the result, microbatches (inside ``update``) do not.
        version_before = policy.version
        results: list[UpdateResult] = []
        with clock("update"):
            for _iteration in range(schedule.num_iterations):
                for minibatch in split_minibatches(batch, schedule.minibatches):
                    results.append(update(policy, optimizer, minibatch, objective, temperature, token_budget))

        # The reference stands still, or follows the policy at a distance.
        if reference and config.objective.sync_ref_model:
            every = config.objective.ref_model_sync_steps
            if policy.version // every > version_before // every:
                reference.move_toward(policy, config.objective.ref_model_mixup_alpha)

        metrics = {"step": step + 1, "time": time.time()}
        metrics |= step_metrics(groups, scores, batch, results, clock)
        last = step + 1 == schedule.steps
        if parts.evaluator and (last or due(step, config.run.eval_steps)):
            metrics |= parts.evaluator.evaluate(parts.engine).metrics()
        folder.append_metrics(metrics)
        if config.report.log_completions:
            folder.write_rollout(step + 1, groups, scores, batch)
        if last or due(step, config.run.save_steps):
            folder.save_checkpoint(parts.state(step + 1))
        yield metrics


def due(step: int, every: int) -> bool:
    """Whether something that happens every so many steps (0: never) happens after this one, counted from 0."""
    return every > 0 and (step + 1) % every == 0
