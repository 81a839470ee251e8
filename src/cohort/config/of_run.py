"""Whether the settings in a folder are those of a run that was started there."""

from __future__ import annotations

from pathlib import Path

from cohort.lock import LOCK

MARKS = ("starts.jsonl", "metrics.jsonl", "summary.json", "objective.txt", "first_prompt.txt", "checkpoints", LOCK)
"""What shows that a run was started in a folder. A process that was killed while it wrote its settings has left the
lock."""


def was_started(folder: Path) -> bool:
    """Whether a run was started in a folder."""
    return any((folder / name).exists() for name in MARKS)


def only_settings(folder: Path) -> str:
    """Why a folder with a ``config.toml`` is not a run folder, in words; empty if a run was started there, or it has
    none."""
    if was_started(folder) or not (folder / "config.toml").is_file():
        return ""
    return (
        f"{folder} is not a run folder: it has settings, but no run was started here (no {MARKS[0]}): did you mean "
        f"'cohort train {folder / 'config.toml'}'?"
    )
