"""No test leaves a process behind, and orphans become children of the test process."""

import ctypes
import os
import sys
import time
from pathlib import Path

import pytest


def sandboxes() -> set[int]:
    """The processes of sandboxes that descend from this process."""
    parents, found = {}, set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if b"/inside.py" in (folder / "cmdline").read_bytes():
                found.add(int(folder.name))
        except OSError:  # the process has ended meanwhile
            continue

    def is_ours(pid: int | None) -> bool:
        return pid is not None and (pid == os.getpid() or is_ours(parents.get(pid)))

    return {pid for pid in found if is_ours(pid)}


@pytest.fixture(autouse=True, scope="package")
def _orphans_stay_ours():
    """Make this process, instead of the machine's first, the parent of processes whose parent has ended."""
    prctl, set_child_subreaper = ctypes.CDLL(None).prctl if sys.platform == "linux" else lambda *_: 0, 36
    assert prctl(set_child_subreaper, 1, 0, 0, 0) == 0
    yield
    prctl(set_child_subreaper, 0, 0, 0, 0)


@pytest.fixture(autouse=True)
def _nothing_is_left():
    before = sandboxes()
    yield
    end = time.monotonic() + 2
    while (left := sandboxes() - before) and time.monotonic() < end:
        time.sleep(0.01)
    assert not left
