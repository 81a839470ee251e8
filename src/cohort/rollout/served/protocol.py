"""What the engine asks of a server that samples, whichever it is: one turn in, its tokens and their log-probs out.

Servers are asked over HTTP (``vllm``, ``sglang``). What vLLM draws in the trainer's own process (``colocated``) is
checked by the same rules. Imports neither vLLM nor torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from threading import Event
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from packaging.version import InvalidVersion, Version

from cohort.errors import ConfigError, EngineError
from cohort.rollout.settings import Sampling
from cohort.rollout.trajectory import Kept, Trajectory
from cohort.types import FinishReason

UNKNOWN_LOGP = -9999.0
"""What vLLM sends for a log-prob that is NaN, minus infinity or missing."""
SMALL_VOCABULARY = 4096
"""Up to so many tokens, a server without masks sends the log-probs of all of them for each draw."""
TIES = 8
"""Log-probs that are asked for beyond ``top_k``: tokens as likely as the k-th are kept, too."""
LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.01, 2.0
"""vLLM raises lower ones than the first, but for 0, and refuses higher ones than the second."""


class ServerError(EngineError):
    """A server did not answer a request, or refused it.

    Args:
        server: its address.
        path: the route.
        reason: what happened.
        status: the HTTP status; None when there was no answer.
        retry_after: seconds until it wants to be asked again; None: it did not say.
    """

    def __init__(
        self, server: str, path: str, reason: str, status: int | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(f"{server}{path}: {reason}")
        self.reason, self.status, self.retry_after = reason, status, retry_after

    @property
    def is_failure(self) -> bool:
        """Whether the server failed, so that another may succeed. False: it refused this request."""
        return self.status is None or self.status >= 500


@contextmanager
def reading(server: str, path: str, answer: Any) -> Iterator[None]:
    """A block that takes an answer apart. Raises ``ServerError``: it has another shape."""
    try:
        yield
    except (TypeError, KeyError, ValueError, IndexError, AttributeError, OverflowError, EOFError) as error:
        raise ServerError(server, path, f"unexpected answer ({error!r}): {str(answer)[:200]}") from None


class WrongWeightsError(ServerError):
    """A server sampled with other weights than the present ones."""

    def __init__(self, server: str, path: str, found: str, expected: str) -> None:
        reason = f"it sampled with weights {found}, expected {expected!r}"
        super().__init__(server, path, f"{reason}: was it started again, or does another run send it weights?")


@dataclass(frozen=True, slots=True)
class Description:
    """What a server, or vLLM in this process, says of itself."""

    weights: str
    """The label of the weights that it samples with."""
    dtype: str = "float32"
    """Of its weights, as in "bfloat16"."""
    device: str = "cpu"
    """"cpu" or "cuda"."""
    workers: int = 1
    """Processes that hold weights."""
    context: int = 0
    """Maximum number of tokens of prompt and completion together."""
    quantization: str | None = None
    masks: bool = False
    """It returns the tokens that each draw could have given."""
    candidates: int = 0
    """Log-probs that it returns for one draw at most; -1: of all tokens."""
    routes: bool = False
    """It returns the experts that each token was routed to."""
    adapters: int = 0
    """The highest rank of adapters that it loads by name; 0: none."""
    can_sleep: bool = False
    can_broadcast: bool = False
    """It receives weights by broadcasts in a process group with the trainer."""
    has_tokenizer: bool = True


@dataclass(frozen=True, slots=True)
class Draw:
    """A turn to draw."""

    token_ids: Sequence[int]
    """The prompt and all tokens so far."""
    sampling: Sampling
    seed: int
    max_tokens: int
    min_tokens: int
    end_token_ids: tuple[int, ...]
    vocab_size: int
    routes: bool = False
    """Whether the experts of each token have to come back."""

    @classmethod
    def of(
        cls, trajectory: Trajectory, end_token_ids: tuple[int, ...], vocab_size: int, *, routes: bool = False
    ) -> Draw:
        """The next turn of a trajectory."""
        request, sampling = trajectory.request, trajectory.request.sampling
        room, drawn = trajectory.limit - len(trajectory.tokens), len(trajectory.tokens)
        return cls(
            [*request.prompt.token_ids, *trajectory.tokens],
            sampling,
            request.key.request_seed(request.prompt.uid, request.sample, trajectory.position),
            room,
            min(room, max(0, sampling.min_completion_length - drawn)),
            end_token_ids,
            vocab_size,
            routes,
        )


def check_temperature(value: float, name: str) -> None:
    """Refuse a temperature that vLLM does not draw at. Raises ``ConfigError``, which calls it ``name``."""
    if 0 < value < LOWEST_TEMPERATURE:
        raise ConfigError(f"{name} is {value:g}: vLLM would raise it to {LOWEST_TEMPERATURE}; set that or more")
    if value > HIGHEST_TEMPERATURE:
        raise ConfigError(f"{name} is {value:g}: vLLM refuses more than {HIGHEST_TEMPERATURE:g}; set that or less")


def check_version(server: str, name: str, found: str, oldest: str) -> None:
    """Refuse a server that is older than what was read. Raises ``ConfigError``."""
    if too_old(found, oldest):
        raise ConfigError(f"{server} runs {name} {found}: {oldest} or newer is needed")


def check_vocabulary(server: str, path: str, answer: str, pattern: str, vocab_size: int, *, above: int = 0) -> None:
    """Refuse a server whose model has another number of tokens than the policy. No route says how many it has; the
    error about a bias of an unknown token does.

    Args:
        server, path: where it was asked.
        answer: the error.
        pattern: finds the number in it.
        vocab_size: tokens of the policy.
        above: what the model has more than that number.

    Raises:
        ConfigError: it has another number.
        ServerError: the answer does not say how many.
    """
    if not (size := re.search(pattern, answer)):
        raise ServerError(server, path, f"cannot tell how many tokens the model has: {answer}")
    if (found := int(size[1]) + above) != vocab_size:
        raise ConfigError(
            f"{server} serves a model with {found} tokens, and the policy has {vocab_size}: start it with the policy's "
            "model"
        )


def too_old(version: str, oldest: str) -> bool:
    """Whether a version is older than the oldest that will do. What was built from source may have no number of its own
    (0.1.dev, 0.0.0), and is not.

    >>> [too_old(one, "0.32") for one in ("0.31.2", "0.32.0rc1", "0.100", "0.1.dev12+gabc", "dev")]
    [True, False, False, False, False]
    """
    try:
        found = Version(version).release
    except InvalidVersion:
        return False
    return (0, 2) <= found < Version(oldest).release


def wants_support(sampling: Sampling) -> bool:
    """Whether the tokens that each draw could have given have to come back. Those of greedy draws are known."""
    return sampling.selects and sampling.record_support


def candidates_of(sampling: Sampling, vocab_size: int) -> int | None:
    """How many log-probs of a draw show which tokens it could have given; None: more than a server should send."""
    if vocab_size <= SMALL_VOCABULARY:
        return -1
    return sampling.top_k + TIES if sampling.top_k and not sampling.constrained else None


def check_support(sampling: Sampling, vocab_size: int, found: Description, name: str, how: str) -> None:
    """Refuse settings under which a server cannot say what each draw could have given.

    Args:
        sampling: the settings.
        vocab_size: tokens of the policy.
        found: what the server says of itself.
        name: of the server.
        how: the setting or argument that makes it return masks.

    Raises:
        ConfigError: it cannot.
    """
    if not wants_support(sampling) or found.masks:
        return
    needed = candidates_of(sampling, vocab_size)
    if needed is None:
        raise ConfigError(
            f"{name} does not return the tokens that a draw could have given, which the update needs with "
            f"{'a grammar' if sampling.constrained else 'rollout.top_p or rollout.min_p'}: {how}"
            + ("" if sampling.constrained else "; or set rollout.top_k as well, such as 50")
        )
    wanted = vocab_size if needed == -1 else needed
    if -1 < found.candidates < wanted:
        raise ConfigError(
            f"{name} returns at most {found.candidates} log-probs for a draw, and {wanted} show what it could have "
            f"given: start it with --max-logprobs {wanted}, or lower rollout.top_k"
        )


@dataclass(slots=True)
class RawTurn:
    """What came back for a turn, before anything is checked."""

    token_ids: Sequence[int]
    logps: Sequence[float]
    """Under the distribution that the tokens were drawn from; of greedy draws without ``masks``, under the full
    softmax."""
    reported: Sequence[int]
    """The tokens that ``logps`` are of."""
    finish: str
    """"stop", "length", or why the turn cannot be used."""
    stop: int | str | None
    """The end token, or the stop string, that ended it."""
    versions: frozenset[str]
    """The labels of the weights that drew it."""
    masks: Sequence[Sequence[int]] | None = None
    """The tokens that each draw could have given."""
    candidates: Sequence[Mapping[int, float]] | None = None
    """Log-probs of the likeliest tokens of each draw, by token; minus infinity for one that was left out."""
    routes: np.ndarray | None = None
    """Experts of each token that was read, [tokens, layers, k]."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A turn that was drawn."""

    token_ids: list[int]
    logps: list[float]
    finish_reason: FinishReason
    supports: list[Kept] | None = None
    """What each draw could have given; None: everything, or nobody asked."""
    routes: np.ndarray | None = None
    full_logps: list[float] | None = None
    """Under the full softmax; None: not known."""


def checked(draw: Draw, raw: RawTurn, version: str, server: str, path: str = "") -> Drawn:
    """A turn, once what came back for it is whole and from the right weights.

    Args:
        draw: what was asked.
        raw: what came back.
        version: the label of the weights that it must come from.
        server: which gave it.
        path: the route, for errors.

    Raises:
        ServerError: the answer is malformed or incomplete, or comes from other weights.
    """

    def check(holds: bool, problem: str) -> None:
        if not holds:
            raise ServerError(server, path, problem)

    tokens, logps, most = list(raw.token_ids), list(raw.logps), draw.max_tokens
    check(raw.finish in ("stop", "length"), f"the request ended with {raw.finish!r}")
    known = all(type(token) is int and 0 <= token < draw.vocab_size for token in tokens)
    check(known, "token ids outside the vocabulary")
    check(list(raw.reported) == tokens, "the log-probs are of other tokens than those that were drawn")
    check(0 < len(tokens) <= most, f"{len(tokens)} tokens, of at most {most}")
    check(raw.finish == "stop" or len(tokens) == most, f"cut after {len(tokens)} of {most} tokens")
    if raw.versions != {version}:
        found = ", ".join(map(repr, sorted(map(str, raw.versions)))) or "without a version"
        raise WrongWeightsError(server, path, found, version)
    reason = FinishReason.LENGTH
    if raw.finish == "stop":
        reason = FinishReason.STOP if isinstance(raw.stop, str) else FinishReason.EOS
    if invalid := [n for n, logp in enumerate(logps) if not math.isfinite(logp) or logp <= UNKNOWN_LOGP]:
        tokens, logps, reason = tokens[: invalid[0]], logps[: invalid[0]], FinishReason.ERROR
    elif reason is FinishReason.EOS:
        check(tokens[-1] in draw.end_token_ids, f"stopped after token {tokens[-1]}, which is no end token")
    supports = _supports(draw, tokens, raw, check)
    routes = raw.routes
    if draw.routes:
        read = len(draw.token_ids) + len(raw.token_ids) - 1
        check(routes is not None, "the experts of its tokens did not come back")
        assert routes is not None
        check(routes.ndim == 3 and len(routes) == read, f"experts of shape {routes.shape} for {read} tokens")
    full_logps = logps if draw.sampling.temperature == 0 and raw.masks is None else None
    return Drawn(tokens, logps, reason, supports, routes, full_logps)


def _supports(draw: Draw, tokens: Sequence[int], raw: RawTurn, check: Callable[[bool, str], None]) -> list[Kept] | None:
    """What each draw could have given."""
    sampling = draw.sampling
    if not (sampling.record_support and sampling.truncates):
        return None
    if sampling.temperature == 0:
        return [(np.array([token], np.int32), False) for token in tokens]
    ends = np.array(sorted(draw.end_token_ids), np.int32)
    if not sampling.selects:  # the minimum length alone
        return [(ends if n < draw.min_tokens else ends[:0], True) for n in range(len(tokens))]
    masks = raw.masks
    if masks is None:
        candidates = raw.candidates or ()
        masks = [[one for one, logp in each.items() if logp > UNKNOWN_LOGP] for each in candidates]
        cut = any(len(kept) == len(each) < draw.vocab_size for kept, each in zip(masks, candidates, strict=True))
        check(not cut, "more tokens are as likely as the k-th than log-probs came back")
    check(len(masks) >= len(tokens), f"what a draw could have given came back for {len(masks)} of {len(tokens)}")
    supports = []
    for token, ids in zip(tokens, masks, strict=False):
        kept = np.unique(np.array(ids, np.int32))
        valid = bool(len(kept)) and kept[0] >= 0 and kept[-1] < draw.vocab_size
        check(valid and token in kept, "a token was drawn that it could not have given")
        excluded = len(kept) > draw.vocab_size // 2  # the shorter list is kept
        if excluded:
            kept = np.setdiff1d(np.arange(draw.vocab_size, dtype=np.int32), kept)
        supports.append((kept, excluded))
    return supports


@dataclass
class Update:
    """Weights on their way to a server: a folder, or broadcasts."""

    timeout: float
    """Seconds to take them."""
    folder: str = ""
    """Safetensors files that the server sees under this name; empty: the weights are broadcast."""
    adapter: str = ""
    """The name of the adapter in ``folder``; empty: all weights."""
    tensors: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Of broadcasts: ``names``, ``dtypes`` and ``shapes``, in their order."""
    begun: Event = field(default_factory=Event)
    """Set when the server is about to receive the broadcasts."""

    def begin(self) -> None:
        """Called right before the request with which the server receives the broadcasts."""
        self.begun.set()


class Server(Protocol):
    """A server that samples. Its methods may be called from several threads at the same time, and raise
    ``ServerError``."""

    url: str
    adapter: str = ""
    """The adapter that it samples with; empty: none. ``load`` sets it on the rank that sends the weights."""
    asleep: bool = False
    """Whether ``sleep`` has freed its memory, and ``load`` has to wake it."""
    options: Mapping[str, str] = MappingProxyType(
        {
            "context": "--max-model-len",
            "sleep": "start it with --enable-sleep-mode",
            "routes": "start it with --enable-return-routed-experts",
        }
    )
    """What makes it serve longer texts, sleep, and return experts."""
    joins_as_torch: bool = False
    """Whether its workers join a group by a name, as torch does: they set no "readyN" in the store, and the connection
    is made at the first weight."""

    def describe(self) -> Description:
        """What it is, and which weights it has. Also shows that it answers."""

    def check(self, vocab_size: int) -> None:
        """Check that it has the routes, the vocabulary and the log-probs that a run needs, after ``describe``. Raises
        ``ConfigError``: it has not; says how to start it."""

    def refusal(self, sampling: Sampling, vocab_size: int) -> str:  # noqa: ARG002
        """Why it cannot draw exactly with these settings, and what to do; empty: it can. After ``describe``."""
        return ""

    def generate(self, draw: Draw, version: str, timeout: float) -> Drawn:
        """Draw a turn with the weights ``version``."""

    def score(self, token_ids: Sequence[int], count: int) -> tuple[list[float], list[int], list[float]]:
        """The log-probs of a text's tokens from the second on, at temperature 1; ``count`` tokens drawn after it, and
        their log-probs. The first reads no cached prefix, the second does."""

    def load(self, update: Update, version: str) -> None:
        """Drop what is under way, take weights, label them, and go on."""

    def join(self, meeting: Mapping[str, Any]) -> None:
        """Let the server's workers join a process group with the trainer. The trainer is rank 0. With
        ``joins_as_torch`` the group has a ``name``."""

    def leave(self) -> None:
        """Let the workers leave that group."""

    @classmethod
    def joining(cls) -> str:
        """How to start a server that can join."""

    def sleep(self) -> None:
        """Free its memory; the weights are lost. ``load`` wakes it."""

    def disconnect(self) -> None:
        """Close the connections of all requests under way, which raise ``ServerError``. The server aborts them."""

    @staticmethod
    def command(model: str = "MODEL", *options: str) -> str:
        """The command that starts such a server."""


Outcome = tuple[int, Drawn | Exception]
"""The number of a trajectory, and its turn or why there is none."""


class Turns(Protocol):
    """Where the engine's turns are drawn: at servers, or by vLLM in this process."""

    sleeps: bool = False
    """Whether ``sleep`` frees memory."""
    together: bool = False
    """See ``Engine``."""

    @property
    def busy(self) -> bool:
        """Whether ``next`` has to be called although this rank waits for no turn: another rank's is under way."""
        return False

    @property
    def reserved(self) -> int:
        """Bytes of the policy's device that it has yet to take, and keeps during updates."""
        return 0

    def session(self) -> AbstractContextManager[None]:
        """A block in which every rank has turns drawn until there are none. An error in it is told to the others."""
        return nullcontext()

    def begin(self, number: int, draw: Draw, prompt: int) -> None:
        """Have a turn drawn.

        Args:
            number: of its trajectory.
            draw: the turn.
            prompt: ``Prompt.uid``. Turns of one prompt share a prefix.
        """

    def next(self, wait: float | None) -> Outcome | None:
        """A turn that has ended, after at most ``wait`` seconds; None if there is none, or it was aborted."""

    def abort(self) -> None:
        """Drop all turns that are under way."""

    def load(self, version: int) -> None:
        """Draw with the policy's present weights from now on. Nothing is under way."""

    def sleep(self) -> None:
        """Free memory, as far as that is possible; ``load`` undoes it."""

    def close(self) -> None:
        """Free everything. Idempotent."""

    def metrics(self) -> dict[str, float]:
        """Numbers since the last call, by metric name."""
        return {}

    def describe(self) -> str:
        """Where it is, in a line."""
