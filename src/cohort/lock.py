"""The lock of a run folder: one process writes it at a time. The kernel ends the lock with the process.

``run.lock`` names the holder: ``{"pid": ..., "host": ..., "since": ...}``. On NFS the lock holds between machines where
the mount has locks, as it has by default. Where the file system has none, a holder on this machine is found by its
number, one on another machine is not, and a warning says so.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

from cohort.errors import RunFolderError

LOCK = "run.lock"
UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF)
"""Errors of file systems without locks, and of NFS for a file that is open for reading only."""
log = logging.getLogger("cohort.runs")
_held: WeakSet[Lock] = WeakSet()
"""The locks that this process holds."""


class Lock:
    """The lock of one owner, as a run folder in a trainer. A second owner is refused, also in the same process; the
    lock ends with ``release``, and at the latest with its owner.

    Args:
        folder: what to lock.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptor: int | None = None

    def take(self) -> bool:
        """Lock the folder, until ``release`` or the end of the process. Returns False if this owner held the lock
        already.

        Raises:
            RunFolderError: another owner writes the folder.
            OSError: the lock file cannot be made.
        """
        if self._is_held():
            return False
        while not self._is_held():
            descriptor = os.open(self._folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
            try:
                _lock_file(descriptor, self._folder.resolve())
            except BaseException:
                os.close(descriptor)
                raise
            self._descriptor = descriptor
            _held.add(self)
            owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
            with suppress(OSError):  # a full disk: the lock holds without a name
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps(owner).encode(), 0)
        return True

    def release(self) -> None:
        """End the lock, if this owner holds it."""
        if self._is_held():
            (self._folder / LOCK).unlink()  # while it is locked: whoever waits for it finds that the file has gone
        self.drop()

    def check(self) -> bool:
        """Check that no other owner writes the folder, which may be read-only here. Returns False if the file system
        has no locks, so that this is not certain.

        Raises:
            RunFolderError: one does.
            OSError: the lock file cannot be read.
        """
        path = self._folder / LOCK
        if self._is_held() or not path.is_file():
            return True
        descriptor = os.open(path, os.O_RDWR if os.access(path, os.W_OK) else os.O_RDONLY)
        try:
            return _lock_file(descriptor, self._folder.resolve())
        finally:
            os.close(descriptor)

    def is_of(self, status: os.stat_result) -> bool:
        """Whether this owner has locked the file of a status."""
        return self._descriptor is not None and os.path.samestat(os.fstat(self._descriptor), status)

    def drop(self) -> None:
        """Close the lock file, and leave it: what is locked is not this owner's any more."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None

    __del__ = drop

    def _is_held(self) -> bool:
        """Whether this owner has locked the file that is now in the folder: not one that was removed since."""
        try:
            held = self.is_of((self._folder / LOCK).lstat())
        except OSError:
            held = False
        if not held:
            self.drop()
        return held


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Wait for other processes and threads that are in such a block with this folder. The lock is the folder's own: no
    file is left behind. On a file system without locks, and with a folder that cannot be read, nothing waits."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        yield
        return
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # also for a process that was forked meanwhile
        os.close(descriptor)


def is_written(folder: Path) -> bool:
    """Whether a process writes a folder, or may do so: on a file system without locks, one of another machine."""
    try:
        return not Lock(folder).check()
    except RunFolderError:
        return True


def holder(folder: Path) -> dict[str, Any]:
    """What the lock file says of the process that holds it: ``pid``, ``host``, ``since``; empty if it says nothing."""
    try:
        found = json.loads((folder / LOCK).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    types = {"pid": int, "host": str, "since": str}
    sound = isinstance(found, dict) and all(isinstance(found.get(key), kind) for key, kind in types.items())
    return found if sound else {}


def _lock_file(descriptor: int, folder: Path) -> bool:
    """Lock the file. Returns whether the file system has locks."""
    owner, status = holder(folder), os.fstat(descriptor)
    if any(lock.is_of(status) for lock in _held):
        raise RunFolderError(
            f"{folder} is being written by another trainer of this process: let its train() end, or close() its steps()"
        )
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lockless = error.errno in UNSUPPORTED
        if not lockless or _is_running(owner):
            who = f"process {owner['pid']} on {owner['host']}, since {owner['since']}" if owner else "another process"
            # Where nothing is locked, the number may be that of a process that has come since.
            how = f"; if that process is no run of Cohort, delete {folder / LOCK}" if lockless else ""
            raise RunFolderError(
                f"{folder} is being written by {who}: wait for its end, stop it, or choose another run.output_dir{how}"
            ) from None
        log.warning("%s is on a file system without locks: start no other run there from another machine", folder)
        return False
    return True


def _is_running(owner: dict[str, Any]) -> bool:
    """Whether the process that a lock file names runs on this machine, and is not this one."""
    if owner.get("host") != socket.gethostname() or owner["pid"] == os.getpid():
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
    for lock in list(_held):
        lock.drop()


os.register_at_fork(after_in_child=_after_fork)
