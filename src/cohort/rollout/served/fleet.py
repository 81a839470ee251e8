"""The servers of an engine: which of them sample with the right weights, which is the least busy, and the requests that
are under way at them."""

from __future__ import annotations

import logging
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from threading import Condition

from cohort.errors import EngineError
from cohort.parallel import World, on_main
from cohort.policy import Policy, named_weights
from cohort.policy.device import release_memory
from cohort.rollout.served.adapters import Adapter
from cohort.rollout.served.protocol import Draw, Drawn, Outcome, Server, ServerError, Turns, WrongWeightsError
from cohort.rollout.served.weights import FolderSender, Sender

log = logging.getLogger("cohort.rollout")
BACKOFF_SECONDS, LONGEST_BACKOFF = 0.25, 8.0
"""Wait before servers that all failed are looked at again; it doubles each time, up to the second."""
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

    @property
    def may_return(self) -> bool:
        """Whether a server that is left out has the present weights, as far as is known."""
        with self._changed:
            return any(state.version == self.version for state in self._states.values())

    def pause(self, seconds: float) -> None:
        """Wait until a server gets requests, for so many seconds at most."""
        with self._changed:
            self._changed.wait_for(lambda: self.live, seconds)

    @contextmanager
    def slot(self, preferred: Server | None = None) -> Iterator[Server | None]:
        """Wait for a place at the least busy server, and hold it; None if no server is left.

        Args:
            preferred: holds a prefix of the request in its cache.
        """
        with self._changed:
            while (server := self._choose(preferred)) is None and self.live:
                self._changed.wait()
            if server is not None:
                self._states[server].in_flight += 1
        if server is None:
            yield None
            return
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
                version = server.describe().weights
            except EngineError:
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
        """The server of the next request; None while all are full, or none is left."""
        busy = {server: self._states[server].in_flight for server in self.live}
        free = [server for server in busy if busy[server] < self.max_in_flight]
        least = min(free, key=busy.__getitem__, default=None)
        if preferred in free and preferred is not None and busy[preferred] <= min(busy.values()) + KEEP_TOGETHER:
            return preferred
        return least


class Servers(Turns):
    """Turns that servers draw. Each turn of a trajectory is one request with all tokens so far; the server's prefix
    cache holds those that it has read.

    Args:
        policy: its weights are sent.
        servers: where turns are drawn. Each gets all weights.
        sender: sends them.
        max_batch_size: requests under way at each server at the same time.
        request_timeout: seconds after which a server that has not answered a request is left out.
        startup_timeout: seconds that requests wait for a server to come back when none is left.
        probe: compares a server with the policy after each update of its weights, and returns metrics. It raises
            ``PolicyMismatchError`` if they differ. None: nothing is compared.
        sleeps: whether ``sleep`` frees the servers' memory.
        max_lora_rank: of adapters that every server loads by name. A higher one, or one of another kind, is merged into
            the weights that are sent.
        world: the ranks. Each sends its own requests; rank 0 sends the weights.

    A server that fails (no connection, no answer in time, a status of 500 or above, an answer that is malformed or from
    other weights) is left out, and its requests are repeated on others. It is taken back when it answers and reports
    the present weights, or has taken those of the next update.
    """

    def __init__(
        self,
        policy: Policy,
        servers: Sequence[Server],
        sender: Sender,
        *,
        max_batch_size: int = 256,
        request_timeout: float = 600.0,
        startup_timeout: float = 600.0,
        probe: Callable[[Server], Mapping[str, float]] | None = None,
        sleeps: bool = False,
        max_lora_rank: int = 0,
        world: World | None = None,
    ) -> None:
        self.policy, self.sender, self.probe, self.sleeps = policy, sender, probe, sleeps
        self.fleet = Fleet(servers, max_in_flight=max_batch_size)
        self.request_timeout, self.startup_timeout = request_timeout, startup_timeout
        self.world = world or World()
        adapter = Adapter.of(policy.model) if isinstance(sender, FolderSender) else None
        self.adapter = adapter if adapter is not None and adapter.rank <= max_lora_rank else None
        self._run = secrets.token_hex(4)  # so that another run's weights are never taken for this run's
        self._outcomes: SimpleQueue[tuple[int, Outcome]] = SimpleQueue()
        self._epoch = 0  # answers to requests of earlier epochs are dropped
        self._homes: dict[int, Server] = {}  # by prompt: where its prefix was read last
        self._seconds: defaultdict[str, list[float]] = defaultdict(list)
        self._measured: dict[str, float] = {}
        self._workers = ThreadPoolExecutor(max_batch_size * len(servers), thread_name_prefix="server")

    def begin(self, number: int, draw: Draw, prompt: int) -> None:
        """See ``Turns``. The request is sent at once."""
        self._workers.submit(self._ask, self._epoch, number, draw, prompt)

    def next(self, wait: float | None) -> Outcome | None:
        """See ``Turns``."""
        try:
            epoch, outcome = self._outcomes.get(timeout=wait)
        except Empty:
            return None
        return outcome if epoch == self._epoch else None

    def abort(self) -> None:
        """See ``Turns``. The servers abort the requests under way."""
        self._epoch += 1
        for server in self.fleet.servers:
            server.disconnect()

    def _ask(self, epoch: int, number: int, draw: Draw, prompt: int) -> None:
        """Put the outcome of a request into the queue. Runs in a worker thread."""
        try:
            drawn: Drawn | Exception | None = self._drawn(epoch, draw, prompt)
        except Exception as error:
            drawn = error
        if drawn is not None:
            self._outcomes.put((epoch, (number, drawn)))

    def _drawn(self, epoch: int, draw: Draw, prompt: int) -> Drawn | None:
        """Send a request to a server, and to others while servers fail; None if it was cancelled."""
        attempts, sent = 2 * len(self.fleet.servers) + 1, 0
        while sent < attempts:
            self._wait(epoch)
            if epoch != self._epoch:
                return None
            with self.fleet.slot(self._homes.get(prompt)) as server, self._timed("generate"):
                if server is None:  # all have failed while it waited
                    continue
                self._homes[prompt], sent = server, sent + 1
                try:
                    return server.generate(draw, self.fleet.version, self.request_timeout)
                except ServerError as error:
                    if epoch != self._epoch:
                        return None
                    if not error.is_failure:
                        raise EngineError(f"{error}. The server refuses what the settings ask for") from None
                    self.fleet.fail(server, error.reason, outdated=isinstance(error, WrongWeightsError))
        raise self.fleet.failure(f"a completion was given up after {attempts} attempts:")

    def _wait(self, epoch: int) -> None:
        """Wait until a server takes requests again, or until they are aborted. Servers that have failed are asked again
        after pauses that double.

        Raises:
            EngineError: no server came back within ``startup_timeout``, or none has the present weights.
        """
        self.fleet.recheck()
        pause, deadline = BACKOFF_SECONDS, time.monotonic() + self.startup_timeout
        while not self.fleet.live and epoch == self._epoch:
            if not self.fleet.may_return:
                raise self.fleet.failure("no server is left:")
            if (left := deadline - time.monotonic()) <= 0:
                within = f"{self.startup_timeout:g} s (server.startup_timeout)"
                raise self.fleet.failure(f"no server is left, and none came back within {within}:")
            self.fleet.pause(min(pause, left))
            pause = min(2 * pause, LONGEST_BACKOFF)
            self.fleet.recheck(now=True)

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._seconds[what].append(time.perf_counter() - start)

    def load(self, version: int) -> None:
        """See ``Turns``. Sends the weights to the servers that do not have them: those that were left out get another
        chance. Rank 0 sends, and all ranks use the servers that took them.

        Raises:
            EngineError: no server took the weights.
            PolicyMismatchError: the probe found a server that computes something else.
        """
        label = f"{self._run}-{version}"
        if label != self.fleet.version:
            self._homes.clear()
        label, left_out, measured = on_main(self.world, lambda: self._load(label))
        if not self.world.is_main:
            self.fleet.adopt(label, left_out)
            for server in self.fleet.servers:
                server.adapter = label if self.adapter else ""
        self._measured |= measured

    def _load(self, label: str) -> tuple[str, dict[str, str], dict[str, float]]:
        """Send the present weights to the servers that do not have them.

        Returns:
            the label of the weights, why servers are left out (by address), and metrics.
        """
        fleet, start = self.fleet, time.perf_counter()
        fleet.version = label
        fleet.recheck(now=True)
        measured: dict[str, float] = {}
        if outdated := fleet.outdated:
            release_memory()  # what this process's allocator keeps, a server that wakes could not map
            loaded = self._send(outdated, label)
            measured["seconds/weights"] = time.perf_counter() - start
            for server in loaded if self.probe else ():
                self._succeeds(server, partial(self._compare, measured))
        if not fleet.live:
            raise fleet.failure("no server has taken the weights:")
        return label, fleet.left_out, measured

    def _compare(self, measured: dict[str, float], server: Server) -> None:
        """Probe a server; of each number, the largest of all servers is kept."""
        assert self.probe is not None
        with self._timed("score"):
            found = self.probe(server)
        for name, value in found.items():
            measured[name] = max(value, measured.get(name, value))

    def _send(self, servers: Sequence[Server], label: str) -> list[Server]:
        """Send the weights to servers; returns those that took them."""
        if self.adapter is None:
            failed = self.sender.send(servers, named_weights(self.policy), label)
        else:
            assert isinstance(self.sender, FolderSender)
            bare = [server for server in servers if not self._has_base(server)]
            failed = dict(self.sender.send(bare, named_weights(self.policy, base=True), label) if bare else {})
            if based := [server for server in servers if server not in failed]:
                failed |= self.sender.send_adapter(based, self.adapter, label)
        for server, error in failed.items():
            self.fleet.fail(server, str(error), outdated=True)
        loaded = [server for server in servers if server not in failed]
        for server in loaded:
            self.fleet.take_in(server)
        return loaded

    def _has_base(self, server: Server) -> bool:
        """Whether a server has weights of this run, and so the base. One that was started again, or has slept, has
        not."""
        try:
            return server.describe().weights.startswith(f"{self._run}-") and not server.asleep
        except EngineError:
            return False

    def _succeeds(self, server: Server, act: Callable[[Server], object]) -> bool:
        """Whether a server did something; it is left out otherwise."""
        try:
            act(server)
        except ServerError as error:
            self.fleet.fail(server, str(error), outdated=True)
            return False
        return True

    def sleep(self) -> None:
        """See ``Turns``. Servers that are not set up to sleep keep their memory. The others lose their weights, and
        wake when they are given weights again."""
        for server in self.fleet.live if self.sleeps and self.world.is_main else ():
            if self._succeeds(server, lambda one: one.sleep()):
                self.fleet.leave_out(server, "it sleeps", outdated=True)

    def close(self) -> None:
        """See ``Turns``."""
        self._workers.shutdown(wait=False, cancel_futures=True)
        self.sender.close()

    def metrics(self) -> dict[str, float]:
        """See ``Turns``: servers in use, failures of servers, what sending the weights took, the probe's, and how long
        servers took to answer."""
        seconds, self._seconds = self._seconds, defaultdict(list)
        measured, self._measured = self._measured, {}
        failures, self.fleet.failures = self.fleet.failures, 0
        measured |= {"server/servers": len(self.fleet.live), "server/failures": failures}
        for what, each in seconds.items():
            measured |= {f"server/seconds_{what}": sum(each) / len(each), f"server/seconds_{what}_max": max(each)}
        return measured

    def describe(self) -> str:
        """See ``Turns``."""
        servers, limit = ", ".join(server.url for server in self.fleet.servers), self.fleet.max_in_flight
        adapter = "; the adapter is loaded beside the base weights" if self.adapter else ""
        return f"servers at {servers}; at most {limit} completions at a time on each{adapter}"
