"""What a run says at its start: how it differs from the same run under TRL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tqdm.auto import tqdm  # type: ignore[import-untyped]  # transformers requires it

from cohort.config import GRPOConfig
from cohort.report.diagnosis import Diagnosis, why_no_gradient
from cohort.report.progress import finding_text
from cohort.runs.folder import RunFolder
from cohort.runs.reader import Run
from cohort.trl.config import FIELDS, RENAMED, Batch, why_off
from cohort.trl.translate import UNUSED_KEYS, in_trl_terms

REWARDS = (
    "a reward function that raises leaves its completions unscored; one that fails on a whole rollout ends the run",
    "reward functions are tried on two rows before the model is loaded",
)
"""What holds for the reward functions of every run."""


def differences(args: Any, config: GRPOConfig, batch: Batch, updates: int) -> str:
    """The differences from TRL that concern this run, one a line, under a heading.

    Args:
        args: the ``cohort.trl.GRPOConfig``.
        config: its translation.
        batch: its batches.
        updates: ``state.max_steps``.
    """
    uploads = ["the hub gets the model when train() ends, not with every checkpoint"] if args.push_to_hub else []
    lines = [*_updates(batch, updates), *_numbers(config), *REWARDS, *uploads, *_fields(args)]
    return "\n".join(["how this run differs from TRL's (see 'cohort docs trl'):", *(f"  {line}" for line in lines)])


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


def _fields(args: Any) -> list[str]:
    """The fields that are set and have no effect, by reason."""
    names: dict[str, list[str]] = {}
    for name in sorted(args.given):
        if (field := FIELDS.get(name)) and field.verdict == "no effect":
            names.setdefault(field.why, []).append(name)
        elif closed := why_off(args, RENAMED.get(name, name)):
            names.setdefault(closed, []).append(name)
    if keys := [key for key in UNUSED_KEYS if (args.model_init_kwargs or {}).get(key) is not None]:
        names["the policy has Cohort's attention and placement"] = [f"model_init_kwargs[{key!r}]" for key in keys]
    return [f"without effect: {', '.join(each)} ({why})" for why, each in names.items()]


# ----------------------------------------
# What the diagnosis finds in a run, printed beside transformers' log, in TRL's terms.


class Findings:
    """Prints what is new with each rollout: a finding that begins, worsens or ends, and once why an update is skipped.

    Args:
        folder: of the run, whose rollouts so far have been told of. None: prints nothing, as on other ranks.
    """

    def __init__(self, folder: RunFolder | None) -> None:
        self._diagnosis = Diagnosis(Run(folder.path).settings) if folder else None
        self._warned = False
        if self._diagnosis and folder:
            for metrics in Run(folder.path).rows:
                self._diagnosis.step_or_log(metrics)

    def show(self, metrics: Mapping[str, Any]) -> None:
        """Print what a rollout's metrics tell."""
        if self._diagnosis is None:
            return
        said = [finding_text(one) for one in self._diagnosis.step_or_log(metrics)]
        if metrics["updates"] == metrics["updates_skipped"] and not self._warned:
            self._warned = True
            said.insert(0, f"step {metrics['step']}: {why_no_gradient(metrics)}")
        for text in said:
            tqdm.write(in_trl_terms(f"rollout {text.removeprefix('step ')}"))
