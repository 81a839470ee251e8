"""The command that draws curves: plot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from cyclopts import Parameter

from cohort.cli.app import app
from cohort.errors import ConfigError


@app.command(
    sort_key=15,
    usage="Usage: cohort plot RUN [RUN ...] --output FILE [--key METRIC ...] [options]",
    help_epilogue="Example: cohort plot runs/*/ --key reward/mean --x tokens --output curves.png. 'cohort docs plot' "
    "has pictures, 'cohort docs metrics' all metrics.",
)
def plot(
    *runs: str,
    output: str,
    key: Annotated[Sequence[str], Parameter(consume_multiple=True, metavar="METRIC...")] = ("reward/mean",),
    x: Literal["step", "updates", "tokens", "seconds", "time"] = "step",
    smooth: int = 0,
    log: Literal["", "x", "y", "xy"] = "",
    theme: Literal["light", "dark"] = "light",
    size: str = "6.4x3.6",
    title: str = "",
    separate: bool = False,
    bare: bool = False,
) -> None:
    """Draw metrics of runs as PNG, SVG or PDF. Runs that differ only by their seed are one line with a band.

    Args:
        runs: Run folders.
        output: The file; its suffix says in which format.
        key: Metrics, a panel for each.
        x: What to draw them over. seconds are those of training steps, without evaluations and pauses.
        smooth: Points of the local linear fit. 0: a tenth of the curve; 1: no smoothing.
        log: Axes with a logarithmic scale.
        theme: Colours.
        size: Width and height of a panel in inches.
        title: A title.
        separate: Draw each seed for itself.
        bare: Leave out the note on lines and bands.
    """
    from cohort.report.history import RunHistory
    from cohort.report.plot import Look, check_output, figure, save

    if not runs:
        raise ConfigError("cohort plot needs a run folder: cohort plot RUN --output curves.png")
    path = check_output(output)
    look = Look(x, smooth, log, theme, separate, _size(size), title, bare)
    save(figure([RunHistory.read(run) for run in runs], key, look), path, look)
    print(f"{path} is written")


def _size(text: str) -> tuple[float, float]:
    width, _, height = text.partition("x")
    try:
        size = float(width), float(height)
    except ValueError:
        size = (0.0, 0.0)
    if not all(1 <= one <= 40 for one in size):
        raise ConfigError(f"--size {text}: expected width and height in inches from 1 to 40, as in 6.4x3.6")
    return size
