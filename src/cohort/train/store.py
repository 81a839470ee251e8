"""The store: what a step leaves in ``rollouts/step-N.parquet``. ``docs/store.md`` describes the columns."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow
import torch
from numpy.typing import NDArray
from torch import Tensor

from cohort.config import GRPOConfig, hide_secrets
from cohort.objective import Cause
from cohort.objective.ratio import exp_clamped
from cohort.parallel import on_main
from cohort.runs.folder import RunFolder
from cohort.runs.tables import UsedRows, advantage_columns, completion_columns, score_columns, time_columns, with_facts
from cohort.train.context import StepContext
from cohort.train.layout import Part, Rollout, split_minibatches
from cohort.train.update import Updates
from cohort.types import Group, TokenBatch

CAUSES = [None if cause is Cause.ACTIVE else cause.name.lower() for cause in Cause]


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """A step whose updates are made."""

    step: int
    context: StepContext
    rollout: Rollout
    """Everything that was sampled."""
    batch: TokenBatch
    """What the updates used of it."""
    updates: Updates


def store_step(folder: RunFolder, config: GRPOConfig, done: TrainedStep) -> None:
    """Write a step's completions if ``[report]`` wants them. Every rank may call; rank 0 writes."""
    settings = config.report
    if settings.log_completions and done.step % settings.store_steps == 0:
        groups = partial(chosen_groups, done.rollout.sampled, settings.store_groups, config.run.seed)
        on_main(done.context.world, lambda: folder.write_rollout(done.step, step_table(done, groups())))


def chosen_groups(groups: Sequence[Group], count: int, seed: int) -> list[int]:
    """The groups of a step that are stored, in order: those of the smallest SHA-256 of "seed uid", whatever their
    completions and rewards are. 0: all groups."""
    if not 0 < count < len(groups):
        return list(range(len(groups)))
    keys = [hashlib.sha256(f"{seed} {group.prompt.uid}".encode()).digest() for group in groups]
    return sorted(sorted(range(len(groups)), key=keys.__getitem__)[:count])


def step_table(done: TrainedStep, chosen: Sequence[int]) -> pyarrow.Table:
    """The table of a step. ``chosen``: the groups that are stored, ascending."""
    rollout = done.rollout
    first_S = [0, *accumulate(len(group.completions) for group in rollout.sampled)]
    rows = [s for p in chosen for s in range(first_S[p], first_S[p + 1])]
    groups, scores = [rollout.sampled[p] for p in chosen], rollout.sampled_scores.select(rows)
    columns = completion_columns(groups) | score_columns(scores)
    columns |= time_columns([completion for group in groups for completion in group.completions], scores)
    if (rewards_N := rollout.sampled_scores.token_rewards_N) is not None:
        pieces = rewards_N.split([completion.num_tokens for completion in rollout.completions])
        columns["token_rewards"] = pyarrow.array([pieces[s].numpy() for s in rows])
    parts = split_minibatches(done.batch, done.context.objective.minibatches)
    return with_facts(columns | _update_columns(done, rows, parts), _facts(done, len(parts), len(groups)))


def _update_columns(done: TrainedStep, rows: Sequence[int], minibatches: Sequence[Part]) -> dict[str, Any]:
    """What the updates saw of the completions in some rows."""
    rollout, batch, updates = done.rollout, done.batch, done.updates
    number = {s: row for row, s in enumerate(rows)}
    kept_S = np.array([s in number for s in rollout.used_S], np.bool_)
    lengths_S, minibatch_S = batch.lengths_S.numpy(), np.zeros(len(kept_S), np.int32)
    for index, part in enumerate(minibatches):
        minibatch_S[part.sequences_S.numpy()] = index
    kept_N = np.repeat(kept_S, lengths_S)
    rows_S = np.array([number[s] for s in rollout.used_S if s in number], np.int64)
    used = UsedRows(rows_S, lengths_S[kept_S], len(rows))
    columns = {"minibatch": used.column(minibatch_S[kept_S])}
    columns |= advantage_columns(used, _numbers(batch.advantages_N)[kept_N])
    for name, values_N in (("old_logps", batch.old_logps_N), ("ref_logps", batch.ref_logps_N)):
        if values_N is not None:
            columns[name] = _known_lists(used, _numbers(values_N)[kept_N])
    columns["update"] = used.column(updates.update_S.numpy().astype(np.int32)[kept_S])
    passed_S = updates.passed_S.numpy()[kept_S]
    for name, values_N in _seen_values(done.context, updates.values).items():
        columns[name] = used.lists(_numbers(values_N)[kept_N], passed_S)
    causes_N = torch.where(batch.loss_N, int(Cause.NO_ADVANTAGE), int(Cause.MASKED)).cpu()
    if "cause" in updates.values:
        passed_N = updates.passed_S[batch.sequence_N.cpu()]
        causes_N = torch.where(passed_N, updates.values["cause"].cpu(), causes_N)
    indices = pyarrow.array(causes_N.to(torch.int8).numpy()[kept_N])
    names = pyarrow.DictionaryArray.from_arrays(indices, CAUSES).cast(pyarrow.string())
    columns["no_gradient"] = used.lists(names, updates.update_S.numpy()[kept_S] >= 0)
    return columns


def _seen_values(context: StepContext, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """The columns of numbers per token, without those that say nothing under the objective."""
    if not values:
        return {}
    objective, found = context.objective, dict(values)
    del found["cause"]
    found["ratio"] = exp_clamped(found.pop("log_ratio"))
    if objective.beta == 0 or objective.kl.place != "loss" or objective.kl.estimator == "full":
        del found["kl_coefficient"]
    if objective.top_entropy == 1:  # both terms have the same 1/Z
        del found["kl_weight"]
    return found


def _known_lists(rows: UsedRows, values_N: NDArray[Any]) -> Any:
    """Log-probs that were computed for some sequences, and are NaN for the others."""
    known_S = np.zeros(len(rows.lengths_S), np.bool_)
    known_S[np.repeat(np.arange(len(known_S)), rows.lengths_S)[~np.isnan(values_N)]] = True
    return rows.lists(values_N, known_S)


def _facts(done: TrainedStep, minibatches: int, stored: int) -> dict[str, Any]:
    """What holds for the whole step."""
    context, rollout, updates = done.context, done.rollout, done.updates
    names = ("grad_norm", "learning_rate", "entropy_coefficient")
    made = [
        {"minibatch": number % minibatches, "skipped": result is None}
        | ({} if result is None else {name: getattr(result, name) for name in names})
        for number, result in enumerate(updates.outcomes)
    ]
    scores = rollout.sampled_scores
    return {
        "step": done.step,
        "objective": hide_secrets(context.objective.model_dump()),
        "minibatches": minibatches,
        "updates": made,
        "version_before": updates.version_before,
        "groups": len(rollout.sampled),
        "groups_stored": stored,
        "reward_weights": dict(zip(scores.names, scores.weights or (1.0,) * len(scores.names), strict=True)),
        "temperature": context.sampling.temperature,
        "repetition_penalty": context.repetition_penalty,
        "max_completion_length": context.sampling.max_completion_length,
        "microbatch_tokens": context.budget.tokens,
        "shared_prompts": context.policy.passes.shared,
    }


def _numbers(values: Tensor) -> NDArray[Any]:
    """The values for NumPy, which has no bfloat16."""
    values = values.cpu()
    return (values.float() if values.dtype == torch.bfloat16 else values).numpy()
