"""The run folder: everything a run produces, readable without Cohort.

config.toml              the settings as resolved
objective.txt            the objective's formula with its numbers, and its coefficients as a table
metrics.jsonl            one line per step
first_prompt.txt         the first prompt as the model reads it, special tokens shown
rollouts/step-N.parquet  every completion of step N, with what the updates saw of each token (docs/store.md)
journal/step-N.safetensors  the rollout of step N, until checkpoints hold the step (see ``journal``)
evaluations/step-N.parquet  completions of the evaluation after step N (0: before the first); -NAME for a named set
best/                    the best model by eval.metric_for_best_model, as in checkpoints/, and best.json, which says why
merged/                  the model with its adapters merged, with model.lora.save_merged
checkpoints/step-N/      see ``checkpoints``
starts.jsonl             a line for each process that started or resumed the run (see ``starts``)
replays/step-N-NAME.json what `cohort replay` found: step N under another objective
summary.json             written when the run ends
logs/rank-N.log          what ranks other than 0 print, under ``cohort launch``
"""

from __future__ import annotations

import itertools
import logging
import shutil
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from cohort.config import GRPOConfig, load_config, to_toml
from cohort.config.schema import RunConfig
from cohort.errors import ConfigError, DiskError, RunFolderError
from cohort.lock import LOCK, Lock
from cohort.objective import explain
from cohort.parallel import World, on_main, together
from cohort.runs import durable
from cohort.runs.changes import Change, check_keys, fact_changes, refuse, setting_changes
from cohort.runs.checkpoints import (
    WEIGHTS,
    Content,
    Models,
    SavedState,
    check_checkpoint,
    content_of,
    copied,
    has_room,
    write_content,
)
from cohort.runs.durable import append_line, as_json, write_atomically
from cohort.runs.journal import StoredRollout, encode_rollout, load_rollout
from cohort.runs.models import named_weights
from cohort.runs.reader import Run, only_settings, was_started
from cohort.runs.reading import metric_lines, read_best, read_object
from cohort.runs.starts import STARTS, WRITTEN, Start, check_replaceable, clear, last_facts
from cohort.runs.tables import write_table
from cohort.runs.trust import check_files, remember
from cohort.runs.writer import Write, Writer
from cohort.watchdog import waiting
from cohort.workers import close_at_exit

log = logging.getLogger("cohort.runs")


class RunFolder:
    """The folder of one run.

    Args:
        path: the folder. It need not exist.
        settings: when to write checkpoints, and which to keep. None: the defaults.
        shared: whether a new run may begin in a folder that holds something else, if it writes over none of it.
    """

    def __init__(self, path: str | Path, settings: RunConfig | None = None, *, shared: bool = False) -> None:
        self.path, self._shared = Path(path).expanduser(), shared
        self._lock = Lock(self.path)
        self._settings = settings or RunConfig()
        self._writer = Writer(self._settings.stop_when_unsaved_minutes)
        self._whole: int | None = None
        self._started = False
        self._saved = time.monotonic()
        self.saved: deque[tuple[int, Path]] = deque()  # models that were written, with their step; callbacks take them

    @classmethod
    def next_free(cls, name: str) -> RunFolder:
        """``runs/NAME-001``, or the first number without a folder."""
        paths = (Path("runs") / f"{name}-{number:03d}" for number in itertools.count(1))
        return cls(next(path for path in paths if not path.exists()))

    def check_free(self) -> None:
        """Check that a new run may begin: the folder is empty, does not exist, or holds nothing of the names that a
        run writes if it is shared.

        Raises:
            RunFolderError: it may not, or another process writes the folder.
        """
        check_files(self.path)
        self._lock.check()
        if self.path.exists() and not self.path.is_dir():
            raise RunFolderError(f"{self.path} is a file: choose another run.output_dir")
        if not self.path.exists() or all(_is_no_run(path) for path in self.path.iterdir()):
            return
        if not self.is_run and not self._shared:
            raise RunFolderError(f"{self.path} is not empty: choose another run.output_dir")
        if not self.is_run:
            if found := [name for name in ("config.toml", *WRITTEN) if (self.path / name).exists()]:
                taken = ", ".join(found)
                raise RunFolderError(f"{self.path} has {taken}, which a run writes: choose another run.output_dir")
            return
        how = f"continue it with 'cohort resume {self.path}' or train(resume=True), or choose another run.output_dir"
        raise RunFolderError(f"{self.path} already holds a run: {how}")

    @property
    def is_run(self) -> bool:
        """Whether the folder holds a run, and not settings alone."""
        return (self.path / "config.toml").is_file() and was_started(self.path)

    def start(
        self, config: GRPOConfig, first_prompt: str, *, anew: bool = False, facts: Mapping[str, str] | None = None
    ) -> None:
        """Create the folder of a new run, and lock it.

        Args:
            config: the settings.
            first_prompt: the first prompt as the model reads it.
            anew: replace a run that ended before its first checkpoint.
            facts: of the run. If they are those of the one that is replaced, its journal stays.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.take()
            if anew:
                clear(self.path, keep_journal=self._is_begun_as(config, facts or {}))
            else:
                self.check_free()
            write_atomically(self.path / "config.toml", to_toml(config))  # first: it marks the folder as a run's
            write_atomically(self.path / "first_prompt.txt", first_prompt)
            write_atomically(self.path / "objective.txt", explain(config.resolved_objective) + "\n")
            remember(self.path)
        except OSError as error:
            raise DiskError(f"cannot write to run.output_dir: {error}") from None
        self._started = True

    def _is_begun_as(self, config: GRPOConfig, facts: Mapping[str, str]) -> bool:
        """Whether the folder's run began with settings and facts that change no result."""
        saved, before = load_config(self.path / "config.toml", of_run=True), last_facts(self.path)
        changes = [*setting_changes(saved, config), *fact_changes(before, facts)]
        return bool(before and facts) and not any(one.reaches_weights for one in changes)

    def take(self) -> None:
        """Lock the folder, until ``close``, and clear up what a killed process has left half written. Does nothing if
        it is locked by this object already.

        Raises:
            RunFolderError: another process or another trainer of this one writes the folder, or as ``check_files``.
        """
        check_files(self.path)
        if self._lock.take():
            durable.recover(self.path / "checkpoints", "step-*")
            for name in ("best", "merged"):
                durable.recover(self.path, name)

    def check_resumable(self, config: GRPOConfig, allowed: Collection[str] = ()) -> int:
        """The step of the newest whole checkpoint, if a run with these settings can continue from it. Every file of it
        is read. Takes the folder.

        Raises:
            RunFolderError: there is no whole checkpoint, a setting that changes results differs from the run's, or
                another process writes the folder.
        """
        if self.is_run:
            self.take()
        self.check_settings(config, allowed)
        if self._whole is None:
            self._whole = self._newest_whole()
        return self._whole

    def check_settings(self, config: GRPOConfig, allowed: Collection[str] = ()) -> list[Change]:
        """The settings that differ from the run's.

        Args:
            config: the settings now.
            allowed: keys of changes that are allowed though they change results.

        Raises:
            RunFolderError: the folder holds no run, or a setting that changes results differs and is not allowed.
        """
        self.check_is_run()
        check_keys(allowed)
        saved = load_config(self.path / "config.toml", of_run=True)
        changes = setting_changes(saved, config, facts_known=bool(self.checkpoint_steps()))
        refuse(self.path, changes, allowed)
        return changes

    def check_is_run(self) -> None:
        """Check that the folder holds a run, and that nothing in it leads elsewhere.

        Raises:
            RunFolderError: it does not, or as ``check_files``.
        """
        check_files(self.path)
        if not self.path.exists():
            raise RunFolderError(f"there is no run folder {self.path} to resume")
        if not self.is_run:
            hint, above = "", self.path.parent.parent
            if (above / "config.toml").exists():
                hint = f" Its run is {above}."
            elif any((self.path / name).exists() for name in ("config.json", "adapter_config.json")):
                hint = " It holds a model: to train it, set model.path to it, and run.output_dir to another folder."
            no_run = f"is not a run folder: it has no config.toml.{hint}"
            raise RunFolderError(only_settings(self.path) or f"{self.path} {no_run}")

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

    def resume(self, config: GRPOConfig, step: int, metrics_step: int | None = None) -> None:
        """Prepare the folder to continue after ``step``: set later checkpoints aside, which are broken, drop later
        metrics and the summary, and write the current settings.

        Args:
            config: the current settings.
            step: complete steps.
            metrics_step: the last step whose metrics stay; None: ``step``.
        """
        (self.path / "summary.json").unlink(missing_ok=True)  # the end of the run writes it anew
        for later in (found for found in self.checkpoint_steps() if found > step):
            aside = self.checkpoint(later).with_name(f"step-{later}.broken")
            shutil.rmtree(aside, ignore_errors=True)
            self.checkpoint(later).rename(aside)
        self.drop_metrics_after(step if metrics_step is None else metrics_step)
        write_atomically(self.path / "config.toml", to_toml(config))
        remember(self.path)
        self._started = True

    def evaluations(self) -> dict[int, dict[str, Any]]:
        """Metrics of the evaluations so far, by step; 0 is the one before the first step."""
        rows = (row for _, row in metric_lines(self.path / "metrics.jsonl")[0])
        found = {row["step"]: {key: row[key] for key in row if key.startswith("eval/")} for row in rows}
        return {step: evaluated for step, evaluated in found.items() if evaluated}

    def record_start(self, start: Start, step: int, steps: int, facts: Mapping[str, str]) -> None:
        """Append a line to ``starts.jsonl``: of a start after ``step`` of the run's ``steps``."""
        line = as_json(start.line(step, steps, facts))
        self._write("record of the start", step, partial(append_line, self.path / STARTS, line))

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
            write_atomically(path, "".join(line for line, metrics in metric_lines(path)[0] if metrics["step"] <= step))

    @property
    def has_summary(self) -> bool:
        """Whether the run has ended. A resumed run removes the summary when it begins."""
        return (self.path / "summary.json").is_file()

    @property
    def save_request(self) -> Path:
        """A file that asks the run for a checkpoint. It also reaches a run on another machine."""
        return self.path / "save.request"

    def read_summary(self) -> dict[str, Any]:
        """The contents of ``summary.json``."""
        return read_object(self.path / "summary.json")

    def write_summary(self, summary: dict[str, Any], *, keep_journal: bool = False) -> None:
        """Write ``summary.json``, and remove the journal.

        Args:
            summary: of the run, which has ended.
            keep_journal: whether a run that goes on from the checkpoint before the last needs it.
        """
        write = partial(write_atomically, self.path / "summary.json", as_json(summary, indent=2))
        self._write("summary", summary.get("steps", 0), write)
        self.settle()
        if not keep_journal:
            shutil.rmtree(self.path / "journal", ignore_errors=True)

    def write_rollout(self, step: int, table: Any) -> None:
        """Write the completions of a step."""
        file = self.path / "rollouts" / f"step-{step}.parquet"
        self._write("completions", step, partial(write_table, table, file), table.nbytes)

    def write_evaluation(self, step: int, name: str, table: Any) -> None:
        """Write every completion of an evaluation as a row of a Parquet file; ``name`` is the set's, or empty."""
        file = self.path / "evaluations" / f"step-{step}{name and '-' + name}.parquet"
        self._write("evaluations", step, partial(write_table, table, file), table.nbytes)

    def journal(self, step: int) -> Path:
        """The file of a step's rollout."""
        return self.path / "journal" / f"step-{step}.safetensors"

    def journal_steps(self) -> list[int]:
        """The steps, from 1, whose rollouts are in the journal."""
        names = (path.stem.removeprefix("step-") for path in (self.path / "journal").glob("step-*.safetensors"))
        return sorted(int(name) for name in names if name.isdecimal())

    def write_journal(self, step: int, rollout: StoredRollout) -> None:
        """Write a step's rollout, to the disk; ``step`` counts from 1."""
        try:
            content = encode_rollout(rollout)
        except RecursionError:  # a state that holds itself
            log.warning("the rollout of step %d cannot be stored: it would be sampled again", step)
            return
        self._write("journal", step, partial(write_atomically, self.journal(step), content), len(content))

    def read_journal(self, step: int) -> StoredRollout:
        """The rollout of a step.

        Raises:
            RunFolderError: the file is missing or damaged.
        """
        return load_rollout(self.journal(step))

    def forget_journal(self, steps: Collection[int]) -> None:
        """Remove the rollouts of some steps, where the disk lets it."""
        for step in steps:
            with suppress(OSError):
                self.journal(step).unlink()

    def _write(self, kind: str, step: int, function: Callable[[], None], num_bytes: int = 0) -> None:
        """Write now, or later if the disk fails."""
        self._writer.now(Write(kind, step, partial(self._write_there, function), num_bytes))

    def _write_there(self, function: Callable[[], None]) -> None:
        self._check_there()
        function()

    def _check_there(self) -> None:
        """Check that the folder has not gone: where a disk was unmounted, its path is on another one."""
        if self._started and not (self.path / "config.toml").exists():
            raise DiskError(f"{self.path}: the run folder is gone")

    def checkpoint_steps(self) -> list[int]:
        """Steps that have a complete checkpoint, in order."""
        return list(Run(self.path).checkpoints)

    def checkpoint(self, step: int) -> Path:
        """The folder of a step's checkpoint."""
        return self.path / "checkpoints" / f"step-{step}"

    def checkpoint_due(self, step: int) -> bool:
        """Whether a checkpoint is due after a step, by ``run.save_steps`` or ``run.save_minutes``."""
        every, minutes = self._settings.save_steps, self._settings.save_minutes
        return 0 < minutes * 60 <= time.monotonic() - self._saved or (every > 0 and step % every == 0)

    @waiting("checkpoint")
    def save_checkpoint(
        self, models: Models, state: SavedState, world: World | None = None, *, wait: bool = False
    ) -> None:
        """Write a checkpoint: ``step-N`` is always complete. Every rank must call; rank 0 writes: in the background,
        from a copy, if the memory allows. Waits until the last one is written.

        Args:
            models, state: what to write.
            world: the ranks.
            wait: whether to return only when it is written.

        Raises:
            DiskError: the disk has failed for ``run.stop_when_unsaved_minutes``.
        """
        world, content = world or World(), content_of(models, state)
        target, self._saved = self.checkpoint(state.step), time.monotonic()
        self._settle(world, "checkpoint")
        if on_main(world, partial(has_room, content)):
            copy = copied(content, write=world.is_main)
            if world.is_main:
                write = partial(self._write_there, partial(self._replace, target, copy))
                self._writer.in_background(Write("checkpoint", state.step, write))
        else:
            self._write_model("checkpoint", target, content, world)
        if wait:
            self._settle(world)

    def _write_model(self, kind: str, target: Path, content: Content, world: World) -> None:
        """Write live tensors, which every rank takes part in, again and again if the disk fails."""
        write = partial(self._replace, target, content, write=world.is_main)
        while True:
            try:
                on_main(world, self._check_there)
                together(world, write)
            except DiskError as error:
                on_main(world, partial(self._writer.failed, Write(kind, content.step, write), error))
            else:
                return on_main(world, self._writer.succeeded)

    def settle(self) -> None:
        """Wait until everything is written.

        Raises:
            DiskError: the disk has failed for ``run.stop_when_unsaved_minutes``.
        """
        self._settle(World())

    def _settle(self, world: World, kind: str = "") -> None:
        """Wait for the writes of a kind. The ranks meet in between, so that none takes another for stuck."""
        while not on_main(world, partial(self._writer.wait, kind)):
            pass

    @property
    def best(self) -> Path:
        """The folder of the best model."""
        return self.path / "best"

    @waiting("saving the best model")
    def save_best(self, models: Models, record: dict[str, Any], world: World | None = None) -> None:
        """Replace the best model. ``best/`` is always complete. Every rank must call; rank 0 writes.

        Raises:
            DiskError: the disk has failed for ``run.stop_when_unsaved_minutes``.
        """
        weights, files = named_weights(models.policy.model), {"best.json": as_json(record).encode()}
        content = Content(models, {WEIGHTS: weights}, record.get("step", 0), files)
        self._write_model("best model", self.best, content, world or World())

    def _replace(self, target: Path, content: Content, *, write: bool = True) -> None:
        """Write a model in place of an older one, and remove what a checkpoint makes superfluous."""
        write_content(target, content, write=write, synced=self.path / "metrics.jsonl")
        if write:
            self.saved.append((content.step, target))
        if not write or target == self.best:
            return
        keep, every = self._settings.save_total_limit, self._settings.keep_every
        for old in self.checkpoint_steps()[:-keep] if keep else []:
            if not every or old % every:
                durable.remove(self.checkpoint(old))
        held = self.checkpoint_steps()[-2:][0]  # should the newest be damaged, the run goes on from the one before
        self.forget_journal([step for step in self.journal_steps() if step <= held])

    def close(self) -> None:
        """Wait for what is being written, try once more what failed, and unlock the folder."""
        self._writer.close()
        self._lock.release()

    def best_record(self) -> dict[str, Any] | None:
        """The contents of ``best/best.json``; None without a best model."""
        try:
            return read_best(self.best / "best.json") if self.best.exists() else None
        except RunFolderError as error:
            raise RunFolderError(f"{error}. To go on without the best model so far, remove {self.best}") from None


def _is_no_run(path: Path) -> bool:
    """Whether a new run may find this in its folder: logs of ranks, or a file that a kill has left half written."""
    return path.name in ("logs", LOCK) or path.name.endswith(".toml.part")


# ----------------------------------------
# How a process begins with the run in a folder, and ends.


T = TypeVar("T")
Resume = bool | Literal["auto"]
"""``train(resume=...)``. True: the folder must hold a run. "auto": it may."""


class Beginning(StrEnum):
    """How a process begins with a run."""

    NEW = "new"
    """From the first step, in a folder without a run."""
    AGAIN = "again"
    """From the first step, in the folder of a run that ended before its first checkpoint."""
    RESUMED = "resumed"
    """From a checkpoint."""
    COMPLETE = "complete"
    """There is nothing to do."""


def find_run(folder: RunFolder, config: GRPOConfig, resume: Resume, allowed: Collection[str] = ()) -> Beginning:
    """How to begin a run with these settings. A run whose checkpoints were removed, or are all set aside, does not
    start again. A complete run whose newest checkpoint is damaged goes on from the one before.

    Args:
        folder: the run folder.
        config: the settings.
        resume: whether to resume. False: the folder must hold no run.
        allowed: keys of changes that are allowed though they change results.

    Raises:
        RunFolderError: the folder holds something else, or a run with other settings.
    """
    if not resume or (resume == "auto" and not folder.is_run):
        folder.check_free()
        return Beginning.NEW
    if folder.is_run:
        folder.take()
    folder.check_settings(config, allowed)
    saved = load_config(folder.path / "config.toml", of_run=True)
    steps = folder.checkpoint_steps()
    ended = folder.has_summary and resume == "auto" and not _goes_further(saved, config, folder.read_summary())
    if ended and (not steps or folder.check_resumable(config, allowed) == steps[-1]):
        folder.close()
        return Beginning.COMPLETE
    if not steps:
        check_replaceable(folder.path)
    return Beginning.RESUMED if steps else Beginning.AGAIN


def _goes_further(saved: GRPOConfig, now: GRPOConfig, summary: Mapping[str, Any]) -> bool:
    """Whether a complete run is to train on: it is given another end, or another patience after it stopped early."""
    ends = [(config.run.max_steps, config.run.num_epochs) for config in (saved, now)]
    patience = [config.eval.early_stopping_patience for config in (saved, now)]
    return ends[0] != ends[1] or (bool(summary.get("stopped_early")) and patience[0] != patience[1])


def output_folder(config: GRPOConfig, world: World, *, resume: bool = False) -> RunFolder:
    """The folder of the settings, or the next free one under ``runs``, which rank 0 finds.

    Raises:
        ConfigError: ``resume`` without ``run.output_dir``.
    """
    if config.run.output_dir is not None:
        return RunFolder(config.run.output_dir, config.run)
    if resume:
        raise ConfigError("to resume a run, set run.output_dir to its folder")
    path = on_main(world, lambda: RunFolder.next_free("run").path)
    return RunFolder(path, config.run)


def find_folder(
    config: GRPOConfig, world: World, resume: Resume, allowed: Collection[str] = (), folder: RunFolder | None = None
) -> tuple[RunFolder, Beginning]:
    """The folder of the settings unless another is given, and how to begin with what is in it: ``output_folder`` and
    ``find_run``."""
    folder = folder or output_folder(config, world, resume=bool(resume))
    with closed_on_error(folder):
        return folder, on_main(world, lambda: find_run(folder, config, resume, allowed))


def template_time(config: GRPOConfig) -> str | None:
    """``data.template_time``; if it is unset, that of the run in ``run.output_dir``, which may be resumed."""
    known, folder = config.data.template_time, config.run.output_dir
    if known is None and folder is not None and RunFolder(folder).is_run:
        with suppress(ConfigError):  # said when the run is resumed
            known = load_config(Path(folder).expanduser() / "config.toml", of_run=True).data.template_time
    return known


def with_template_time(config: GRPOConfig, time: str | None) -> GRPOConfig:
    """The settings with ``data.template_time``, unless it is None."""
    return (
        config.model_copy(update={"data": config.data.model_copy(update={"template_time": time})}) if time else config
    )


@contextmanager
def closed_on_error(folder: RunFolder) -> Iterator[None]:
    """Close the folder if the block raises, so that another trainer of the process may take it."""
    try:
        yield
    except BaseException:
        folder.close()
        raise


def closing(folder: RunFolder, steps: Iterable[T]) -> Generator[T]:
    """The steps of a run, after which its folder is closed, however they end: also if they never begin, and when the
    interpreter exits before."""

    def closed() -> Generator[Any]:
        try:
            yield
            yield from steps
        finally:
            folder.close()

    found = closed()
    next(found)  # enters the block: a generator that is not in it is closed without leaving it
    close_at_exit(found)
    return found


def log_to(folder: RunFolder, world: World) -> None:
    """Send this process's log and warnings to ``logs/rank-N.log``, and not to the console, which is rank 0's. Does
    nothing on rank 0."""
    if world.is_main:
        return
    path = folder.path / "logs" / f"rank-{world.rank}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    logging.captureWarnings(True)
    logging.getLogger().addHandler(handler)
