"""Send what a run folder holds to a tracker, each step once."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from cohort.config.account import account_records
from cohort.config.secrets import hide_secrets
from cohort.errors import ConfigError, RunFolderError
from cohort.lock import Lock
from cohort.report.diagnosis import Diagnosis, Finding, Level
from cohort.report.rollouts import StoredStep
from cohort.report.trackers.kinds import KINDS, check_installed
from cohort.runs.durable import write_atomically
from cohort.runs.reader import Run, flat, json_object

# ----------------------------------------
# What a tracker was sent of a run, in ``trackers/NAME/state.json`` of the run folder: a run that goes on, and
# ``cohort track``, continue from there.


ID = re.compile(r"[\w.-]{1,128}")
MAX_STATE = 1 << 16
"""Bytes of a state file."""
MAX_ERROR = 500
"""Characters of an error in it."""


@dataclass(frozen=True, slots=True)
class State:
    """What a tracker was sent of a run."""

    id: str | None = None
    """The run's id in the tracker."""
    project: str | None = None
    """The project that the run is in."""
    step: int = -1
    """The last step that was sent; 0 is the evaluation before the first, -1: nothing."""
    configured: bool = False
    """Whether the settings were sent."""
    error: str | None = None
    """Why the last attempt failed."""

    @classmethod
    def read(cls, run: Path, kind: str) -> Self:
        """The state in a run folder; the empty one if there is none, or it is damaged."""
        try:
            with file_of(run, kind).open("rb") as file:
                found = json_object(file.read(MAX_STATE).decode())
        except (OSError, ValueError, RecursionError):
            return cls()
        texts = {key: _text(found.get(key)) for key in ("id", "project", "error")}
        if texts["id"] and not ID.fullmatch(texts["id"]):
            texts["id"] = None
        step = found.get("step")
        step = step if type(step) is int and step >= -1 else -1
        return cls(**texts, step=step, configured=found.get("configured") is True)

    def write(self, run: Path, kind: str, **changes: Any) -> Self:
        """Write the state with some changes; returns it."""
        changed = replace(self, **changes)
        assert changed.id is None or ID.fullmatch(changed.id), changed.id  # or it would not be read again
        write_atomically(file_of(run, kind), json.dumps(asdict(changed)) + "\n")
        return changed

    def remember(self, run: Path, kind: str) -> None:
        """Record that this account sends the run folder to this run of the tracker."""
        record = self._record(run, kind)
        with suppress(OSError):  # there may be no home to write to: then ``cohort track`` needs --project
            record.parent.mkdir(parents=True, exist_ok=True)
            record.touch()

    def is_known(self, run: Path, kind: str) -> bool:
        """Whether this account has sent the run folder to this run of the tracker."""
        return self._record(run, kind).exists()

    def _record(self, run: Path, kind: str) -> Path:
        key = json.dumps([str(run.resolve()), kind, self.project, self.id])
        return account_records("tracker_runs") / hashlib.sha256(key.encode()).hexdigest()


def folder_of(run: Path, kind: str) -> Path:
    """The folder of a tracker in a run folder."""
    return run / "trackers" / kind


def file_of(run: Path, kind: str) -> Path:
    """The state file of a tracker in a run folder."""
    return folder_of(run, kind) / "state.json"


def error_text(error: BaseException) -> str:
    """The first line of a tracker's exception, without secrets: MLflow's name the server with user and password."""
    text: str = hide_secrets(f"{type(error).__name__}: {error}".splitlines()[0][: 10 * MAX_ERROR])
    return text[:MAX_ERROR]


def _text(value: Any) -> str | None:
    return value[:1000] if isinstance(value, str) else None


# ----------------------------------------
# One class per tracker: ``accelerate.tracking`` opens it, logs numbers and settings, and closes it; what accelerate
# lacks, tables and findings, is sent through the tracker's own library.
#
# accelerate was chosen over ``transformers.integrations``, whose callbacks rename metrics (``train/...``), need a
# ``TrainingArguments``, and send no tables. The libraries print, patch and install handlers: use only in a process
# that does nothing else.


RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
Rows = Sequence[Sequence[Any]]


@dataclass(frozen=True, slots=True)
class Opening:
    """What opens a run in a tracker."""

    folder: Path
    """The run folder."""
    project: str
    name: str
    """The name to show."""
    id: str | None = None
    """That of the tracker's run to go on with; None: a new one."""
    step: int = -1
    """The last step that was sent."""


class Outlet:
    """A run in a tracker: what most trackers share."""

    tracker: Any
    """accelerate's tracker."""
    id: str
    """The run's id, by which it can be opened again."""
    step: int | None = None
    """The last step that the tracker has; None: it does not say."""
    settings_once = False
    """Whether settings that were sent cannot be sent again when the run goes on."""

    def name_of(self, key: str) -> str:
        """A metric's name as the tracker accepts it."""
        return key

    def configure(self, values: dict[str, bool | int | float | str]) -> None:
        """Send the settings."""
        self.tracker.store_init_configuration(values)

    def table(self, name: str, columns: Sequence[str], rows: Rows, step: int) -> None:
        """Send a table of completions."""
        raise NotImplementedError

    def say(self, finding: Finding, *, live: bool) -> None:
        """Send a finding of the diagnosis. ``live``: the run is in progress, so that somebody may be told."""
        raise NotImplementedError


def _started(tracker: Any) -> Any:
    tracker.main_process_only = False  # this process is no rank
    tracker.start()
    return tracker


class _TensorBoard(Outlet):
    """Event files in the run folder. Tables and findings are texts."""

    settings_once = True

    def __init__(self, opening: Opening) -> None:
        from accelerate.tracking import TensorBoardTracker

        again = {"purge_step": opening.step + 1} if opening.step >= 0 else {}
        self.tracker = _started(TensorBoardTracker("tensorboard", opening.folder, **again))
        self.id = "tensorboard"

    def configure(self, values: dict[str, bool | int | float | str]) -> None:
        # accelerate would write the settings as another run.
        from torch.utils.tensorboard.summary import hparams

        for summary in hparams(values, {}):
            self.tracker.writer.file_writer.add_summary(summary)

    def table(self, name: str, columns: Sequence[str], rows: Rows, step: int) -> None:
        # TensorBoard renders Markdown. In an indented block, a completion stays text.
        lines = (f"    {line}" for row in rows for line in [*_lines(columns, row).splitlines(), ""])
        self.tracker.writer.add_text(name, "\n".join(lines), step)

    def say(self, finding: Finding, *, live: bool) -> None:  # noqa: ARG002
        self.tracker.writer.add_text(f"findings/{finding.check}", _words(finding), finding.end or finding.step)


class _Wandb(Outlet):
    """W&B. Findings go to the run's summary and, from a run in progress, as alerts."""

    def __init__(self, opening: Opening) -> None:
        import wandb
        from accelerate.tracking import WandBTracker

        settings = wandb.Settings(console="off", silent=True)
        again = {"id": opening.id, "resume": "allow"} if opening.id else {}
        # Its files stay in its own place: it links them to its cache, and a run folder may have no such links.
        self.tracker = _started(WandBTracker(opening.project, name=opening.name, settings=settings, **again))
        run = self.tracker.run
        self.id = run.id
        self.step = run.step - 1 if run.resumed else None

    def table(self, name: str, columns: Sequence[str], rows: Rows, step: int) -> None:
        self.tracker.log_table(name, columns=list(columns), data=[list(row) for row in rows], step=step)

    def say(self, finding: Finding, *, live: bool) -> None:
        self.tracker.run.summary[f"findings/{finding.check}"] = _words(finding)
        if live and finding.stands and finding.level is not Level.NOTE and finding.worst is None:  # it is not milder
            from wandb import AlertLevel

            level = AlertLevel.ERROR if finding.level is Level.ALARM else AlertLevel.WARN
            self.tracker.run.alert(title=f"{finding.check} at step {finding.step}", text=_words(finding), level=level)


class _MLflow(Outlet):
    """MLflow, at ``MLFLOW_TRACKING_URI``. Tables are artifacts, findings tags.

    In its store of plain files, a metric is a file and each "/" in its name a folder, so that "rewards/f" and
    "rewards/f/std" exclude each other: there, names have "." in place of "/".
    """

    settings_once = True

    def __init__(self, opening: Opening) -> None:
        import mlflow
        from accelerate.tracking import MLflowTracker

        self._in_files = urlsplit(mlflow.get_tracking_uri()).scheme in ("", "file")
        self.tracker = _started(MLflowTracker(opening.project, run_id=opening.id, run_name=opening.name))
        self.id = self.tracker.active_run.info.run_id

    def name_of(self, key: str) -> str:
        name = re.sub(r"[^\w\-. :/]", "_", key)
        return name.replace("/", ".") if self._in_files else name

    def table(self, name: str, columns: Sequence[str], rows: Rows, step: int) -> None:
        import mlflow

        data = {column: list(values) for column, values in zip(columns, zip(*rows, strict=True), strict=True)}
        mlflow.log_table(data, f"{name}/step-{step}.json")

    def say(self, finding: Finding, *, live: bool) -> None:  # noqa: ARG002
        import mlflow

        mlflow.set_tag(f"findings/{finding.check}", _words(finding))


def run_name(folder: str) -> str:
    """A name that no other run has: trackio knows its runs by their names."""
    return re.sub(r"[^\w.-]+", "-", folder)[:100] + f"-{os.urandom(3).hex()}"


class _Trackio(Outlet):
    """trackio, on this machine or in a Space."""

    def __init__(self, opening: Opening) -> None:
        from accelerate.tracking import TrackioTracker

        name = opening.id or run_name(opening.name)
        self.tracker = _started(TrackioTracker(opening.project, name=name, resume="allow", embed=False))
        self.id = name

    def name_of(self, key: str) -> str:
        return "wall_time" if key == "time" else key  # which is a name of its own

    def table(self, name: str, columns: Sequence[str], rows: Rows, step: int) -> None:
        import pandas
        import trackio

        frame = pandas.DataFrame([list(row) for row in rows], columns=list(columns))
        self.tracker.log({name: trackio.Table(dataframe=frame)}, step=step)

    def say(self, finding: Finding, *, live: bool) -> None:  # noqa: ARG002
        import trackio

        levels = {Level.ALARM: trackio.AlertLevel.ERROR, Level.WARNING: trackio.AlertLevel.WARN}
        level = levels.get(finding.level, trackio.AlertLevel.INFO)
        self.tracker.run.alert(title=finding.check, text=_words(finding), level=level, step=finding.end or finding.step)


class _SwanLab(Outlet):
    """SwanLab. Tables and findings are texts."""

    def __init__(self, opening: Opening) -> None:
        import swanlab
        from accelerate.tracking import SwanLabTracker

        again = {"id": opening.id, "resume": "allow"} if opening.id else {}
        self.tracker = _started(SwanLabTracker(opening.project, experiment_name=opening.name, **again))
        self._text: Callable[..., Any] = swanlab.Text
        self.id = str(self.tracker.run.id)

    def table(self, name: str, columns: Sequence[str], rows: Rows, step: int) -> None:
        self.tracker.log({name: [self._text(_lines(columns, row)) for row in rows]}, step=step)

    def say(self, finding: Finding, *, live: bool) -> None:  # noqa: ARG002
        step = finding.end or finding.step
        self.tracker.log({f"findings/{finding.check}": self._text(_words(finding))}, step=step)


class _Comet(Outlet):
    """Comet."""

    def __init__(self, opening: Opening) -> None:
        import comet_ml
        from accelerate.tracking import CometMLTracker

        settings = comet_ml.ExperimentConfig(
            name=opening.name,
            log_code=False,
            log_git_metadata=False,
            auto_output_logging=False,
            auto_param_logging=False,
            auto_metric_logging=False,
        )
        online = None if os.environ.get("COMET_START_ONLINE") is None else os.environ["COMET_START_ONLINE"] != "0"
        more = {"experiment_key": opening.id, "mode": "get_or_create", "online": online}
        self.tracker = _started(CometMLTracker(opening.project, experiment_config=settings, **more))
        self.id = self.tracker.writer.get_key()

    def table(self, name: str, columns: Sequence[str], rows: Rows, step: int) -> None:
        data = [list(row) for row in rows]
        self.tracker.writer.log_table(f"{name}/step-{step}.csv", tabular_data=data, headers=list(columns), step=step)

    def say(self, finding: Finding, *, live: bool) -> None:  # noqa: ARG002
        self.tracker.writer.log_text(_words(finding), step=finding.end or finding.step)


OUTLETS: dict[str, Callable[[Opening], Outlet]] = {
    "tensorboard": _TensorBoard,
    "wandb": _Wandb,
    "mlflow": _MLflow,
    "trackio": _Trackio,
    "swanlab": _SwanLab,
    "comet": _Comet,
}


def open_outlet(kind: str, opening: Opening) -> Outlet:
    """Open a run in a tracker.

    Raises:
        Exception: whatever the tracker raises.
    """
    from accelerate import PartialState

    for name in RANK_VARIABLES:  # of the run that started this process
        os.environ.pop(name, None)
    PartialState(cpu=True)  # accelerate's logging needs it
    return OUTLETS[kind](opening)


def _words(finding: Finding) -> str:
    ended = f" It ended at step {finding.end}." if finding.end is not None else ""
    return f"step {finding.begin or finding.step}, {finding.level}: {finding.found} {finding.advice}{ended}".strip()


def _lines(columns: Sequence[str], row: Sequence[Any]) -> str:
    """A row as lines of text, ``column: value``."""
    texts = (value if isinstance(value, str) else json.dumps(value) for value in row)
    return "\n".join(f"{column}: {text}" for column, text in zip(columns, texts, strict=True))


TABLE_STEPS = 10
"""A table of completions is sent of the first step and of every this many steps."""
TABLE_ROWS, TABLE_OF_GROUP, TABLE_TEXT = 16, 4, 2000
"""Completions in a table and of one group in it, and characters of a text."""


@dataclass(frozen=True, slots=True)
class Sent:
    """What was sent, and where the run is now."""

    steps: int
    """Steps sent now."""
    before: int
    """The last step that the tracker had before; -1: none."""
    last: int
    """The last step that it has now."""
    project: str
    id: str


def send_run(
    run: str | Path, kind: str, project: str | None = None, announce: Callable[[str], None] | None = None
) -> Sent:
    """Send a run to a tracker: what it was not sent yet.

    Args:
        run: the run folder; the run may be in progress, stopped or complete.
        kind: the tracker's name.
        project: the project; None: the one that the run is in already, else see ``Kind.project``.
        announce: is told the project and the tracker's run before they are opened.

    Raises:
        ConfigError: the tracker is unknown or not installed, the run is in another project, or it is in a tracker's run
            that this account has not written to and ``project`` is None.
        RunFolderError: the folder holds no run, leads elsewhere, or is being sent by another process.
        Exception: whatever the tracker raises.
    """
    from cohort.runs.trust import check_files  # which imports torch

    check_installed([kind])
    history = Run.read(run)
    check_files(history.path)
    with Sender.of(history.path, kind, project, announce=announce) as sender:
        if project is None:
            _check_known(history.path, kind, sender.state)
        count = sender.send()
        return Sent(count, sender.before, sender.state.step, str(sender.state.project), str(sender.state.id))


def _check_known(run: Path, kind: str, state: State) -> None:
    """Check that this account has written to the tracker's run that a run folder names, which may come from anybody."""
    if state.id and not state.is_known(run, kind):
        raise ConfigError(
            f"{file_of(run, kind)} names run {state.id} in project {state.project!r} of {KINDS[kind].title}, to which "
            f"this account has sent nothing from this folder, and a run folder may come from anybody. To go on in that "
            f"run, give --project {state.project}; to send all of it to a new run, delete {folder_of(run, kind)}"
        )


class Sender:
    """Sends one run to one tracker. Opens the run in the tracker when there is something to send, or when only the
    tracker knows whether there is.

    Args:
        run: the run folder.
        kind: the tracker's name.
        project: the project; None: see ``Kind.project``.
        live: whether the run is in progress.
        announce: is told where the run goes before it is opened there.
    """

    def __init__(
        self,
        run: Path,
        kind: str,
        project: str | None = None,
        *,
        live: bool = False,
        announce: Callable[[str], None] | None = None,
    ) -> None:
        self._run, self._kind, self._live, self._announce = run, kind, live, announce
        self.state = State.read(run, kind)
        self.before = self.state.step
        """The last step that the tracker had when its run was opened."""
        if project and self.state.id and project != self.state.project:
            raise ConfigError(
                f"the run {run} is in project {self.state.project!r} of {KINDS[kind].title}, not in {project!r}: leave "
                f"out the project, or delete {folder_of(run, kind)} to send all of it to a new run"
            )
        self._history = Run.read(run)
        self._settings = self._history.settings
        of_run = self._history.flat_settings().get("report.tracker_project")
        given = project or (of_run if isinstance(of_run, str) else None)
        self._project = self.state.project or KINDS[kind].project(given)
        self._diagnosis = Diagnosis(self._settings)
        self._outlet: Outlet | None = None

    @classmethod
    @contextmanager
    def of(cls, run: Path, kind: str, project: str | None = None, **more: Any) -> Iterator[Self]:
        """A sender that no other process has for this run and tracker. Closes the tracker's run at the end.

        Raises:
            RunFolderError: another process sends the run to this tracker.
        """
        folder = folder_of(run, kind)
        folder.mkdir(parents=True, exist_ok=True)
        lock = Lock(folder)
        try:
            lock.take()
        except RunFolderError:
            raise RunFolderError(f"another process is sending {run} to {KINDS[kind].title}: wait for its end") from None
        try:
            sender = cls(run, kind, project, **more)
            try:
                yield sender
            finally:
                if sender._outlet is not None:
                    sender._outlet.tracker.finish()
        finally:
            with suppress(OSError):
                lock.release()

    def send(self) -> int:
        """Send the steps whose lines are complete and that were not sent yet; returns their number.

        Raises:
            Exception: whatever the tracker raises. What it was sent is written down; use another sender.
        """
        count = 0
        if self._outlet is None and self.state.id and KINDS[self._kind].says_step:
            self._open()  # before a line is read: it may lack steps that were sent
        replaced, rows = self._history.refresh()
        if replaced:  # by a resumed run
            self._diagnosis = Diagnosis(self._settings)
        for metrics in rows:
            count += self._send_step(metrics, self._diagnosis.step_or_log(metrics))
        return count

    def _send_step(self, metrics: Mapping[str, Any], findings: Sequence[Finding]) -> bool:
        """Send a step, unless it was sent. Returns whether it was not."""
        step = metrics["step"]
        if step <= self.state.step:
            return False
        outlet = self._outlet or self._open()
        if step <= self.state.step:  # the tracker has said that it has more
            return False
        values = {outlet.name_of(key): one for key, one in metrics.items() if key != "step" and one is not None}
        outlet.tracker.log(values, step=step)
        evaluated = any(key.startswith("eval/") for key in metrics)
        for name, columns, rows in tables(self._run, step, evaluated=evaluated):
            outlet.table(name, columns, rows, step)
        for finding in findings:
            outlet.say(finding, live=self._live)
        self.state = self.state.write(self._run, self._kind, step=step, error=None)
        return True

    def _open(self) -> Outlet:
        """Open the tracker's run, and send the settings to a new one."""
        name = self._run.resolve().name
        opening = Opening(self._run, self._project, name, self.state.id, self.state.step)
        if self._announce:
            which = f"run {self.state.id}" if self.state.id else "a new run"
            self._announce(f"opening {KINDS[self._kind].title}, project {self._project}, {which}")
        self._outlet = outlet = open_outlet(self._kind, opening)
        known = {} if outlet.step is None else {"step": outlet.step}
        self.state = self.state.write(self._run, self._kind, id=outlet.id, project=self._project, **known)
        self.before = self.state.step
        self.state.remember(self._run, self._kind)
        if not (self.state.configured and outlet.settings_once):
            outlet.configure(hyperparameters(self._settings))
            self.state = self.state.write(self._run, self._kind, configured=True)
        return outlet


def hyperparameters(settings: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """Settings by ``section.key``, without secrets; lists and infinite numbers as text.

    >>> hyperparameters({"model": {"path": "m", "lora": {"rank": 8}}, "reward": {"functions": ["f(api_key='k')"]}})
    {'model.path': 'm', 'model.lora.rank': 8, 'reward.functions': '["f(api_key=\\'***\\')"]'}
    """
    found: dict[str, bool | int | float | str] = {}
    for key, value in flat(hide_secrets(settings)):
        plain = isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))
        found[key] = value if plain else json.dumps(value)
    return found


def tables(run: Path, step: int, *, evaluated: bool) -> Iterator[tuple[str, list[str], list[list[Any]]]]:
    """Some completions of a step and of its evaluations, as name, columns and rows. A file that is missing or damaged
    is left out."""
    files = {}
    if step == 1 or (step and step % TABLE_STEPS == 0):
        files["completions"] = run / "rollouts" / f"step-{step}.parquet"
    if evaluated:
        with suppress(OSError):
            for path in sorted((run / "evaluations").glob(f"step-{step}[.-]*parquet")):
                name = path.stem.removeprefix(f"step-{step}").removeprefix("-")
                files[f"evaluations/{name}".rstrip("/")] = path
    for name, path in files.items():
        with suppress(RunFolderError):
            yield name, *_table(path)


def _table(path: Path) -> tuple[list[str], list[list[Any]]]:
    wanted = ("group", "prompt", "completion", "finish_reason", "reward", "advantage")
    head = StoredStep.read(path, columns=["group"])
    seen: Counter[Any] = Counter()
    rows: list[int] = []
    for row, group in enumerate(head.values("group")):
        if seen[group] < TABLE_OF_GROUP and len(rows) < TABLE_ROWS:
            rows.append(row)
        seen[group] += 1
    rewards = [name for name in head.names if name.startswith("rewards/")][:20]
    found = StoredStep.read(path, columns=[*wanted, *rewards], rows=rows).table
    columns = [name for name in (*wanted, *rewards) if name in found.column_names]
    return columns, [[_short(row[name]) for name in columns] for row in found.select(columns).to_pylist()]


def _short(value: Any) -> Any:
    return f"{value[:TABLE_TEXT]} ..." if isinstance(value, str) and len(value) > TABLE_TEXT else value


def left_to_send(run: Path, kind: str) -> Sequence[int]:
    """Steps in ``metrics.jsonl`` that the tracker has not received."""
    last = State.read(run, kind).step
    return [metrics["step"] for metrics in Run(run).rows if metrics["step"] > last]
