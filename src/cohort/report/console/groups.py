"""The groups of a step as the live display shows them: prompt, and completions with reward and advantage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from rich.text import Text

from cohort.report.console.view import wrapped
from cohort.report.history import stored_rollouts
from cohort.report.words import clean, number, one_line

COLUMNS = ("prompt", "completion", "reward", "advantage", "finish_reason", "reward_error", "episode_error")
MAX_SHOWN = 10_000
"""Characters of a text that are shown."""


@dataclass(frozen=True, slots=True)
class ShownCompletion:
    """A completion of a group."""

    text: str
    reward: float | None
    """None: it was not scored."""
    advantage: float | None
    """The mean over its tokens; None: no update used it."""
    finish_reason: str
    error: str = ""
    """Why it has no reward, or why its episode failed."""


@dataclass(frozen=True, slots=True)
class ShownGroup:
    """A group of a stored step."""

    step: int
    number: int
    """From 1."""
    count: int
    """Groups of the step."""
    prompt: str
    completions: Sequence[ShownCompletion]


def newest_file(run: Path) -> Path | None:
    """The table of the newest step in a run folder that is stored; None without one."""
    found = stored_rollouts(run)
    return found[max(found)] if found else None


class StoredGroups:
    """The groups of a step, in the order in which they were sampled. Each is read when it is shown.

    Args:
        file: the table of the step.

    Raises:
        RunFolderError: it cannot be read.
    """

    def __init__(self, file: Path) -> None:
        from cohort.report.rollouts import StoredStep

        self._file = file
        groups = StoredStep.read(file, ["group"]).values("group")
        rows = (list(rows) for _, rows in groupby(range(len(groups)), key=lambda row: groups[row]))
        self._rows = list(rows)

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, index: int) -> ShownGroup:
        """A group by its number, from 0.

        Raises:
            RunFolderError: it cannot be read.
        """
        from cohort.report.rollouts import StoredStep

        stored = StoredStep.read(self._file, COLUMNS, self._rows[index])
        columns = {name: stored.values(name) for name in COLUMNS}
        completions = []
        for n in range(len(stored)):
            row = {name: values[n] for name, values in columns.items()}
            text, finish, *errors = (
                row[name] or "" for name in ("completion", "finish_reason", "episode_error", "reward_error")
            )
            completions.append(
                ShownCompletion(text, row["reward"], row["advantage"], finish, next(filter(None, errors), ""))
            )
        return ShownGroup(stored.step or 0, index + 1, len(self), columns["prompt"][0] or "", completions)


def group_view(group: ShownGroup, width: int, height: int, top: int = 0, keys: str = "") -> tuple[list[Text], int]:
    """A group in at most ``height`` lines of less than ``width`` columns, from its line ``top`` on, and the last
    possible ``top``."""
    lines, columns = group_lines(group, width), width - 1
    room = max(1, height - 2)
    last = max(0, len(lines) - room)
    top = min(top, last)
    more = f"lines {top + 1} to {min(len(lines), top + room)} of {len(lines)}" if last else ""
    title = Text(f"step {group.step}, group {group.number} of {group.count}  "[:columns], "bold")
    title.append(more[: max(0, columns - len(title))], "dim")
    return [title, *lines[top : top + room], Text(keys[:columns], "dim")], last


def group_lines(group: ShownGroup, width: int) -> list[Text]:
    """All lines of a group: the prompt, then each completion below its reward, advantage and finish reason."""
    columns = width - 1
    lines = [Text("prompt", "dim"), *_body(group.prompt, columns)]
    for n, one in enumerate(group.completions, 1):
        style = "" if not one.advantage else "green" if one.advantage > 0 else "red"
        head = Text.assemble((f"{n:>2}  ", "dim"), (f"reward {number(one.reward)}", "bold"))
        head.append("  advantage " + ("none" if one.advantage is None else f"{one.advantage:+.3f}"), style)
        head.append(f"  {one_line(one.finish_reason)}"[:20], "dim")
        head.truncate(columns)
        lines += [head, *_body(one.text, columns)]
        if one.error:
            lines += [Text(line, "yellow") for line in wrapped(f"    {clean(one.error)}"[:MAX_SHOWN], columns)]
    return lines


def _body(text: str, columns: int) -> list[Text]:
    """A text with a bar at its left; of a long one, the beginning."""
    shown = clean(text[:MAX_SHOWN])
    lines = [Text.assemble(("  | ", "dim"), line) for line in wrapped(shown, columns - 4)]
    if len(text) > MAX_SHOWN:
        lines.append(Text(f"  | ... {len(text) - MAX_SHOWN:,} more characters"[:columns], "dim"))
    return lines
