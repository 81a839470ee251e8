"""The engine whose turns are drawn outside the trainer's own modules: at servers, or by vLLM in the trainer's process.

The seed of a turn follows from its ``RNGKey``, so a turn that is repeated elsewhere draws the same tokens, up to
rounding. Nothing here imports vLLM.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import count
from typing import Any, ClassVar

from cohort.errors import ConfigError
from cohort.policy import Policy, context_length, placeholder_ids
from cohort.rollout.checks import check_finished, check_requests, describe_policy
from cohort.rollout.engine import Capabilities, EndedTurn, Engine, Request, TokenEvent, Watch
from cohort.rollout.served.protocol import Draw, Drawn, Turns, check_temperature
from cohort.rollout.trajectory import StopStrings, Trajectory
from cohort.types import FinishReason

POLL_SECONDS = 0.02
"""How often callbacks of a Watch are called while nothing ends."""


class ServedEngine(Engine):
    """Samples where ``Turns`` are drawn.

    Args:
        policy: the trainer's.
        tokenizer: decodes completions.
        end_token_ids: tokens that end a completion.
        turns: where turns are drawn.
        context: maximum number of tokens of prompt and completion together there. None: the model's.
        routes: whether the experts of each token are recorded.

    ``stream`` calls ``on_token`` for all tokens of a turn when the turn has ended, and ``cancelled`` and ``on_step``
    about 50 times a second or more often. A cancelled turn has no tokens. It raises ``EngineError`` if no server is
    left, or if one refuses a request.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(support=True, grammars=True, continuation=True, routes=True)

    def __init__(
        self,
        policy: Policy,
        tokenizer: Any,
        end_token_ids: Sequence[int],
        turns: Turns,
        *,
        context: int | None = None,
        routes: bool = False,
    ) -> None:
        self.policy, self.tokenizer, self.turns, self.routes = policy, tokenizer, turns, routes
        self.sleeps, self.together = turns.sleeps, turns.together
        self.end_token_ids = tuple(sorted(end_token_ids))
        own = context_length(policy.model.config)
        self.context = min((length for length in (context, own) if length is not None), default=None)
        """Maximum number of tokens of prompt and completion together; None: no limit."""
        self._version: int | None = None
        self._stops = StopStrings(tokenizer, ())  # stop strings are looked for where turns are drawn
        self._numbers = count()
        self._under_way: dict[int, Trajectory] = {}
        self._parked: dict[int, Trajectory] = {}
        self._ended: deque[EndedTurn] = deque()
        self._streaming = False

    @property
    def unfinished(self) -> int:
        """See ``Engine``."""
        return len(self._under_way) + len(self._parked) + len(self._ended) + self._streaming

    def session(self) -> AbstractContextManager[None]:
        """See ``Engine``."""
        return self.turns.session()

    def submit(self, requests: Sequence[Request]) -> list[int]:
        """See ``Engine``. ``ConfigError``: there are no weights yet, or vLLM does not draw at the temperature."""
        if self._version is None:
            raise ConfigError("the sampler has no weights yet: call update_weights() first")
        check_requests(requests, self.policy.vocab_size, self.context, placeholder_ids(self.policy.model.config))
        for sampling in {request.sampling for request in requests}:
            check_temperature(sampling.temperature, "temperature")
        trajectories = [Trajectory(next(self._numbers), request, self._stops) for request in requests]
        for trajectory in trajectories:
            if trajectory.room:
                self._begin(trajectory)
            else:  # forced tokens alone
                self._end(trajectory, FinishReason.LENGTH)
        return [trajectory.number for trajectory in trajectories]

    def extend(self, trajectory: int, token_ids: Sequence[int], *, rewrite: bool = False) -> None:
        """See ``Engine``. The next turn begins with the whole history."""
        if trajectory not in self._parked:
            raise ConfigError(
                f"trajectory {trajectory} is not parked: extend one whose request has continues=True, after its turn"
            )
        self._parked[trajectory].extend(token_ids, rewrite=rewrite, vocab_size=self.policy.vocab_size)
        self._begin(self._parked.pop(trajectory))

    def release(self, trajectory: int) -> None:
        """See ``Engine``."""
        self._parked.pop(trajectory, None)

    def reset(self) -> None:
        """See ``Engine``."""
        self._abort()
        self._parked.clear()
        self._ended.clear()

    def update_weights(self, version: int) -> None:
        """See ``Engine``, and ``Turns.load``."""
        check_finished(self.unfinished, "take new weights")
        self.turns.load(version)
        self._version = version

    def sleep(self) -> None:
        """See ``Engine``."""
        check_finished(self.unfinished, "sleep")
        self.turns.sleep()

    def close(self) -> None:
        """See ``Engine``."""
        self.reset()
        self.turns.close()

    def metrics(self) -> dict[str, float]:
        """See ``Sampler`` and ``Turns.metrics``."""
        return self.turns.metrics()

    def describe_model(self) -> str:
        """Model, numerics and where turns are drawn, a line each."""
        return f"{describe_policy(self.policy)}\nsampler: {self.turns.describe()}"

    def _begin(self, trajectory: Trajectory) -> None:
        self._under_way[trajectory.number] = trajectory
        draw = Draw.of(trajectory, self.end_token_ids, self.policy.vocab_size, routes=self.routes)
        self.turns.begin(trajectory.number, draw, trajectory.request.prompt.uid)

    def _advance(self, watch: Watch) -> bool:
        """Call the callbacks, and take the next turn that has ended if there is one."""
        if not self._under_way and not self.turns.busy:
            return False
        if watch.on_step:
            watch.on_step()
        if watch.cancelled and watch.cancelled():
            for trajectory in self._abort():
                self._end(trajectory, FinishReason.CANCELLED)
        if self._under_way or self.turns.busy:
            outcome = self.turns.next(POLL_SECONDS if watch.on_step or watch.cancelled else None)
            if outcome is not None:
                number, drawn = outcome
                trajectory = self._under_way.pop(number)
                if isinstance(drawn, Exception):
                    raise drawn
                self._record(trajectory, drawn, watch)
        return True

    def _record(self, trajectory: Trajectory, drawn: Drawn, watch: Watch) -> None:
        """Append what was drawn."""
        request, first = trajectory.request, trajectory.position
        greedy = request.sampling.temperature == 0
        logps = [0.0] * len(drawn.logps) if greedy else drawn.logps
        trajectory.tokens += drawn.token_ids
        trajectory.logps += logps
        if trajectory.full_logps is not None:
            unknown = [float("nan")] * len(logps)
            trajectory.full_logps += unknown if drawn.full_logps is None else drawn.full_logps
        if trajectory.supports is not None:
            assert drawn.supports is not None
            trajectory.supports += drawn.supports
        if drawn.routes is not None:
            trajectory.take_routes(drawn.routes)
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
        """Abort the turns under way; returns their trajectories."""
        aborted = list(self._under_way.values())
        self._under_way.clear()
        if aborted:
            self.turns.abort()
        return aborted
