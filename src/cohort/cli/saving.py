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
    from cohort.runs import RunFolder
    from cohort.runs.save_request import request_save, save_answered

    folder = RunFolder(Path(run))
    folder.check_is_run()
    if (folder.path / "summary.json").exists():
        raise RunFolderError(f"{run} is complete: its last checkpoint is of step {folder.checkpoint_steps()[-1:]}")
    file, until = request_save(folder.path), time.monotonic() + timeout
    while file.exists():
        if time.monotonic() > until:
            save_answered(folder.path)
            raise RunFolderError(f"no run has answered in {run} for {timeout:g} s: is it running? (--timeout)")
        time.sleep(POLL_SECONDS)
    print(f"{folder.checkpoint(folder.checkpoint_steps()[-1])} is written")
