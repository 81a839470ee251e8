"""``python -m cohort.launch.rank NOTES``: what a rank's process runs. It arranges the process, then runs ``cohort``.

Rank 0 has the console. The others print to ``logs/rank-N.log`` in the run folder. A rank that fails leaves when
and why in the folder NOTES. A rank whose launcher dies is killed (on Linux).
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

from cohort.errors import STOPPED
from cohort.launch.job import LOG_HEADER, End, Job, note_path, write_note
from cohort.orphans import end_with
from cohort.watchdog import save_signal_ignored

SECONDS_FOR_RANK_0 = 3.0
SECONDS_TO_END = 1.0
"""A rank that has failed is ended after this time: in open process groups, the end of the interpreter may wait for the
other ranks."""
INTERRUPTED = 130


def write_command(notes: Path, job: Job, cwd: str | None = None) -> None:
    """Leave for the ranks what they are to run."""
    command = {
        "launcher": os.getpid(),
        "folder": str(job.folder),
        "module": job.module,
        "arguments": job.arguments,
        "cwd": cwd or str(Path.cwd()),
    }
    (notes / "command.json").write_text(json.dumps(command), encoding="utf-8")


@save_signal_ignored()  # as soon as the launcher passes on signals
def main() -> None:
    """Run this process's rank."""
    notes, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    command = json.loads((notes / "command.json").read_text(encoding="utf-8"))
    end_with(command["launcher"])
    os.chdir(command["cwd"])
    log = Job(tuple(command["arguments"]), Path(command["folder"]), ranks=1).log(rank)
    note_path(notes, rank).unlink(missing_ok=True)  # of an earlier attempt
    if (notes / "stopped").exists():  # the run was asked to stop: it is not to be restarted
        write_note(notes, End(rank, STOPPED, time.time()))
        sys.exit(STOPPED)
    note_path(notes, rank).with_suffix(".pid").write_text(str(os.getpid()))
    if rank:
        _print_to(log)
    sys.argv = [command["module"], *command["arguments"]]
    try:
        runpy.run_module(command["module"], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if code == STOPPED:
            (notes / "stopped").touch()
        if code:
            write_note(notes, End(rank, code, time.time()))
            if code != INTERRUPTED:  # the launcher interrupts all ranks itself
                _wait_for_rank_0(notes)
            _end_soon()
        raise
    except BaseException as error:
        write_note(notes, End(rank, 1, time.time(), "".join(traceback.format_exception_only(error)).strip()))
        if not rank:
            _print_to(log)
        traceback.print_exc()
        _end_soon()
        sys.exit(1)


def _print_to(log: Path) -> None:
    """Append standard output and error to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    log.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
    here = f"process {os.getpid()} on {socket.gethostname()}"
    rank = f"{os.environ['RANK']} of {os.environ['WORLD_SIZE']}"
    print(f"{LOG_HEADER}{rank}, {time.strftime('%Y-%m-%d %H:%M:%S')}, {here}")


def _wait_for_rank_0(notes: Path) -> None:
    """Wait until rank 0 has failed too, for a while: the first rank that ends makes the launcher end the others, and
    rank 0 may still be reporting the same error."""
    until = time.monotonic() + SECONDS_FOR_RANK_0
    while not note_path(notes, 0).exists() and time.monotonic() < until:
        time.sleep(0.05)


def _end_soon() -> None:
    """Let the kernel end this process if its interpreter does not; what Python still has to do comes before."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, SECONDS_TO_END)


if __name__ == "__main__":
    main()
