"""The command that makes the page of a run: report."""

from __future__ import annotations

from cohort.cli.app import app


@app.command(sort_key=13, usage="Usage: cohort report RUN [--output report.html]")
def report(run: str, /, *, output: str | None = None) -> None:
    """Write one HTML file that shows a run: curves, diagnosis, every token of a sample, settings, time.

    Args:
        run: The run folder; the run may be in progress.
        output: The file; report.html in the run folder if it is not given. An earlier report is replaced, any other
            file is not.
    """
    from cohort.report.page import write_report

    path = write_report(run, output)
    print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")
