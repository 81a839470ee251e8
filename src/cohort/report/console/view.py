"""What the live display shows, as lines of text: a pure function of the run's progress, the time and the width."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from cohort.report.console.progress import RunProgress, Series, hint, sparkline
from cohort.report.series import parts_of
from cohort.report.words import clean, duration, number, one_line, share
from cohort.runs.reader import Run

# ----------------------------------------
# The groups of a step as the live display shows them: prompt, and completions with reward and advantage.


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
    found = Run(run).rollouts
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


NARROW = 60
"""Below this width, labels are shorter."""
MAX_SPARKLINE = 60
MAX_FUNCTIONS = 4
"""Reward functions with a line of their own."""
STYLES = {"note": "green", "warning": "yellow", "alarm": "bold red"}
"""Colours of the health line by the level of the worst finding."""


@dataclass(frozen=True, slots=True)
class Moment:
    """What the display shows besides the progress of the steps."""

    now: float
    """Seconds since 1970."""
    doing: str = ""
    """What the run does now, or what is known of it."""
    saved: int | None = None
    """The step of the newest checkpoint; None: there is none."""
    going: bool = True
    """Whether the run goes on, so that there is a time left."""
    keys: str = ""
    """The keys that do something; empty: they are not read."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The run's settings as nested tables, for the hint."""
    ascii_only: bool = False
    """Whether the terminal's encoding has no other characters."""


def view(progress: RunProgress, moment: Moment, width: int, height: int) -> list[Text]:
    """The display: at most ``height`` lines of less than ``width`` columns. Without enough lines, the less important
    ones are left out."""
    rows = [row for row in _rows(progress, moment, width) if row[1]]
    while sum(len(lines) for _, lines in rows) > max(1, height) and len(rows) > 1:
        rows.remove(max(rows, key=lambda row: row[0]))
    return [line for _, lines in rows for line in lines][: max(1, height)]


def _rows(progress: RunProgress, moment: Moment, width: int) -> Iterator[tuple[int, list[Text]]]:
    """The rows from top to bottom; those with the highest numbers are left out first."""
    columns = width - 1  # a terminal may wrap a line that reaches the last column
    yield 0, [bar_line(progress, moment, columns)]
    functions = list(progress.rewards.items())
    only = functions[0][1] if len(functions) == 1 else None
    binary = progress.rewards.keys() - progress.graded
    if only is None or only.last != progress.reward.last or not binary:
        yield 1, _course("reward", number(progress.reward.last), progress.reward, moment, columns)
    for name, series in functions[:MAX_FUNCTIONS] if only is None or binary else []:
        shown = share(series.last) if name in binary else number(series.last)
        label = one_line(name) if only is None else "accuracy"
        yield 4 if only is None else 1, _course(label, shown, series, moment, columns)
    if len(functions) > MAX_FUNCTIONS:
        yield 7, row("", f"and {len(functions) - MAX_FUNCTIONS} more reward functions", columns, "dim")
    yield 3, row("evaluation" if columns >= NARROW else "eval", _evaluations(progress, moment), columns)
    yield 2, row("health", progress.health, columns, STYLES.get(progress.level, ""))
    yield 5, row("time", _time(progress), columns)
    seconds = progress.seconds()
    yield 8, row("", hint(seconds, moment.settings, progress.metrics) if seconds else "", columns, "yellow")
    saved = "" if moment.saved is None else f"checkpoint of step {moment.saved}"
    yield 9, row("saved", saved, columns)
    yield 2, row("now", moment.doing, columns)
    yield 6, row("keys", moment.keys, columns, "dim")


def bar_line(progress: RunProgress, moment: Moment, columns: int) -> Text:
    """The steps as a bar, with their share and the time left."""
    step, steps = progress.step, progress.steps
    if not steps:
        return Text(f"step {step}")
    done, left = min(1.0, step / steps), progress.time_left(moment.now) if moment.going else None
    start = f"step {step:>{len(str(steps))}}/{steps} "
    end = f" {done:4.0%}  "
    if left is not None and step < steps:
        end += f"{duration(left)} left" if columns >= NARROW else duration(left)
    room = min(60, columns - len(start) - (22 if columns >= NARROW else 16))  # the same for all times
    if room < 5:
        return Text(f"{start}{end}"[:columns])
    full, empty = ("#", "-") if moment.ascii_only else ("━", "─")
    filled = round(done * room)
    return Text.assemble((start, "bold"), (full * filled, "green"), (empty * (room - filled), "dim"), end)


def _course(label: str, shown: str, series: Series, moment: Moment, columns: int) -> list[Text]:
    """A number and how it got there."""
    if series.last is None:
        return []
    value = f"{shown:>7}"
    room = min(MAX_SPARKLINE, columns - label_width(columns) - cell_len(value) - 2)
    line = sparkline(series.points(max(1, room)), ascii_only=moment.ascii_only) if room > 3 else ""
    return [Text.assemble((fitted(label, columns), "dim"), value, "  ", (line, "cyan"))]


def _evaluations(progress: RunProgress, moment: Moment) -> str:
    """The mean rewards of the latest evaluation, set by set, and those of the first."""
    if not progress.evaluations:
        return ""
    (first, before), (last, metrics) = progress.evaluations[0], progress.evaluations[-1]
    found = ", ".join(_rewards(metrics, interval=True))
    if last != first:
        found += f" {_after(last)}; {', '.join(_rewards(before))} {_after(first)}"
    else:
        found += f" {_after(last)}"
    points = progress.evaluated.points(MAX_SPARKLINE // 4)
    return f"{found}  {sparkline(points, ascii_only=moment.ascii_only)}" if len(points) > 2 else found


def _rewards(metrics: Mapping[str, Any], *, interval: bool = False) -> list[str]:
    """The mean reward of each set of an evaluation."""
    found = []
    for key, mean in metrics.items():
        name, metric = parts_of(key)
        if metric == "reward" and key.endswith("/mean"):
            low, high = (number(metrics.get(key.removesuffix("mean") + end)) for end in ("low", "high"))
            text = f"{number(mean)} ({low} to {high})" if interval else number(mean)
            found.append(f"{one_line(name)} {text}" if name else text)
    return found


def _after(step: int) -> str:
    return f"after step {step}" if step else "before training"


def _time(progress: RunProgress) -> str:
    """Seconds of a step, and the shares of its phases."""
    seconds = progress.seconds()
    if seconds is None:
        return ""
    form = ".2f" if seconds.step < 10 else ".0f"
    shares = ", ".join(f"{words} {part:.0%}" for words, part in seconds.shares.items() if part >= 0.01)
    return f"{seconds.step:{form}} s a step: {shares}"


def label_width(columns: int) -> int:
    """The columns of the labels, the space after them included."""
    return 12 if columns >= NARROW else 9


def fitted(label: str, columns: int) -> str:
    """A label in its columns: a longer one is cut, with a dot at its end."""
    width = label_width(columns)
    return set_cell_size(label if cell_len(label) < width else f"{set_cell_size(label, width - 2)}.", width)


def row(label: str, text: str, columns: int, style: str = "") -> list[Text]:
    """A labelled text, wrapped at words beside its label; none if it is empty."""
    if not text:
        return []
    width = label_width(columns)
    lines = wrapped(text, columns - width)
    labels = [fitted(label, columns), *[" " * width] * (len(lines) - 1)]
    return [Text.assemble((one, "dim"), (line, style)) for one, line in zip(labels, lines, strict=True)]


_PLAIN = Console(width=80, color_system=None, legacy_windows=False)


def wrapped(text: str, columns: int) -> list[str]:
    """Text in lines of at most so many columns, broken at words; wide characters count two."""
    if "\n" not in text and cell_len(text) <= columns:
        return [text.rstrip()]
    lines = Text(text).wrap(_PLAIN, max(2, columns), tab_size=4)
    return [line.plain.rstrip() for line in lines]


def hanging(text: str, columns: int) -> str:
    """Paragraphs wrapped at words, each with its lines below the beginning of its first words.

    >>> print(hanging("one two three\\n  -> four five six", 12))
    one two
      three
      -> four
         five
         six
    """
    lines = []
    for paragraph in text.split("\n"):
        lead = len(paragraph) - len(paragraph.lstrip(" "))
        indent = lead + (3 if paragraph[lead:].startswith("-> ") else 2)
        first, *rest = wrapped(paragraph.strip(), max(10, columns - indent)) or [""]
        lines += [" " * lead + first, *(" " * indent + line for line in rest)]
    return "\n".join(lines)


def as_plain(lines: Sequence[Text]) -> str:
    """Lines without colours, as a picture for files and logs."""
    return "\n".join(line.plain.rstrip() for line in lines)
