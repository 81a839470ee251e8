"""The lock of a run folder: one process writes it at a time. The kernel ends the lock with the process.

``run.lock`` names the holder: ``{"pid": ..., "host": ..., "since": ...}``. On NFS the lock holds between machines where
the mount has locks, as it has by default. Where the file system has none, a holder on this machine is found by its
number, one on another machine is not, and a warning says so.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from cohort.errors import RunFolderError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK = "run.lock"
UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""Errors of file systems without locks."""
log = logging.getLogger("cohort.runs")
_held: dict[Path, int] = {}
"""Descriptors of the lock files that this process holds, by folder."""


def lock(folder: Path) -> None:
    """Lock a folder for this process, until ``unlock`` or the end of the process. Does nothing if it is locked by this
    process already.

    Raises:
        RunFolderError: another process writes the folder.
        OSError: the lock file cannot be made.
    """
    folder = folder.resolve()
    while not _is_held(folder):
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
        try:
            _lock_file(descriptor, folder)
        except BaseException:
            os.close(descriptor)
            raise
        _held[folder] = descriptor
    owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    with suppress(OSError):  # a full disk: the lock holds without a name
        os.ftruncate(_held[folder], 0)
        os.lseek(_held[folder], 0, os.SEEK_SET)
        os.write(_held[folder], json.dumps(owner).encode())


def unlock(folder: Path) -> None:
    """End the lock, if this process holds it."""
    folder = folder.resolve()
    if _is_held(folder):
        (folder / LOCK).unlink()  # while it is locked: whoever waits for it finds that the file has gone
    if (descriptor := _held.pop(folder, None)) is not None:
        os.close(descriptor)


def check_unlocked(folder: Path) -> None:
    """Check that no other process writes a folder.

    Raises:
        RunFolderError: one does.
    """
    folder = folder.resolve()
    if _is_held(folder) or not (folder / LOCK).is_file():
        return
    descriptor = os.open(folder / LOCK, os.O_RDWR)
    try:
        _lock_file(descriptor, folder)
    finally:
        os.close(descriptor)


def holder(folder: Path) -> dict[str, Any]:
    """What the lock file says of the process that holds it: ``pid``, ``host``, ``since``; empty if it says nothing."""
    try:
        found = json.loads((folder / LOCK).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    types = {"pid": int, "host": str, "since": str}
    sound = isinstance(found, dict) and all(isinstance(found.get(key), kind) for key, kind in types.items())
    return found if sound else {}


def _is_held(folder: Path) -> bool:
    """Whether this process has locked the file that is now in the folder: not one that was removed since."""
    if folder not in _held:
        return False
    try:
        same = os.path.samestat(os.fstat(_held[folder]), (folder / LOCK).lstat())
    except OSError:
        same = False
    if not same:
        os.close(_held.pop(folder))
    return same


def _lock_file(descriptor: int, folder: Path) -> None:
    try:
        if fcntl is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = holder(folder)
        if error.errno not in UNSUPPORTED or _is_running(owner):
            who = f"process {owner['pid']} on {owner['host']}, since {owner['since']}" if owner else "another process"
            raise RunFolderError(
                f"{folder} is being written by {who}: wait for its end, stop it, or choose another run.output_dir"
            ) from None
        log.warning("%s is on a file system without locks: start no other run there from another machine", folder)


def _is_running(owner: dict[str, Any]) -> bool:
    """Whether the process that a lock file names runs on this machine, and is not this one."""
    if owner.get("host") != socket.gethostname() or owner["pid"] == os.getpid() or os.name != "posix":
        return False
    try:
        os.kill(owner["pid"], 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # it runs, as another user; or the file names no process
        return True
    return True


def _after_fork() -> None:
    """A child does not hold the locks of the process that it was forked from."""
    for descriptor in _held.values():
        os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
