"""``cohort watch``: the live display of a run that was started elsewhere."""

from __future__ import annotations

from pathlib import Path

from cohort.cli.app import app


@app.command(sort_key=14, usage="Usage: cohort watch RUN [--once]")
def watch(run: str, /, *, once: bool = False) -> None:
    """Show the progress of a run that another process trains, until it is complete. It only reads the run folder.

    On a terminal, g shows the last group and q quits. Otherwise lines are printed as the run goes on.

    Args:
        run: The run folder.
        once: Print how the run stands, and exit.
    """
    from cohort.report.watch import watch as show

    show(Path(run), once=once)
