"""Writes that a failing disk puts off."""

import errno
import os
import threading
import time

import pytest

from cohort.errors import DiskError
from cohort.runs import folder as folders
from cohort.runs import writer as module
from cohort.runs.folder import RunFolder
from cohort.runs.writer import Write, Writer


class Disk:
    """Takes writes, or fails."""

    def __init__(self):
        self.full = False
        self.written = []
        self.attempts = 0

    def write(self, kind, step, num_bytes=0):
        def run():
            self.attempts += 1
            if self.full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.written.append((kind, step))

        return Write(kind, step, run, num_bytes)


@pytest.fixture
def disk(monkeypatch):
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.01)
    return Disk()


def test_writes_wait_for_the_disk_in_their_order(disk, caplog):
    writer = Writer()
    assert writer.now(disk.write("metrics", 1))
    disk.full = True
    for step in (2, 3):
        assert not writer.now(disk.write("metrics", step))
        assert not writer.now(disk.write("completions", step))
    writer.in_background(disk.write("checkpoint", 3))
    writer.check()
    assert disk.written == [("metrics", 1)]
    disk.full = False
    writer.settle()
    assert writer.now(disk.write("metrics", 4))
    writer.close()
    kinds = {kind: [step for other, step in disk.written if other == kind] for kind, _ in disk.written}
    assert kinds == {"metrics": [1, 2, 3, 4], "completions": [2, 3], "checkpoint": [3]}
    first, *_, last = caplog.messages
    assert first.startswith("not written yet: metrics of step 2: No space left on device. Training goes on")
    assert last.startswith("everything is written again")
    assert len(caplog.messages) == 2  # a warning a minute


def test_a_newer_checkpoint_takes_the_place_of_one_that_failed(disk):
    writer = Writer()
    disk.full = True
    writer.in_background(disk.write("checkpoint", 1))
    writer.in_background(disk.write("checkpoint", 2))  # waits for the attempt to write the first
    assert disk.attempts >= 1
    disk.full = False
    writer.close()
    assert disk.written == [("checkpoint", 2)]


def test_a_checkpoint_that_is_being_written_is_waited_for(disk):
    writer, begun, go = Writer(), threading.Event(), threading.Event()

    def slow():
        begun.set()
        go.wait()
        disk.written.append("slow")

    writer.in_background(Write("checkpoint", 1, slow))
    begun.wait()
    assert writer.now(disk.write("metrics", 2))  # other kinds do not wait
    threading.Timer(0.05, go.set).start()
    writer.free("checkpoint")
    assert disk.written == [("metrics", 2), "slow"]


def test_a_write_that_is_being_repeated_is_waited_for(disk, tmp_path, monkeypatch):
    """Otherwise two writers fill one folder."""
    folder, attempts, begun, go = RunFolder(tmp_path), [], threading.Event(), threading.Event()

    def slow():
        attempts.append(len(attempts))
        if len(attempts) == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        begun.set()
        go.wait()
        disk.written.append("repeated")

    def save_now(*_):
        disk.written.append("newer")
        return True

    monkeypatch.setattr(folders, "model_of", lambda models, files, step: None)
    monkeypatch.setattr(folders, "save_now", save_now)
    folder._writer.in_background(Write("best model", 1, slow))
    begun.wait()
    threading.Timer(0.05, go.set).start()
    folder.save_best(None, {"step": 2})
    assert disk.written == ["repeated", "newer"]


def test_the_run_ends_when_the_disk_fails_for_too_long(disk, caplog):
    disk.full = True
    writer = Writer(minutes=0.05 / 60)
    writer.now(disk.write("metrics", 7))
    with pytest.raises(
        DiskError, match=r"for 0.000833333 minutes \(run.stop_when_unsaved_minutes\): metrics of step 7"
    ):
        writer.settle()
    writer.close()
    assert caplog.messages[-1] == "not written: metrics of step 7: No space left on device"
    writer = Writer(minutes=0)
    writer.now(disk.write("metrics", 7))
    with pytest.raises(DiskError):
        writer.check()


def test_tables_are_dropped_when_they_fill_the_memory(disk, monkeypatch, caplog):
    monkeypatch.setattr(module, "KEPT_BYTES", 25)
    writer = Writer()
    disk.full = True
    writer.now(disk.write("metrics", 1))
    for step in range(1, 5):
        writer.now(disk.write("completions", step, 10))
    disk.full = False
    writer.settle()
    assert sorted(disk.written) == [("completions", 3), ("completions", 4), ("metrics", 1)]
    assert caplog.messages[-1].endswith("except completions of steps 1 to 2, dropped for memory")


def test_a_bug_is_no_failure_of_the_disk(disk):
    writer = Writer()
    with pytest.raises(ZeroDivisionError):
        writer.now(Write("metrics", 1, lambda: 1 / 0))
    writer.in_background(Write("checkpoint", 1, lambda: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        writer.settle()


def test_its_thread_ends_before_it_is_closed(monkeypatch):
    """Also the end of the thread, which frees what was written last: at the interpreter's exit that aborts it."""
    work = Writer._work

    def late(writer):
        work(writer)
        time.sleep(0.1)

    monkeypatch.setattr(Writer, "_work", late)
    writer = Writer()
    writer.in_background(Write("checkpoint", 1, lambda: None))
    writer.settle()
    writer.close()
    assert writer._thread is not None
    assert not writer._thread.is_alive()
