"""Experiment trackers: each has a thread that sends what the run folder holds. docs/trackers.md.

``Trackers`` follows a run in progress. ``send_run``, which ``cohort track`` calls, sends what is missing from a folder.
The libraries are used directly: accelerate's trackers need its process state and send no texts, and those of
``transformers.integrations`` rename metrics and need a ``TrainingArguments``.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import logging
import math
import os
import random
import re
import runpy
import sys
import threading
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from textwrap import indent
from types import SimpleNamespace
from typing import Any, ClassVar, Self
from urllib.parse import urlsplit

from cohort.config.account import account_records
from cohort.config.schema import ReportConfig
from cohort.config.secrets import hide_secrets
from cohort.errors import ConfigError, RunFolderError, did_you_mean
from cohort.lock import Lock
from cohort.report.diagnosis import Diagnosis, Finding
from cohort.report.rollouts import StoredStep
from cohort.runs.durable import write_atomically
from cohort.runs.reader import Run, flat

log = logging.getLogger("cohort.trackers")
Settings = Mapping[str, bool | int | float | str]
Rows = Sequence[Sequence[Any]]


# ----------------------------------------
# What a tracker was sent of a run, in ``trackers/NAME/state.json`` of the run folder: a run that goes on, and
# ``cohort track``, continue from there.


ID = re.compile(r"[\w.-]{1,128}")
MAX_ERROR = 500
"""Characters of an error that are shown."""


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

    @classmethod
    def read(cls, run: Path, kind: str) -> Self:
        """The state in a run folder; the empty one if there is none, or it is damaged."""
        found = Run(run).json(f"trackers/{kind}/state.json") or {}
        name, project, step = (found.get(key) for key in ("id", "project", "step"))
        return cls(
            id=name if isinstance(name, str) and ID.fullmatch(name) else None,
            project=project[:1000] if isinstance(project, str) else None,
            step=step if type(step) is int and step >= -1 else -1,
            configured=found.get("configured") is True,
        )

    def write(self, run: Path, kind: str, **changes: Any) -> Self:
        """Write the state with some changes; returns it."""
        changed = replace(self, **changes)
        write_atomically(folder_of(run, kind) / "state.json", json.dumps(asdict(changed)) + "\n")
        return changed

    def record(self, run: Path, kind: str) -> Path:
        """The record that this account has sent the run folder to this run of the tracker: a run folder that names one
        may come from anybody."""
        key = json.dumps([str(run.resolve()), kind, self.project, self.id])
        return account_records("tracker_runs") / hashlib.sha256(key.encode()).hexdigest()


def folder_of(run: Path, kind: str) -> Path:
    """The folder of a tracker in a run folder."""
    return run / "trackers" / kind


def left_to_send(run: Path, kind: str) -> list[int]:
    """Steps in ``metrics.jsonl`` that the tracker has not received."""
    last = State.read(run, kind).step
    return [row["step"] for row in Run(run).rows if row["step"] > last]


def error_text(error: BaseException) -> str:
    """The first line of a tracker's exception, without secrets: MLflow's name the server with user and password."""
    text: str = hide_secrets(f"{type(error).__name__}: {error}".splitlines()[0][: 10 * MAX_ERROR])
    return text[:MAX_ERROR]


# ----------------------------------------
# A class for each tracker. Its library is imported when the run is opened.


class Tracker:
    """A run in a tracker. Opening it, like each of its functions, raises whatever the library raises.

    Args:
        run: the run folder.
        state: what was sent before; ``id``: the tracker's run to go on with, None: a new one.
        settings: the run's, for trackers that take them when they are opened.
    """

    title: ClassVar[str]
    package: ClassVar[str]
    """The name under which its library is imported."""
    project_variable: ClassVar[str] = ""
    """The environment variable with which its users name the project."""
    environment: ClassVar[Mapping[str, str]] = {}
    """Variables that keep the library away from the process around it, unless they are set."""
    says_step: ClassVar[bool] = False
    """Whether a run that is opened again says which steps arrived."""

    id: str
    """The run's id, by which it can be opened again."""
    step: int | None = None
    """The last step that the tracker has; None: it does not say."""
    numbers: Callable[[Mapping[str, float], int], object]
    """Sends metrics and their step."""
    text: Callable[[str, str, int], object]
    """Sends the name of a text, the text, such as a finding of the diagnosis, and its step."""
    close: Callable[[], object]
    """Closes the run, which can be opened again."""

    def __init__(self, run: Path, state: State, settings: Settings) -> None:
        raise NotImplementedError

    def configure(self, settings: Settings) -> None:
        """Send the settings, once."""

    def table(self, name: str, columns: Sequence[str], rows: Rows, step: int) -> object:
        """Send a table of completions; as a text, unless the tracker has tables."""
        lines = ("".join(f"{column}: {_plain(row[n])}\n" for n, column in enumerate(columns)) for row in rows)
        return self.text(name, indent("\n".join(lines), "    "), step)  # as code in Markdown, they stay text


class _TensorBoard(Tracker):
    """Event files in the run folder."""

    title, package = "TensorBoard", "tensorboard"

    def __init__(self, run: Path, state: State, settings: Settings) -> None:  # noqa: ARG002
        from torch.utils.tensorboard import SummaryWriter

        # Steps that are sent again take the place of those that a killed process has sent.
        again = {"purge_step": state.step + 1} if state.step >= 0 else {}
        self.id, self.writer = "tensorboard", SummaryWriter(str(run / "tensorboard"), **again)
        self.text, self.close = self.writer.add_text, self.writer.close

    def configure(self, settings: Settings) -> None:
        self.text("settings", "".join(f"    {key} = {value}\n" for key, value in settings.items()), 0)

    def numbers(self, values: Mapping[str, float], step: int) -> None:
        for key, value in values.items():
            self.writer.add_scalar(key, value, step)
        self.writer.flush()


class _Wandb(Tracker):
    """W&B. Texts are in the run's summary."""

    title, package, project_variable, says_step = "W&B", "wandb", "WANDB_PROJECT", True

    def __init__(self, run: Path, state: State, settings: Settings) -> None:
        import wandb

        # Its files stay in its own place: it links them to its cache, and a run folder may have no such links.
        own = wandb.Settings(console="off", silent=True, reinit="create_new")
        if hasattr(own, "stop_fn"):  # otherwise its Stop button sends SIGINT to this process
            own.stop_fn = lambda: None
        again = {"resume": "allow"} if state.id else {}
        self.id, name = state.id or os.urandom(4).hex(), run.resolve().name
        self.run = wandb.init(project=state.project, name=name, id=self.id, config=settings, settings=own, **again)
        self.step = self.run.step - 1 if self.run.resumed else None
        self.numbers = lambda values, step: self.run.log(dict(values), step=step)
        self.text = lambda name, text, _: self.run.summary.update({name: text})
        self.close = self.run.finish

    def table(self, name: str, columns: Sequence[str], rows: Rows, step: int) -> object:
        import wandb

        return self.run.log({name: wandb.Table(columns=columns, data=rows)}, step=step)


class _MLflow(Tracker):
    """MLflow, at ``MLFLOW_TRACKING_URI``. Tables are artifacts, texts are tags.

    In its store of plain files, a metric is a file and each "/" in its name a folder, so that "rewards/f" and
    "rewards/f/std" exclude each other: there, names have "." in place of "/".
    """

    title, package, project_variable = "MLflow", "mlflow", "MLFLOW_EXPERIMENT_NAME"
    environment: ClassVar[Mapping[str, str]] = {"MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true"}

    def __init__(self, run: Path, state: State, settings: Settings) -> None:  # noqa: ARG002
        import mlflow
        from mlflow.tracking.context.registry import resolve_tags

        self.client = client = mlflow.MlflowClient()
        self.in_files = urlsplit(mlflow.get_tracking_uri()).scheme in ("", "file")
        if state.id:
            self.id = state.id
            client.update_run(self.id, status="RUNNING")
        else:
            found = client.get_experiment_by_name(state.project)
            experiment = found.experiment_id if found else client.create_experiment(state.project)
            self.id = client.create_run(experiment, tags=resolve_tags(), run_name=run.resolve().name).info.run_id
        self.text = lambda name, text, _: client.set_tag(self.id, name, text)
        self.close = lambda: client.set_terminated(self.id)

    def configure(self, settings: Settings) -> None:
        from mlflow.entities import Param

        params = [Param(key, str(value)) for key, value in settings.items()]
        for start in range(0, len(params), 100):  # it takes no more at once
            self.client.log_batch(self.id, params=params[start : start + 100])

    def numbers(self, values: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now, names = round(time.time() * 1000), (re.sub(r"[^\w\-. :/]", "_", key) for key in values)
        names = (name.replace("/", ".") if self.in_files else name for name in names)
        metrics = [Metric(name, value, now, step) for name, value in zip(names, values.values(), strict=True)]
        self.client.log_batch(self.id, metrics)

    def table(self, name: str, columns: Sequence[str], rows: Rows, step: int) -> object:
        data = {column: [row[n] for row in rows] for n, column in enumerate(columns)}
        return self.client.log_table(self.id, data, f"{name}/step-{step}.json")


class _Trackio(Tracker):
    """trackio, on this machine or in a Space. It knows its runs by their names."""

    title, package, project_variable = "trackio", "trackio", "TRACKIO_PROJECT"

    def __init__(self, run: Path, state: State, settings: Settings) -> None:
        import trackio

        self.id = state.id or run_name(run.resolve().name)
        self.run = trackio.init(state.project, name=self.id, resume="allow", config=dict(settings), embed=False)
        self.text = lambda name, text, step: self.run.log({name: trackio.Markdown(text)}, step=step)
        self.close = self.run.finish

    def numbers(self, values: Mapping[str, float], step: int) -> None:
        # "time" is a name of its own.
        self.run.log({"wall_time" if key == "time" else key: value for key, value in values.items()}, step=step)

    def table(self, name: str, columns: Sequence[str], rows: Rows, step: int) -> object:
        import pandas
        import trackio

        return self.run.log({name: trackio.Table(dataframe=pandas.DataFrame(rows, columns=columns))}, step=step)


class _SwanLab(Tracker):
    title, package, project_variable = "SwanLab", "swanlab", "SWANLAB_PROJECT"
    environment: ClassVar[Mapping[str, str]] = {"SWANLAB_TERMINAL_PROXY_TYPE": "none"}

    def __init__(self, run: Path, state: State, settings: Settings) -> None:
        import swanlab

        again = {"id": state.id, "resume": "allow"} if state.id else {}
        name, config = run.resolve().name, dict(settings)
        opened = swanlab.init(project=state.project, experiment_name=name, config=config, **again)
        self.id, self.close = str(opened.id), opened.finish
        self.numbers = lambda values, step: opened.log(dict(values), step=step)
        self.text = lambda name, text, step: opened.log({name: swanlab.Text(text)}, step=step)


class _Comet(Tracker):
    title, package, project_variable = "Comet", "comet_ml", "COMET_PROJECT_NAME"
    environment: ClassVar[Mapping[str, str]] = {
        "COMET_DISABLE_AUTO_LOGGING": "1",
        "COMET_ERROR_TRACKING_ENABLE": "false",
        "COMET_LOGGING_CONSOLE": "WARNING",
    }

    def __init__(self, run: Path, state: State, settings: Settings) -> None:
        import comet_ml

        off = ("log_code", "log_git_metadata", "auto_output_logging", "auto_param_logging", "auto_metric_logging")
        config = comet_ml.ExperimentConfig(name=run.resolve().name, **dict.fromkeys(off, False))
        online = os.environ.get("COMET_START_ONLINE")
        more = {"mode": "get_or_create", "online": online and online != "0", "experiment_config": config}
        self.id = state.id or os.urandom(16).hex()
        self.run = comet_ml.start(project_name=state.project, experiment_key=self.id, **more)
        self.run.log_parameters(dict(settings))
        self.numbers = lambda values, step: self.run.log_metrics(dict(values), step=step)
        self.text = lambda name, text, step: self.run.log_text(text, step=step, metadata={"name": name})
        self.close = self.run.end

    def table(self, name: str, columns: Sequence[str], rows: Rows, step: int) -> object:
        return self.run.log_table(f"{name}/step-{step}.csv", tabular_data=rows, headers=columns, step=step)


KINDS: Mapping[str, type[Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": _Wandb,
    "mlflow": _MLflow,
    "trackio": _Trackio,
    "swanlab": _SwanLab,
    "comet": _Comet,
}
"""The trackers by name."""


def check_installed(names: Iterable[str]) -> None:
    """Check that trackers exist and can be imported.

    Raises:
        ConfigError: one is unknown, or not installed; names the extra to install.
    """
    for name in names:
        if name not in KINDS:
            hint = did_you_mean(name, KINDS, form="{!r}") or f"; the trackers are {', '.join(KINDS)}"
            raise ConfigError(f"unknown tracker {name!r}{hint}")
        if importlib.util.find_spec(package := KINDS[name].package) is None:
            raise ConfigError(
                f"the tracker {name!r} needs {package}, which is not installed: pip install 'cohort-rl[{name}]'"
            )


def load(kind: str) -> None:
    """Import a tracker's library. What it draws from Python's generator while it is imported is put back, so other
    threads must not draw meanwhile.

    Raises:
        Exception: whatever importing it raises.
    """
    os.environ |= {name: value for name, value in KINDS[kind].environment.items() if name not in os.environ}
    state = random.getstate()
    try:
        importlib.import_module(KINDS[kind].package)
    finally:
        random.setstate(state)


OWN_RANDOM = SimpleNamespace(**runpy.run_path(random.__file__))
"""A copy of the module ``random``, with a generator of its own."""


def keep_apart(package: str) -> None:
    """Give the modules of a library ``OWN_RANDOM``: names, colours and pauses before another attempt that it draws are
    not drawn from the run's generator. Their ``print`` prints nothing."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == package:
            names = vars(module)
            names.setdefault("print", lambda *_, **__: None)
            names |= {"random": OWN_RANDOM} if names.get("random") is random else {}


# ----------------------------------------
# Sending a run.


class Sender:
    """Sends one run to one tracker. Opens the run in the tracker when there is something to send, or when only the
    tracker knows whether there is.

    Args:
        run: the run folder.
        kind: the tracker's name.
        project: the project; None: that of the run's settings, by the tracker's environment variable, or "cohort".
        announce: is told where the run goes before it is opened there.

    Raises:
        ConfigError: the run is in another project.
    """

    def __init__(
        self, run: Path, kind: str, project: str | None = None, announce: Callable[[str], None] | None = None
    ) -> None:
        self._path, self._kind, self._announce = run, kind, announce
        self.state = State.read(run, kind)
        self.before = self.state.step
        """The last step that the tracker had when its run was opened."""
        if project and self.state.id and project != self.state.project:
            raise ConfigError(
                f"the run {run} is in project {self.state.project!r} of {KINDS[kind].title}, not in {project!r}: leave "
                f"out the project, or delete {folder_of(run, kind)} to send all of it to a new run"
            )
        self._run = Run.read(run)
        of_run = self._run.flat_settings().get("report.tracker_project")
        given = project or (of_run if isinstance(of_run, str) else None)
        self._project = self.state.project or given or os.environ.get(KINDS[kind].project_variable) or "cohort"
        self._diagnosis = Diagnosis(self._run.settings)
        self._findings: dict[int, list[Finding]] = {}
        self._tracker: Tracker | None = None

    @classmethod
    @contextmanager
    def of(cls, run: Path, kind: str, project: str | None = None, **more: Any) -> Iterator[Self]:
        """A sender that nothing else has for this run and tracker. Closes the tracker's run at the end.

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
                sender.close()
        finally:
            with suppress(OSError):
                lock.release()

    def send(self) -> Iterator[int]:
        """Send the steps whose lines are complete and that were not sent yet; yields each when it is sent.

        Raises:
            Exception: whatever the tracker raises. What it was sent is written down: ``close``, and send again.
        """
        replaced, rows = self._run.refresh()
        if replaced:  # by a resumed run
            self._diagnosis, self._findings = Diagnosis(self._run.settings), {}
        self._findings |= {row["step"]: said for row in rows if (said := self._diagnosis.step_or_log(row))}
        left = self._left()
        if self._tracker is None and (left or (self.state.id and KINDS[self._kind].says_step)):
            self._open()
            left = self._left()  # the tracker may know better
        for row in left:
            assert self._tracker is not None
            self._send_step(row, self._tracker)
            yield row["step"]

    def _left(self) -> list[dict[str, Any]]:
        rows = self._run.rows
        return rows[bisect_right(rows, self.state.step, key=lambda row: row["step"]) :]

    def _send_step(self, row: Mapping[str, Any], tracker: Tracker) -> None:
        step = row["step"]
        tracker.numbers({key: value for key, value in row.items() if key != "step" and value is not None}, step)
        evaluated = any(key.startswith("eval/") for key in row)
        for name, columns, rows in tables(self._path, step, evaluated=evaluated):
            tracker.table(name, columns, rows, step)
        for finding in self._findings.get(step, ()):
            tracker.text(f"findings/{finding.check}", _words(finding), finding.end or finding.step)
        self.state = self.state.write(self._path, self._kind, step=step)

    def _open(self) -> None:
        """Open the tracker's run, and send the settings to a new one."""
        kind = KINDS[self._kind]
        if self._announce:
            which = f"run {self.state.id}" if self.state.id else "a new run"
            self._announce(f"opening {kind.title}, project {self._project}, {which}")
        settings, state = hyperparameters(self._run.settings), replace(self.state, project=self._project)
        keep_apart(kind.package)
        tracker = self._tracker = kind(self._path, state, settings)
        keep_apart(kind.package)  # what it has imported meanwhile
        known = {} if tracker.step is None else {"step": tracker.step}
        self.state = self.state.write(self._path, self._kind, id=tracker.id, project=self._project, **known)
        self.before = self.state.step
        with suppress(OSError):  # there may be no home to write to: then ``cohort track`` needs --project
            record = self.state.record(self._path, self._kind)
            record.parent.mkdir(parents=True, exist_ok=True)
            record.touch()
        if not self.state.configured:
            tracker.configure(settings)
            self.state = self.state.write(self._path, self._kind, configured=True)

    def close(self) -> None:
        """Close the tracker's run, if it is open. ``send`` opens it again."""
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            tracker.close()


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
        project: the project; None: the one that the run is in already, else see ``Sender``.
        announce: is told the project and the tracker's run before they are opened.

    Raises:
        ConfigError: the tracker is unknown or not installed, the run is in another project, or it is in a tracker's run
            that this account has not written to and ``project`` is None.
        RunFolderError: the folder holds no run, leads elsewhere, or is being sent by another process.
        Exception: whatever the tracker raises.
    """
    from cohort.runs.trust import check_files  # which imports torch

    check_installed([kind])
    path = Run.read(run).path
    check_files(path)
    load(kind)
    with Sender.of(path, kind, project, announce=announce) as sender:
        at = sender.state
        if project is None and at.id and not at.record(path, kind).exists():
            raise ConfigError(
                f"{folder_of(path, kind) / 'state.json'} names run {at.id} in project {at.project!r} of "
                f"{KINDS[kind].title}, to which this account has sent nothing from this folder, and a run folder may "
                f"come from anybody. To go on in that run, give --project {at.project}; to send all of it to a new "
                f"run, delete {folder_of(path, kind)}"
            )
        count = sum(1 for _ in sender.send())
        return Sent(count, sender.before, sender.state.step, str(sender.state.project), str(sender.state.id))


# ----------------------------------------
# What is sent besides the metrics: settings, completions, findings.


TABLE_STEPS = 10
"""A table of completions is sent of the first step and of every this many steps."""
TABLE_ROWS, TABLE_OF_GROUP, TABLE_TEXT = 16, 4, 2000
"""Completions in a table and of one group in it, and characters of a text."""


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


def run_name(folder: str) -> str:
    """A name that no other run has."""
    return re.sub(r"[^\w.-]+", "-", folder)[:100] + f"-{os.urandom(3).hex()}"


def tables(run: Path, step: int, *, evaluated: bool) -> Iterator[tuple[str, list[str], list[list[Any]]]]:
    """Some completions of a step and of its evaluations, as name, columns and rows. A file that is missing or damaged
    is left out."""
    files = {}
    if step == 1 or (step and step % TABLE_STEPS == 0):
        files["completions"] = run / "rollouts" / f"step-{step}.parquet"
    if evaluated:
        found = Run(run).evaluations
        files |= {f"evaluations/{name}".rstrip("/"): path for (of, name), path in found.items() if of == step}
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


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _words(finding: Finding) -> str:
    ended = f" It ended at step {finding.end}." if finding.end is not None else ""
    return f"step {finding.begin or finding.step}, {finding.level}: {finding.found} {finding.advice}{ended}".strip()


# ----------------------------------------
# Trackers of a run in progress.


WARN_SECONDS = 60.0
"""Time without an answer after which a tracker is said not to answer."""
END_SECONDS, STOP_SECONDS = 30.0, 10.0
"""How long the end of a complete run, and of a stopped one, waits for all its trackers."""
SILENT_SECONDS = 2.0
"""How much of it is waited without a word."""


class Trackers:
    """A callback (``cohort.callbacks``) that sends the run to trackers, each in a thread.

    Args:
        names: the trackers.
        project: see ``Sender``.

    Raises:
        ConfigError: one is not installed.
    """

    def __init__(self, names: Sequence[str], project: str | None = None) -> None:
        check_installed(names)
        self._names, self._project = list(dict.fromkeys(names)), project
        self._all: list[_Thread] = []

    @classmethod
    def of(cls, settings: ReportConfig) -> list[Self]:
        """The trackers of a run's settings; empty without any."""
        return [cls(settings.trackers, settings.tracker_project)] if settings.trackers else []

    def on_start(self, trainer: Any, start: Any) -> None:  # noqa: ARG002
        """Start the threads."""
        self._all = [_Thread(start.output_dir, name, self._project) for name in self._names]
        for one in self._all:
            with suppress(Exception):  # it is raised again when the tracker is opened
                load(one.kind)
            one.wake.set()  # for the evaluation before the first step, and what an earlier process has left
            one.start()

    def on_step(self, trainer: Any, event: Any) -> None:  # noqa: ARG002
        """Wake the threads, and warn of one that does not answer."""
        for one in self._all:
            if one.since is not None and time.monotonic() - one.since >= WARN_SECONDS:
                one.warn("no answer")
            one.wake.set()

    def on_end(self, trainer: Any, end: Any) -> None:  # noqa: ARG002
        """Wait for the threads, within the limit, and say what was not sent."""
        began, seconds = time.monotonic(), END_SECONDS if end.outcome == "complete" else STOP_SECONDS
        for one in self._all:
            one.has_ended = True
            one.wake.set()
        try:
            if late := self._alive(began + min(SILENT_SECONDS, seconds)):
                names = ", ".join(one.title for one in late)
                log.warning("the run has ended and waits for %s: at most %.0f seconds", names, seconds)
                self._alive(began + seconds)
        finally:  # also if Ctrl-C ends the wait
            for one in self._all:
                if one.is_alive() or one.error:
                    one.say_what_is_left()

    def _alive(self, until: float) -> list[_Thread]:
        """The threads that have not ended by a time."""
        for one in self._all:
            one.join(max(0.0, until - time.monotonic()))
        return [one for one in self._all if one.is_alive()]


class _Thread(threading.Thread):
    """Sends a run to a tracker while it goes on. What fails is tried again at the next step."""

    def __init__(self, folder: Path, kind: str, project: str | None) -> None:
        super().__init__(name=f"cohort-{kind}", daemon=True)  # one that hangs does not keep the process
        self.folder, self.kind, self.project = folder, kind, project
        self.title, self.command = KINDS[kind].title, f"cohort track {folder} --to {kind}"
        self.wake, self.has_ended, self.has_warned = threading.Event(), False, False
        self.error = ""
        """Why the last attempt failed; empty if it did not."""
        self.since: float | None = None
        """When the tracker last answered, or began to be asked; None: it is not being asked."""

    def run(self) -> None:
        """Send what there is, at each step and when the run has ended."""
        sender, last = None, False
        with ExitStack() as stack:
            while not last:
                self.wake.wait()
                self.wake.clear()
                last, self.since = self.has_ended, time.monotonic()  # before it looks: afterwards no line comes
                try:
                    sender = sender or stack.enter_context(Sender.of(self.folder, self.kind, self.project))
                    for _ in sender.send():
                        self.since = time.monotonic()
                    if last:
                        sender.close()
                    self.error = ""
                except (Exception, SystemExit) as error:
                    self.error = error_text(error)
                    if not last:
                        self.warn(self.error)
                    with suppress(Exception):
                        if sender is not None:
                            sender.close()
                self.since = None

    def warn(self, reason: str) -> None:
        """Say why nothing is sent, the first time."""
        if not self.has_warned:
            self.has_warned, step = True, State.read(self.folder, self.kind).step
            sent = f"steps up to {step} are sent" if step >= 0 else "nothing is sent yet"
            then = "Training goes on, and each step tries again; what is missing at the end is sent with"
            log.warning("%s: %s; %s. %s: %s", self.title, reason, sent, then, self.command)

    def say_what_is_left(self) -> None:
        """Name the steps that were not sent, and the command that sends them."""
        left = left_to_send(self.folder, self.kind)
        what = f"steps {left[0]} to {left[-1]} were not sent" if left else "the last steps may not have arrived"
        reason = self.error or "no answer in time"
        log.warning("%s: %s: %s. Send them with: %s", self.title, what, reason, self.command)
