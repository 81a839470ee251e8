"""Writes that a failing disk puts off."""

import errno
import os
import threading
import time

import pytest

from cohort.errors import DiskError
from cohort.runs import writer as module
from cohort.runs.writer import Write, Writer


class Disk:
    """Takes writes, or fails."""

    def __init__(self):
        self.full = False
        self.written = []

    def write(self, kind, step, num_bytes=0):
        def run():
            if self.full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.written.append((kind, step))

        return Write(kind, step, run, num_bytes)


@pytest.fixture
def disk(monkeypatch):
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.01)
    return Disk()


def settle(writer):
    while not writer.wait():
        pass


def test_writes_wait_for_the_disk_in_their_order(disk, caplog):
    writer = Writer()
    writer.now(disk.write("metrics", 1))
    disk.full = True
    for step in (2, 3):
        writer.now(disk.write("metrics", step))
        writer.now(disk.write("completions", step))
    writer.in_background(disk.write("checkpoint", 3))
    writer.check()
    assert disk.written == [("metrics", 1)]
    disk.full = False
    settle(writer)
    writer.now(disk.write("metrics", 4))
    writer.close()
    kinds = {kind: [step for other, step in disk.written if other == kind] for kind, _ in disk.written}
    assert kinds == {"metrics": [1, 2, 3, 4], "completions": [2, 3], "checkpoint": [3]}
    first, *_, last = caplog.messages
    assert first.startswith("not written yet: metrics of step 2: No space left on device. Training goes on")
    assert last.startswith("everything is written again")
    assert len(caplog.messages) <= 3  # a warning a minute, and one when the training begins to wait


def test_a_kind_is_waited_for_and_the_others_are_not(disk):
    writer, begun, go = Writer(), threading.Event(), threading.Event()

    def slow():
        begun.set()
        go.wait()
        disk.written.append("slow")

    writer.in_background(Write("checkpoint", 1, slow))
    begun.wait()
    writer.now(disk.write("metrics", 2))
    assert writer.wait("metrics")
    assert not writer.wait("checkpoint")
    go.set()
    while not writer.wait("checkpoint"):
        pass
    assert disk.written == [("metrics", 2), "slow"]


def test_the_run_ends_when_the_disk_fails_for_too_long(disk, caplog):
    disk.full = True
    writer = Writer(minutes=0.05 / 60)
    writer.now(disk.write("metrics", 7))
    with pytest.raises(
        DiskError, match=r"for 0.000833333 minutes \(run.stop_when_unsaved_minutes\): metrics of step 7"
    ):
        settle(writer)
    writer.close()
    assert caplog.messages[-1] == "not written: metrics of step 7: No space left on device"
    writer = Writer(minutes=0)
    writer.now(disk.write("metrics", 7))
    with pytest.raises(DiskError):
        writer.check()


def test_the_training_waits_when_tables_fill_the_memory(disk, monkeypatch, caplog):
    monkeypatch.setattr(module, "KEPT_BYTES", 25)
    writer = Writer()
    disk.full = True
    for step in range(1, 4):
        writer.now(disk.write("completions", step, 10))
    assert "Training waits" not in caplog.text
    waits = threading.Thread(target=writer.now, args=[disk.write("completions", 4, 10)])
    waits.start()
    while "completions of steps 1 to 3: No space left on device. Training waits" not in caplog.text:
        time.sleep(0.01)
    assert waits.is_alive()
    disk.full = False
    waits.join()
    settle(writer)
    assert disk.written == [("completions", step) for step in range(1, 5)]


def test_a_bug_is_no_failure_of_the_disk():
    writer = Writer()
    with pytest.raises(ZeroDivisionError):
        writer.now(Write("metrics", 1, lambda: 1 / 0))
    writer.in_background(Write("checkpoint", 1, lambda: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        settle(writer)


def test_its_thread_ends_before_it_is_closed(monkeypatch):
    """Also the end of the thread, which frees what was written last: at the interpreter's exit that aborts it."""
    work = Writer._work

    def late(writer):
        work(writer)
        time.sleep(0.1)

    monkeypatch.setattr(Writer, "_work", late)
    writer, before = Writer(), threading.enumerate()
    writer.in_background(Write("checkpoint", 1, lambda: None))
    settle(writer)
    writer.close()
    assert set(threading.enumerate()) <= set(before)
