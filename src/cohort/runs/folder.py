"""The run folder: everything a run produces, readable without Cohort.

config.toml              the settings as resolved
objective.txt            the objective's formula with its numbers, and its coefficients as a table
metrics.jsonl            one line per step
first_prompt.txt         the first prompt as the model reads it, special tokens shown
rollouts/step-N.parquet  every completion of step N
evaluations/step-N.parquet  completions of the evaluation after step N (0: before the first); -NAME for a named set
best/                    the best model by eval.metric_for_best_model, as in checkpoints/, and best.json, which says why
checkpoints/step-N/      see ``checkpoints``
summary.json             written when the run ends
logs/rank-N.log          what ranks other than 0 print, under ``cohort launch``
"""

from __future__ import annotations

import errno
import itertools
import json
import logging
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import torch

from cohort.config import GRPOConfig, load_config, to_toml
from cohort.config.schema import RunConfig
from cohort.errors import DiskError, RunFolderError
from cohort.objective import explain
from cohort.parallel import World, on_main, together
from cohort.rewards.scores import Scores
from cohort.rollout.budget import free_bytes
from cohort.runs import durable
from cohort.runs.checkpoints import (
    WEIGHTS,
    Content,
    Models,
    SavedState,
    check_checkpoint,
    content_of,
    copied,
    num_copied_bytes,
    write_content,
)
from cohort.runs.durable import write_atomically
from cohort.runs.lines import append_line, as_json
from cohort.runs.lock import LOCK, check_unlocked, lock, unlock
from cohort.runs.tables import advantage_columns, completion_columns, score_columns, write_table
from cohort.runs.tensors import named_weights
from cohort.runs.writer import Write, Writer
from cohort.types import Group

MAY_CHANGE_ON_RESUME: dict[str, set[str] | bool] = {
    "model": {"device", "gradient_checkpointing", "native_kernels"},
    "rollout": {"max_batch_size", "cache_tokens", "lag"},
    "vllm": True,
    "reward": {"workers", "timeout", "retries", "on_error", "max_concurrent"},
    "optim": {"microbatch_tokens"},
    "eval": True,
    "parallel": True,
    "run": {*RunConfig.model_fields} - {"seed"},
    "report": True,
}
"""Settings that do not change what a step computes: where, how long and how fast a run goes, and how it is judged."""

COPY_SHARE = 0.5
"""Share of the free memory that the copy of a checkpoint may take while it is written; the next step needs the rest."""
log = logging.getLogger("cohort.runs")
ENDING_SCHEDULES = ("linear", "cosine")
"""Learning-rate schedules that depend on the number of updates of the whole run."""


class RunFolder:
    """The folder of one run.

    Args:
        path: the folder. It need not exist.
        settings: when to write checkpoints, and which to keep. None: the defaults.
    """

    def __init__(self, path: str | Path, settings: RunConfig | None = None) -> None:
        self.path = Path(path).expanduser()
        self._settings = settings or RunConfig()
        self._writer = Writer(self._settings.stop_when_unsaved_minutes)
        self._whole: int | None = None
        self._started = False
        self._saved = time.monotonic()
        self._missed = False

    @classmethod
    def next_free(cls, name: str) -> RunFolder:
        """``runs/NAME-001``, or the first number without a folder."""
        paths = (Path("runs") / f"{name}-{number:03d}" for number in itertools.count(1))
        return cls(next(path for path in paths if not path.exists()))

    def check_free(self) -> None:
        """Check that the folder is empty or does not exist.

        Raises:
            RunFolderError: it is not, or another process writes it.
        """
        check_unlocked(self.path)
        # The logs of ranks (``cohort launch``) are there before the run.
        others = self.path.is_dir() and any(path.name not in ("logs", LOCK) for path in self.path.iterdir())
        if others or (self.path.exists() and not self.path.is_dir()):
            what, more = "is not empty" if self.path.is_dir() else "is a file", ""
            if (self.path / "config.toml").exists():
                what, more = "already holds a run", ", or continue it (--resume, train(resume=True))"
            raise RunFolderError(f"{self.path} {what}: choose another run.output_dir{more}")

    def start(self, config: GRPOConfig, first_prompt: str) -> None:
        """Create the folder of a new run, and lock it."""
        self.check_free()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock(self.path)
            self.check_free()  # another process may have been first
            write_atomically(self.path / "config.toml", to_toml(config))
            write_atomically(self.path / "first_prompt.txt", first_prompt)
            write_atomically(self.path / "objective.txt", explain(config.resolved_objective) + "\n")
        except OSError as error:
            raise DiskError(f"cannot write to run.output_dir: {error}") from None
        self._started = True

    def check_resumable(self, config: GRPOConfig) -> int:
        """The step of the newest whole checkpoint, if a run with these settings can continue from it. Every file of it
        is read. Locks the folder.

        Raises:
            RunFolderError: there is no whole checkpoint, a setting that changes results differs from the run's, or
                another process writes the folder.
        """
        if self.path.is_dir():
            lock(self.path)
            durable.recover(self.path / "checkpoints", "step-*")
            durable.recover(self.path, "best")
        self.check_settings(config)
        if self._whole is None:
            self._whole = self._newest_whole()
        return self._whole

    def check_settings(self, config: GRPOConfig) -> None:
        """Check that the folder has a checkpoint from which a run with these settings can continue.

        Raises:
            RunFolderError: it has none, or a setting that changes results differs from the run's.
        """
        steps = self.checkpoint_steps()
        if not self.path.exists():
            raise RunFolderError(f"there is no run folder {self.path} to resume")
        if not steps:
            raise RunFolderError(f"{self.path} has no checkpoint to resume from: remove it to start over")
        saved, now = load_config(self.path / "config.toml"), config
        # The same objective may be written in several ways.
        same = saved.resolved_objective.settings() == now.resolved_objective.settings()
        ignored = MAY_CHANGE_ON_RESUME | {"objective": {"preset", *saved.objective.parts()} if same else set()}
        new = now.model_dump(exclude=ignored)
        if changed := [
            f"{section}.{key}: the run has {_shown(value)}, now {_shown(new[section][key])}"
            for section, values in saved.model_dump(exclude=ignored).items()
            for key, value in values.items()
            if value != new[section][key]
        ]:
            raise RunFolderError(
                f"cannot resume {self.path} with other settings:\n  " + "\n  ".join(changed) + "\nTo go on with them, "
                f"start a new run whose model.path is {self.checkpoint(steps[-1])}"
            )
        longer = (saved.run.max_steps, saved.run.num_epochs) != (now.run.max_steps, now.run.num_epochs)
        if longer and now.optim.lr_scheduler_type in ENDING_SCHEDULES:
            raise RunFolderError(
                f"cannot resume {self.path} with another run.max_steps or run.num_epochs: the learning rate's schedule "
                f"({now.optim.lr_scheduler_type}) depends on the end of the run. To train longer, start a new run with "
                "the checkpoint as model.path"
            )

    def _newest_whole(self) -> int:
        """The newest checkpoint that is as it was written. Logs a warning that names what is wrong with newer ones."""
        broken: list[str] = []
        for step in reversed(self.checkpoint_steps()):
            try:
                check_checkpoint(self.checkpoint(step))
            except RunFolderError as error:
                broken.append(str(error))
                continue
            if broken:
                log.warning("%s; going on from step %s instead", "; ".join(broken), step)
            return step
        raise RunFolderError(f"{self.path} has no whole checkpoint to resume from: {'; '.join(broken)}")

    def resume(self, config: GRPOConfig, step: int) -> None:
        """Prepare the folder to continue after ``step``: set later checkpoints aside, which are broken, drop later
        metrics and the summary, and write the current settings."""
        (self.path / "summary.json").unlink(missing_ok=True)  # the end of the run writes it anew
        for later in (found for found in self.checkpoint_steps() if found > step):
            aside = self.checkpoint(later).with_name(f"step-{later}.broken")
            shutil.rmtree(aside, ignore_errors=True)
            self.checkpoint(later).rename(aside)
        self.drop_metrics_after(step)
        write_atomically(self.path / "config.toml", to_toml(config))
        self._started = True

    def first_evaluation(self) -> dict[str, Any] | None:
        """Metrics of the evaluation before the first step, if there was one."""
        path = self.path / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        first = json.loads(lines[0]) if lines else {}
        if first.get("step") != 0:
            return None
        return {key: value for key, value in first.items() if key.startswith("eval/")}

    def append_metrics(self, metrics: dict[str, Any]) -> None:
        """Append a line to ``metrics.jsonl``.

        Raises:
            DiskError: something could not be written for ``run.stop_when_unsaved_minutes``.
        """
        line = as_json(metrics)
        self._write("metrics", metrics["step"], partial(append_line, self.path / "metrics.jsonl", line))
        self._writer.check()

    def drop_metrics_after(self, step: int) -> None:
        """Remove the lines of steps that a resumed run repeats."""
        path = self.path / "metrics.jsonl"
        if path.exists():
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
            write_atomically(path, "".join(kept))

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write ``summary.json``."""
        write = partial(write_atomically, self.path / "summary.json", as_json(summary, indent=2))
        self._write("summary", summary.get("steps", 0), write)
        self._writer.settle()

    def write_rollout(
        self, step: int, groups: Sequence[Group], scores: Scores, advantages: Sequence[Sequence[float] | None]
    ) -> None:
        """Write every completion of a step as a row of a Parquet file.

        Args:
            step: the step.
            groups: all sampled groups.
            scores: their scores.
            advantages: of each completion, the advantages of its tokens; None if no update used it.
        """
        columns = completion_columns(groups) | score_columns(scores) | advantage_columns(advantages)
        self._write_table("completions", step, columns, self.path / "rollouts" / f"step-{step}.parquet")

    def write_evaluation(self, step: int, name: str, table: Any) -> None:
        """Write every completion of an evaluation as a row of a Parquet file; ``name`` is the set's, or empty."""
        file = f"step-{step}{name and '-' + name}.parquet"
        self._write_table("evaluations", step, table, self.path / "evaluations" / file)

    def _write_table(self, kind: str, step: int, columns: Any, file: Path) -> None:
        table = pyarrow.table(columns) if isinstance(columns, dict) else columns
        self._write(kind, step, partial(write_table, table, file), table.nbytes)

    def _write(self, kind: str, step: int, function: Callable[[], None], num_bytes: int = 0) -> bool:
        """Write now, or later if the disk fails. Returns whether it is written."""

        def run() -> None:
            self._check_there()
            function()

        return self._writer.now(Write(kind, step, run, num_bytes))

    def _check_there(self) -> None:
        """Check that the folder has not gone: where a disk was unmounted, its path is on another one."""
        if self._started and not (self.path / "config.toml").exists():
            raise FileNotFoundError(errno.ENOENT, "the run folder is gone", str(self.path))

    def newest_checkpoint(self) -> int | None:
        """The step of the newest checkpoint, once it is written."""
        self._writer.free("checkpoint")
        return max(self.checkpoint_steps(), default=None)

    def checkpoint_steps(self) -> list[int]:
        """Steps that have a complete checkpoint, in order."""
        names = (path.name.removeprefix("step-") for path in (self.path / "checkpoints").glob("step-*"))
        return sorted(int(name) for name in names if name.isdigit())

    def checkpoint(self, step: int) -> Path:
        """The folder of a step's checkpoint."""
        return self.path / "checkpoints" / f"step-{step}"

    def checkpoint_due(self, step: int) -> bool:
        """Whether a checkpoint is due after a step: by ``run.save_steps`` or ``run.save_minutes``, or because the last
        one could not be written."""
        every, minutes = self._settings.save_steps, self._settings.save_minutes
        is_old = 0 < minutes * 60 <= time.monotonic() - self._saved
        return self._missed or is_old or (every > 0 and step % every == 0)

    def save_checkpoint(
        self, models: Models, state: SavedState, world: World | None = None, *, wait: bool = False
    ) -> None:
        """Write a checkpoint: ``step-N`` is always complete. Every rank must call; rank 0 writes: in the background,
        from a copy, if the memory allows. If the disk fails, the write is repeated until a newer one takes its place.

        Args:
            models, state: what to write.
            world: the ranks.
            wait: whether to return only when it is written.

        Raises:
            DiskError: with ``wait``, when the disk has failed for ``run.stop_when_unsaved_minutes``.
        """
        world, content = world or World(), content_of(models, state)
        self._saved = time.monotonic()
        if on_main(world, partial(self._has_room, "checkpoint", content)):
            write = partial(self._write_checkpoint, state.step, copied(content, write=world.is_main), World())
            if world.is_main:
                self._writer.in_background(Write("checkpoint", state.step, write))
        else:
            write = partial(self._write_checkpoint, state.step, content, world)
            while (missed := not self._try_all("checkpoint", state.step, write, world)) and wait:
                on_main(world, self._writer.pause)
            self._missed = missed
        if wait:
            on_main(world, self._writer.settle)

    def _has_room(self, kind: str, content: Content) -> bool:
        """Whether there is memory for a copy, once the last one of this kind is written."""
        self._writer.free(kind)
        free = free_bytes(torch.device("cpu"))
        return free is not None and num_copied_bytes(content) < free * COPY_SHARE

    def _try_all(self, kind: str, step: int, write: Callable[[], None], world: World) -> bool:
        """Write from live tensors, which every rank takes part in. Returns whether the disk took it."""
        try:
            write()
        except DiskError as error:
            on_main(world, partial(self._writer.missed, kind, step, error))
            return False
        on_main(world, partial(self._writer.made_up_for, kind))
        return True

    def _write_checkpoint(self, step: int, content: Content, world: World) -> None:
        self._replace(self.checkpoint(step), content, world)
        keep, every = self._settings.save_total_limit, self._settings.keep_every
        for old in self.checkpoint_steps()[:-keep] if keep and world.is_main else []:
            if not every or old % every:
                durable.remove(self.checkpoint(old))

    @property
    def best(self) -> Path:
        """The folder of the best model."""
        return self.path / "best"

    def save_best(self, models: Models, record: dict[str, Any], world: World | None = None) -> bool:
        """Replace the best model. ``best/`` is always complete. Every rank must call; rank 0 writes. If the disk fails,
        a copy is kept if the memory allows, and its write repeated until a newer one takes its place. Returns whether
        it is written."""
        world = world or World()
        weights = {WEIGHTS: named_weights(models.policy.model)}
        content = Content(models, weights, files={"best.json": as_json(record).encode()})
        step = record.get("step", 0)
        if self._try_all("best model", step, partial(self._replace, self.best, content, world), world):
            return True
        if on_main(world, partial(self._has_room, "best model", content)):
            write = partial(self._replace, self.best, copied(content, write=world.is_main), World())
            if world.is_main:
                self._writer.in_background(Write("best model", step, write))
        else:
            log.warning("the best model, of step %s, is lost: no memory for a copy of it", step)
        return False

    def _replace(self, target: Path, content: Content, world: World) -> None:
        """Write a folder in place of an older one. Every rank must call, unless the content is a copy."""

        def replace() -> None:
            if world.size == 1:  # other ranks wait for what the block exchanges
                self._check_there()
            with durable.replaced(target) if world.is_main else nullcontext(target) as folder:
                write_content(folder, content, write=world.is_main)
                if world.is_main:
                    self._check_there()
                    with suppress(FileNotFoundError):  # a resumed run has the lines of its steps, if any
                        durable.sync_path(self.path / "metrics.jsonl")

        together(world, replace)

    def close(self) -> None:
        """Wait for what is being written, try once more what failed, and unlock the folder."""
        self._writer.close()
        if self._started:
            unlock(self.path)

    def best_record(self) -> dict[str, Any] | None:
        """The contents of ``best/best.json``; None without a best model."""
        file = self.best / "best.json"
        found: dict[str, Any] | None = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
        return found


def _shown(value: Any) -> str:
    return "unset" if value is None else repr(value)
