"""Starts a function of a test module in several processes, with the environment variables that torchrun sets.

The processes are forked from one that has imported the modules and done nothing else: importing takes much longer than
most of these tests. It lives as long as the tests' process.
"""

from __future__ import annotations

import importlib
import os
import pickle
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_parents: list[subprocess.Popen[bytes]] = []
"""The process that forks, once there is one."""


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
        port = free_port()
        variables = [{**os.environ, **environment(rank, size, port)} for rank in range(size)]
        job = (function.__module__, function.__qualname__, arguments)
        (self.folder / "job").write_bytes(pickle.dumps((function.__module__, pickle.dumps(job), variables)))
        stdin = _parent().stdin
        assert stdin is not None
        stdin.write(f"{self.folder}\n".encode())
        stdin.flush()

    def codes(self) -> list[int | None]:
        """The return code of each rank; None: it runs."""
        paths = [self.folder / f"code-{rank}" for rank in range(self.size)]
        return [int(path.read_text()) if path.exists() else None for path in paths]

    def wait(self, timeout: float) -> float:
        """Wait until all processes have ended; returns the seconds."""
        start = time.monotonic()
        while None in self.codes():
            assert _parent().poll() is None, "the process that starts the ranks has died"
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
        while None in (codes := self.codes()):
            for rank, code in enumerate(codes):
                if code is None and (path := self.folder / f"pid-{rank}").exists():
                    with suppress(ProcessLookupError):
                        os.kill(int(path.read_text()), signal.SIGKILL)
            time.sleep(0.01)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        shutil.rmtree(self.folder)


def _parent() -> subprocess.Popen[bytes]:
    if not _parents:
        command = [sys.executable, "-m", "tests.parallel.launching"]
        one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        _parents.append(subprocess.Popen(command, stdin=subprocess.PIPE, cwd=ROOT, env=os.environ | one_thread))
    return _parents[0]


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


def main() -> None:
    """Fork the ranks of each job whose folder is written to standard input; note how they end."""
    import torch

    torch.set_num_threads(1)
    children: dict[int, Path] = {}
    while True:
        ready = select.select([sys.stdin], [], [], 0.01 if children else None)[0]
        if ready:
            if not (line := sys.stdin.buffer.raw.readline()):  # unbuffered, for select
                break
            folder = Path(line.decode().strip())
            module, job, variables = pickle.loads((folder / "job").read_bytes())
            with suppress(Exception):
                importlib.import_module(module)  # an error is told by the ranks
            for rank, one in enumerate(variables):
                if not (child := os.fork()):
                    _be_rank(folder, rank, one, job)
                    return
                _write(folder / f"pid-{rank}", str(child).encode())
                children[child] = folder / f"code-{rank}"
        while children and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if (path := children.pop(ended[0], None)) and path.parent.exists():
                _write(path, str(os.waitstatus_to_exitcode(ended[1])).encode())
    for child in children:
        os.kill(child, signal.SIGKILL)


def _be_rank(folder: Path, rank: int, variables: dict[str, str], job: bytes) -> None:
    os.environ.clear()
    os.environ.update(variables)
    for stream, name in ((0, os.devnull), (1, os.devnull), (2, folder / f"stderr-{rank}")):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), stream)
    outcome: tuple[str, Any, str]
    try:
        module, name, arguments = pickle.loads(job)
        function: Any = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
        outcome = ("returned", function(*arguments), "")
    except BaseException as error:
        outcome = ("raised", (type(error).__name__, str(error)), traceback.format_exc())
    _write(folder / f"outcome-{rank}", pickle.dumps(outcome))


def _write(path: Path, data: bytes) -> None:
    path.with_suffix(".part").write_bytes(data)
    path.with_suffix(".part").rename(path)


if __name__ == "__main__":
    main()
