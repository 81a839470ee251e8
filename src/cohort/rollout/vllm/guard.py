"""Run a command that ends with the process that started it, however that ends.

python -I -S guard.py LOG COMMAND ...

Standard input is a pipe that the starter holds open: when it closes, the command and all processes it has started are
killed. A line in the pipe is a file to which the log is moved. Imports nothing of Cohort, so that it starts at once.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

GRACE_SECONDS = 5.0
"""Time for the command to end by itself."""


def main(log: str, command: list[str]) -> int:
    """Run a command; returns its exit code."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C does not reach it, and it is killed as a group
    )
    assert process.stdout is not None
    threading.Thread(target=_obey, args=(process, log), daemon=True).start()
    while chunk := os.read(process.stdout.fileno(), 2**16):
        with _lock:
            _log[0].write(chunk)
    code = process.wait()
    _kill(process, signal.SIGKILL)  # what it has left behind
    return code


_lock = threading.Lock()
_log = [open(sys.argv[1], "wb", buffering=0)] if __name__ == "__main__" else []  # noqa: PTH123, SIM115


def _obey(process: subprocess.Popen[bytes], log: str) -> None:
    """Move the log for each line in the pipe, and end the command when the pipe is closed."""
    for line in sys.stdin:
        target = line.rstrip("\n")
        with _lock, contextlib.suppress(OSError):
            Path(target).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(log, target)
            _log[0].close()
            _log[0] = Path(target).open("ab", buffering=0)  # noqa: SIM115
            Path(log).unlink()
            log = target
    _kill(process, signal.SIGTERM)
    until = time.monotonic() + GRACE_SECONDS
    while process.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    _kill(process, signal.SIGKILL)
    os._exit(0)


def _kill(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
