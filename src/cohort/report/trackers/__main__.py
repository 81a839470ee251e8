"""Sends a run to a tracker while it goes on: ``python -m cohort.report.trackers RUN NAME PROJECT``.

The training process holds standard input open. This process ends when standard input is closed and everything is sent.
It repeats what fails, and writes the reason to its state.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from pathlib import Path

from cohort.config.secrets import hide_secrets
from cohort.report.trackers.send import Sender, State, error_text

LOOK_SECONDS, RETRY_SECONDS = 1.0, 30.0
"""Time between looks at the run folder, and between attempts after a failure."""
END_SECONDS = 600.0
"""Time for what is left when the run has ended: a process that trains waits less and kills, one that was killed does
not."""


def main(run: Path, kind: str, project: str | None, ended: threading.Event) -> int:
    """Send until the run has ended. Returns 0 if everything was sent."""
    is_first = True
    while True:
        last = ended.is_set()
        try:
            with Sender.of(run, kind, project, live=True) as sender:
                if is_first and sender.state.error:  # of an earlier process
                    sender.state = sender.state.write(run, kind, error=None)
                is_first = False
                while True:
                    last = ended.is_set()  # before it looks: afterwards no line comes
                    sender.send()
                    if last:
                        break
                    ended.wait(LOOK_SECONDS)
            return 0
        except Exception as error:
            with contextlib.suppress(OSError):  # the disk of the run folder may be what fails
                State.read(run, kind).write(run, kind, error=error_text(error))
            with contextlib.suppress(OSError):
                print(hide_secrets(traceback.format_exc()), file=sys.stderr, flush=True)
        if last:
            return 1
        ended.wait(RETRY_SECONDS)


def _wait_for_end(ended: threading.Event) -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 1):
            pass
    ended.set()
    time.sleep(END_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    os.nice(10)  # training goes first
    of_run = threading.Event()
    threading.Thread(target=_wait_for_end, args=(of_run,), daemon=True).start()
    code = main(Path(sys.argv[1]), sys.argv[2], sys.argv[3] or None, of_run)
    sys.stdout.flush()
    os._exit(code)  # whatever a tracker does at exit was done when its run was closed
