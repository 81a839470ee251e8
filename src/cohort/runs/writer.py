"""Writes of a run that survive a failing disk: what cannot be written now is kept in memory and tried again.

The training thread writes small files itself. A thread writes copies of models, and repeats what failed; it runs only
while there is something to write. Writes of one kind keep their order; one kind does not wait for another. Nothing is
dropped: when too much waits, so does the training.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from cohort.errors import DiskError
from cohort.runs.durable import is_of_disk

RETRY_SECONDS, WARN_SECONDS = 10.0, 60.0
"""Time between attempts to write, and between warnings."""
KEPT_BYTES = 2**30
"""Memory of tables that wait to be written; beyond it the training waits."""
log = logging.getLogger("cohort.runs")


@dataclass(frozen=True, slots=True, eq=False)
class Write:
    """Something to write. ``run`` may be called again after it raised."""

    kind: str
    """What it is, in the plural if there may be several: "metrics", "completions", "checkpoint"."""
    step: int
    run: Callable[[], None]
    num_bytes: int = 0
    """Memory of a table."""


class Writer:
    """Writes now, or in the background; repeats what fails.

    Args:
        minutes: a failure that lasts longer than this ends the run: ``run.stop_when_unsaved_minutes``.
    """

    def __init__(self, minutes: float = 60.0) -> None:
        self._minutes = minutes
        self._waiting: list[Write] = []
        self._repeated: list[Write] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._works = self._closing = self._stalled = False
        self._failed_since: float | None = None
        self._reason, self._warned = "", -WARN_SECONDS
        self._bug: Exception | None = None

    def now(self, write: Write) -> None:
        """Write in this thread, or in the background if that fails or an earlier one of its kind waits."""
        if self._waits(write.kind) or not self._attempt(write):
            while sum(other.num_bytes for other in self._waiting) > KEPT_BYTES:
                self.wait()
            self.in_background(write)

    def in_background(self, write: Write) -> None:
        """Write in the background."""
        with self._changed:
            self._waiting.append(write)
            self._warn()
            if not self._works:
                self._works = True
                self._thread = threading.Thread(target=self._work, name="writer", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def failed(self, write: Write, error: Exception) -> None:
        """Record the failure of a write that the caller repeats, and wait before the next attempt.

        Raises:
            DiskError: the disk has failed for too long.
        """
        self._record(error)
        self._repeated = [write]
        self._stall()
        time.sleep(RETRY_SECONDS)

    def succeeded(self) -> None:
        """Record that a write of the caller's has succeeded."""
        self._repeated = []
        self._written()

    def wait(self, kind: str = "") -> bool:
        """Wait a while for every write, or those of a kind. Returns whether none waits.

        Raises:
            DiskError: the disk has failed for too long.
        """
        with self._changed:
            self._stall()
            if self._waits(kind):
                self._changed.wait(RETRY_SECONDS)
            self.check()
            return not self._waits(kind)

    def _stall(self) -> None:
        """The training waits for writes: if the disk fails, tell so at once."""
        with self._changed:
            if self._failed_since is not None and not self._stalled:
                self._stalled, self._warned = True, -WARN_SECONDS
            self._warn()
            self.check()

    def check(self) -> None:
        """Check that the disk has not failed for too long.

        Raises:
            DiskError: it has.
        """
        with self._changed:
            if self._bug is not None:
                raise self._bug
            if self._minutes_left() <= 0:
                raise DiskError(
                    f"could not be written for {self._minutes:g} minutes (run.stop_when_unsaved_minutes): "
                    f"{self._unwritten()}: {self._reason}"
                )

    def close(self) -> None:
        """Wait for what is being written, and try the rest once more."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()  # also of what it wrote last: see Display.__exit__
        self._closing = False
        if self._waiting:
            log.warning("not written: %s: %s", self._unwritten(), self._reason)

    def _waits(self, kind: str) -> bool:
        """Whether a write, of a kind if one is given, waits."""
        with self._changed:
            return any(kind in ("", write.kind) for write in self._waiting)

    def _work(self) -> None:
        while True:
            with self._changed:
                last, todo = self._closing, list(self._waiting)
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
        """Try to write; returns whether no other attempt is needed."""
        try:
            write.run()
        except Exception as error:
            if is_of_disk(error) or threading.current_thread() is not self._thread:
                self._record(error)
                return False
            self._bug = error  # which ``check`` raises
        with self._changed:
            self._waiting = [other for other in self._waiting if other is not write]
            self._written()
            self._changed.notify_all()
        return True

    def _record(self, error: Exception) -> None:
        """Record that the disk fails; raises an error that is of something else."""
        if not is_of_disk(error):
            raise error
        with self._changed:
            cause = error.__cause__ or error
            self._reason = getattr(cause, "strerror", None) or str(cause)
            if self._failed_since is None:
                self._failed_since = time.monotonic()
            self._changed.notify_all()

    def _written(self) -> None:
        """After a write: if nothing else waits, the disk works again."""
        if self._waiting or self._repeated or self._failed_since is None:
            return
        minutes = (time.monotonic() - self._failed_since) / 60
        log.warning("everything is written again after %.1f minutes", minutes)
        self._failed_since, self._stalled, self._warned = None, False, -WARN_SECONDS

    def _warn(self) -> None:
        left = self._minutes_left()
        if not 0 < left < math.inf or time.monotonic() - self._warned < WARN_SECONDS:
            return
        self._warned = time.monotonic()
        log.warning(
            "not written yet: %s: %s. Training %s and the writes are repeated; the run ends in %.0f minutes "
            "(run.stop_when_unsaved_minutes)",
            self._unwritten(),
            self._reason,
            "waits" if self._stalled else "goes on",
            left,
        )

    def _minutes_left(self) -> float:
        """Infinity: the disk has not failed."""
        if self._failed_since is None:
            return math.inf
        return self._minutes - (time.monotonic() - self._failed_since) / 60

    def _unwritten(self) -> str:
        """What is not written, in words: "checkpoint of step 4, metrics of steps 3 to 4"."""
        steps: dict[str, list[int]] = defaultdict(list)
        for write in (*self._waiting, *self._repeated):
            steps[write.kind].append(write.step)
        return ", ".join(
            f"{kind} of step {some[0]}" if len(set(some)) == 1 else f"{kind} of steps {min(some)} to {max(some)}"
            for kind, some in sorted(steps.items())
        )
