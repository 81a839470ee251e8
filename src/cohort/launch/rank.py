"""``python -m cohort.launch.rank NOTES LAUNCHER FOLDER MODULE [ARGUMENT ...]``: what a rank's process runs. It arranges
the process, then runs the module, which is ``cohort``.

Rank 0 has the console. The others print to ``logs/rank-N.log`` in the run folder FOLDER. A rank that fails leaves when
and why in torchrun's error file. A rank whose launcher, the process LAUNCHER, dies is killed (on Linux). In the folder
NOTES, ranks leave what concerns all attempts: their process ids, and that the run was asked to stop.
"""

from __future__ import annotations

import os
import runpy
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

from cohort.errors import STOPPED
from cohort.launch.ends import ERROR_FILE, LOG_HEADER, End
from cohort.launch.job import Job
from cohort.orphans import end_with
from cohort.watchdog import save_signal_ignored

SECONDS_FOR_RANK_0 = 3.0
SECONDS_TO_END = 1.0
"""A rank that has failed is ended after this time: in open process groups, the end of the interpreter may wait for the
other ranks."""
INTERRUPTED = 130


def command(job: Job, notes: str) -> list[str]:
    """The arguments of Python for a rank of a job, whose launcher is this process."""
    own = ["-u", "-m", "cohort.launch.rank", notes, str(os.getpid()), str(job.folder), job.module]
    return [*own, *job.arguments]


@save_signal_ignored()  # as soon as the launcher passes on signals
def main() -> None:
    """Run this process's rank."""
    notes, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    launcher, folder, module, *arguments = sys.argv[2:]
    end_with(int(launcher))
    if (notes / "stopped").exists():  # the run was asked to stop: it is not to be restarted
        End(rank, STOPPED, time.time(), "").leave()
        sys.exit(STOPPED)
    (notes / f"rank-{rank}.pid").write_text(str(os.getpid()))
    log = Job(tuple(arguments), Path(folder), ranks=1).log(rank)
    if rank:
        _print_to(log)
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if code == STOPPED:
            (notes / "stopped").touch()
        if code:
            End(rank, code, time.time(), "").leave()
            if code != INTERRUPTED:  # the launcher interrupts all ranks itself
                _wait_for_rank_0()
            _end_soon()
        raise
    except BaseException as error:
        End(rank, 1, time.time(), "".join(traceback.format_exception_only(error)).strip()).leave()
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


def _wait_for_rank_0() -> None:
    """Wait until rank 0 has failed too, for a while: the first rank that ends makes the launcher end the others, and
    rank 0 may still be reporting the same error."""
    own, until = Path(os.environ[ERROR_FILE]), time.monotonic() + SECONDS_FOR_RANK_0
    while not (own.parents[1] / "0" / own.name).exists() and time.monotonic() < until:
        time.sleep(0.05)


def _end_soon() -> None:
    """Let the kernel end this process if its interpreter does not; what Python still has to do comes before."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, SECONDS_TO_END)


if __name__ == "__main__":
    main()
