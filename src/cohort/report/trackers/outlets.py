"""One class per tracker: ``accelerate.tracking`` opens it, logs numbers and settings, and closes it; what accelerate
lacks, tables and findings, is sent through the tracker's own library.

accelerate was chosen over ``transformers.integrations``, whose callbacks rename metrics (``train/...``), need a
``TrainingArguments``, and send no tables. The libraries print, patch and install handlers: use only in a process that
does nothing else.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cohort.report.diagnosis import Finding, Level

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
