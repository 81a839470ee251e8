"""A run on the terminal: a picture at its bottom that a thread draws, or else lines.

Rich renders the picture and puts it, by a render hook, below everything that is printed. Between two drawings the
cursor rests on the empty line above it. So what others write meanwhile, such as a worker process or a signal's handler,
appears above the picture, and the terminal can change its size: nothing depends on where the lines below the cursor
are. (``rich.live`` rests the cursor below the picture, and erases both.)
"""

from __future__ import annotations

import logging
import os
import re
import select
import signal
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self, TextIO, cast

import numpy as np
from rich.ansi import AnsiDecoder
from rich.console import (
    Console,
    ConsoleDimensions,
    ConsoleOptions,
    ConsoleRenderable,
    Group,
    RenderableType,
    RenderHook,
)
from rich.progress_bar import ProgressBar
from rich.segment import ControlType, Segment, Segments
from rich.table import Table
from rich.text import Text

from cohort import terminal
from cohort.errors import RunFolderError
from cohort.report.diagnosis import why_no_gradient, worst
from cohort.report.progress import Progress, after, hint, means_of, step_line
from cohort.report.words import clean, duration, number, one_line, share
from cohort.runs.reader import Row, Run
from cohort.watchdog import waits_of

# ----------------------------------------
# The picture of a run.

NARROW = 60
"""Below this width, labels are shorter."""
MAX_SPARKLINE = 60
MAX_FUNCTIONS = 4
"""Reward functions with a row of their own."""
STYLES = {"note": "green", "warning": "yellow", "alarm": "bold red"}
"""Colours of the health row by the level of the worst finding."""


def sparkline(values: Sequence[float], count: int, *, ascii_only: bool = False) -> str:
    """Values as at most ``count`` bars, each the mean of equally many, between their minimum and their maximum; equal
    ones as bars of half the height.

    >>> (
    ...     sparkline([0, 1, 2, 3], 4),
    ...     sparkline([0, 2, 5, 5], 2),
    ...     sparkline([5, 5], 9),
    ...     sparkline([0, 1, 2], 3, ascii_only=True),
    ... )
    ('▁▃▆█', '▁█', '▄▄', '_-^')
    """
    bars = "_.-=^" if ascii_only else "▁▂▃▄▅▆▇█"
    if not len(values) or count < 1:
        return ""
    means = np.array([part.mean() for part in np.array_split(np.asarray(values), min(count, len(values)))])
    low, spread = means.min(), np.ptp(means)
    heights = (means - low) / spread if spread > 0 else np.full(len(means), (len(bars) - 1) // 2 / (len(bars) - 1))
    return "".join(bars[round(height * (len(bars) - 1))] for height in heights)


def view(progress: Progress, options: ConsoleOptions, *, doing: str = "", going: bool = True, keys: str = "") -> Group:
    """The picture, for a console with these options. What matters most is at the top: a low terminal cuts the rest.

    Args:
        doing: what the run does now, or what is known of it.
        going: whether the run goes on, so that there is a time left.
        keys: the keys that do something; empty: they are not read.
    """
    narrow, ascii_only = options.max_width < NARROW, options.ascii_only
    width, gap = (8, 1) if narrow else (10, 2)
    rows = Table.grid(padding=(0, gap, 0, 0))
    rows.add_column(style="dim", width=width, no_wrap=True, overflow="crop" if ascii_only else "ellipsis")
    rows.add_column(overflow="fold")

    def row(label: str, text: str, style: str = "") -> None:
        if text:
            rows.add_row(Text(one_line(label)), Text(clean(text), style))

    def course(label: str, key: str, form: Callable[[float | None], str] = number) -> None:
        if values := progress.courses.get(key):
            value = f"{form(values[-1]):>7}  "
            room = min(MAX_SPARKLINE, options.max_width - width - gap - len(value))
            bars = sparkline(values, room, ascii_only=ascii_only)
            rows.add_row(Text(one_line(label)), Text.assemble(value, (bars, "cyan"), no_wrap=True))

    row("health", progress.diagnosis.health, STYLES[worst(progress.diagnosis.findings) or "note"])
    row("now", doing)
    functions = [key for key in progress.courses if key.startswith("rewards/")]
    binary = [key for key in functions if key not in progress.graded]
    if len(functions) != 1:
        course("reward", "reward/mean")
        for key in functions[:MAX_FUNCTIONS]:
            course(key.removeprefix("rewards/"), key, share if key in binary else number)
        if len(functions) > MAX_FUNCTIONS:
            row("", f"and {len(functions) - MAX_FUNCTIONS} more reward functions", "dim")
    else:  # the reward is that of the function, or follows from it
        if not binary or progress.courses.get("reward/mean", [])[-1:] != progress.courses[binary[0]][-1:]:
            course("reward", "reward/mean")
        for key in binary:
            course("accuracy", key, share)
    row("eval" if narrow else "evaluation", _evaluations(progress, ascii_only=ascii_only))
    if seconds := progress.seconds():
        form = ".2f" if seconds.step < 10 else ".0f"
        shares = ", ".join(f"{words} {part:.0%}" for words, part in seconds.shares.items() if part >= 0.01)
        row("time", f"{seconds.step:{form}} s a step: {shares}")
        row("", hint(seconds, progress.settings, progress.row), "yellow")
    row("saved", "" if progress.saved is None else f"checkpoint of step {progress.saved}")
    row("keys", keys, "dim")
    return Group(_bar(progress, narrow=narrow, going=going), rows)


def _bar(progress: Progress, *, narrow: bool, going: bool) -> RenderableType:
    """The steps as a bar, with their share and the time left."""
    step, steps = progress.row["step"], progress.steps
    if not steps:
        return Text(f"step {step}", "bold")
    left = progress.time_left(time.time()) if going and step < steps else None
    end = "" if left is None else duration(left) if narrow else f"{duration(left)} left"
    bar = Table.grid(padding=(0, 1, 0, 0))
    bar.add_column(style="bold", no_wrap=True)
    bar.add_column(max_width=60)
    bar.add_column(no_wrap=True, width=14 if narrow else 20)  # the same for all times
    start = f"step {step:>{len(str(steps))}}/{steps}"
    bar.add_row(start, ProgressBar(steps, step, complete_style="green"), f"{min(1.0, step / steps):4.0%}  {end}")
    return bar


def _evaluations(progress: Progress, *, ascii_only: bool) -> str:
    """The mean rewards of the latest evaluation, set by set, and those of the first."""
    if not progress.evaluations:
        return ""
    first, last = progress.evaluations[0], progress.evaluations[-1]
    now = [f"{name} {mean}{low_high}".strip() for name, metric, mean, low_high in means_of(last) if metric == "reward"]
    then = [f"{name} {mean}".strip() for name, metric, mean, _ in means_of(first) if metric == "reward"]
    found = f"{', '.join(now)} {after(last['step'])}"
    if last["step"] != first["step"]:
        found += f"; {', '.join(then)} {after(first['step'])}"
    course = progress.courses.get("eval/reward/mean", ())
    return found + (f"  {sparkline(course, MAX_SPARKLINE // 4, ascii_only=ascii_only)}" if len(course) > 2 else "")


# ----------------------------------------
# The last group of a stored step: its prompt, and each completion with reward, advantage and finish reason.

COLUMNS = ("prompt", "completion", "reward", "advantage", "finish_reason", "reward_error", "episode_error")
MAX_SHOWN = 10_000
"""Characters of a text that are shown."""


def group_text(file: Path) -> Text:
    """The last group of the table of a step.

    Raises:
        RunFolderError: it cannot be read.
    """
    from cohort.report.rollouts import StoredStep

    groups = StoredStep.read(file, ["group"]).values("group")
    rows = [row for row, group in enumerate(groups) if group == groups[-1]]
    if not rows:
        return Text("the step has no group")
    stored = StoredStep.read(file, COLUMNS, rows)
    columns = {name: stored.values(name) for name in COLUMNS}
    count = len(set(groups))
    text = Text.assemble((f"step {stored.step or 0}, group {count} of {count}", "bold"), "\n")
    text.append("prompt\n", "dim").append(_body(columns["prompt"][0]))
    for n in range(len(rows)):
        one = {name: values[n] for name, values in columns.items()}
        advantage = one["advantage"]
        text.append(f"{n + 1:>2}  ", "dim").append(f"reward {number(one['reward'])}", "bold")
        style = "" if not advantage else "green" if advantage > 0 else "red"
        text.append("  advantage " + ("none" if advantage is None else f"{advantage:+.3f}"), style)
        text.append(f"  {one_line(one['finish_reason'] or '')[:20]}\n", "dim").append(_body(one["completion"]))
        if error := one["episode_error"] or one["reward_error"]:
            text.append(f"    {clean(error[:MAX_SHOWN])}\n", "yellow")
    text.rstrip()
    return text


def _body(text: str | None) -> Text:
    """A text with a bar at its left; of a long one, the beginning."""
    text = text or ""
    lines = clean(text[:MAX_SHOWN]).split("\n")
    if len(text) > MAX_SHOWN:
        lines.append(f"... {len(text) - MAX_SHOWN:,} more characters")
    return Text.assemble(*(part for line in lines for part in (("  | ", "dim"), line, "\n")))


# ----------------------------------------
# The terminal: single keys, and what is printed.


def is_live_terminal() -> bool:
    """Whether standard output is a terminal that a display can be drawn on: not in a notebook, a log of continuous
    integration (``CI``), or with ``TERM=dumb``."""
    is_log = os.environ.get("CI", "").lower() not in ("", "0", "false")
    return _is_terminal(sys.stdout) and not is_log and os.environ.get("TERM", "") not in ("", "dumb", "unknown")


def _is_terminal(stream: Any) -> bool:
    try:
        return bool(stream is not None and stream.isatty() and os.isatty(stream.fileno()))
    except (OSError, ValueError, AttributeError):  # closed, or replaced by an object without a descriptor
        return False


def in_foreground(descriptor: int) -> bool | None:
    """Whether this process is in the foreground of a terminal; None: it is not the terminal of its session, as that of
    a rank under ``cohort launch``."""
    try:
        return os.tcgetpgrp(descriptor) == os.getpgrp()
    except OSError:
        return None


class Keys:
    """Single keys of standard input, without echo, while this process is in the foreground of that terminal. Ctrl-C is
    a signal as before. Ctrl-Z is a key, so that the terminal is set back before the process is stopped."""

    KEY = re.compile(rb"\x1b[\[O][0-9;]*[~A-Za-z]|.", re.DOTALL)

    def __init__(self) -> None:
        self._descriptor = sys.stdin.fileno() if _is_terminal(sys.stdin) else None
        self._before: list[Any] | None = None
        self._lock, self._released = threading.RLock(), False

    @property
    def are_read(self) -> bool:
        """Whether keys are read now."""
        return self._before is not None

    def follow(self, *, wanted: bool = True) -> None:
        """Change the terminal's mode as it has to be now: single keys in the foreground, and as it was otherwise."""
        with self._lock, suppress(termios.error, OSError):
            if self._descriptor is None or not in_foreground(self._descriptor):
                self._before = None  # the mode is that of the shell
            elif self._released or not wanted:
                before, self._before = self._before, None
                if before:
                    termios.tcsetattr(self._descriptor, termios.TCSANOW, before)
            elif (mode := termios.tcgetattr(self._descriptor))[3] & termios.ICANON:  # also if a shell has set it since
                self._before = self._before or [*mode]
                mode[0] &= ~termios.IXON  # Ctrl-S would stop the run at its next line
                mode[3] &= ~(termios.ICANON | termios.ECHO)
                mode[6] = [*mode[6]]
                mode[6][termios.VSUSP] = b"\0"  # disabled
                termios.tcsetattr(self._descriptor, termios.TCSANOW, mode)

    def release(self) -> None:
        """Set the terminal's mode to what it was, and read no more keys. A signal handler may call it."""
        self._released = True
        self.follow()

    def read(self) -> list[bytes]:
        """The keys pressed since the last call, as the terminal sends them."""
        with suppress(OSError):  # the terminal is gone, or this process is in the background now
            if self._descriptor is not None and self.are_read and select.select([self._descriptor], [], [], 0)[0]:
                return self.KEY.findall(os.read(self._descriptor, 1024))
        return []


class Printed:
    """Stands for ``sys.stdout`` or ``sys.stderr`` beside a picture: writes complete lines above it. A line that is
    written over with carriage returns, as progress bars do, counts as it is at its end."""

    def __init__(self, stream: TextIO, console: Console) -> None:
        self.stream = stream
        self._console, self._process, self._rest = console, os.getpid(), ""

    def write(self, text: str, /) -> int:
        """Keep text until its line is complete."""
        if os.getpid() != self._process:  # a forked child: its parent draws
            return self.stream.write(text)
        *lines, rest = (self._rest + text).split("\n")
        self._rest = rest[:-1].rpartition("\r")[2] + rest[-1:]
        if lines:
            decoder = AnsiDecoder()  # colours stay; what would move the cursor goes
            self._console.print(Text("\n").join(decoder.decode_line(line.removesuffix("\r")) for line in lines))
        return len(text)

    def writelines(self, lines: Iterable[str], /) -> None:
        """Write several texts."""
        self.write("".join(lines))

    def close_line(self) -> None:
        """Write what is there of an incomplete line."""
        if self._rest:
            self.write("\n")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@dataclass(slots=True)
class _Page:
    """A text that is scrolled."""

    text: Text
    top: int = 0
    """The line that is shown first."""
    _width: int = 0
    _lines: list[list[Segment]] = field(default_factory=list)

    def lines(self, console: Console, room: int) -> list[list[Segment]]:
        """The lines that are shown, and one about the keys."""
        if self._width != console.width:  # a long text takes a while
            self._width, self._lines = console.width, console.render_lines(self.text, pad=False)
        count, room = len(self._lines), max(1, room - 1)
        self.top = max(0, min(self.top, count - room))
        more = f"arrows scroll   lines {self.top + 1} to {self.top + room} of {count}" if count > room else ""
        keys = Text(f"g back   {more}", "dim", no_wrap=True, overflow="crop")
        return self._lines[self.top : self.top + room] + console.render_lines(keys, pad=False)


def _control(codes: str) -> Segment:
    """What the terminal gets as it is, among what rich renders."""
    return Segment(codes, None, [(ControlType.CARRIAGE_RETURN,)])


ERASE = Segments([_control("\r\x1b[J")])
"""Erases the cursor's line and all below it."""

# ----------------------------------------
# The display.

TICK = 0.25
"""Seconds between two pictures."""
LOOK_SECONDS = 2.0
"""Seconds between two looks for checkpoints: the folder may be on a slow disk."""
REDRAW_SECONDS = 2.0
"""After this time the same picture is drawn again, in case something else has written over it."""
JOIN_SECONDS = 2.0
LINES = 20
"""Lines about steps of a whole run without a terminal, at least."""
LINE_SECONDS = 1.0
"""Steps that take less have no line each."""
SCROLL = {b"\x1b[A": -1, b"\x1bOA": -1, b"\x1b[B": 1, b"\x1bOB": 1, b"\x1b[5~": -10, b"\x1b[6~": 10, b" ": 10}
"""Lines by which a key moves the text of a group."""
FAILED = "the live display ended: %r"
log = logging.getLogger("cohort.report")


class Display(RenderHook):
    """The course of a run: a picture on a terminal. Otherwise a line for each step, but at most one a second, for each
    twentieth of the run, and for every half minute within a step.

    Args:
        progress: of the run.
        doing: what the run does now, in words.
        enabled: False shows nothing.
        ending: whether the process is about to end: then the terminal's mode is as it was before.
        keys: what to say of the keys that do something besides ``g``.
    """

    silence = 30.0
    """Without a terminal, a line says what the run does after so many seconds without one."""

    def __init__(
        self,
        progress: Progress,
        doing: Callable[[], str],
        *,
        enabled: bool = True,
        ending: Callable[[], bool] = bool,
        keys: str = "",
    ) -> None:
        self.progress = progress
        self.going = True
        """Whether a process trains the run, so that there is a time left."""
        self._doing, self._enabled, self._ending, self._own_keys = doing, enabled, ending, keys
        self.quitting = threading.Event()
        """The key ``q`` was pressed."""
        self._warned = self._caught_up = False
        self._line_at, self._said_at, self._drawn_at, self._look_at = 0.0, time.monotonic(), 0.0, 0.0
        self._console: Console | None = None
        """Of the terminal; None: there is none, or it was given back."""
        self._lines: list[list[Segment]] = []
        """The picture as it was drawn; empty: there is none on the terminal."""
        self._size = ConsoleDimensions(0, 0)
        self._page: _Page | None = None
        self._keys, self._printed = Keys(), list[Printed]()
        self._taken = ExitStack()
        """Gives back what was taken with the terminal."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cohort-display", daemon=True)

    @classmethod
    def of_training(
        cls, steps: int, folder: Path | None = None, stopping: Callable[[], bool] = bool, *, enabled: bool = True
    ) -> Self:
        """The display of a training by this thread.

        Args:
            steps: of the whole run.
            folder: of the run, with the earlier steps of a resumed one. None: the run is complete.
            stopping: whether the run was asked to stop.
            enabled: False shows nothing.
        """
        progress = Progress(Run(folder) if folder and enabled else None, steps)
        progress.look()
        doing = partial(_doing, threading.get_ident(), progress, stopping)
        return cls(progress, doing, enabled=enabled, ending=stopping, keys="Ctrl-C stops with a checkpoint")

    def __enter__(self) -> Self:
        if self._enabled:
            if is_live_terminal():
                self._take_terminal()
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Draw a last picture, which stays, and leave the terminal as it was."""
        if self._ended.is_set() or not self._enabled:
            return
        self._ended.set()
        self._keys.release()
        # A thread that outlived the run would hold the last reference to its model and, at the interpreter's exit, free
        # tensors without a GIL to come back to, which aborts the process. While the terminal takes nothing, it does.
        self._thread.join(JOIN_SECONDS)
        try:
            self._give_terminal_back(writable=not self._thread.is_alive())
        except Exception as error:  # the run goes on
            log.warning(FAILED, error, exc_info=error)

    @property
    def draws(self) -> bool:
        """Whether the picture is drawn now: on a terminal, while the process is not in its background."""
        return self._console is not None and in_foreground(self._console.file.fileno()) is not False

    def show(self, row: Row) -> None:
        """Show the step that this process has trained."""
        if not self._enabled:
            return
        if not self._caught_up and (run := self.progress.run):  # on the evaluation before the first step
            self.progress.look(before=row["step"])
            self.progress.run = Run(run.path)  # without the rows, which are no longer needed
        self._caught_up = True
        self.tell(row, self.progress.add(row))

    def tell(self, row: Row, said: Sequence[str]) -> None:
        """Print what there is to say of a row that ``progress`` has taken, and once a warning when a step had no
        gradient. Without a picture, print its line."""
        step, steps = row["step"], self.progress.steps
        due = step in (1, steps) or step % max(1, (steps or 0) // LINES) == 0
        if step and (due or time.monotonic() - self._line_at >= LINE_SECONDS) and not self.draws:
            self._line_at = time.monotonic()
            left = self.progress.time_left(time.time()) if self.going else None
            line = step_line(row, groups_can_die=self.progress.diagnosis.groups_compared)
            self.print(clean(f"step {step}/{steps or '?'}  {line}{f'  {duration(left)} left' if left else ''}"))
        if row.get("updates", 1) == row.get("updates_skipped", 0) and not self._warned:
            self._warned = True
            self.print(clean(f"step {step}: {why_no_gradient(row)}"))
        for text in said:
            self.print(text)

    def print(self, text: str) -> None:
        """Print text, above the picture if there is one."""
        self._said_at = time.monotonic()
        if console := self._console:
            console.print(Text(text))
        else:
            print(text, flush=True)

    # The terminal.

    def _take_terminal(self) -> None:
        # Exported COLUMNS and LINES do not follow the terminal's size.
        environ = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        self._console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False, _environ=environ)
        self._console.push_render_hook(self)
        for redirected, stream in ((redirect_stdout, sys.stdout), (redirect_stderr, sys.stderr)):
            if _is_terminal(stream):
                stream.flush()
                self._printed.append(Printed(stream, self._console))
                self._taken.enter_context(redirected(cast("TextIO", self._printed[-1])))
        terminal.changed.append(self._keys.release)
        self._taken.callback(terminal.changed.remove, self._keys.release)
        self._taken.callback(setattr, sys, "breakpointhook", sys.breakpointhook)
        sys.breakpointhook = self._on_breakpoint

    def _give_terminal_back(self, *, writable: bool = True) -> None:
        console, drawn = self._console, bool(self._lines)
        self._console, self._lines = None, []
        with self._taken:
            if console and writable:
                console.print(ERASE if drawn else "", end="")
                for printed in self._printed:
                    printed.close_line()
                if drawn and self._ended.is_set():
                    self.progress.look_for_checkpoints()
                    console.print("", view(self.progress, console.options, going=False), sep="\n")

    def _on_breakpoint(self, *arguments: Any, **named: Any) -> Any:
        """``breakpoint()`` in a reward function: the debugger gets the terminal, and the display ends."""
        self.__exit__()
        return sys.breakpointhook(*arguments, **named)

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Rich's hook: what is printed, above the picture."""
        if not (lines := self._lines) or self._console is None:
            return renderables
        if self._console.size != self._size:  # the picture is drawn for the new size soon
            return [ERASE, *renderables]
        picture = [segment for line in lines for segment in (Segment.line(), *line)]
        return [ERASE, *renderables, Segments([*picture, _control(f"\x1b[{len(lines)}A\r")])]

    # The thread.

    def _run(self) -> None:
        # So that it is not stopped when the process goes into the background meanwhile.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU, signal.SIGTTIN})
        try:
            while not self._ended.wait(TICK):
                self._tick()
        except Exception as error:  # the run goes on, and prints plain lines
            self._keys.release()
            self._give_terminal_back()
            log.warning(FAILED, error, exc_info=error)

    def _tick(self) -> None:
        self._keys.follow(wanted=self.draws and not self._ending())
        for key in self._keys.read():
            self._press(key)
        if (console := self._console) is not None and self.draws:
            self._draw(console)
            return
        self._lines = []
        if time.monotonic() - self._said_at >= self.silence:
            self.print(self._doing())

    def _draw(self, console: Console) -> None:
        size, now = console.size, time.monotonic()
        room = max(1, size.height - 2)
        if self._page:
            lines = self._page.lines(console, room)
        else:
            doing, keys = self._doing(), f"g last group   {self._own_keys}" if self._keys.are_read else ""
            if now >= self._look_at:
                self.progress.look_for_checkpoints()
                self._look_at = now + LOOK_SECONDS
            with self.progress.lock:
                shown = view(self.progress, console.options, doing=doing, going=self.going, keys=keys)
            lines = console.render_lines(shown, pad=False)[:room]
        if lines != self._lines or size != self._size or now - self._drawn_at >= REDRAW_SECONDS:
            self._lines, self._size, self._drawn_at = lines, size, now
            console.print(end="")

    def _press(self, key: bytes) -> None:
        if key == b"\x1a":
            self._suspend()
        elif self._page:
            self._page.top += SCROLL.get(key, 0)
            self._page = None if key in (b"g", b"q", b"\x1b") else self._page
        elif key == b"g":
            self._page = self._last_group()
        elif key == b"q":
            self.quitting.set()

    def _suspend(self) -> None:
        """What the terminal does on Ctrl-Z, after the picture is erased and the terminal as it was."""
        if self._console and self._lines:
            self._lines = []
            self._console.print(ERASE, end="")
        self._keys.follow(wanted=False)
        os.killpg(os.getpgrp(), signal.SIGTSTP)
        time.sleep(TICK)  # which ends after the process was continued
        with self.progress.lock:
            self.progress.recent.append({})  # the time until the next step says nothing of the pace

    def _last_group(self) -> _Page | None:
        try:
            if found := self.progress.run.rollouts if self.progress.run else {}:
                return _Page(group_text(found[max(found)]))
        except RunFolderError as error:
            self.print(clean(str(error)))
            return None
        off = self.progress.settings.get("report.log_completions") is False
        self.print("no group is stored: report.log_completions is off" if off else "no group is stored yet")
        return None


def _doing(thread: int, progress: Progress, stopping: Callable[[], bool]) -> str:
    """What a thread of this process does now, in words."""
    if stopping():
        return "stopping with a checkpoint"
    step, waits = progress.row["step"], waits_of(thread)
    if not waits:
        return f"step {step + 1}"
    what, seconds, detail = waits[0]
    text = f"step {step + 1}: {what}"
    if what == "evaluation":
        text = f"evaluation after step {step}" if step else "evaluation before training"
    text += f" for {seconds:.0f} s" if seconds >= 1 else ""
    inner = [f"{name}{', ' if more else ''}{more}" for name, _, more in waits[1:]]
    return text + "".join(f", {one}" for one in [detail, *inner] if one)
