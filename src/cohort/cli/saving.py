"""``cohort save``: a checkpoint of a run without stopping it."""

from __future__ import annotations

import time
from pathlib import Path

from cohort.cli.app import app
from cohort.errors import RunFolderError

POLL_SECONDS = 0.2


@app.command(sort_key=4, usage="Usage: cohort save RUN [--timeout SECONDS]")
def save(run: str, /, *, timeout: float = 600.0) -> None:
    """Let a run write a checkpoint before its next update, and go on; it may run on another machine.

    Args:
        run: The run folder.
        timeout: Seconds to wait for the checkpoint. [default: 600]
    """
    from cohort.lock import is_written
    from cohort.runs.folder import RunFolder

    folder = RunFolder(Path(run).expanduser())
    folder.check_is_run()
    last = (f"its last checkpoint is of step {step}" for step in reversed(folder.checkpoint_steps()))
    if folder.has_summary:
        raise RunFolderError(f"{run} is complete: {next(last, 'it has no checkpoint')}")
    file, until = folder.save_request, time.monotonic() + timeout
    try:
        file.touch()
        while file.exists():
            if not is_written(folder.path):
                raise RunFolderError(f"no process writes {run}: {next(last, 'it has no checkpoint')}")
            if time.monotonic() > until:
                raise RunFolderError(f"no run has answered in {run} for {timeout:g} s: is it running? (--timeout)")
            time.sleep(POLL_SECONDS)
    finally:
        file.unlink(missing_ok=True)  # also if no run has answered
    print(f"{folder.checkpoint(folder.checkpoint_steps()[-1])} is written")
