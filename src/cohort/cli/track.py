"""The command that sends a run to an experiment tracker: track."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from cohort.cli.app import app


@app.command(
    sort_key=17,
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
    """Send a run to an experiment tracker: what it was not sent yet.

    Args:
        run: A run folder. The run may be complete, stopped, killed, or in progress.
        to: The tracker.
        project: Its project or experiment. [default: report.tracker_project, the tracker's own variable, or cohort]
    """
    from cohort.errors import CohortError, TrackerError
    from cohort.report.trackers import KINDS, send_run
    from cohort.report.trackers.state import error_text
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
