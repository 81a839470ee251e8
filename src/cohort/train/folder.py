"""The run folder: everything a run produces, readable without Cohort.

config.toml              the settings as resolved
objective.txt            the objective's formula with its numbers, and its coefficients as a table
metrics.jsonl            one line per step
first_prompt.txt         the first prompt as the model reads it, special tokens shown
rollouts/step-N.parquet  every completion of step N
evaluations/step-N.parquet  of the evaluation after step N (0: before the first); step-N-NAME.parquet of a named set
best/                    the best model by eval.metric_for_best_model, as in checkpoints/, and best.json, which says why
checkpoints/step-N/      weights, config and tokenizer that transformers loads as they are
    state/               what the loop needs to go on: optimizer, schedule, reference, random state, position
summary.json             written when the run ends
"""

from __future__ import annotations

import json
import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cohort.config import EvalConfig, GRPOConfig, load_config, to_toml
from cohort.data import DataCursor
from cohort.errors import RunFolderError
from cohort.objective import explain
from cohort.policy import Policy, has_adapters, load_adapter_weights, merged, without_progress_bars
from cohort.train.adapt import Adaptive
from cohort.train.best import Best
from cohort.train.evaluate import Evaluation
from cohort.train.optim import Optimizer
from cohort.train.random_state import random_state, set_random_state
from cohort.train.rollout import Rollout
from cohort.train.table import completion_columns, score_columns, write_table
from cohort.types import TokenBatch

MAY_CHANGE_ON_RESUME = frozenset(
    {
        *("run.output_dir", "run.max_steps", "run.num_epochs", "run.save_steps"),
        *(f"eval.{name}" for name in EvalConfig.model_fields),
        *("run.save_total_limit", "rollout.max_batch_size", "rollout.cache_tokens"),
        *("model.native_kernels", "optim.microbatch_tokens"),
        *("reward.workers", "reward.timeout", "reward.retries", "reward.on_error", "reward.max_concurrent"),
        *(
            "model.device",
            "model.gradient_checkpointing",
            "report.progress",
            "report.log_completions",
            "report.update_kl_completions",
            "report.term_norms_steps",
            "report.check_saved",
        ),
    }
)
"""Settings that change where, how long or how fast a run goes, or how it is judged, not what a step computes."""

ENDING_SCHEDULES = ("linear", "cosine")
"""Learning-rate schedules that depend on the number of updates of the whole run."""


@dataclass(frozen=True, slots=True)
class RunState:
    """What a checkpoint holds, and a resumed run is given back."""

    step: int
    policy: Policy
    reference: Policy | None
    optimizer: Optimizer
    adaptive: Adaptive
    best: Best
    cursor: DataCursor
    tokenizer: Any
    identity: dict[str, str]
    """Facts that are no settings and must be the same in a resumed run."""

    @property
    def keeps_reference(self) -> bool:
        """Whether the reference has weights of its own: not those of the policy's model without its adapter."""
        return self.reference is not None and self.reference.model is not self.policy.model


class RunFolder:
    """One run's folder.

    Args:
        path: the folder. It need not exist.
        keep_checkpoints: the newest so many are kept; None: all.
    """

    def __init__(self, path: str | Path, *, keep_checkpoints: int | None = None) -> None:
        self.path = Path(path).expanduser()
        self._keep = keep_checkpoints

    @classmethod
    def next_free(cls, name: str, *, keep_checkpoints: int | None = None) -> RunFolder:
        """``runs/NAME-001``, or the first number that no folder has."""
        number = 1
        while (Path("runs") / f"{name}-{number:03d}").exists():
            number += 1
        return cls(Path("runs") / f"{name}-{number:03d}", keep_checkpoints=keep_checkpoints)

    def check_free(self) -> None:
        """Raise unless the folder is empty or does not exist.

        Raises:
            RunFolderError: it holds something.
        """
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            what = "is not empty" if self.path.is_dir() else "is a file"
            what = "already holds a run" if (self.path / "config.toml").exists() else what
            raise RunFolderError(
                f"{self.path} {what}: choose another run.output_dir"
                + (", or continue it (--resume, train(resume=True))" if what.endswith("run") else "")
            )

    def start(self, config: GRPOConfig, first_prompt: str) -> None:
        """Take the folder for a new run."""
        self.check_free()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_whole(self.path / "config.toml", to_toml(config))
            write_whole(self.path / "first_prompt.txt", first_prompt)
            write_whole(self.path / "objective.txt", explain(config.resolved_objective) + "\n")
        except OSError as error:
            raise RunFolderError(f"cannot write to run.output_dir: {error}") from None

    def check_resumable(self, config: GRPOConfig) -> int:
        """The step of the newest checkpoint, when ``config`` continues this run.

        Raises:
            RunFolderError: there is no checkpoint, or a setting that changes results differs from the run's.
        """
        steps = self.checkpoint_steps()
        if not self.path.exists():
            raise RunFolderError(f"there is no run folder {self.path} to resume")
        if not steps:
            raise RunFolderError(f"{self.path} has no checkpoint to resume from: remove it to start over")
        theirs, ours = load_config(self.path / "config.toml"), config
        # The same objective may be written in several ways.
        same = theirs.resolved_objective.settings() == ours.resolved_objective.settings()
        ignored = {f"objective.{part}" for part in ("preset", *theirs.objective.parts())} if same else set()
        changed = [
            f"{section}.{key}: the run has {_said(old)}, now {_said(new)}"
            for section in GRPOConfig.model_fields
            for key, old in getattr(theirs, section).model_dump().items()
            if (new := getattr(ours, section).model_dump()[key]) != old
            and f"{section}.{key}" not in MAY_CHANGE_ON_RESUME | ignored
        ]
        if changed:
            raise RunFolderError(
                f"cannot resume {self.path} with other settings:\n  " + "\n  ".join(changed) + "\nTo go on with them, "
                f"start a new run whose model.path is {self.checkpoint(steps[-1])}"
            )
        longer = (theirs.run.max_steps, theirs.run.num_epochs) != (ours.run.max_steps, ours.run.num_epochs)
        if longer and ours.optim.lr_scheduler_type in ENDING_SCHEDULES:
            raise RunFolderError(
                f"cannot resume {self.path} with another run.max_steps or run.num_epochs: the learning rate's schedule "
                f"({ours.optim.lr_scheduler_type}) was laid out for the run's end. Train on with a new run whose "
                "model.path is the checkpoint"
            )
        return steps[-1]

    def resume(self, config: GRPOConfig, step: int) -> None:
        """Go on after ``step``: what is done again is forgotten, and the settings are those of now."""
        self.drop_metrics_after(step)
        write_whole(self.path / "config.toml", to_toml(config))

    def first_evaluation(self) -> dict[str, Any] | None:
        """The evaluation from before the first step, if there was one."""
        path = self.path / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        first = json.loads(lines[0]) if lines else {}
        if first.get("step") != 0:
            return None
        return {key: value for key, value in first.items() if key.startswith("eval/")}

    def append_metrics(self, metrics: dict[str, Any]) -> None:
        """One line of ``metrics.jsonl``."""
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(json_value(metrics), allow_nan=False) + "\n")

    def drop_metrics_after(self, step: int) -> None:
        """Forget the lines of steps that a resumed run does again."""
        path = self.path / "metrics.jsonl"
        if path.exists():
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
            write_whole(path, "".join(kept))

    def write_summary(self, summary: dict[str, Any]) -> None:
        """``summary.json``."""
        write_whole(self.path / "summary.json", json.dumps(json_value(summary), indent=2, allow_nan=False) + "\n")

    def write_rollout(self, step: int, rollout: Rollout, batch: TokenBatch) -> None:
        """Every completion of a step, a row each, as Parquet; those that no update used have no advantage."""
        import pyarrow

        count, advantages = len(rollout.completions), split_by_sequence(batch)
        used = dict(zip(rollout.used_S, advantages, strict=True))
        kept = [used.get(place) for place in range(count)]
        columns = completion_columns(rollout.sampled) | score_columns(rollout.sampled_scores)
        columns["advantage"] = pyarrow.array([None if n is None else _mean(n) for n in kept], pyarrow.float64())
        if any(len(set(numbers)) > 1 for numbers in advantages):
            columns["token_advantages"] = pyarrow.array(kept, pyarrow.list_(pyarrow.float64()))
        write_table(columns, self.path / "rollouts" / f"step-{step}.parquet")

    def write_evaluation(self, step: int, name: str, evaluation: Evaluation) -> None:
        """Every completion of an evaluation, a row each, as Parquet."""
        write_table(evaluation.table, self.path / "evaluations" / f"step-{step}{name and '-' + name}.parquet")

    def checkpoint_steps(self) -> list[int]:
        """Steps that have a whole checkpoint, in order."""
        found = (self.path / "checkpoints").glob("step-*")
        return sorted(
            int(path.name.removeprefix("step-")) for path in found if path.name.removeprefix("step-").isdigit()
        )

    def checkpoint(self, step: int) -> Path:
        """Where a step's checkpoint is."""
        return self.path / "checkpoints" / f"step-{step}"

    def save_checkpoint(self, state: RunState) -> None:
        """Write a checkpoint beside the others, then give it its name: one that has its name is whole."""
        target = self.checkpoint(state.step)
        part = target.with_name(f"{target.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        (part / "state").mkdir(parents=True)
        save_model(state.policy, state.tokenizer, part)
        if state.keeps_reference:
            assert state.reference is not None
            torch.save(state.reference.model.state_dict(), part / "state" / "reference.pt")
        torch.save(state.optimizer.state_dict(), part / "state" / "optimizer.pt")
        loop = {
            "step": state.step,
            "version": state.policy.version,
            "place": state.cursor.state_dict(),
            "adaptive": state.adaptive.state_dict(),
            "best": state.best.state_dict(),
            "identity": state.identity,
            "random": random_state(),
        }
        torch.save(loop, part / "state" / "loop.pt")
        shutil.rmtree(target, ignore_errors=True)
        part.rename(target)
        for old in self.checkpoint_steps()[: -self._keep] if self._keep else []:
            shutil.rmtree(self.checkpoint(old))

    @property
    def best(self) -> Path:
        """Where the best model is."""
        return self.path / "best"

    def save_best(self, state: RunState) -> None:
        """Keep the model as the best so far, in place of the one before. One that has its name is whole, and there is
        always one: the one before goes when the new one has its place (``best_record`` brings it back)."""
        target, part, old = self.best, self.path / "best.part", self.path / "best.old"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        save_model(state.policy, state.tokenizer, part)
        (part / "best.json").write_text(json.dumps(state.best.record(), allow_nan=False) + "\n", encoding="utf-8")
        shutil.rmtree(old, ignore_errors=True)
        if target.exists():
            target.rename(old)
        part.rename(target)
        shutil.rmtree(old, ignore_errors=True)

    def best_record(self) -> dict[str, Any] | None:
        """What ``best/`` says of itself; None where there is none. One that a killed run had put aside has its name
        again."""
        old = self.path / "best.old"
        if old.exists() and not self.best.exists():
            old.rename(self.best)
        file = self.best / "best.json"
        found: dict[str, Any] | None = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
        return found

    def load_checkpoint(self, state: RunState) -> DataCursor:
        """Put the checkpoint of ``state.step`` into a run's parts. Returns its position in the data.

        Raises:
            RunFolderError: the run that wrote it had other prompts or rewards.
        """
        folder, device = self.checkpoint(state.step), state.policy.device
        loop = torch.load(folder / "state" / "loop.pt", weights_only=False)
        for what, value in loop["identity"].items():
            if state.identity[what] != value:
                raise RunFolderError(f"cannot resume {self.path}: its {what} were {value}, now {state.identity[what]}")
        if has_adapters(state.policy.model):
            load_adapter_weights(state.policy.model, folder)
        else:
            # Through transformers, which knows how it wrote each architecture's weights.
            with without_progress_bars():
                loaded = type(state.policy.model).from_pretrained(folder, dtype=state.policy.precision.master)
            state.policy.model.load_state_dict(loaded.state_dict())
        if state.keeps_reference:
            assert state.reference is not None
            weights = torch.load(folder / "state" / "reference.pt", map_location=device)
            state.reference.model.load_state_dict(weights)
        state.optimizer.load_state_dict(torch.load(folder / "state" / "optimizer.pt", map_location=device))
        state.policy.version = loop["version"]
        state.adaptive.load_state_dict(loop["adaptive"])
        state.best.load_state_dict(loop["best"], self.best_record())
        set_random_state(loop["random"])
        return DataCursor.from_state(loop["place"])


def save_model(policy: Policy, tokenizer: Any, path: str | Path, *, merge: bool = False) -> None:
    """Weights, config and tokenizer as transformers loads them, in the master dtype; of a model with adapters the
    adapter alone or, to ``merge``, the model with it."""
    model = policy.model
    more: dict[str, Any] = {}
    if has_adapters(model):
        model, more = (merged(model), {}) if merge else (model, {"selected_adapters": list(model.active_adapters)})
    generation_config = getattr(model, "generation_config", None)
    if generation_config is not None and generation_config.do_sample is not True:
        # A temperature beside do_sample=False is what transformers refuses to write, after all the training.
        sampling = ("temperature", "top_p", "top_k", "min_p", "typical_p")
        if any(getattr(generation_config, name, None) is not None for name in sampling):
            generation_config.do_sample = True
    with without_progress_bars():
        model.save_pretrained(path, **more)
    tokenizer.save_pretrained(path)


def _said(value: Any) -> str:
    return "it unset" if value is None else repr(value)


def split_by_sequence(batch: TokenBatch) -> list[list[float]]:
    """The advantages of each completion's tokens."""
    lengths = [len(ids) for ids in batch.completion_ids]
    return [numbers.tolist() for numbers in batch.advantages_N.cpu().split(lengths)] if lengths else []


def _mean(numbers: list[float]) -> float:
    """Without rounding where all are the same."""
    return numbers[0] if len(set(numbers)) == 1 else math.fsum(numbers) / len(numbers)


def json_value(value: Any) -> Any:
    """JSON has no NaN and no infinity: null."""
    if isinstance(value, dict):
        return {key: json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it is either the old one or the whole new one."""
    part = path.with_name(path.name + ".part")
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
