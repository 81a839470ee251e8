"""One process writes a run's folder."""

import errno
import fcntl
import json
import os
import socket
import subprocess
import sys
import warnings

import pytest

from cohort.errors import RunFolderError
from cohort.runs import lock as locks
from cohort.runs.lock import LOCK, check_unlocked, holder, lock, unlock
from tests.train.harness import make_trainer

HOLD = """
import fcntl, json, os, socket, sys
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": "10:31"}))
file.flush()
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other(tmp_path):
    """Another process, which holds the lock of ``tmp_path / "run"``."""
    (tmp_path / "run").mkdir()
    command = [sys.executable, "-I", "-c", HOLD, str(tmp_path / "run" / LOCK)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        yield process
        process.kill()


def test_a_second_process_is_refused_until_the_first_has_died(other, tmp_path, demo_tokenizer):
    folder = tmp_path / "run"
    message = f"run is being written by process {other.pid} on .*, since 10:31"
    for refused in (lock, check_unlocked):
        with pytest.raises(RunFolderError, match=message):
            refused(folder)
    trainer = make_trainer(demo_tokenizer, folder, max_steps=1)
    for resume in (False, True, "auto"):
        (folder / "config.toml").touch()
        with pytest.raises(RunFolderError, match=message):
            trainer.train(resume=resume)
        (folder / "config.toml").unlink()
    other.kill()
    other.wait()
    trainer.train()
    assert not (folder / LOCK).exists()


def test_the_lock_of_this_process(tmp_path):
    lock(tmp_path)
    lock(tmp_path)  # it holds it already
    assert holder(tmp_path)["pid"] == os.getpid()
    (tmp_path / LOCK).unlink()
    lock(tmp_path)  # the file of another folder, now
    with (tmp_path / LOCK).open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    unlock(tmp_path)
    unlock(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_forked_child_does_not_keep_the_lock(tmp_path):
    lock(tmp_path)
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
        child = os.fork()
    if child == 0:
        os.write(writer, b"x")
        os.close(writer)
        signal_wait = os.pipe()[0]
        os.read(signal_wait, 1)  # for ever
    try:
        os.read(reader, 1)
        os.close(locks._held.pop(tmp_path))  # as the end of this process does
        check_unlocked(tmp_path)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)


def test_a_file_system_without_locks(tmp_path, monkeypatch, caplog, other):
    def refused(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refused)
    with pytest.raises(RunFolderError, match=f"written by process {other.pid}"):
        lock(tmp_path / "run")
    other.kill()
    other.wait()
    lock(tmp_path / "run")
    unlock(tmp_path / "run")
    assert "is on a file system without locks" in caplog.text
    (tmp_path / LOCK).write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname() + "x", "since": ""}))
    lock(tmp_path)
    unlock(tmp_path)


@pytest.mark.parametrize("text", ["", "[1]", '{"pid": "1", "host": 2}', "\0\xff"])
def test_a_broken_lock_file(tmp_path, text):
    (tmp_path / LOCK).write_text(text, encoding="latin-1")
    assert holder(tmp_path) == {}
    lock(tmp_path)
    unlock(tmp_path)
