"""Commands that read a run's folder: watch, diagnose, report, plot, replay, track, verify."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from shutil import get_terminal_size
from typing import Annotated, Literal

from cyclopts import Parameter

from cohort.cli.app import FIRST_HOUR, app
from cohort.errors import ConfigError
from cohort.flags import ReplayFlags

# ----------------------------------------
# ``cohort watch``: the live display of a run that was started elsewhere.


@app.command(group=FIRST_HOUR, sort_key=4, usage="Usage: cohort watch RUN [--once]")
def watch(run: str, /, *, once: bool = False) -> None:
    """Show the progress of a run that another process trains.

    It only reads the run folder, and ends when the run is complete. On a terminal, g shows the last group and q quits.
    Otherwise lines are printed as the run goes on.

    Args:
        run: The run folder.
        once: Print how the run stands, and exit.
    """
    from cohort.report.watch import watch as show

    show(Path(run), once=once)


# ----------------------------------------
# The command that says what is wrong with a run: diagnose.


@app.command(
    sort_key=4,
    usage="Usage: cohort diagnose RUN [--json]",
    help_epilogue="The exit code is 1 if an alarm stands at the end. 'cohort docs diagnosis' explains the checks.",
)
def diagnose(run: str, /, *, json_output: Annotated[bool, Parameter("--json")] = False) -> int:
    """Say what is wrong with a run, and what to try.

    From its metrics: what, since when, and why.

    Args:
        run: A run folder, of a run that has ended or is in progress.
        json_output: Print one JSON object instead of text.
    """
    from cohort.report.diagnosis import Diagnosis, Level, not_run, worst
    from cohort.report.words import one_line
    from cohort.runs.durable import as_json
    from cohort.runs.reader import Run

    history = Run.read(run)
    diagnosis = Diagnosis(history.settings)
    said = [finding for metrics in history.rows for finding in diagnosis.step(metrics)]
    silent = not_run(history.keys())
    alarm = worst(diagnosis.findings) is Level.ALARM
    steps = [metrics for metrics in history.rows if "updates" in metrics]
    health = diagnosis.health or "no step yet"
    if json_output:
        findings = [finding.as_json() for finding in diagnosis.findings]
        found = {"ok": not alarm, "health": health, "steps": len(steps), "findings": findings, "not_run": list(silent)}
        print(as_json(found, indent=1), end="")
    else:
        lines = [finding.show(get_terminal_size((119, 24)).columns) for finding in said]
        print("\n".join([*lines, f"after step {steps[-1]['step']}, {health}" if steps else health]))
        if steps and silent:
            named = ", ".join(silent)
            print(f"not checked, because the run has no metrics for it: {named} (see 'cohort docs diagnosis')")
        for damage in history.missing:
            if damage.startswith("metrics.jsonl"):
                print(one_line(damage))
    return int(alarm)


# ----------------------------------------
# The command that makes the page of a run: report.


@app.command(group=FIRST_HOUR, sort_key=5, usage="Usage: cohort report RUN [RUN ...] [--output report.html]")
def report(*runs: str, output: str | None = None) -> None:
    """Write one HTML file that shows a run, or compares several.

    It has curves, the diagnosis, every token of a sample, settings and times.

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


# ----------------------------------------
# The command that draws curves: plot.


@app.command(
    sort_key=5,
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
    """Draw metrics of runs as PNG, SVG or PDF.

    Runs that differ only by their seed are one line with a band.

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
    from cohort.report.plot import Look, check_output, figure, save
    from cohort.runs.reader import Run

    if not runs:
        raise ConfigError("cohort plot needs a run folder: cohort plot RUN --output curves.png")
    path = check_output(output)
    look = Look(x, smooth, log, theme, separate, _size(size), title, bare)
    save(figure([Run.read(run) for run in runs], key, look), path, look)
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


# ----------------------------------------
# The command that puts a stored step under another objective: replay.


@app.command(
    sort_key=6,
    usage="Usage: cohort replay RUN [--step N] [--objective PRESET] [--set PART=VALUE ...]",
    help_epilogue="Example: cohort replay runs/mine --step 12 --objective dr_grpo --set beta=0.01. 'cohort docs "
    "replay' explains the result, which is also in RUN/replays/.",
)
def replay(run: str, /, *, flags: ReplayFlags | None = None) -> int:
    """Compute what a stored step teaches under another objective.

    Nothing is sampled, and the run is not changed.

    Args:
        run: The run folder.
    """
    from cohort.replay import command

    return command.run(command.Request(run=run, **vars(flags or ReplayFlags())))


# ----------------------------------------
# The command that sends a run to an experiment tracker: track.


@app.command(
    sort_key=7,
    usage="Usage: cohort track RUN --to TRACKER [--project NAME]",
    help_epilogue="Trackers: tensorboard, wandb, mlflow, trackio, swanlab, comet (see 'cohort docs trackers'). "
    "Addresses and keys are those of the tracker's own settings, such as WANDB_API_KEY or MLFLOW_TRACKING_URI.",
)
def track(
    run: str,
    /,
    *,
    to: Annotated[str, Parameter(metavar="TRACKER")],
    project: Annotated[str | None, Parameter(metavar="NAME")] = None,
) -> None:
    """Send to an experiment tracker what it lacks of a run.

    Args:
        run: A run folder. The run may be complete, stopped, killed, or in progress.
        to: The tracker.
        project: Its project or experiment. [default: report.tracker_project, the tracker's own variable, or cohort]
    """
    from cohort.errors import CohortError, TrackerError
    from cohort.report.trackers import KINDS, error_text, send_run
    from cohort.report.words import one_line

    def say(text: str) -> None:
        print(one_line(text), flush=True)

    try:
        sent = send_run(run, to, project, announce=say)
    except (CohortError, KeyboardInterrupt):
        raise
    except Exception as error:
        raise TrackerError(f"{KINDS[to].title}: {error_text(error)}") from None  # its own text may hold secrets
    where = f"{KINDS[to].title}, project {sent.project}, run {sent.id}"
    if sent.steps:
        had = f" (up to step {sent.before} it was there)" if sent.before >= 0 else ""
        say(f"sent {sent.steps} steps, up to step {sent.last}, to {where}{had}")
    else:
        say(f"nothing to send: {where} has all steps" if sent.last >= 0 else "nothing to send: no step is complete")


# ----------------------------------------
# ``cohort verify``.


@app.command(sort_key=8, usage="Usage: cohort verify RUN")
def verify(run: str, /) -> int:
    """Check every file of a run folder, or of one checkpoint.

    Each has a size, a hash or a checksum. Exit code 0 if all are whole, 1 if not. Folders that were set aside
    (step-N.broken) do not count.

    Args:
        run: The folder.
    """
    from cohort.runs.verify import verify as verdicts

    found = list(verdicts(Path(run).expanduser()))
    broken = [one for one in found if one.problem]
    whole = [one.name for one in found if not one.problem and not one.note]
    models = [name for name in whole if not name.endswith((".toml", ".json", ".jsonl", ".parquet"))]
    files = len(whole) - len(models)
    for name in models:
        print(f"whole   {name}")
    if files:
        print(f"whole   {files} other file{'s' if files > 1 else ''}")
    for one in found:
        if one.note:
            print(f"note    {one.name}: {one.note}")
    for one in broken:
        print(f"broken  {one.name}: {one.problem}")
    return 1 if broken else 0
