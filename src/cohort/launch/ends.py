"""How ranks end: which one failed first, and what to tell the user.

A rank that fails leaves an ``End`` in torchrun's error file. torchrun's own ``get_first_failure`` compares whole
seconds, in which all ranks have lost the one that was killed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from cohort.errors import STOPPED
from cohort.launch.job import Job

USER_ERROR = 2
SECONDS_TO_NOTICE = 5.0
"""Within this time, the launcher has noticed that a signal ended a rank."""
LOG_HEADER = "--- rank "
"""A rank's log begins with this at each start."""
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable that names the file in which a rank leaves how it failed."""


@dataclass(frozen=True, slots=True)
class End:
    """The end of a rank that failed."""

    rank: int
    code: int
    """The exit code; minus the number of the signal that ended the process."""
    timestamp: float
    """When it failed, in seconds since the epoch."""
    message: str | None = None
    """An exception that nothing caught: its type and text. Empty: the rank has printed why it failed. None: the rank
    wrote nothing, as one that a signal or ``os._exit`` ends cannot."""

    def leave(self) -> None:
        """Write this to the error file of this rank, as a whole. torchrun reads ``message`` and ``timestamp``."""
        file = Path(os.environ[ERROR_FILE])
        part = file.with_suffix(".part")
        text = {"message": self.message, "timestamp": self.timestamp, "end": asdict(self)}
        part.write_text(json.dumps(text), encoding="utf-8")
        part.replace(file)

    @classmethod
    def left_in(cls, file: Path) -> End | None:
        """What a rank has left; None: nothing."""
        return cls(**json.loads(file.read_text(encoding="utf-8"))["end"]) if file.exists() else None


def first_end(ends: Sequence[End]) -> End:
    """The failure that caused the others. The launcher ends the other ranks by SIGTERM, so such an end is a cause only
    if it was noticed first. A rank that left nothing, as one that a signal ended, was noticed after its end."""
    if ends[0].code == -signal.SIGTERM:
        return ends[0]
    own = [end for end in ends if end.code != -signal.SIGTERM]
    return min(own, key=lambda end: end.timestamp - SECONDS_TO_NOTICE * (end.code < 0 or end.message is None))


def report(job: Job, ends: Sequence[End]) -> int:
    """Print why a job has failed, unless rank 0 has; returns its exit code. A folder that the launcher has numbered is
    removed if all ranks have refused the start, and it has nothing but their logs."""
    code, text = explain_failure(job, ends)
    if text:
        print(f"cohort: error: {text}", file=sys.stderr)
    elif code == USER_ERROR and job.numbered and [path.name for path in job.folder.glob("*")] == ["logs"]:
        shutil.rmtree(job.folder)
    return code


def explain_failure(job: Job, ends: Sequence[End]) -> tuple[int, str | None]:
    """The exit code of a failed job, and what to print; None: rank 0 has printed it.

    Args:
        job: the job.
        ends: failed ranks, in the order in which they were noticed.
    """
    if any(end.code == STOPPED for end in ends):
        return STOPPED, None
    first = first_end(ends)
    log = job.log(first.rank)
    if first.code < 0:
        text = f"rank {first.rank} was ended by {_signal_name(-first.code)}, so all ranks were ended"
        if first.code == -signal.SIGKILL:
            text += "; without a known sender, SIGKILL usually means that the machine ran out of memory"
        return 1, f"{text}; {_log_and_checkpoint(job, log)}"
    if first.message:
        return 1, f"rank {first.rank} failed: {first.message}; the traceback is in {log}"
    if first.message == "":
        if any(end.rank == 0 and end.code == first.code for end in ends):
            return first.code, None  # rank 0 failed with all others, and has said why
        if line := _last_line(log):
            return first.code, f"rank {first.rank}: {line}; its log is {log}"
    text = f"rank {first.rank} ended with exit code {first.code}, without a message"
    return first.code, f"{text}; {_log_and_checkpoint(job, log)}"


def _log_and_checkpoint(job: Job, log: Path) -> str:
    its_log = f"its log is {log}; " if log.exists() else ""
    names = (path.name.removeprefix("step-") for path in (job.folder / "checkpoints").glob("step-*"))
    if steps := [int(name) for name in names if name.isdigit()]:
        return f"{its_log}{job.folder} has a checkpoint of step {max(steps)}: continue with 'resume {job.folder}'"
    return f"{its_log}{job.folder} has no checkpoint yet"


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    last = next((line for line in reversed(lines) if line.strip()), "")
    return "" if last.startswith(LOG_HEADER) else last.removeprefix("cohort: error: ")
