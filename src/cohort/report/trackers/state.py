"""What a tracker was sent of a run, in ``trackers/NAME/state.json`` of the run folder: a run that goes on, and ``cohort
track``, continue from there."""

from __future__ import annotations

import hashlib
import json
import re
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from cohort.config.account import account_records
from cohort.config.secrets import hide_secrets
from cohort.report.files import json_object
from cohort.runs.lines import write_atomically

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
