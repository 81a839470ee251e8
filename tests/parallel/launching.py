"""Starts a function of a test module in several processes, with the environment variables that torchrun sets. They are
forked from the process of ``tests.warm``: importing takes much longer than most of these tests."""

from __future__ import annotations

import importlib
import os
import pickle
import shutil
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import warm


def on_ranks(size: int, function: Callable[..., Any], *arguments: Any, timeout: float = 900) -> list[Any]:
    """What a module's function returns on each rank, by rank.

    Raises:
        AssertionError: with the tracebacks, when it raised on some rank; or it took more than ``timeout`` seconds.
    """
    with Ranks(size, function, *arguments) as ranks:
        ranks.wait(timeout)
        outcomes = ranks.outcomes()
    failed = [f"rank {rank}: {outcome!r:.20000}" for rank, outcome in enumerate(outcomes) if outcome[0] != "returned"]
    assert not failed, "\n".join(failed).replace("\\n", "\n")
    return [value for _, value, _ in outcomes]


class Ranks:
    """The processes of ``on_ranks``, to look at while they run.

    ``outcomes()`` gives for each rank ("returned", value, ""), ("raised", exception's type and text, traceback) or
    ("died", return code, standard error).
    """

    def __init__(self, size: int, function: Callable[..., Any], *arguments: Any) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="cohort-ranks-"))
        (self.folder / "job").write_bytes(pickle.dumps((function.__qualname__, arguments)))
        port, command = free_port(), (str(self.folder), function.__module__)
        self._processes = [
            warm.begin(*command, module=__name__, **{**os.environ, **environment(rank, size, port)})
            for rank in range(size)
        ]

    def codes(self) -> list[int | None]:
        """The return code of each rank; None: it runs."""
        return [process.poll() for process in self._processes]

    def wait(self, timeout: float) -> float:
        """Wait until all processes have ended; returns the seconds."""
        start = time.monotonic()
        while None in self.codes():
            if time.monotonic() - start > timeout:
                running = [rank for rank, code in enumerate(self.codes()) if code is None]
                self.stop()
                raise AssertionError(f"ranks {running} still run after {timeout:g} s: {self.outcomes()}")
            time.sleep(0.01)
        return time.monotonic() - start

    def outcomes(self) -> list[tuple[str, Any, str]]:
        found = []
        for rank, code in enumerate(self.codes()):
            path = self.folder / f"outcome-{rank}"
            if path.exists():
                found.append(pickle.loads(path.read_bytes()))
            else:
                stderr = self.folder / f"stderr-{rank}"
                found.append(("died", code, stderr.read_text(errors="replace")[-8000:] if stderr.exists() else ""))
        return found

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        for process in self._processes:
            process.communicate()
        shutil.rmtree(self.folder)


def environment(rank: int, size: int, port: int) -> dict[str, str]:
    """What torchrun sets, with one thread a rank."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> int:
    """Be the rank that the environment names, of the job in the folder that the first argument names."""
    folder, module, rank = Path(sys.argv[1]), sys.argv[2], os.environ["RANK"]
    for stream, name in ((1, os.devnull), (2, folder / f"stderr-{rank}")):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), stream)
    outcome: tuple[str, Any, str]
    try:
        function: Any = importlib.import_module(module)
        qualified, arguments = pickle.loads((folder / "job").read_bytes())
        for part in qualified.split("."):
            function = getattr(function, part)
        outcome = ("returned", function(*arguments), "")
    except BaseException as error:
        outcome = ("raised", (type(error).__name__, str(error)), traceback.format_exc())
    path = folder / f"outcome-{rank}"
    path.with_suffix(".part").write_bytes(pickle.dumps(outcome))
    path.with_suffix(".part").rename(path)
    return 0
