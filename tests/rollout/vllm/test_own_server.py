"""The server that the trainer starts. A small HTTP server in place of vLLM; see test_real.py for the real one."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cohort.config import VLLMConfig
from cohort.errors import ConfigError, EngineError
from cohort.rollout.vllm.own_server import OwnServer, server_arguments, server_environment
from tests.test_workers import alive, wait_for_end

API_SERVER = """
import json, os, subprocess, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer

arguments = sys.argv[1:]
if "--fail" in arguments:
    print("WARNING such as OSError: too many files")
    print("ValidationError: 1 error")
    print("  no such model")
    for number in range(60):
        print("cleaning up", number)
    sys.exit(3)
if "--hang" in arguments:
    time.sleep(60)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])  # as vLLM's workers
print("child", child.pid)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        text = json.dumps({"arguments": arguments, "environment": dict(os.environ), "child": child.pid}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


HTTPServer((arguments[arguments.index("--host") + 1], int(arguments[arguments.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def python(tmp_path):
    """An interpreter in whose environment something called vllm is installed."""
    package = tmp_path / "site" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    (package / "api_server.py").write_text(API_SERVER)
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path}/site:$PYTHONPATH exec {sys.executable} "$@"\n')
    script.chmod(0o755)
    return str(script)


class Tokenizer:
    def save_pretrained(self, folder):
        folder.mkdir()
        (folder / "tokenizer.json").write_text("{}")


def own(python, *arguments, **more):
    return OwnServer(VLLMConfig(start=True, python=python, arguments=arguments), "some/model", dtype="float32", **more)


def test_a_server_answers_and_ends_with_all_it_has_started(python, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    server = own(python, "--max-model-len", "64", tokenizer=Tokenizer())
    told = []
    server.wait(30, told.append)
    found = server.server.get("/anything")
    arguments, environment = found["arguments"], found["environment"]
    assert server.server.host == "127.0.0.1"
    assert arguments[arguments.index("--model") + 1] == "some/model"
    assert (Path(arguments[arguments.index("--tokenizer") + 1]) / "tokenizer.json").exists()
    assert arguments[arguments.index("--host") + 1] == "127.0.0.1"
    assert arguments[arguments.index("--max-model-len") + 1] == "64"
    assert not {"RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID"} & environment.keys()
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert "vllm_plugin" in environment["PYTHONPATH"]
    assert server.server.url in told[0]

    before = server.log
    server.move_log(tmp_path / "logs" / "vllm.log")
    until = time.monotonic() + 10
    while before.exists() and time.monotonic() < until:
        time.sleep(0.02)
    assert f"child {found['child']}" in (tmp_path / "logs" / "vllm.log").read_text()
    assert not before.exists()

    server.close()
    server.close()
    wait_for_end(found["child"])
    assert not server.server.is_healthy()
    assert not before.parent.exists()


def test_a_server_ends_when_the_trainer_is_killed(python):
    code = (
        "import sys; from cohort.config import VLLMConfig; from cohort.rollout.vllm.own_server import OwnServer\n"
        f"own = OwnServer(VLLMConfig(start=True, python={python!r}), 'm', dtype='float32'); own.wait(30)\n"
        "print(own.server.get('/')['child'], flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as trainer:
        child = int(trainer.stdout.readline())
        assert alive(child)
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
    wait_for_end(child)


def test_a_server_that_ends_names_its_first_error_and_shows_the_end_of_its_log(python):
    server = own(python, "--fail")
    with pytest.raises(
        EngineError,
        match="exit code 3: see below.\nValidationError: 1 error\n  no such model\nThe end of(.|\n)*cleaning up 59",
    ):
        server.wait(30)
    assert server.log.exists()


def test_a_server_that_does_not_answer_is_ended(python):
    server = own(python, "--hang")
    with pytest.raises(EngineError, match=r"did not answer within 0.5 s: raise vllm.startup_timeout"):
        server.wait(0.5)
    assert server._process.poll() is not None


@pytest.mark.parametrize("form", ["--port={}", "--port {}"])
def test_a_port_in_use_is_refused(python, form):
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} cannot be used"):
            own(python, *form.format(port).split())


@pytest.mark.parametrize("argument", ["--host=0.0.0.0", "--model", "--dtype", "--logprobs_mode=raw_logprobs"])
def test_arguments_that_the_trainer_sets_are_refused(python, argument):
    name = argument.partition("=")[0].replace("_", "-")
    with pytest.raises(ConfigError, match=f"{name} is set by the trainer"):
        own(python, argument)


def test_an_interpreter_without_vllm_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"vllm.start needs vllm.python"):
        own("")
    with pytest.raises(ConfigError, match="no interpreter"):
        own(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="vLLM is not installed"):
        own(sys.executable)


def test_sleep_mode_is_switched_on_by_the_setting():
    def arguments(**values):
        return server_arguments(VLLMConfig(**values), "m", tokenizer="", dtype="bfloat16", port=1)

    assert "--enable-sleep-mode" in arguments(sleep=True)
    assert "--enable-sleep-mode" not in arguments()
    assert arguments(arguments=("--port", "7"))[-2:] == ["--port", "7"]


def test_the_environment_of_a_server_keeps_what_is_not_the_launchers():
    kept = server_environment(
        {"RANK": "0", "CUDA_VISIBLE_DEVICES": "1", "PATH": "/bin", "PYTHONPATH": "theirs"}, "/v/python"
    )
    assert kept["CUDA_VISIBLE_DEVICES"] == "1"
    assert kept["PATH"] == f"/v{os.pathsep}/bin"
    assert "theirs" not in kept["PYTHONPATH"]
    assert "RANK" not in kept
