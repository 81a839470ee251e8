"""The servers of an engine: which of them sample with the right weights, and which is the least busy."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Condition

from cohort.errors import EngineError
from cohort.rollout.vllm.server import Server, ServerError

log = logging.getLogger("cohort.rollout")
KEEP_TOGETHER = 16
"""Requests that a server may have more than the least busy one to get those that share a prefix with earlier ones."""
RECHECK_SECONDS = 5.0
"""Time between two looks at a server that was left out."""


@dataclass(slots=True)
class ServerState:
    """What the engine knows about a server."""

    in_flight: int = 0
    """Requests under way."""
    version: str | None = None
    """The label of the weights that were last sent to it. None: unknown."""
    left_out: str = ""
    """Why it gets no requests. Empty: it gets some."""
    checked: float = 0.0
    """When it was left out, or looked at since."""


class Fleet:
    """Gives requests to servers. Its methods may be called from several threads at the same time.

    Args:
        servers: at least one.
        max_in_flight: requests under way at each server at the same time.
    """

    def __init__(self, servers: Sequence[Server], *, max_in_flight: int) -> None:
        self.servers = tuple(servers)
        self.max_in_flight = max_in_flight
        self.version = ""
        """The label of the weights that answers must come from."""
        self.failures = 0
        """How often a server has failed."""
        self._states = {server: ServerState(left_out="it has no weights yet") for server in servers}
        self._changed = Condition()  # its lock is reentrant

    @property
    def live(self) -> list[Server]:
        """The servers that get requests, in the order of the settings."""
        with self._changed:
            return [server for server in self.servers if not self._states[server].left_out]

    @property
    def outdated(self) -> list[Server]:
        """The servers that do not have the present weights, as far as is known."""
        with self._changed:
            return [server for server in self.servers if self._states[server].version != self.version]

    @contextmanager
    def slot(self, preferred: Server | None = None) -> Iterator[Server]:
        """Wait for a place at the least busy server, and hold it.

        Args:
            preferred: holds a prefix of the request in its cache.

        Raises:
            EngineError: no server is left.
        """
        with self._changed:
            while (server := self._choose(preferred)) is None:
                self._changed.wait()
            self._states[server].in_flight += 1
        try:
            yield server
        finally:
            with self._changed:
                self._states[server].in_flight -= 1
                self._changed.notify_all()

    def leave_out(self, server: Server, reason: str, *, outdated: bool = False) -> None:
        """Give a server no more requests.

        Args:
            server: one of the servers.
            reason: why.
            outdated: it has other weights than the present ones.
        """
        with self._changed:
            state = self._states[server]
            state.left_out, state.checked = reason, time.monotonic()
            if outdated:
                state.version = None
            self._changed.notify_all()

    def fail(self, server: Server, reason: str, *, outdated: bool = False) -> None:
        """Leave out a server that has failed, with a warning. See ``leave_out``."""
        with self._changed:
            self.failures += 1
            if not self._states[server].left_out:  # else other requests have failed with it
                log.warning("%s is left out: %s", server.url, reason)
            self.leave_out(server, reason, outdated=outdated)

    def take_in(self, server: Server) -> None:
        """Give a server requests: it has the present weights."""
        with self._changed:
            state = self._states[server]
            state.left_out, state.version = "", self.version
            self._changed.notify_all()

    def recheck(self, *, now: bool = False) -> None:
        """Take back the servers that answer again and still have the present weights.

        Args:
            now: look at all that were left out, not only at those that were not looked at for ``RECHECK_SECONDS``.
        """
        with self._changed:
            due = time.monotonic() - (0.0 if now else RECHECK_SECONDS)
            found = [
                server
                for server, state in self._states.items()
                if state.left_out and state.version == self.version and state.checked <= due
            ]
            for server in found:
                self._states[server].checked = time.monotonic()
        for server in found:
            try:
                server.get("/health", timeout=5.0)
                version = server.weights_version()
            except ServerError:
                continue
            if version == self.version:
                self.take_in(server)
            else:  # it was started again, or another run has sent it weights
                self.leave_out(server, f"it answers again, with weights {version!r}", outdated=True)

    @property
    def left_out(self) -> dict[str, str]:
        """Why servers get no requests, by address."""
        with self._changed:
            return {server.url: state.left_out for server, state in self._states.items() if state.left_out}

    def adopt(self, version: str, left_out: Mapping[str, str]) -> None:
        """Use the servers as rank 0 has found them."""
        with self._changed:
            self.version = version
            for server, state in self._states.items():
                state.left_out = left_out.get(server.url, "")
                if not state.left_out:
                    state.version = version
            self._changed.notify_all()

    def failure(self, what: str) -> EngineError:
        """An error that says why each server is left out."""
        with self._changed:
            reasons = [f"  {server.url}: {self._states[server].left_out or 'it answers'}" for server in self.servers]
        return EngineError(f"{what}\n" + "\n".join(reasons))

    def _choose(self, preferred: Server | None) -> Server | None:
        """The server of the next request; None while all are full."""
        if not (live := self.live):
            raise self.failure("no vLLM server is left:")
        busy = {server: self._states[server].in_flight for server in live}
        free = [server for server in live if busy[server] < self.max_in_flight]
        least = min(free, key=busy.__getitem__, default=None)
        if preferred in free and preferred is not None and busy[preferred] <= min(busy.values()) + KEEP_TOGETHER:
            return preferred
        return least
