"""How ranks end: which one failed first, and what to tell the user."""

from __future__ import annotations

import contextlib
import json
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


@dataclass(frozen=True, slots=True)
class End:
    """The end of a rank that failed."""

    rank: int
    code: int
    """The exit code; minus the number of the signal that ended the process."""
    time: float
    """When it failed, in seconds since the epoch."""
    error: str | None = None
    """An exception that nothing caught: its type and text."""
    noted: bool = True
    """Whether the rank wrote this itself. A rank that a signal or ``os._exit`` ends cannot."""


def note_path(notes: Path, rank: int) -> Path:
    """Where a rank leaves how it failed."""
    return notes / f"rank-{rank}.json"


def write_note(notes: Path, end: End) -> None:
    """Leave how a rank failed, for ``read_end``."""
    note_path(notes, end.rank).write_text(json.dumps(asdict(end)), encoding="utf-8")


def read_end(notes: Path, rank: int, code: int, noticed: float) -> End:
    """The end of a rank: as it noted it, or, if it could not, as it was noticed."""
    with contextlib.suppress(OSError, ValueError):
        return End(**json.loads(note_path(notes, rank).read_text(encoding="utf-8")))
    return End(rank, code, noticed, noted=False)


def first_end(ends: Sequence[End]) -> End:
    """The failure that caused the others. The launcher ends the other ranks by SIGTERM, so such an end is a cause only
    if it was noticed first. A rank that noted nothing, as one that a signal ended, was noticed after its end."""
    if ends[0].code == -signal.SIGTERM:
        return ends[0]
    own = [end for end in ends if end.code != -signal.SIGTERM]
    return min(own, key=lambda end: end.time - SECONDS_TO_NOTICE * (end.code < 0 or not end.noted))


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
        name = _signal_name(-first.code)
        text = f"rank {first.rank} was ended by {name}, so all ranks were ended"
        if first.code == -signal.SIGKILL:
            text += "; without a known sender, SIGKILL usually means that the machine ran out of memory"
        return 1, f"{text}; {_log_and_checkpoint(job, log)}"
    if first.error is not None:
        return 1, f"rank {first.rank} failed: {first.error}; the traceback is in {log}"
    if first.noted and any(end.rank == 0 and end.code == first.code for end in ends):
        return first.code, None  # rank 0 failed with all others, and has said why
    if first.noted and (line := _last_line(log)):
        return first.code, f"rank {first.rank}: {line}; its log is {log}"
    text = f"rank {first.rank} ended with exit code {first.code}, without a message"
    return first.code, f"{text}; {_log_and_checkpoint(job, log)}"


def _log_and_checkpoint(job: Job, log: Path) -> str:
    parts = [f"its log is {log}"] if log.exists() else []
    names = (path.name.removeprefix("step-") for path in (job.folder / "checkpoints").glob("step-*"))
    if steps := [int(name) for name in names if name.isdigit()]:
        parts.append(f"{job.folder} has a checkpoint of step {max(steps)}: continue with 'resume {job.folder}'")
    else:
        parts.append(f"{job.folder} has no checkpoint yet")
    return "; ".join(parts)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    last = next((line for line in reversed(lines) if line.strip()), "")
    return "" if last.startswith(LOG_HEADER) else last.removeprefix("cohort: error: ")
