"""The local engine: samples with the trainer's own weights, in the trainer's own process.

It connects the scheduler, which decides, with a backend, which computes: the lean path for Llama-like models, else
transformers' forward pass.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import Any, ClassVar

from cohort.errors import ConfigError, ModelError, out_of_memory
from cohort.policy import Policy, context_length, placeholder_ids
from cohort.policy.device import release_memory
from cohort.rollout.checks import check_finished, check_requests, describe_policy
from cohort.rollout.engine import (
    Capabilities,
    EndedTurn,
    Engine,
    Request,
    Watch,
)
from cohort.rollout.local.backend import Backend, plan
from cohort.rollout.local.choose import choose_backend
from cohort.rollout.local.runner import ActiveSequences, BackendRunner
from cohort.rollout.local.scheduler import Scheduler
from cohort.rollout.settings import Sampling
from cohort.rollout.trajectory import StopStrings, Trajectory
from cohort.types import FinishReason


class LocalEngine(Engine):
    """Samples from a ``Policy``.

    Args:
        policy: its weights are read in each call, so there is nothing to synchronise, unless ``trained`` is given.
        tokenizer: decodes completions, for their text and for stop strings.
        end_token_ids: tokens that end a completion.
        max_batch_size: maximum number of trajectories decoded at a time.
        cache_tokens: maximum number of tokens whose keys and values are kept at a time, prompts included. None: as many
            as half of the free memory holds when sampling begins.
        native_kernels: whether native kernels are used where they are available.
        trained: the policy that is trained while this engine samples. ``update_weights`` then copies its weights into
            ``policy``, a ``Policy.snapshot`` of it. None: ``policy`` itself is trained, between the calls.

    ``max_batch_size``, ``cache_tokens`` and ``native_kernels`` change memory and time, never a draw (the
    last one changes rounding).
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        shared_weights=True,
        support=True,
        full_logps=True,
        repetition_penalty=True,
        grammars=True,
        continuation=True,
    )

    def __init__(
        self,
        policy: Policy,
        tokenizer: Any,
        end_token_ids: Sequence[int],
        *,
        max_batch_size: int = 256,
        cache_tokens: int | None = None,
        native_kernels: bool = True,
        trained: Policy | None = None,
    ) -> None:
        self.policy = policy
        self.trained = trained or policy
        self.tokenizer = tokenizer
        self.end_token_ids = frozenset(end_token_ids)
        self.max_batch_size = max_batch_size
        self._most_rows = 0  # ``max_batch_size`` as it was set, once memory has run out
        self._clean_calls, self._patience = 0, 1  # since memory ran out, and how many of them it takes to try more rows
        self.cache_tokens = cache_tokens
        self.backend: Backend = choose_backend(policy, native_kernels=native_kernels)
        self._stops: dict[tuple[str, ...], StopStrings] = {}
        self._numbers = count()
        self._waiting: list[Trajectory] = []  # until memory is allocated for them
        self._scheduler: Scheduler | None = None  # while memory is allocated
        self._rows = 1  # for which memory is allocated
        self._parked: dict[int, Trajectory] = {}  # those that a scheduler without memory has left
        self._ended: deque[EndedTurn] = deque()
        self._streaming = False
        self._tokens_read_again: int | None = None  # None: no trajectory had several turns

    @property
    def unfinished(self) -> int:
        """See ``Engine``."""
        running = self._scheduler.unfinished if self._scheduler else 0
        return running + len(self._parked) + len(self._waiting) + len(self._ended) + self._streaming

    def submit(self, requests: Sequence[Request]) -> list[int]:
        """See ``Engine``. Requests that do not fit the memory that a running stream has allocated wait for its end."""
        config = self.policy.model.config
        check_requests(requests, self.policy.vocab_size, context_length(config), placeholder_ids(config))
        if self._tokens_read_again is None and any(request.continues for request in requests):
            self._tokens_read_again = 0
        grammars = {sampling: self.grammar(sampling) for sampling in {request.sampling for request in requests}}
        trajectories = [
            Trajectory(
                next(self._numbers), request, self._stop_strings(request.sampling.stop), grammars[request.sampling]
            )
            for request in requests
        ]
        for trajectory in trajectories:
            if trajectory.room:
                self._waiting.append(trajectory)
            else:  # forced tokens alone
                self._end(trajectory, FinishReason.LENGTH)
        self._submit_waiting()
        return [trajectory.number for trajectory in trajectories]

    def extend(self, trajectory: int, token_ids: Sequence[int], *, rewrite: bool = False) -> None:
        """See ``Engine``."""
        if lost := self._parked.get(trajectory):
            lost.extend(token_ids, rewrite=rewrite, vocab_size=self.policy.vocab_size)
            lost.forget()
            self._waiting.append(self._parked.pop(trajectory))
            self._submit_waiting()
            return
        if self._scheduler is None or trajectory not in self._scheduler.parked:
            raise ConfigError(
                f"trajectory {trajectory} is not parked: extend one whose request has continues=True, after its turn"
            )
        parked = self._scheduler.parked[trajectory]
        parked.extend(token_ids, rewrite=rewrite, vocab_size=self.policy.vocab_size)
        self._scheduler.resume(trajectory)

    def release(self, trajectory: int) -> None:
        """See ``Engine``."""
        self._parked.pop(trajectory, None)
        if self._scheduler is not None and trajectory in self._scheduler.parked:
            self._scheduler.release(trajectory)
            if not (self._scheduler.unfinished or self._streaming):
                self._free()

    def reset(self) -> None:
        """See ``Engine``."""
        self._waiting.clear()
        self._parked.clear()
        self._ended.clear()
        self._free()

    def update_weights(self, version: int) -> None:  # noqa: ARG002
        """See ``Engine``. Moves nothing if the policy's weights are read where they are trained."""
        check_finished(self.unfinished, "take new weights")
        if self.trained is not self.policy:
            self.policy.take_weights(self.trained)

    def sleep(self) -> None:
        """Free copies of the weights in compute precision; the next call makes them again."""
        check_finished(self.unfinished, "sleep")
        self.backend.sleep()

    def close(self) -> None:
        """See ``Engine``."""
        self.reset()
        self.backend.sleep()

    def describe_model(self) -> str:
        """Model, numerics and backend, a line each."""
        return f"{describe_policy(self.trained)}\nsampler: {self.backend.description}{self._describe_copy()}"

    def _describe_copy(self) -> str:
        """Where the weights are, if not where they are trained."""
        if self.trained is self.policy:
            return ""
        theirs = {weight.data_ptr() for weight in self.trained.model.parameters()}
        copied = [weight for weight in self.policy.model.parameters() if weight.data_ptr() not in theirs]
        return f", from a copy of the weights ({sum(weight.nbytes for weight in copied) / 2**20:,.1f} MiB)"

    def grammar(self, sampling: Sampling) -> Any:
        """The compiled grammar of sampling settings, None without one. Raises ``ConfigError`` if it does not compile or
        does not allow the forced tokens."""
        if not sampling.constrained:
            return None
        from cohort.rollout.grammar import Grammar

        grammar = Grammar.of(self.tokenizer, sampling, sorted(self.end_token_ids), self.policy.vocab_size)
        matcher = grammar.matcher()
        for token in sampling.forced_ids:
            matcher.consume(token)
        return grammar

    def _stop_strings(self, stops: tuple[str, ...]) -> StopStrings:
        """Kept between calls, with what it has learned about the vocabulary."""
        if stops not in self._stops:
            self._stops[stops] = StopStrings(self.tokenizer, stops)
        return self._stops[stops]

    def _advance(self, watch: Watch) -> bool:
        """``_decode``; when memory runs out, go on with half as many trajectories at a time. After some calls in which
        memory suffices, twice as many are tried. Each failure doubles how many such calls that takes.

        Raises:
            ModelError: memory runs out with one.
        """
        try:
            return self._decode(watch)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
        if self._scheduler is not None and self.backend.grows:  # room for more rows than there are takes no memory
            self._rows = max(1, min(self._rows, len(self._scheduler.active)))
        if self._rows == 1:
            raise ModelError(
                "out of memory decoding one completion at a time: lower rollout.max_completion_length or "
                "rollout.cache_tokens, or use a smaller model"
            )
        self._most_rows = max(self._most_rows, self.max_batch_size)
        self.max_batch_size = self._rows // 2
        self._clean_calls, self._patience = -1, 2 * self._patience
        if scheduler := self._scheduler:
            for trajectory, reason in scheduler.ended.items():
                self._end(trajectory, reason)
            self._waiting = [*scheduler.take_unfinished(), *self._waiting]
            self._parked |= scheduler.parked
        self._free()
        release_memory()
        warnings.warn(
            f"out of memory in sampling: going on with {self.max_batch_size:,} completions at a time. To begin with "
            "fewer, set rollout.max_batch_size",
            stacklevel=2,
        )
        return True

    def _decode(self, watch: Watch) -> bool:
        """Decode one token for every row; False if there was nothing to decode."""
        if self._scheduler is None and not self._waiting:
            return False
        scheduler = self._scheduler or self._allocate()
        if watch.on_step:
            watch.on_step()
        cancelled = bool(watch.cancelled and watch.cancelled())
        ended: dict[Trajectory, FinishReason] | None
        if cancelled:
            ended = dict.fromkeys([*scheduler.cancel(), *self._waiting], FinishReason.CANCELLED)
            self._waiting.clear()
        else:
            ended = scheduler.advance(watch.on_token)
        for trajectory, reason in (ended or {}).items():
            self._end(trajectory, reason)
        if not scheduler.unfinished:
            self._free()
            self._try_more_rows()
        return bool(ended) or (ended is not None and not cancelled)

    def _try_more_rows(self) -> None:
        """After a call in which memory sufficed."""
        self._clean_calls += 1
        if self.max_batch_size < self._most_rows and self._clean_calls >= self._patience:
            self.max_batch_size, self._clean_calls = min(self._most_rows, 2 * self.max_batch_size), 0

    def _end(self, trajectory: Trajectory, reason: FinishReason) -> None:
        self._ended.append(trajectory.ended(reason, self.tokenizer, self.policy.version))

    def _allocate(self) -> Scheduler:
        """Allocate memory for the requests that wait."""
        waiting = [trajectory.request for trajectory in self._waiting]
        prompts = {id(request.prompt): len(request.prompt.token_ids) for request in waiting}
        history = 0 if self.backend.keeps_rows else max(map(_history, self._waiting))
        capacity = plan(
            list(prompts.values()),
            len(waiting),
            history + max(prompts.values()),
            max(request.sampling.max_completion_length for request in waiting),
            max_rows=self.max_batch_size,
            max_tokens=self.cache_tokens,
            token_bytes=self.backend.token_bytes,
            token_multiple=self.backend.token_multiple,
            row_bytes=self.backend.row_bytes,
            device=self.policy.device,
            grows=self.backend.grows,
        )
        self._rows = capacity.rows
        self.backend.begin(capacity)
        sequences = ActiveSequences(
            capacity.rows, sorted(self.end_token_ids), self.policy.vocab_size, self.policy.device
        )
        self._scheduler = Scheduler(BackendRunner(self.backend, sequences), capacity, self.end_token_ids)
        # Prompts of similar length one after another: what is kept at the same time is padded little.
        self._waiting.sort(key=lambda trajectory: -len(trajectory.request.prompt.token_ids))
        self._submit_waiting()
        return self._scheduler

    def _submit_waiting(self) -> None:
        """Hand the trajectories that wait and fit to the scheduler, if memory is allocated."""
        if self._scheduler is None:
            return
        capacity = self._scheduler.capacity

        def fits(trajectory: Trajectory) -> bool:
            request = trajectory.request
            own, prompt = request.sampling.max_completion_length, len(request.prompt.token_ids)
            history = 0 if self.backend.keeps_rows else _history(trajectory)
            return own <= capacity.completion_length and prompt + history <= capacity.prompt_length

        chosen = [trajectory for trajectory in self._waiting if fits(trajectory)]
        self._waiting = [trajectory for trajectory in self._waiting if not fits(trajectory)]
        self._scheduler.submit(chosen)

    def metrics(self) -> dict[str, float]:
        """See ``Sampler``: the tokens that trajectories of several turns had to read again."""
        count, self._tokens_read_again = self._tokens_read_again, None
        return {} if count is None else {"episodes/tokens_read_again": count}

    def _free(self) -> None:
        if self._scheduler and self._tokens_read_again is not None:
            self._tokens_read_again += self._scheduler.tokens_read_again
        self._scheduler = None
        self.backend.end()


def _history(trajectory: Trajectory) -> int:
    """Tokens after the prompt that have to be read, or may have to be read again."""
    request = trajectory.request
    return request.sampling.max_completion_length if request.continues else len(trajectory.unread)
