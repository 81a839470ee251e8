"""The command that makes the page of a run: report."""

from __future__ import annotations

from cohort.cli.app import app
from cohort.errors import ConfigError


@app.command(sort_key=13, usage="Usage: cohort report RUN [RUN ...] [--output report.html]")
def report(*runs: str, output: str | None = None) -> None:
    """Write one HTML file that shows a run: curves, diagnosis, every token of a sample, settings, time. Of several
    runs, it compares them.

    Args:
        runs: Run folders; runs may be in progress.
        output: The file; if it is not given, report.html in the run folder, and of several runs in the working
            directory. An earlier report is replaced, any other file is not.
    """
    from cohort.report.page import write_report

    if not runs:
        raise ConfigError("cohort report needs a run folder: cohort report RUN")
    path = write_report(runs, output)
    print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")
