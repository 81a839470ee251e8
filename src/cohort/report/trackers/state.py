"""What a tracker was sent of a run, in ``trackers/NAME/state.json`` of the run folder: a run that goes on, and ``cohort
track``, continue from there."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from cohort.report.history import json_object

ID = re.compile(r"[\w.-]{1,128}")
MAX_STATE = 1 << 16
"""Bytes of a state file."""


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
        file = file_of(run, kind)
        part = file.with_suffix(".part")
        part.write_text(json.dumps(asdict(changed)) + "\n", encoding="utf-8")
        part.replace(file)
        return changed


def folder_of(run: Path, kind: str) -> Path:
    """The folder of a tracker in a run folder."""
    return run / "trackers" / kind


def file_of(run: Path, kind: str) -> Path:
    """The state file of a tracker in a run folder."""
    return folder_of(run, kind) / "state.json"


def _text(value: Any) -> str | None:
    return value[:1000] if isinstance(value, str) else None
