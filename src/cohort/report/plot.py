"""``cohort plot``: curves of runs as PNG, SVG or PDF, for papers and chats."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from cohort.errors import ConfigError
from cohort.report.series import Curve, check_key, common_window, grouped, means_of_groups, words_for
from cohort.runs.reader import AXES, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Panel: TypeAlias = Sequence[tuple[Curve, list[Curve]]]
"""A curve for each group of runs, and those of its runs."""

SUFFIXES = (".png", ".svg", ".pdf")
COLORS = {
    "light": ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#8C6D00", "#56B4E9", "#444444"),
    "dark": ("#56B4E9", "#FF8C42", "#2CC295", "#E69AC4", "#F0C83C", "#9AA7FF", "#DDDDDD"),
}
"""After the palette of Okabe and Ito, which people with any colour vision can tell apart, as contrast allows."""
GROUND = {"light": ("#FFFFFF", "#222222", "#6B6B6B", "#E6E6E6"), "dark": ("#16181D", "#E8E8E8", "#A0A4AB", "#31353D")}
"""Colours of ground, text, notes and grid."""
LINES = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (6, 1.5, 1, 1.5)))
"""Styles of lines: another one after each round of colours."""
MARKED = 40
"""Curves of at most so many points show them."""


@dataclass(frozen=True, slots=True)
class Look:
    """How a figure looks."""

    axis: str = "step"
    """One of ``reader.AXES``."""
    window: int = 0
    """Points of the local fit (``series.loess``); 0: a tenth of the curve; 1: none."""
    log: str = ""
    """The axes with logarithmic scale: "", "x", "y" or "xy"."""
    theme: Literal["light", "dark"] = "light"
    separate: bool = False
    """Draw each run for itself, instead of the mean of runs that differ by their seed."""
    size: tuple[float, float] = (6.4, 3.6)
    """Inches of one panel."""
    title: str = ""
    bare: bool = False
    """Without the note below that says what lines and bands are."""


def figure(runs: Sequence[Run], keys: Sequence[str], look: Look | None = None) -> Figure:
    """Draw metrics of runs, a panel for each.

    Runs with equal settings apart from the seed are one line, their mean, with a band; their own curves are behind it.
    Lines are named by the settings that differ.

    Args:
        runs: the runs.
        keys: the metrics.
        look: how it looks; None: the defaults.

    Raises:
        ConfigError: no run has a metric, or none has the axis; matplotlib is missing.
    """
    look = look or Look()
    panels = []
    for key in keys:
        check_key(runs, key)
    for key in keys:
        panels.append(_panel(runs, key, look))
        if not any(len(mean.x) for mean, _ in panels[-1]):
            raise ConfigError(f"{key} cannot be drawn over {look.axis}: no run has both in its metrics")
    with _style(look) as matplotlib:
        columns = min(len(keys), 2)
        rows = math.ceil(len(keys) / columns)
        width, height = look.size
        made: Figure = matplotlib.figure.Figure(figsize=(width * columns, height * rows), layout="constrained")
        all_axes = made.subplots(rows, columns, squeeze=False).ravel()
        for axes, key, panel in zip(all_axes, keys, panels, strict=False):
            _draw(axes, key, panel, look)
        for axes in all_axes[len(keys) :]:
            axes.set_visible(False)
        _name_lines(made, panels, look)
        return made


def save(made: Figure, path: str | Path, look: Look | None = None) -> Path:
    """Write a figure; the suffix says in which format. The same figure gives the same bytes.

    Raises:
        ConfigError: the suffix is none of ``SUFFIXES``.
    """
    path = check_output(path)
    dates = {".png": {}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}[path.suffix.lower()]
    with _style(look or Look()):
        made.savefig(path, metadata=dates)
    return path


def check_output(path: str | Path) -> Path:
    """The path of a figure.

    Raises:
        ConfigError: the suffix is none of ``SUFFIXES``, or the folder does not exist.
    """
    path = Path(path).expanduser()
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"--output {path}: expected a file that ends in {', '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise ConfigError(f"--output {path}: there is no folder {path.parent}")
    return path


def _panel(runs: Sequence[Run], key: str, look: Look) -> Panel:
    """What is drawn of a metric."""
    groups = grouped(runs)
    if look.separate:
        singles = [(group, run, seed) for group in groups for run, seed in zip(group.runs, group.seeds, strict=True)]
        names = [f"{group.label}, seed {seed}" if len(group.runs) > 1 else group.label for group, _, seed in singles]
        groups = [replace(group, label=name, runs=(run,)) for name, (group, run, _) in zip(names, singles, strict=True)]
    return means_of_groups(groups, key, look.axis, look.window or common_window(runs, key))


def _draw(axes: Axes, key: str, panel: Panel, look: Look) -> None:
    """One metric. The lines are, group by group: the curves behind it, then the main one, labelled."""
    unit, words = _unit(panel, look)
    palette = COLORS[look.theme]
    for number, (mean, members) in enumerate(panel):
        if not len(mean.x):
            continue
        color, style = palette[number % len(palette)], LINES[number // len(palette) % len(LINES)]
        behind = [(one.x, one.line) for one in members] if mean.runs > 1 else [(mean.x, mean.y)] * (mean.window > 1)
        for x, y in behind:
            axes.plot(x / unit, y, color=color, linewidth=0.7, alpha=0.4, label="_behind")
        if mean.band:
            axes.fill_between(mean.x / unit, mean.low, mean.high, color=color, alpha=0.16, linewidth=0)
        (line,) = axes.plot(mean.x / unit, mean.line, color=color, linestyle=style, markersize=3.5)
        line.set(label=_escaped(mean.label), marker="o" if len(mean.x) <= MARKED else "")
        if mean.window == 1 and len(mean.x) > 100:  # not smoothed
            line.set_linewidth(1.1)
    _scales(axes, panel, look)
    axes.set_xlabel(words)
    axes.set_ylabel(_escaped(words_for(key)))


def _unit(panel: Panel, look: Look) -> tuple[float, str]:
    """What x is divided by, and the label of the axis: seconds may be minutes or hours; dates are in days."""
    if look.axis == "time":
        return 86400.0, AXES["time"]
    last = max(mean.x[-1] for mean, _ in panel if len(mean.x))
    if look.axis != "seconds" or last < 300:
        return 1.0, AXES[look.axis]
    return (60.0, "training time, minutes") if last < 3 * 3600 else (3600.0, "training time, hours")


def _scales(axes: Axes, panel: Panel, look: Look) -> None:
    """Ticks, scales, and limits that a band of few seeds cannot blow up."""
    from matplotlib import dates, ticker

    class Plain(ticker.LogFormatter):
        """Writes 0.3 rather than a power of ten, at the ticks that deserve it."""

        def __call__(self, x: float, pos: int | None = None) -> str:
            return f"{x:g}" if super().__call__(x, pos) else ""

    if look.axis == "time":
        locator = dates.AutoDateLocator()
        axes.xaxis.set_major_locator(locator)
        axes.xaxis.set_major_formatter(dates.ConciseDateFormatter(locator))
    elif look.axis in ("step", "updates"):
        axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    elif look.axis == "tokens":
        axes.xaxis.set_major_formatter(ticker.EngFormatter(sep=""))
    values = np.concatenate([part for mean, curves in panel for one in (mean, *curves) for part in (one.y, one.line)])
    if "y" in look.log and not (values > 0).any():
        raise ConfigError("--log y needs values above 0")
    for name, scale, ticks in (("x", axes.set_xscale, axes.xaxis), ("y", axes.set_yscale, axes.yaxis)):
        if name in look.log:
            scale("log")
            if look.axis != "tokens" or name == "y":
                ticks.set_major_formatter(Plain())
                ticks.set_minor_formatter(Plain())
    if "y" not in look.log:
        low, high = axes.get_ylim()
        spread = (values.max() - values.min()) or abs(values.max()) or 1.0
        axes.set_ylim(max(low, values.min() - 0.5 * spread), min(high, values.max() + 0.5 * spread))


def _name_lines(made: Figure, panels: Sequence[Panel], look: Look) -> None:
    """Title, legend and note."""
    handles: dict[str, Any] = {}
    for axes in made.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    title = _escaped(look.title) if look.title else ""
    if len(handles) > 1:
        columns = 1 if max(map(len, handles)) > 40 else min(len(handles), 3)
        legend = {"loc": "outside upper left", "ncols": columns, "title": title, "alignment": "left"}
        made.legend(handles.values(), handles.keys(), title_fontproperties={"weight": "bold"}, **legend)
    else:
        made.suptitle(title or next(iter(handles)), x=0.01, ha="left", weight="bold")
    note = describe([mean for panel in panels for mean, _ in panel])
    if note and not look.bare:
        made.supxlabel(note, x=0.01, ha="left", fontsize=7, color=GROUND[look.theme][2], wrap=True)


def describe(curves: Sequence[Curve]) -> str:
    """What lines and bands are, for the caption; empty if there is nothing to say."""
    windows = " and ".join(map(str, sorted({one.window for one in curves if one.window > 1})))
    averaged = any(one.runs > 1 for one in curves)
    lines = ["mean over seeds"] * averaged + [f"local linear fits (LOESS) over {windows} points"] * bool(windows)
    behind = ["single seeds"] * averaged + ["logged values"] * any(one.window > 1 and one.runs == 1 for one in curves)
    bands = "; ".join(dict.fromkeys(one.band for one in curves if one.band))
    said = [f"Lines: {' of '.join(lines)}; behind them: {' or '.join(behind)}."] * bool(lines)
    return " ".join([*said, *[f"Bands: {bands}."] * bool(bands)])


def _escaped(text: str) -> str:
    """Text that matplotlib shows as it is: without formulas, control characters, or the mark of hidden labels."""
    plain = "".join(one if one.isprintable() else " " for one in text)
    return plain.replace("$", r"\$").lstrip("_") or "?"


@contextmanager
def _style(look: Look) -> Iterator[Any]:
    try:
        import matplotlib
        import matplotlib.figure
    except ImportError:
        raise ConfigError("plots need matplotlib, which is not installed: pip install 'cohort-rl[plot]'") from None
    ground, text, note, grid = GROUND[look.theme]
    settings = {
        "font.family": "DejaVu Sans",  # which matplotlib brings: the same figure everywhere
        "font.size": 9,
        "legend.fontsize": 8.5,
        "legend.handlelength": 1.8,
        "lines.linewidth": 1.9,
        "lines.solid_capstyle": "round",
        "axes.xmargin": 0.01,
        "grid.color": grid,
        **dict.fromkeys(("axes.titlesize", "figure.titlesize"), 10),
        **dict.fromkeys(("grid.linewidth", "axes.linewidth"), 0.8),
        **dict.fromkeys(("legend.frameon", "axes.spines.top", "axes.spines.right"), False),
        **dict.fromkeys(("axes.grid", "axes.axisbelow"), True),
        **dict.fromkeys(("figure.facecolor", "axes.facecolor"), ground),
        **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), text),
        **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), note),
        "savefig.dpi": 200,
        "svg.hashsalt": "cohort",
        "pdf.fonttype": 42,
        "timezone": "UTC",
    }
    with matplotlib.rc_context(settings):
        yield matplotlib
