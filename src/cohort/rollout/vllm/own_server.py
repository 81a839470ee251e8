"""A vLLM server that the trainer starts on its own machine, and that ends with it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cohort.config import VLLMConfig
from cohort.errors import ConfigError, EngineError
from cohort.rollout.vllm.plugin import PLUGIN, PLUGIN_ARGUMENTS
from cohort.rollout.vllm.server import Server

HOST = "127.0.0.1"
GUARD = Path(__file__).with_name("guard.py")
LAUNCHER = re.compile(
    "(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*|PYTHON(PATH|HOME)|VIRTUAL_ENV"
)
"""Environment variables of the trainer's launcher and Python. vLLM would join the trainer's process group by them."""
OURS = ("--host", "--model", "--dtype", "--served-model-name", "--logprobs-mode", "--uds")
"""Arguments that the trainer sets itself."""
TAIL_LINES = 30
ERROR = re.compile(r"^(?!.*\b(WARNING|INFO)\b).*\b\w*(Error|Exception): ")
"""A line of the log with an exception, and not with a warning that mentions one."""


class OwnServer:
    """A vLLM server on the loopback device of this machine. It ends with this object or with this process, however that
    ends.

    Args:
        settings: interpreter, arguments and time limit.
        model: folder or hub id of the model.
        tokenizer: looks for stop strings. It is written to a folder from which the server reads it. None: the model's.
        dtype: of the weights in the server, as in "bfloat16".
        trust_remote_code: as in the settings of the model.

    Raises:
        ConfigError: no interpreter, no vLLM in its environment, an argument that the trainer sets, or a port in use.
    """

    def __init__(
        self, settings: VLLMConfig, model: str, *, tokenizer: Any = None, dtype: str, trust_remote_code: bool = False
    ) -> None:
        python = interpreter(settings)
        port = _port(settings.arguments)
        self._folder = Path(tempfile.mkdtemp(prefix="cohort-vllm-"))
        if tokenizer is not None:
            tokenizer.save_pretrained(self._folder / "tokenizer")
        command = [python, "-m", "vllm.entrypoints.openai.api_server"]
        command += server_arguments(
            settings, model, tokenizer=str(self._folder / "tokenizer") if tokenizer else "", dtype=dtype, port=port
        )
        command += ["--trust-remote-code"] if trust_remote_code else []
        self.server = Server(f"http://{HOST}:{port}")
        self.log = self._folder / "vllm.log"
        """What the server has printed."""
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(GUARD), str(self.log), *command],
            stdin=subprocess.PIPE,
            env=server_environment(os.environ, python),
            text=True,
            start_new_session=True,
        )
        self._end = weakref.finalize(self, _end, self._process, self._folder)

    def wait(self, seconds: float, announce: Callable[[str], object] | None = None) -> None:
        """Wait until the server answers.

        Args:
            seconds: time limit.
            announce: is told that the server starts.

        Raises:
            EngineError: it has ended, or the time is over. Its last lines are in the message; the server is ended.
        """
        if announce:
            announce(f"starting a vLLM server at {self.server.url}; its log: {self.log}")
        until = time.monotonic() + seconds
        while not self.server.is_healthy():
            code = self._process.poll()
            if code is None and time.monotonic() < until:
                time.sleep(0.2)
                continue
            problem = f"did not answer within {seconds:g} s" if code is None else f"ended with exit code {code}"
            hint = "raise vllm.startup_timeout, or see below" if code is None else "see below"
            self._end.detach()
            _end(self._process)  # the log stays
            raise EngineError(f"the vLLM server {problem}: {hint}.\n{self.tail()}")

    def tail(self) -> str:
        """The first error in the log, which is the cause of others, and the last lines."""
        try:
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError as error:
            return f"(no log: {error})"
        errors = (number for number, line in enumerate(lines) if ERROR.search(line))
        first = next(errors, len(lines))
        return "\n".join([*lines[first : first + 2], f"The end of {self.log}:", *lines[-TAIL_LINES:]])

    def move_log(self, path: Path) -> None:
        """Write the log to another file from now on, with what it holds so far."""
        if self._process.poll() is not None or self._process.stdin is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(self.log, path)
        else:
            print(path.absolute(), file=self._process.stdin, flush=True)
        self.log = path

    def close(self) -> None:
        """End the server and what it has started. Idempotent."""
        self._end()


def _end(process: subprocess.Popen[str], folder: Path | None = None) -> None:
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(20)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def interpreter(settings: VLLMConfig) -> str:
    """The Python interpreter of vLLM's environment.

    Raises:
        ConfigError: there is none, or vLLM is not installed there.
    """
    install = "install vLLM in an environment of its own (`make vllm` does for CPUs) and set vllm.python to its python"
    if not settings.python:
        raise ConfigError(f"vllm.start needs vllm.python: {install}")
    found = shutil.which(os.path.expanduser(settings.python))  # noqa: PTH111 - a name on PATH is not a path
    if found is None:
        raise ConfigError(f"vllm.python: no interpreter {settings.python!r}: {install}")
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        done = subprocess.run([found, "-c", code], env=server_environment(os.environ, found), timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"vllm.python: {settings.python!r} does not run ({error}): {install}") from None
    if done.returncode:
        raise ConfigError(f"vllm.python: vLLM is not installed in the environment of {settings.python!r}: {install}")
    return found


def server_arguments(settings: VLLMConfig, model: str, *, tokenizer: str, dtype: str, port: int) -> list[str]:
    """The arguments of a server: what Cohort needs, then those of the settings.

    Raises:
        ConfigError: the settings have an argument that the trainer sets itself.
    """
    given = {argument.partition("=")[0].replace("_", "-") for argument in settings.arguments}
    if taken := sorted(given.intersection(OURS)):
        raise ConfigError(f"vllm.arguments: {', '.join(taken)} is set by the trainer: leave it out")
    arguments = ["--model", model, "--served-model-name", "policy", "--host", HOST, "--dtype", dtype]
    arguments += ["--tokenizer", tokenizer] if tokenizer else []
    arguments += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    arguments += [*PLUGIN_ARGUMENTS, *(["--enable-sleep-mode"] if settings.sleep else [])]
    return [*arguments, *settings.arguments, *([] if "--port" in given else ["--port", str(port)])]


def server_environment(environment: Mapping[str, str], python: str) -> dict[str, str]:
    """The environment variables of a server: the trainer's without those of its launcher and its own Python."""
    kept = {name: value for name, value in environment.items() if not LAUNCHER.fullmatch(name)}
    paths = os.pathsep.join([str(Path(python).parent), kept.get("PATH", os.defpath)])
    # The development routes update the weights. The server listens on the loopback device only.
    return {**kept, "PATH": paths, "PYTHONPATH": str(PLUGIN), "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}


def _port(arguments: Sequence[str]) -> int:
    """The port in the arguments, or a free one.

    Raises:
        ConfigError: it is in use, or no port.
    """
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--port", nargs="?", default="0", const="")
    given = parser.parse_known_args(arguments)[0].port
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, int(given)))
        except (ValueError, OverflowError):
            raise ConfigError(f"vllm.arguments: --port {given!r} is no port") from None
        except OSError as error:
            raise ConfigError(
                f"vllm.arguments: port {given} cannot be used ({error.strerror}): another server may run there. Leave "
                "--port out to use a free one"
            ) from None
        return int(probe.getsockname()[1])
