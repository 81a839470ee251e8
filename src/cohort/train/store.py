"""The store: what a step leaves in ``rollouts/step-N.parquet``. ``docs/store.md`` describes the columns."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
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
from cohort.train.layout import Part, split_minibatches
from cohort.train.rollout import Rollout
from cohort.train.update import Updates
from cohort.types import Group, TokenBatch

CAUSES = [None if cause is Cause.ACTIVE else cause.name.lower() for cause in Cause]


def store_step(
    folder: RunFolder,
    config: GRPOConfig,
    context: StepContext,
    step: int,
    rollout: Rollout,
    batch: TokenBatch,
    updates: Updates,
) -> None:
    """Write a step's completions if ``[report]`` wants them. Every rank may call; rank 0 writes.

    Args:
        folder, config, context: of the run and of the step.
        step: the step, from 1.
        rollout: everything that was sampled.
        batch: what the updates used of it.
        updates: the step's updates.
    """
    settings = config.report
    if not settings.log_completions or step % settings.store_steps:
        return

    def write() -> None:
        chosen = chosen_groups(rollout.sampled, settings.store_groups, config.run.seed)
        table = step_table(context, step, rollout, batch, updates, context.objective.minibatches, chosen)
        folder.write_rollout(step, table)

    on_main(context.world, write)


def chosen_groups(groups: Sequence[Group], count: int, seed: int) -> list[int]:
    """The groups of a step that are stored, in order: those of the smallest SHA-256 of "seed uid", whatever their
    completions and rewards are. 0: all groups."""
    if not 0 < count < len(groups):
        return list(range(len(groups)))
    keys = [hashlib.sha256(f"{seed} {group.prompt.uid}".encode()).digest() for group in groups]
    return sorted(sorted(range(len(groups)), key=keys.__getitem__)[:count])


def step_table(
    context: StepContext,
    step: int,
    rollout: Rollout,
    batch: TokenBatch,
    updates: Updates,
    minibatches: int,
    chosen: Sequence[int],
) -> pyarrow.Table:
    """The table of a step.

    Args:
        context, step, rollout, batch, updates: as ``store_step`` takes them.
        minibatches: ``objective.minibatches``.
        chosen: the groups that are stored, ascending.
    """
    first_S = [0, *accumulate(len(group.completions) for group in rollout.sampled)]
    rows = [s for p in chosen for s in range(first_S[p], first_S[p + 1])]
    groups, scores = [rollout.sampled[p] for p in chosen], rollout.sampled_scores.select(rows)
    columns = completion_columns(groups) | score_columns(scores)
    columns |= time_columns([completion for group in groups for completion in group.completions], scores)
    if (rewards_N := rollout.sampled_scores.token_rewards_N) is not None:
        pieces = rewards_N.split([completion.num_tokens for completion in rollout.completions])
        columns["token_rewards"] = pyarrow.array([pieces[s].numpy() for s in rows])
    parts = split_minibatches(batch, minibatches)
    columns |= _update_columns(context, rows, rollout, batch, updates, parts)
    return with_facts(columns, _facts(context, step, rollout, updates, len(parts), len(groups)))


def _update_columns(
    context: StepContext,
    rows: Sequence[int],
    rollout: Rollout,
    batch: TokenBatch,
    updates: Updates,
    minibatches: Sequence[Part],
) -> dict[str, Any]:
    """What the updates saw of the completions in some rows."""
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
    seen = updates.seen
    columns["update"] = used.column(seen.update_S.numpy().astype(np.int32)[kept_S])
    passed_S = seen.passed_S.numpy()[kept_S]
    for name, values_N in _seen_values(context, seen.values).items():
        columns[name] = used.lists(_numbers(values_N)[kept_N], passed_S)
    causes_N = torch.where(batch.loss_N, int(Cause.NO_ADVANTAGE), int(Cause.MASKED)).cpu()
    if "cause" in seen.values:
        passed_N = seen.passed_S[batch.sequence_N.cpu()]
        causes_N = torch.where(passed_N, seen.values["cause"].cpu(), causes_N)
    indices = pyarrow.array(causes_N.to(torch.int8).numpy()[kept_N])
    names = pyarrow.DictionaryArray.from_arrays(indices, CAUSES).cast(pyarrow.string())
    columns["no_gradient"] = used.lists(names, seen.update_S.numpy()[kept_S] >= 0)
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


def _facts(
    context: StepContext, step: int, rollout: Rollout, updates: Updates, minibatches: int, stored: int
) -> dict[str, Any]:
    """What holds for the whole step."""
    results = iter(updates.results)
    made: list[dict[str, Any]] = []
    for number in range(updates.done):
        about: dict[str, Any] = {"minibatch": number % minibatches, "skipped": number in updates.skipped}
        if not about["skipped"]:
            result = next(results)
            names = ("grad_norm", "learning_rate", "entropy_coefficient")
            about |= {name: getattr(result, name) for name in names}
        made.append(about)
    sampling, scores = context.sampling, rollout.sampled_scores
    return {
        "step": step,
        "objective": hide_secrets(context.objective.model_dump()),
        "minibatches": minibatches,
        "updates": made,
        "version_before": updates.version_before,
        "groups": len(rollout.sampled),
        "groups_stored": stored,
        "reward_weights": dict(zip(scores.names, scores.weights or (1.0,) * len(scores.names), strict=True)),
        "temperature": context.temperature,
        "repetition_penalty": context.repetition_penalty,
        "max_completion_length": sampling.max_completion_length,
        "microbatch_tokens": context.budget.tokens,
        "shared_prompts": context.policy.passes.shared,
    }


def _numbers(values: Tensor) -> NDArray[Any]:
    """The values for NumPy, which has no bfloat16."""
    values = values.cpu()
    return (values.float() if values.dtype == torch.bfloat16 else values).numpy()
