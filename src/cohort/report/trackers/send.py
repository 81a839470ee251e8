"""Send what a run folder holds to a tracker, each step once."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from cohort.config.secrets import hide_secrets
from cohort.errors import ConfigError, RunFolderError
from cohort.lock import Lock
from cohort.report.console.tail import Tail
from cohort.report.diagnosis import Diagnosis, Finding
from cohort.report.files import flat
from cohort.report.history import RunHistory
from cohort.report.rollouts import StoredStep
from cohort.report.trackers.kinds import KINDS, check_installed
from cohort.report.trackers.outlets import Opening, Outlet, open_outlet
from cohort.report.trackers.state import State, file_of, folder_of

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
    history = RunHistory.read(run)
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
        history = RunHistory.read(run)
        self._settings = history.settings
        of_run = history.flat_settings().get("report.tracker_project")
        given = project or (of_run if isinstance(of_run, str) else None)
        self._project = self.state.project or KINDS[kind].project(given)
        self._diagnosis = Diagnosis(self._settings)
        self._lines = Tail(run / "metrics.jsonl")
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
        replaced, lines = self._lines.read()
        while lines:
            if replaced:  # by a resumed run
                self._diagnosis = Diagnosis(self._settings)
            for metrics in lines:
                count += self._send_step(metrics, self._diagnosis.step_or_log(metrics))
            replaced, lines = self._lines.read()
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
    return [metrics["step"] for metrics in Tail(run / "metrics.jsonl").everything() if metrics["step"] > last]
