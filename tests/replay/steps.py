"""Stored steps for tests: updates on a tiny model, or columns made up by hand."""

import dataclasses

import torch

from cohort.config import GRPOConfig
from cohort.replay.stored import read_step
from cohort.runs.tables import with_facts, write_table
from cohort.train import Rollout, assign_advantages, lay_out, split_minibatches, update
from cohort.train.store import TrainedStep, step_table
from cohort.train.update import Updates
from tests.train.updates import CPU, context_for, logps_of, rollout, shifted_policy

CONFIG = GRPOConfig(max_completion_length=8)


def stored_step(
    folder, policy, objective, *, minibatches=1, iterations=1, budget=10_000, old=True, reference=None, chosen=None
):
    """A step of real updates as the store writes it. Old, sampler and reference policies differ from the current."""
    groups, scores = rollout(truncated=(1,))
    logps_N = logps_of(shifted_policy(), lay_out(groups, CPU))
    noise_N = torch.randn(logps_N.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    pieces = iter((logps_N + 0.02 * noise_N).split(lay_out(groups, CPU).lengths_S.tolist()))
    groups = [
        dataclasses.replace(
            group,
            completions=tuple(dataclasses.replace(c, sampler_logps=next(pieces).numpy()) for c in group.completions),
        )
        for group in groups
    ]
    whole = Rollout.of(groups, scores, objective)
    batch = lay_out(whole.used_groups, CPU)
    master = policy.precision.master
    old_N = logps_of(shifted_policy(), batch).to(master)
    has_old = old or objective.advantages_need_logps
    ref_N = old_N - 0.1 if objective.beta and objective.kl.estimator == "sampled" else None
    batch = dataclasses.replace(batch, old_logps_N=old_N if has_old else None, ref_logps_N=ref_N)
    batch = assign_advantages(batch, whole.used_scores, objective, max_completion_length=8)
    objective = objective.model_copy(update={"minibatches": minibatches})
    context = context_for(policy, objective, budget, learning_rate=1e-2, reference=reference)
    updates = Updates.none(batch, 0)
    for part in split_minibatches(batch, minibatches) * iterations:
        updates.add(update(context, batch, part))
    rows = range(len(groups)) if chosen is None else chosen
    table = step_table(TrainedStep(1, context, whole, batch, updates), rows)
    write_table(table, folder / "rollouts" / "step-1.parquet")
    return read_step(folder, 1, CONFIG)


FACTS = {
    "groups": 1,
    "minibatches": 1,
    "max_completion_length": 8,
    "microbatch_tokens": 10_000,
    "shared_prompts": True,
    "objective": {"kl": {"beta": 0.0}},
    "updates": [{"skipped": False, "learning_rate": 1e-3}],
    "reward_weights": {},
}
"""What the file of a step says about the whole step."""


def made_up_step(folder, columns, step=1):
    """A step from some of its columns, without what its updates saw of each token."""
    count = len(columns["reward"])
    lengths = [len(ids) for ids in columns["token_ids"]]
    defaults = {
        "group": [0] * count,
        "row": [0] * count,
        "prompt": ["2+3="] * count,
        "completion": ["5"] * count,
        "finish_reason": ["eos"] * count,
        "weights_version": [0] * count,
        "sampler_logps": [[-1.0] * length for length in lengths],
        "advantage": [1.0] * count,
    }
    write_table(with_facts(defaults | columns, FACTS), folder / "rollouts" / f"step-{step}.parquet")
    return read_step(folder, step, CONFIG)
