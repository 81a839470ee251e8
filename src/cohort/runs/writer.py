"""Writes of a run that survive a failing disk: what cannot be written now is kept in memory and tried again.

The training thread writes small files itself. A thread writes what is large, and repeats what failed; it runs only
while there is something to write. Writes of one kind keep their order; one kind does not wait for another.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

from cohort.errors import DiskError
from cohort.runs.durable import is_of_disk

RETRY_SECONDS, WARN_SECONDS = 10.0, 60.0
"""Time between attempts to write, and between warnings."""
KEPT_BYTES = 2**30
"""Memory for tables that wait to be written. The oldest are dropped beyond it."""
log = logging.getLogger("cohort.runs")


@dataclass(frozen=True, slots=True, eq=False)
class Write:
    """Something to write. ``run`` may be called again after it raised."""

    kind: str
    """What it is, in the plural if there may be several: "metrics", "completions", "checkpoint"."""
    step: int
    run: Callable[[], None]
    num_bytes: int = 0
    """Memory of a table, which may be dropped."""


class Writer:
    """Writes now, or in the background; repeats what fails.

    Args:
        minutes: a failure that lasts longer than this ends the run: ``run.stop_when_unsaved_minutes``.
    """

    def __init__(self, minutes: float = 60.0) -> None:
        self._minutes = minutes
        self._waiting: list[Write] = []
        self._failed: set[Write] = set()
        self._running: Write | None = None
        self._missed: dict[str, int] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._works = False
        self._closing = False
        self._failed_since: float | None = None
        self._reason = ""
        self._dropped: list[Write] = []
        self._warned = -WARN_SECONDS
        self._bug: BaseException | None = None

    def now(self, write: Write) -> bool:
        """Write in this thread, or keep it for later if that fails or an earlier one of its kind waits. Returns whether
        it was written."""
        with self._changed:
            first = all(other.kind != write.kind for other in self._waiting)
        if first:
            try:
                write.run()
            except Exception as error:
                self._record(error)
            else:
                self._written()
                return True
        self._add(write)
        return False

    def in_background(self, write: Write) -> None:
        """Write in the background, instead of an older one of its kind that has failed."""
        self.free(write.kind)
        self._add(write)

    def free(self, kind: str) -> None:
        """Wait until each of a kind is written or has failed, and no attempt to write it goes on; forget what has
        failed: a newer one comes."""
        with self._changed:
            while any(
                other.kind == kind and (other not in self._failed or other is self._running) for other in self._waiting
            ):
                self._changed.wait()
            self._waiting = [other for other in self._waiting if other.kind != kind]
            self._missed.pop(kind, None)

    def missed(self, kind: str, step: int, error: Exception) -> None:
        """Record a failed write of something without a copy. The caller tries again."""
        self._record(error)
        with self._changed:
            self._missed[kind] = step
            self._warn()

    def made_up_for(self, kind: str) -> None:
        """Record that the missed write, or a newer one of its kind, has succeeded."""
        with self._changed:
            self._missed.pop(kind, None)
            self._waiting = [other for other in self._waiting if other.kind != kind]
            self._written()

    def pause(self) -> None:
        """Wait before the next attempt to write what was ``missed``.

        Raises:
            DiskError: the disk has failed for too long.
        """
        self.check()
        time.sleep(RETRY_SECONDS)

    def _record(self, error: Exception) -> None:
        """Record that the disk fails; raises an error that is of something else."""
        if not is_of_disk(error):
            raise error
        with self._changed:
            cause = error.__cause__ or error
            self._reason = getattr(cause, "strerror", None) or str(cause)
            if self._failed_since is None:
                self._failed_since = time.monotonic()

    def check(self) -> None:
        """Check that the disk has not failed for too long.

        Raises:
            DiskError: it has.
        """
        with self._changed:
            if self._bug is not None:
                raise self._bug
            left = self._minutes_left()
            if left is not None and left <= 0:
                raise DiskError(
                    f"could not be written for {self._minutes:g} minutes (run.stop_when_unsaved_minutes): "
                    f"{self._unwritten()}: {self._reason}"
                )

    def settle(self) -> None:
        """Wait until everything is written.

        Raises:
            DiskError: the disk has failed for too long.
        """
        with self._changed:
            while self._waiting:
                self.check()
                self._changed.wait(1.0)
        self.check()

    def close(self) -> None:
        """Wait for what is being written, and try the rest once more."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()  # also of what it wrote last: see Display.__exit__
        with self._changed:
            self._closing = False
            if self._waiting:
                log.warning("not written: %s: %s", self._unwritten(), self._reason)

    def _add(self, write: Write) -> None:
        with self._changed:
            self._waiting.append(write)
            tables = [other for other in self._waiting if other.num_bytes]
            while sum(other.num_bytes for other in tables) > KEPT_BYTES:
                self._waiting.remove(tables[0])
                self._dropped.append(tables.pop(0))
            self._warn()
            if not self._works:
                self._works = True
                self._thread = threading.Thread(target=self._work, name="writer", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _work(self) -> None:
        last = False
        while True:
            with self._changed:
                last |= self._closing
                todo = list(self._waiting)
            failed: set[str] = set()
            for write in todo:
                if write.kind not in failed and not self._attempt(write):
                    failed.add(write.kind)
            with self._changed:
                if not self._waiting or last:
                    self._works = False
                    self._changed.notify_all()
                    return
                if failed and not self._closing:
                    self._warn()
                    self._changed.wait(RETRY_SECONDS)

    def _attempt(self, write: Write) -> bool:
        """Try a write that still waits; returns whether it needs no other attempt."""
        with self._changed:
            if write not in self._waiting:  # dropped
                return True
            self._running = write
        done = True
        try:
            write.run()
        except Exception as error:
            try:
                self._record(error)
                done = False
            except Exception as bug:
                self._bug = bug
        with self._changed:
            self._running = None
            self._failed.discard(write)
            if not done:
                self._failed.add(write)
            elif write in self._waiting:
                self._waiting.remove(write)
                self._written()
            self._changed.notify_all()
        return done

    def _written(self) -> None:
        """After a write: if nothing else waits, the disk works again."""
        if self._waiting or self._missed or self._failed_since is None:
            return
        minutes = (time.monotonic() - self._failed_since) / 60
        lost = f", except {_described(self._dropped)}, dropped for memory" if self._dropped else ""
        log.warning("everything is written again after %.1f minutes%s", minutes, lost)
        self._failed_since, self._warned = None, -WARN_SECONDS
        self._dropped.clear()

    def _warn(self) -> None:
        left = self._minutes_left()
        if left is None or left <= 0 or time.monotonic() - self._warned < WARN_SECONDS:
            return
        self._warned = time.monotonic()
        log.warning(
            "not written yet: %s: %s. Training goes on and the writes are repeated; the run ends in %.0f minutes "
            "(run.stop_when_unsaved_minutes)",
            self._unwritten(),
            self._reason,
            left,
        )

    def _minutes_left(self) -> float | None:
        """None: the disk has not failed."""
        if self._failed_since is None:
            return None
        return self._minutes - (time.monotonic() - self._failed_since) / 60

    def _unwritten(self) -> str:
        missed = [Write(kind, step, lambda: None) for kind, step in self._missed.items()]
        return _described([*self._dropped, *self._waiting, *missed])


def _described(writes: list[Write]) -> str:
    """Writes in words.

    >>> _described([Write("metrics", 3, print), Write("metrics", 4, print), Write("checkpoint", 4, print)])
    'checkpoint of step 4, metrics of steps 3 to 4'
    """
    kinds = groupby(sorted(writes, key=lambda write: (write.kind, write.step)), key=lambda write: write.kind)
    steps = {kind: [write.step for write in some] for kind, some in kinds}
    return ", ".join(
        f"{kind} of step{'' if some[0] == some[-1] else 's'} {some[0]}"
        + ("" if some[0] == some[-1] else f" to {some[-1]}")
        for kind, some in steps.items()
    )
