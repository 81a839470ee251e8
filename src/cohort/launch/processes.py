"""Ranks as processes of this machine, started and watched by torchrun's agent."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousTimeoutError,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from cohort.errors import STOPPED, ConfigError, RankError
from cohort.launch.ends import End, report
from cohort.launch.job import Job, check_gpus
from cohort.launch.rank import command

SECONDS_TO_END = 8
"""After the first failure or a signal, ranks that have not ended are killed after this time."""
SECONDS_TO_JOIN = 900
"""Time for all machines to arrive."""
SECONDS_TO_ANSWER = 60
STORE = "import sys; from torch.distributed import TCPStore; TCPStore(sys.argv[1], int(sys.argv[2]), is_master=False)"


def start_processes(job: Job) -> int:
    """Start a job's ranks on this machine, and wait for their end. Returns and raises as ``launch``."""
    check_gpus(job)
    if job.flags.rdzv_endpoint:
        _check_endpoint(*job.flags.rdzv_endpoint.rsplit(":", 1))
    os.environ["OMP_NUM_THREADS"] = str(job.threads)
    with tempfile.TemporaryDirectory(prefix="cohort-launch-") as folder, _quiet():
        notes = Path(folder)
        agent = elastic_launch(_config(job, notes), sys.executable)
        arguments = [one.replace("$", "$$") for one in command(job, folder)]  # torchrun replaces ${...}
        try:
            # In a thread, torchrun's agent leaves the signals alone, which it would answer by ending the ranks.
            with _passing_on_signals(notes) as passed_on, ThreadPoolExecutor(1) as thread:
                thread.submit(agent, *arguments).result()
        except ChildFailedError as error:
            ends = [
                End.left_in(Path(failed.error_file)) or End(rank, failed.exitcode, failed.timestamp)
                for rank, failed in error.failures.items()
            ]
            if not passed_on or any(end.code == STOPPED for end in ends):
                return report(job, ends)
            if passed_on[0] != signal.SIGINT:  # rank 0 reports an interrupt
                print(f"cohort: ended by {passed_on[0].name}, with all ranks of this machine", file=sys.stderr)
            return 128 + passed_on[0]
        except RendezvousError as error:
            # Ranks that have lost the machine of the meeting point have said so.
            ends = [end for file in notes.rglob("error.json") if (end := End.left_in(file))]
            if not ends:
                raise _meeting_failed(job, error) from error
            return report(job, ends)
    return 0


@contextlib.contextmanager
def _passing_on_signals(notes: Path) -> Iterator[list[signal.Signals]]:
    """Pass on signals to the ranks of this machine; yields those that have come. After the first that asks for a stop,
    another one ends the launcher, and with it the ranks."""
    passed_on: list[signal.Signals] = []

    def stop(number: int, _: Any) -> None:
        passed_on.append(signal.Signals(number))
        for other in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(other, signal.SIG_DFL)
        send(number)

    def send(number: int, *_: Any) -> None:
        for file in notes.glob("rank-*.pid"):
            with contextlib.suppress(OSError, ValueError):
                os.kill(int(file.read_text()), number)

    handlers = {signal.SIGTERM: stop, signal.SIGINT: stop, signal.SIGUSR1: stop, signal.SIGUSR2: send}
    handlers[signal.SIGQUIT] = send  # each prints its stacks
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield passed_on
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _config(job: Job, notes: Path) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=job.flags.nnodes,
        max_nodes=job.flags.nnodes,
        nproc_per_node=job.ranks,
        run_id=job.flags.rdzv_id if job.flags.rdzv_endpoint else str(uuid.uuid4()),
        role="rank",
        rdzv_backend="c10d",
        rdzv_endpoint=job.flags.rdzv_endpoint or "localhost:0",
        rdzv_configs={"join_timeout": SECONDS_TO_JOIN},
        local_addr=None if job.flags.rdzv_endpoint else "localhost",
        max_restarts=job.flags.max_restarts,
        monitor_interval=0.1,
        shutdown_timeout=SECONDS_TO_END,
        logs_specs=DefaultLogsSpecs(log_dir=str(notes)),  # nothing is redirected: each rank arranges its own log
    )


def _check_endpoint(host: str, port: str) -> None:
    """Check that another program does not use the port where the machines are to meet.

    Raises:
        ConfigError: something answers there that is not a job's meeting point.
    """
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=5):
        command = [sys.executable, "-c", STORE, host, port]  # a foreign program may never answer
        try:
            done = subprocess.run(command, timeout=SECONDS_TO_ANSWER, check=False, capture_output=True)
        except subprocess.TimeoutExpired:
            done = None
        if done is None or done.returncode:
            raise ConfigError(f"port {port} of {host} is used by another program: choose another --rdzv-endpoint")


def _meeting_failed(job: Job, error: RendezvousError) -> RankError:
    where = f"the machines of job {job.flags.rdzv_id!r} cannot meet at {job.flags.rdzv_endpoint}"
    if isinstance(error, RendezvousTimeoutError):
        return RankError(f"{where}: fewer than {job.flags.nnodes} came within {SECONDS_TO_JOIN} s")
    if isinstance(error, RendezvousClosedError):
        return RankError(f"{where}: the job has ended there; choose another --rdzv-id")
    if isinstance(error, RendezvousConnectionError):
        return RankError(f"{where}: check that the host is one of the machines, and that the port can be reached")
    return RankError(f"{where}: {error}")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the messages of torchrun's agent, unless the user has set its LOGLEVEL."""
    if "LOGLEVEL" not in os.environ:
        logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
