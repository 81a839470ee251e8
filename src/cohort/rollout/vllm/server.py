"""A vLLM server over HTTP, and how weights get to it. Imports neither vLLM nor torch.

The client is ``http.client`` from the standard library. A request takes as long as a completion, so a connection of its
own costs nothing, and closing the connection from another thread is how a request is cancelled. No HTTP library is a
dependency of Cohort.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import math
import socket
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock
from typing import Any, Protocol
from urllib.parse import urlencode, urlsplit

from cohort.errors import ConfigError, EngineError
from cohort.rollout.trajectory import Trajectory
from cohort.types import FinishReason


class ServerError(EngineError):
    """A server did not answer a request, or refused it.

    Args:
        server: its address.
        path: the route.
        reason: what happened.
        status: the HTTP status; None when there was no answer.
    """

    def __init__(self, server: str, path: str, reason: str, status: int | None = None) -> None:
        super().__init__(f"{server}{path}: {reason}")
        self.reason = reason
        self.status = status

    @property
    def is_failure(self) -> bool:
        """Whether the server failed, so that another may succeed. False: it refused this request."""
        return self.status is None or self.status >= 500


class Server:
    """One vLLM server. Its methods may be called from several threads at the same time.

    Args:
        url: ``http://HOST:PORT``.

    Raises:
        ConfigError: the address is malformed.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = 0
        if parts.scheme != "http" or not parts.hostname or port == 0 or parts.path.strip("/") or parts.query:
            raise ConfigError(f"vllm.url: expected an address such as 'http://127.0.0.1:8000', got {url!r}")
        self.host, self.port = parts.hostname, port or 80
        shown = f"[{self.host}]" if ":" in self.host else self.host
        self.url = f"http://{shown}:{self.port}"
        self._open: set[http.client.HTTPConnection] = set()
        self._lock = Lock()

    def __repr__(self) -> str:
        return f"Server({self.url!r})"

    def get(self, path: str, *, timeout: float = 60.0) -> Any:
        """As ``post``, with the method GET."""
        return self._request("GET", path, None, timeout)

    def post(self, path: str, body: Any = None, *, timeout: float = 60.0, **query: str) -> Any:
        """Send a request; return the decoded JSON of the answer, None if it is empty.

        Args:
            path: of the route.
            body: is sent as JSON. None: nothing.
            timeout: seconds without a byte from the server.
            query: parameters in the address.

        Raises:
            ServerError: no connection, no answer in time, a status other than 2xx, or an answer that is not JSON.
        """
        return self._request("POST", f"{path}?{urlencode(query)}" if query else path, body, timeout)

    def _request(self, method: str, target: str, body: Any, timeout: float) -> Any:
        path = target.partition("?")[0]
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        with self._lock:
            self._open.add(connection)
        try:
            content = None if body is None else json.dumps(body).encode()
            headers = {"Connection": "close", "Accept": "application/json"}
            if content is not None:
                headers["Content-Type"] = "application/json"
            connection.request(method, target, content, headers)
            response = connection.getresponse()
            status, text = response.status, response.read()
        except TimeoutError:
            raise ServerError(self.url, path, f"no answer within {timeout:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(self.url, path, _words(error)) from None
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()
        if not 200 <= status < 300:
            raise ServerError(self.url, path, f"status {status}: {_message(text)}", status)
        try:
            return json.loads(text) if text.strip() else None
        except ValueError:
            raise ServerError(self.url, path, f"the answer is not JSON: {text[:80]!r}") from None

    def disconnect(self) -> None:
        """Close the connections of all requests under way, which raise ``ServerError``. vLLM then aborts them."""
        with self._lock:
            connections = list(self._open)
        for connection in connections:
            if connection.sock is not None:
                with suppress(OSError):  # closed already
                    connection.sock.shutdown(socket.SHUT_RDWR)

    def is_healthy(self, *, timeout: float = 5.0) -> bool:
        """Whether ``/health`` answers."""
        try:
            self.get("/health", timeout=timeout)
        except ServerError:
            return False
        return True

    def weights_version(self) -> str:
        """The label of the weights that the server samples with."""
        return self.text("/weight_info", "weight_version")

    def text(self, path: str, name: str) -> str:
        """A text in the answer of a route. Raises ``ServerError`` without it."""
        answer = self.get(path)
        if not isinstance(answer, dict) or not isinstance(answer.get(name), str):
            raise ServerError(self.url, path, f"expected a {name}, got {answer!r:.80}")
        return str(answer[name])

    def check_private(self) -> None:
        """Check that the address is on the loopback device or on a private network.

        vLLM's routes for weights have no access control: whoever reaches them can replace the model or run code.

        Raises:
            ConfigError: it is not, or the name is unknown.
        """
        try:
            found = {info[4][0] for info in socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)}
        except OSError as error:
            raise ConfigError(f"vllm.url {self.url}: the name {self.host!r} is unknown ({_words(error)})") from None
        public = sorted(str(one) for one in found if ipaddress.ip_address(str(one).partition("%")[0]).is_global)
        if public:
            raise ConfigError(
                f"vllm.url {self.url} is a public address ({', '.join(public)}). Weights are sent to it through routes "
                "without access control: use a loopback or private address, or a tunnel such as ssh -L"
            )


class WeightTransport(Protocol):
    """Moves the trainer's weights to servers."""

    def check(self, servers: Sequence[Server]) -> Mapping[Server, Any]:
        """Check that the servers have what the transport needs. Called before the model is loaded.

        Returns:
            what each says of itself, a ``plugin.ServerDescription``.

        Raises:
            ConfigError: a server lacks it; says how to start the server.
        """

    def send(
        self, servers: Sequence[Server], weights: Iterable[tuple[str, Any]], version: str
    ) -> Mapping[Server, EngineError]:
        """Load weights into servers, which the caller has paused and resumes afterwards.

        Args:
            servers: those to load. A server that was left out is loaded alone later.
            weights: names as in the model's ``state_dict``, with whole tensors. Read once, by any number of servers.
            version: the label of the weights. The caller sets it on the servers (``/update_weight_version``).

        Returns:
            the servers that failed, with the reason; the caller leaves them out.

        Raises:
            EngineError: the weights cannot be sent to any server.
        """

    def close(self) -> None:
        """Free everything. Idempotent."""


def _words(error: Exception) -> str:
    """An exception in words."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text or type(error).__name__


def _message(text: bytes) -> str:
    """What an error's answer says: the message of vLLM's or FastAPI's JSON, else the text."""
    try:
        found = json.loads(text)
    except ValueError:
        found = text.decode(errors="replace")
    if isinstance(found, dict):
        error = found.get("error", found.get("detail", found))
        found = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(found).split())[:300] or "no message"


# ----------------------------------------
# The request and the answer of vLLM's route for tokens in and tokens out, ``/inference/v1/generate``.


GENERATE = "/inference/v1/generate"
UNKNOWN_LOGP = -9999.0
"""What vLLM sends for a log-prob that is NaN, minus infinity or missing."""


@dataclass(frozen=True, slots=True)
class DrawnTurn:
    """What a server drew."""

    token_ids: list[int]
    logps: list[float]
    """Under the distribution that the tokens were drawn from; of greedy draws, under the full softmax."""
    finish_reason: FinishReason


def generate_request(trajectory: Trajectory, end_token_ids: Collection[int]) -> dict[str, Any]:
    """The body of a request for the next turn of a trajectory.

    The end tokens are sent as stop tokens, and the server ignores those of its own model: what ends a turn does not
    depend on the files that the server was started with. No default of the server applies to what is sent here.
    """
    request, sampling = trajectory.request, trajectory.request.sampling
    room = trajectory.limit - len(trajectory.tokens)
    parameters: dict[str, Any] = {
        "seed": request.key.request_seed(request.prompt.uid, request.sample, trajectory.position),
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "max_tokens": room,
        "min_tokens": min(room, max(0, sampling.min_completion_length - len(trajectory.tokens))),
        "stop_token_ids": sorted(end_token_ids),
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": bool(sampling.stop),
    }
    if sampling.stop:
        parameters |= {"stop": list(sampling.stop), "include_stop_str_in_output": True, "skip_special_tokens": False}
    return {"token_ids": [*request.prompt.token_ids, *trajectory.tokens], "sampling_params": parameters}


def read_answer(
    server: Server, answer: Any, *, max_tokens: int, end_token_ids: Collection[int], vocab_size: int, version: str
) -> DrawnTurn:
    """The drawn tokens of an answer.

    Args:
        server: which gave it.
        answer: decoded JSON.
        max_tokens: of the request.
        end_token_ids: tokens that end a turn.
        vocab_size: tokens of the policy.
        version: the label of the weights that the tokens must come from.

    Raises:
        ServerError: the answer is malformed or incomplete, or comes from other weights.
    """

    def check(holds: bool, problem: str) -> None:
        if not holds:
            raise ServerError(server.url, GENERATE, problem)

    try:
        (choice,) = answer["choices"]
        tokens, reason, stop = choice["token_ids"], choice["finish_reason"], choice["stop_reason"]
        content, spans = choice["logprobs"]["content"], choice["weight_versions"]
        logps = [float(one["logprob"]) for one in content]
        reported = [one["token_id"] for one in content]
        versions = {span["version"] for span in spans or ()}
    except (TypeError, KeyError, ValueError):
        raise ServerError(server.url, GENERATE, f"unexpected answer {str(answer)[:200]}") from None
    check(reason in ("stop", "length"), f"the request ended with {reason!r}")
    check(all(type(token) is int and 0 <= token < vocab_size for token in tokens), "token ids outside the vocabulary")
    check(reported == tokens, "the log-probs are of other tokens than those that were drawn")
    check(0 < len(tokens) <= max_tokens, f"{len(tokens)} tokens, of at most {max_tokens}")
    check(reason == "stop" or len(tokens) == max_tokens, f"cut after {len(tokens)} of {max_tokens} tokens")
    if versions != {version}:
        found = ", ".join(map(repr, sorted(map(str, versions)))) or "without a version"
        raise WrongWeightsError(server, found, version)
    if invalid := [n for n, logp in enumerate(logps) if not math.isfinite(logp) or logp <= UNKNOWN_LOGP]:
        return DrawnTurn(tokens[: invalid[0]], logps[: invalid[0]], FinishReason.ERROR)
    if reason == "length":
        return DrawnTurn(tokens, logps, FinishReason.LENGTH)
    if isinstance(stop, str):
        return DrawnTurn(tokens, logps, FinishReason.STOP)
    check(tokens[-1] in end_token_ids, f"stopped after token {tokens[-1]}, which is no end token")
    return DrawnTurn(tokens, logps, FinishReason.EOS)


class WrongWeightsError(ServerError):
    """A server sampled with other weights than the present ones."""

    def __init__(self, server: Server, found: str, expected: str) -> None:
        super().__init__(
            server.url,
            GENERATE,
            f"it sampled with weights {found}, expected {expected!r}: was it started again, or does another run send "
            "it weights?",
        )
