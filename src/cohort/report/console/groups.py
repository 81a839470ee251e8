"""The groups of a step as the live display shows them: prompt, and completions with reward and advantage."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.text import Text

from cohort.errors import RunFolderError
from cohort.report.console.lines import clean, number
from cohort.report.console.view import wrapped

FILE = re.compile(r"step-(0|[1-9][0-9]{0,15})\.parquet")
COLUMNS = ("group", "prompt", "completion", "reward", "advantage", "finish_reason", "reward_error", "episode_error")
MAX_BYTES = 256 * 2**20
"""Uncompressed size of the columns that are read. A larger table is not shown."""
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
    try:
        names = [path.name for path in (run / "rollouts").iterdir()]
    except OSError:
        return None
    steps = [int(match[1]) for match in map(FILE.fullmatch, names) if match]
    return run / "rollouts" / f"step-{max(steps)}.parquet" if steps else None


def read_groups(file: Path) -> list[ShownGroup]:
    """The groups of a step in the order in which they were sampled.

    Raises:
        RunFolderError: the file is not a table of completions, or too large to be shown.
    """
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            columns = [name for name in COLUMNS if name in table.schema_arrow.names]
            if size_of(table, columns) > MAX_BYTES:
                raise RunFolderError(f"{file} is too large to be shown here")
            rows = table.read(columns).to_pylist()
    except (OSError, ValueError, KeyError, pyarrow.ArrowException) as error:
        raise RunFolderError(
            f"{file} cannot be read: {str(error).splitlines()[0] if str(error) else error!r}"
        ) from None
    step = int(match[1]) if (match := FILE.fullmatch(file.name)) else 0
    # Rows of a group stand together; two groups of one prompt in a step have the same uid only in other rounds.
    groups = [list(rows) for _, rows in groupby(rows, key=lambda row: (row.get("group"), row.get("prompt")))]
    return [
        ShownGroup(step, n, len(groups), _text(some[0].get("prompt")), [_completion(one) for one in some])
        for n, some in enumerate(groups, 1)
    ]


def size_of(table: Any, columns: Sequence[str]) -> int:
    """The uncompressed bytes of some columns of an open Parquet file."""
    groups = (table.metadata.row_group(n) for n in range(table.metadata.num_row_groups))
    parts = (group.column(n) for group in groups for n in range(group.num_columns))
    return sum(part.total_uncompressed_size for part in parts if part.path_in_schema.split(".")[0] in columns)


def binary_rewards(file: Path) -> set[str]:
    """The reward functions whose rewards in a stored step are all 0 or 1, and not all missing."""
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            names = [name for name in table.schema_arrow.names if name.startswith("rewards/")]
            if size_of(table, names) > MAX_BYTES:
                return set()
            columns = table.read(names).to_pydict()
    except (OSError, ValueError, KeyError, pyarrow.ArrowException):
        return set()
    values = {name.removeprefix("rewards/"): set(column) - {None} for name, column in columns.items()}
    return {name for name, found in values.items() if found and found <= {0.0, 1.0}}


def _completion(row: dict[str, Any]) -> ShownCompletion:
    error = _text(row.get("episode_error")) or _text(row.get("reward_error"))
    reward, advantage = (_number(row.get(name)) for name in ("reward", "advantage"))
    return ShownCompletion(_text(row.get("completion")), reward, advantage, _text(row.get("finish_reason")), error)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _text(value: Any) -> str:
    return "" if value is None else str(value)


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
        head.append(f"  {clean(one.finish_reason)}"[:20], "dim")
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
