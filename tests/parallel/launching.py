"""Starts a function of a test module in several processes, with the environment variables that torchrun sets."""

from __future__ import annotations

import importlib
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


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
        self.size = size
        self.folder = Path(tempfile.mkdtemp(prefix="cohort-ranks-"))
        job = self.folder / "job"
        job.write_bytes(pickle.dumps((function.__module__, function.__qualname__, arguments)))
        port = free_port()
        self.processes = [self._start(environment(rank, size, port)) for rank in range(size)]

    def _start(self, variables: dict[str, str]) -> subprocess.Popen[bytes]:
        with (self.folder / f"stderr-{variables['RANK']}").open("wb") as stderr:
            return subprocess.Popen(
                [sys.executable, "-m", "tests.parallel.launching", str(self.folder)],
                env=os.environ | variables,
                cwd=ROOT,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
            )

    def wait(self, timeout: float) -> float:
        """Wait until all processes have ended; returns the seconds."""
        start = time.monotonic()
        while any(process.poll() is None for process in self.processes):
            if time.monotonic() - start > timeout:
                running = [rank for rank, process in enumerate(self.processes) if process.poll() is None]
                self.stop()
                raise AssertionError(f"ranks {running} still run after {timeout:g} s: {self.outcomes()}")
            time.sleep(0.01)
        return time.monotonic() - start

    def outcomes(self) -> list[tuple[str, Any, str]]:
        found = []
        for rank, process in enumerate(self.processes):
            path = self.folder / f"outcome-{rank}"
            if path.exists():
                found.append(pickle.loads(path.read_bytes()))
            else:
                stderr = (self.folder / f"stderr-{rank}").read_text(errors="replace")
                found.append(("died", process.returncode, stderr[-8000:]))
        return found

    def stop(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        for path in self.folder.iterdir():
            path.unlink()
        self.folder.rmdir()


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


def main(folder: Path) -> None:
    import torch

    torch.set_num_threads(1)
    module, name, arguments = pickle.loads((folder / "job").read_bytes())
    outcome: tuple[str, Any, str]
    try:
        function: Any = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
        outcome = ("returned", function(*arguments), "")
    except BaseException as error:
        outcome = ("raised", (type(error).__name__, str(error)), traceback.format_exc())
    path = folder / f"outcome-{os.environ['RANK']}"
    path.with_suffix(".part").write_bytes(pickle.dumps(outcome))
    path.with_suffix(".part").rename(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
