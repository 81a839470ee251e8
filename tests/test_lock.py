"""One process writes a run's folder."""

import errno
import fcntl
import json
import os
import socket
import subprocess
import sys
import time
import warnings
from functools import partial

import pytest

from cohort.cli import main
from cohort.errors import RunFolderError
from cohort.lock import LOCK, Lock, holder
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
    for refused in (Lock(folder).take, Lock(folder).check):
        with pytest.raises(RunFolderError, match=message):
            refused()
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


def test_the_lock_of_one_owner(tmp_path):
    lock, other = Lock(tmp_path), Lock(tmp_path)
    assert lock.take()
    assert not lock.take()  # it holds it already
    assert holder(tmp_path)["pid"] == os.getpid()
    for refused in (other.take, other.check):
        with pytest.raises(RunFolderError, match="is being written by another trainer of this process: let its"):
            refused()
    other.release()  # what it does not hold
    with (tmp_path / LOCK).open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    (tmp_path / LOCK).unlink()
    assert lock.take()  # that was the file of another folder
    del lock
    assert other.take()  # the lock has ended with its owner
    other.release()
    other.release()
    assert list(tmp_path.iterdir()) == []


def test_trainers_of_one_process(demo_tokenizer, tmp_path):
    """As in a notebook, where an exception's traceback keeps the trainer alive that it has ended."""
    make = partial(make_trainer, demo_tokenizer, tmp_path / "run", max_steps=2, save_steps=1)
    first = make()
    steps = first.steps()
    next(steps)
    first.folder.settle()
    (tmp_path / "run" / "checkpoints" / "step-2.part").mkdir()  # being written
    later = make()
    with pytest.raises(RunFolderError, match=r"another trainer of this process.* close\(\) its steps"):
        later.steps(resume=True)
    assert (tmp_path / "run" / "checkpoints" / "step-2.part").exists()
    steps.close()
    with pytest.raises(RunFolderError, match="run.seed: the run has 0, now 1"):
        (refused := make(seed=1)).train(resume=True)
    rest = later.steps(resume=True)  # the refused one, which still lives, does not keep the lock
    for ended in (refused, first):
        ended.folder and ended.folder.close()
    assert holder(tmp_path / "run")["pid"] == os.getpid()
    with pytest.raises(RunFolderError, match="another trainer of this process"):
        refused.steps(resume=True)
    rest.close()  # before it has begun
    assert make().train(resume=True)["steps"] == 2


def test_a_checkpoint_is_asked_of_a_run_that_goes_on(tmp_path, capsys, monkeypatch):
    """No other run answers, and none is waited for: ``cohort save``."""
    (tmp_path / "config.toml").touch()
    (tmp_path / "checkpoints" / "step-12").mkdir(parents=True)
    message = f"no process writes {tmp_path}: its last checkpoint is of step 12"
    assert main(["save", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
    lock = Lock(tmp_path)
    lock.take()
    monkeypatch.setattr(time, "sleep", lambda _: lock.release())  # the run ends meanwhile
    assert main(["save", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "config.toml"]
    (tmp_path / "summary.json").write_text("{}")
    assert main(["save", str(tmp_path)]) == 2
    assert "is complete: its last checkpoint is of step 12" in capsys.readouterr().err


def test_a_forked_child_does_not_keep_the_lock(tmp_path):
    lock = Lock(tmp_path)
    lock.take()
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
        lock.drop()  # as the end of this process does
        Lock(tmp_path).check()
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)


def test_a_file_system_without_locks(tmp_path, monkeypatch, caplog, other):
    def refused(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refused)
    lock = Lock(tmp_path / "run")
    with pytest.raises(
        RunFolderError, match=f"written by process {other.pid} on .* is no run of Cohort, delete .*run.lock"
    ):
        lock.take()
    other.kill()
    other.wait()
    lock.take()
    with pytest.raises(RunFolderError, match="another trainer of this process"):
        Lock(tmp_path / "run").take()
    lock.release()
    assert "is on a file system without locks" in caplog.text
    (tmp_path / LOCK).write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname() + "x", "since": ""}))
    lock = Lock(tmp_path)
    lock.take()
    lock.release()


@pytest.mark.parametrize("text", ["", "[1]", '{"pid": "1", "host": 2}', "\0\xff"])
def test_a_broken_lock_file(tmp_path, text):
    (tmp_path / LOCK).write_text(text, encoding="latin-1")
    assert holder(tmp_path) == {}
    lock = Lock(tmp_path)
    lock.take()
    lock.release()


@pytest.mark.parametrize("readable", [True, False])
def test_a_folder_that_may_only_be_read(tmp_path, monkeypatch, capsys, readable):
    """``cohort verify`` and ``cohort save`` look at the lock of another user's run."""
    (tmp_path / LOCK).write_text("")
    (tmp_path / "config.toml").write_text("")
    real = os.open

    def opens(path, flags, *more, **named):
        if str(path).endswith(LOCK) and (flags & os.O_RDWR or not readable):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", opens)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert main(["verify", str(tmp_path)]) == 0
    assert ("is not known: Permission denied" in capsys.readouterr().out) == (not readable)
    if readable:
        with (tmp_path / LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            assert main(["verify", str(tmp_path)]) == 0
        assert "is being written by" in capsys.readouterr().out
