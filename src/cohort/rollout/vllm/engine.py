"""The vLLM engine: samples on servers, which get the trainer's weights after every update.

Each turn of a trajectory is one HTTP request with all tokens so far; the server's prefix cache holds those it has read.
The seed of a request follows from its ``RNGKey``, so a request that is repeated on another server draws the same
tokens, up to rounding. Nothing here imports vLLM.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any, ClassVar

from cohort.errors import ConfigError, EngineError
from cohort.parallel import World, on_main
from cohort.policy import Policy, context_length, named_weights, placeholder_ids
from cohort.policy.device import release_memory
from cohort.rollout.checks import check_finished, check_requests, describe_policy
from cohort.rollout.engine import Capabilities, EndedTurn, Engine, Request, TokenEvent, Watch
from cohort.rollout.trajectory import StopStrings, Trajectory
from cohort.rollout.vllm.fleet import Fleet
from cohort.rollout.vllm.server import (
    GENERATE,
    DrawnTurn,
    Server,
    ServerError,
    WeightTransport,
    WrongWeightsError,
    generate_request,
    read_answer,
)
from cohort.types import FinishReason

POLL_SECONDS = 0.02
"""How often callbacks of a Watch are called while nothing ends."""
BACKOFF_SECONDS = 0.25
"""Wait before servers that all failed are looked at again; it doubles each time."""
LOWEST_TEMPERATURE = 0.01
"""vLLM raises lower ones to it, but for 0."""
ADMIN_SECONDS = 60.0
"""Time limit of a request that pauses, labels or resumes a server."""


Answer = tuple[int, Trajectory, DrawnTurn | Exception]
"""The epoch of a request, whose it was, and its outcome."""


class VLLMEngine(Engine):
    """Samples on vLLM servers.

    Args:
        policy: its weights are sent to the servers by ``update_weights``.
        tokenizer: decodes completions.
        end_token_ids: tokens that end a completion.
        servers: where completions are drawn. Each gets all weights.
        transport: sends the weights.
        context: maximum number of tokens of prompt and completion together at the servers. None: the model's.
        max_batch_size: requests under way at each server at the same time.
        request_timeout: seconds after which a server that has not answered a request is left out.
        probe: compares a server with the policy after each update of its weights, and returns metrics. It raises
            ``PolicyMismatchError`` if they differ. None: nothing is compared.
        sleeps: whether ``sleep`` frees the servers' memory. Their weights are lost with it.
        world: the ranks. Each sends its own requests; rank 0 sends the weights.

    A server that fails (no connection, no answer in time, a status of 500 or above, an answer that is malformed or from
    other weights) is left out, and its requests are repeated on others. It is taken back when it answers and reports
    the present weights, or has taken those of the next update.

    ``stream`` calls ``on_token`` for all tokens of a turn when the turn has ended, and ``cancelled`` and ``on_step``
    about 50 times a second. A cancelled turn has no tokens. It raises ``EngineError`` if no server is left, or if a
    server refuses a request.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(continuation=True)

    def __init__(
        self,
        policy: Policy,
        tokenizer: Any,
        end_token_ids: Sequence[int],
        servers: Sequence[Server],
        transport: WeightTransport,
        *,
        context: int | None = None,
        max_batch_size: int = 256,
        request_timeout: float = 600.0,
        probe: Callable[[Server], Mapping[str, float]] | None = None,
        sleeps: bool = False,
        world: World | None = None,
    ) -> None:
        self.policy, self.tokenizer = policy, tokenizer
        self.end_token_ids = frozenset(end_token_ids)
        self.fleet = Fleet(servers, max_in_flight=max_batch_size)
        own = context_length(policy.model.config)
        self.context = min((length for length in (context, own) if length is not None), default=None)
        """Maximum number of tokens of prompt and completion together; None: no limit."""
        self.transport, self.probe = transport, probe
        self.sleeps = sleeps
        self._asleep: set[Server] = set()
        self.request_timeout = request_timeout
        self.world = world or World()
        self._run = secrets.token_hex(4)  # so that another run's weights are never taken for this run's
        self._version: int | None = None
        self._stops = StopStrings(tokenizer, ())  # the servers look for stop strings
        self._numbers = count()
        self._under_way: dict[int, Trajectory] = {}
        self._parked: dict[int, Trajectory] = {}
        self._ended: deque[EndedTurn] = deque()
        self._answers: SimpleQueue[Answer] = SimpleQueue()
        self._epoch = 0  # answers to requests of earlier epochs are dropped
        self._homes: dict[int, Server] = {}  # by prompt: where its prefix was read last
        self._streaming = False
        self._metrics: dict[str, float] = {}
        self._workers = ThreadPoolExecutor(max_batch_size * len(servers), thread_name_prefix="vllm")

    @property
    def unfinished(self) -> int:
        """See ``Engine``."""
        return len(self._under_way) + len(self._parked) + len(self._ended) + self._streaming

    def submit(self, requests: Sequence[Request]) -> list[int]:
        """See ``Engine``. Requests are sent at once. ``ConfigError``: no weights were sent yet, or the settings need
        what the servers cannot do."""
        if self._version is None:
            raise ConfigError("no weights were sent to the vLLM servers yet: call update_weights() first")
        check_requests(requests, self.policy.vocab_size, self.context, placeholder_ids(self.policy.model.config))
        for sampling in {request.sampling for request in requests}:
            if sampling.constrained or sampling.repetition_penalty != 1:
                raise ConfigError("VLLMEngine samples under no grammar and no repetition penalty: use LocalEngine")
            if 0 < sampling.temperature < LOWEST_TEMPERATURE:
                lowest = f"vLLM would raise it to {LOWEST_TEMPERATURE}; set that or more"
                raise ConfigError(f"temperature is {sampling.temperature:g}: {lowest}")
        trajectories = [Trajectory(next(self._numbers), request, self._stops) for request in requests]
        for trajectory in trajectories:
            if trajectory.room:
                self._send(trajectory)
            else:  # forced tokens alone
                self._end(trajectory, FinishReason.LENGTH)
        return [trajectory.number for trajectory in trajectories]

    def extend(self, trajectory: int, token_ids: Sequence[int], *, rewrite: bool = False) -> None:
        """See ``Engine``. The next turn is a new request with the whole history."""
        if trajectory not in self._parked:
            raise ConfigError(
                f"trajectory {trajectory} is not parked: extend one whose request has continues=True, after its turn"
            )
        self._parked[trajectory].extend(token_ids, rewrite=rewrite, vocab_size=self.policy.vocab_size)
        self._send(self._parked.pop(trajectory))

    def release(self, trajectory: int) -> None:
        """See ``Engine``."""
        self._parked.pop(trajectory, None)

    def reset(self) -> None:
        """See ``Engine``. The servers abort the requests under way."""
        self._abort()
        self._parked.clear()
        self._ended.clear()

    def update_weights(self, version: int) -> None:
        """See ``Engine``. Sends the weights to the servers that do not have them: those that were left out get another
        chance. Rank 0 sends, and all ranks use the servers that took them.

        Raises:
            EngineError: no server took the weights.
            PolicyMismatchError: the probe found a server that computes something else.
        """
        check_finished(self.unfinished, "take new weights")
        label, left_out, measured = on_main(self.world, lambda: self._load(version))
        if not self.world.is_main:
            self.fleet.adopt(label, left_out)
        self._metrics |= measured
        if version != self._version:
            self._homes.clear()
        self._version = version

    def sleep(self) -> None:
        """See ``Engine``. Servers that are not set up to sleep keep their memory. The others lose their weights, and
        wake when they are given weights again."""
        check_finished(self.unfinished, "sleep")
        for server in self.fleet.live if self.sleeps and self.world.is_main else ():
            if self._succeeds(server, lambda one: one.post("/sleep", level="2", timeout=ADMIN_SECONDS)):
                self._asleep.add(server)
                self.fleet.leave_out(server, "it sleeps", outdated=True)

    def close(self) -> None:
        """See ``Engine``."""
        self.reset()
        self._workers.shutdown(wait=False, cancel_futures=True)
        self.transport.close()

    def metrics(self) -> dict[str, float]:
        """See ``Sampler``: servers in use, failures of servers, what sending the weights took, and the probe's."""
        measured, self._metrics = self._metrics, {}
        failures, self.fleet.failures = self.fleet.failures, 0
        return measured | {"vllm/servers": len(self.fleet.live), "vllm/failures": failures}

    def describe_model(self) -> str:
        """Model, numerics and servers, a line each."""
        servers, limit = ", ".join(server.url for server in self.fleet.servers), self.fleet.max_in_flight
        return (
            f"{describe_policy(self.policy)}\nsampler: vLLM at {servers}; at most {limit} completions at a time on each"
        )

    def _send(self, trajectory: Trajectory) -> None:
        self._under_way[trajectory.number] = trajectory
        body = generate_request(trajectory, self.end_token_ids)
        self._workers.submit(self._ask, self._epoch, trajectory, body)

    def _ask(self, epoch: int, trajectory: Trajectory, body: dict[str, Any]) -> None:
        """Put the outcome of a request into the queue. Runs in a worker thread."""
        try:
            outcome: DrawnTurn | Exception | None = self._drawn(epoch, trajectory.request.prompt.uid, body)
        except Exception as error:
            outcome = error
        if outcome is not None:
            self._answers.put((epoch, trajectory, outcome))

    def _drawn(self, epoch: int, prompt: int, body: dict[str, Any]) -> DrawnTurn | None:
        """Send a request to a server, and to others while servers fail; None if it was cancelled."""
        attempts = 2 * len(self.fleet.servers) + 1
        for attempt in range(attempts):
            self.fleet.recheck()
            if not self.fleet.live:
                time.sleep(BACKOFF_SECONDS * 2**attempt)
                self.fleet.recheck(now=True)
                if not self.fleet.live and epoch == self._epoch:
                    continue
            if epoch != self._epoch:
                return None
            with self.fleet.slot(self._homes.get(prompt)) as server:
                self._homes[prompt] = server
                try:
                    return read_answer(
                        server,
                        server.post(GENERATE, body, timeout=self.request_timeout),
                        max_tokens=body["sampling_params"]["max_tokens"],
                        end_token_ids=self.end_token_ids,
                        vocab_size=self.policy.vocab_size,
                        version=self.fleet.version,
                    )
                except ServerError as error:
                    if epoch != self._epoch:
                        return None
                    if not error.is_failure:
                        raise EngineError(f"{error}. The server refuses what the settings ask for") from None
                    self.fleet.fail(server, error.reason, outdated=isinstance(error, WrongWeightsError))
        given_up = f"a completion was given up after {attempts} attempts:"
        raise self.fleet.failure(given_up if self.fleet.live else "no vLLM server is left:")

    def _advance(self, watch: Watch) -> bool:
        """Call the callbacks, and take the next answer if there is one."""
        if not self._under_way:
            return False
        if watch.on_step:
            watch.on_step()
        if watch.cancelled and watch.cancelled():
            for trajectory in self._abort():
                self._end(trajectory, FinishReason.CANCELLED)
        if self._under_way:
            with suppress(Empty):
                timeout = POLL_SECONDS if watch.on_step or watch.cancelled else None
                epoch, trajectory, outcome = self._answers.get(timeout=timeout)
                if epoch == self._epoch:
                    del self._under_way[trajectory.number]
                    if isinstance(outcome, Exception):
                        raise outcome
                    self._record(trajectory, outcome, watch)
        return True

    def _record(self, trajectory: Trajectory, drawn: DrawnTurn, watch: Watch) -> None:
        """Append what was drawn."""
        request, first = trajectory.request, trajectory.position
        greedy = request.sampling.temperature == 0
        logps = [0.0] * len(drawn.logps) if greedy else drawn.logps
        trajectory.tokens += drawn.token_ids
        trajectory.logps += logps
        if trajectory.full_logps is not None:
            trajectory.full_logps += drawn.logps if greedy else [float("nan")] * len(drawn.logps)
        if watch.on_token:
            for n, (token, logp) in enumerate(zip(drawn.token_ids, logps, strict=True)):
                reason = drawn.finish_reason if n == len(logps) - 1 else None
                watch.on_token(TokenEvent(request.prompt_index, request.sample, first + n, token, logp, reason))
        self._end(trajectory, drawn.finish_reason)

    def _end(self, trajectory: Trajectory, reason: FinishReason) -> None:
        assert self._version is not None
        turn = trajectory.ended(reason, self.tokenizer, self._version)
        self._ended.append(turn)
        if turn.room:
            self._parked[trajectory.number] = trajectory

    def _abort(self) -> list[Trajectory]:
        """Abort the requests under way; returns their trajectories."""
        self._epoch += 1
        aborted = list(self._under_way.values())
        self._under_way.clear()
        if aborted:
            for server in self.fleet.servers:
                server.disconnect()
        return aborted

    def _load(self, version: int) -> tuple[str, dict[str, str], dict[str, float]]:
        """Send the present weights to the servers that do not have them.

        Returns:
            the label of the weights, why servers are left out (by address), and metrics.
        """
        fleet, start = self.fleet, time.perf_counter()
        fleet.version = label = f"{self._run}-{version}"
        fleet.recheck(now=True)
        paused = [server for server in fleet.outdated if self._succeeds(server, self._pause)]
        measured: dict[str, float] = {}
        if paused:
            failed = self.transport.send(paused, named_weights(self.policy), label)
            for server, error in failed.items():
                fleet.fail(server, str(error), outdated=True)
            loaded = [server for server in paused if server not in failed and self._succeeds(server, self._resume)]
            for server in loaded:
                fleet.take_in(server)
            measured["seconds/weights"] = time.perf_counter() - start
            probe, probed = self.probe or (lambda _: {}), list[Mapping[str, float]]()
            for server in loaded:
                self._succeeds(server, lambda one: probed.append(probe(one)))
            for name, value in (item for found in probed for item in found.items()):
                measured[name] = max(value, measured.get(name, value))
        if not fleet.live:
            raise fleet.failure("no vLLM server has taken the weights:")
        return label, fleet.left_out, measured

    def _succeeds(self, server: Server, act: Callable[[Server], object]) -> bool:
        """Whether a server did something; it is left out otherwise."""
        try:
            act(server)
        except ServerError as error:
            self.fleet.fail(server, str(error), outdated=True)
            return False
        return True

    def _pause(self, server: Server) -> None:
        # Nobody waits for requests that may be left over; the answers to aborted ones are dropped.
        server.post("/pause", mode="abort", timeout=ADMIN_SECONDS)
        if server in self._asleep:
            release_memory()  # what this process's allocator keeps, the server could not map
            server.post("/wake_up", tags="weights", timeout=ADMIN_SECONDS)

    def _resume(self, server: Server) -> None:
        if server in self._asleep:  # the cache was not there while weights were sent
            server.post("/wake_up", tags="kv_cache", timeout=ADMIN_SECONDS)
            self._asleep.discard(server)
        server.post("/update_weight_version", {"new_version": self.fleet.version}, timeout=ADMIN_SECONDS)
        server.post("/reset_prefix_cache", timeout=ADMIN_SECONDS)  # what it holds belongs to the previous weights
        server.post("/resume", timeout=ADMIN_SECONDS)
        if (found := server.weights_version()) != self.fleet.version:
            raise ServerError(server.url, "/weight_info", f"it reports weights {found!r}, not {self.fleet.version!r}")
