"""What a run says at its start: how it differs from the same run under TRL."""

from __future__ import annotations

from typing import Any

from cohort.config import GRPOConfig
from cohort.trl.batch import Batch
from cohort.trl.fields import FIELDS


def differences(args: Any, config: GRPOConfig, batch: Batch, updates: int) -> str:
    """The differences from TRL that concern this run, one a line, under a heading.

    Args:
        args: the ``cohort.trl.GRPOConfig``.
        config: its translation.
        batch: its batches.
        updates: ``state.max_steps``.
    """
    lines = [*_updates(batch, updates), *_numbers(config), *_rewards(), *_uploads(args), *_fields(args)]
    return "\n".join(["how this run differs from TRL's (docs/trl.md):", *(f"  {line}" for line in lines)])


def _updates(batch: Batch, updates: int) -> list[str]:
    per_rollout, prompts = batch.updates_per_rollout, batch.prompts_per_step // batch.minibatches
    groups = "1 group" if prompts == 1 else f"{prompts} groups"
    lines = [
        "an update whose gradient is exactly 0 is skipped: it counts in global_step, and the learning-rate schedule "
        "does not advance"
    ]
    if batch.minibatches > 1:
        lines.insert(0, f"groups stay whole: each update uses {groups} of {batch.num_generations} completions")
    if per_rollout > 1:
        lines.append(
            f"{per_rollout} updates use a rollout: evaluations, checkpoints and the end wait for the last of them"
        )
    if spare := batch.rollouts(updates) * per_rollout - updates:
        lines.append(f"max_steps {updates} ends within a rollout, which is used in full: {updates + spare} updates")
    return lines


def _numbers(config: GRPOConfig) -> list[str]:
    computed = "" if config.model.precision == "float32" else f"; computation is in {config.model.precision}"
    lines = [f"the trained weights are float32, whatever dtype the model is loaded in{computed}", "dropout is off"]
    if config.optim.warmup_steps:
        lines.append(f"warm-up: update k of {config.optim.warmup_steps} has k/{config.optim.warmup_steps} of the rate")
    rollout = config.rollout
    cut = rollout.top_k or rollout.top_p < 1 or rollout.min_p or rollout.repetition_penalty != 1
    if cut:
        lines.append("top_k, top_p, min_p and repetition_penalty also shape the log-probabilities of the update")
    return lines


def _rewards() -> list[str]:
    return [
        "a reward function that raises leaves its completions unscored; one that fails on a whole rollout ends the run",
        "reward functions are tried on two rows before the model is loaded",
    ]


def _uploads(args: Any) -> list[str]:
    return ["the hub gets the model when train() ends, not with every checkpoint"] if args.push_to_hub else []


def _fields(args: Any) -> list[str]:
    """The fields that are set and have no effect, by reason."""
    names: dict[str, list[str]] = {}
    for name in sorted(args.given):
        if (field := FIELDS.get(name)) and field.verdict == "no effect":
            names.setdefault(field.why, []).append(name)
    return [f"without effect: {', '.join(each)} ({why})" for why, each in names.items()]
