"""The engine protocol: what the trainer, evaluation and ``cohort generate`` ask of anything that samples.

An engine is given requests and hands back each trajectory when its turn ends. ``generate`` is the loop over that for
completions of one turn. No signature here mentions a tensor or the policy: an engine may run in another process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, fields
from typing import ClassVar, Protocol

from cohort.config import GRPOConfig
from cohort.errors import ConfigError
from cohort.rollout.philox import RNGKey
from cohort.rollout.settings import Sampling
from cohort.types import Completion, FinishReason, Group, Prompt


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can do. The trainer checks them before it loads a model."""

    shared_weights: bool = False
    """It samples with the trainer's own parameters: ``update_weights`` moves no data."""
    support: bool = False
    """It records the tokens that each draw could have given: ``Completion.support``."""
    full_logps: bool = False
    """It also reports log-probs under the full softmax when it drew from fewer tokens: ``Completion.full_logps``."""
    repetition_penalty: bool = False
    """It applies a repetition penalty as the trainer does."""
    grammars: bool = False
    """It samples under a regular expression or a JSON schema."""
    routes: bool = False
    """It records the experts that tokens were routed to: ``Segment.routes`` and ``Completion.prompt_routes``."""
    continuation: bool = False
    """``extend`` works: a trajectory can have several turns."""


def required_capabilities(config: GRPOConfig, *, trains: bool = True) -> dict[str, str]:
    """The capabilities that a run needs, each with the setting that needs it. One that does not train needs none of the
    log-probs.

    >>> required_capabilities(GRPOConfig())
    {}
    """
    sampling = Sampling.of(config.rollout)
    needed = {}
    if trains and config.rollout.replay_routing:
        needed["routes"] = "rollout.replay_routing is on"
    if config.environment.wanted:
        needed["continuation"] = "[environment] names tools or an environment"
    if sampling.constrained:
        needed["grammars"] = f"rollout.{'regex' if sampling.json_schema is None else 'json_schema'} is set"
    if trains and sampling.repetition_penalty != 1:
        needed["repetition_penalty"] = f"rollout.repetition_penalty is {sampling.repetition_penalty:g}"
    if trains and sampling.truncates:
        name, replay = ("support", "on") if sampling.record_support else ("full_logps", "off")
        needed[name] = (
            f"rollout.replay_sampling is {replay}, and top_k, top_p, min_p, min_completion_length or a grammar "
            "excludes tokens"
        )
    return needed


def check_capabilities(engine: type[Engine], config: GRPOConfig, *, trains: bool = True) -> None:
    """Refuse settings that an engine cannot serve.

    Raises:
        ConfigError: lists every missing capability and the setting that needs it.
    """
    missing = [
        f"{name} ({reason})"
        for name, reason in required_capabilities(config, trains=trains).items()
        if not getattr(engine.capabilities, name)
    ]
    if missing:
        able = [field.name for field in fields(Capabilities) if getattr(engine.capabilities, field.name)]
        raise ConfigError(
            f"{engine.__name__} lacks what these settings need: {'; '.join(missing)}. It has: "
            f"{', '.join(able) or 'none of the optional capabilities'}. Change the settings, or use another engine"
        )


@dataclass(frozen=True, slots=True)
class Request:
    """One trajectory to sample."""

    prompt: Prompt
    sample: int
    """Which completion of the prompt this is, 0..G-1."""
    sampling: Sampling
    key: RNGKey
    prompt_index: int = 0
    """The caller's index of the prompt; only reported back."""
    continues: bool = False
    """Whether the trajectory may have further turns: when a turn ends, the engine keeps what it has computed until
    ``extend`` or ``release``."""


@dataclass(frozen=True, slots=True)
class EndedTurn:
    """A turn of a trajectory that has ended."""

    trajectory: int
    """The number that ``submit`` returned."""
    request: Request
    completion: Completion
    """The whole trajectory so far, earlier turns included; its finish reason is that of this turn."""
    num_drawn: int
    """Tokens that the policy drew in this turn: the last ones of ``completion.token_ids``."""
    room: int
    """Tokens, given and drawn, that may still follow; 0 when the trajectory cannot be extended."""


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """A token that has just been drawn."""

    prompt_index: int
    """``Request.prompt_index``; in ``generate``, the index of the prompt."""
    sample: int
    """Which completion of the prompt, 0..G-1."""
    position: int
    """Index of the token in the completion."""
    token_id: int
    logp: float
    finish_reason: FinishReason | None
    """Set on the last token of a turn."""


@dataclass(frozen=True, slots=True)
class Watch:
    """Callbacks of a running ``generate`` or ``stream``. They change no draw.

    ``generate()`` is not reentrant; do not call it from a Watch callback. ``submit``, ``extend`` and ``release`` may be
    called.
    """

    on_token: Callable[[TokenEvent], None] | None = None
    """Called for each drawn token."""
    on_completion: Callable[[int, int, Completion], None] | None = None
    """Called by ``generate`` with prompt index, sample and completion when a completion ends. Not called for
    completions that were cancelled before their first token."""
    cancelled: Callable[[], bool] | None = None
    """Called before each decode step. If it returns True, every trajectory that is queued or being decoded ends with
    finish reason ``cancelled``."""
    on_step: Callable[[], None] | None = None
    """Called before each decode step; a place to ``extend`` and ``release`` parked trajectories."""
    on_prompt: Callable[[int, Prompt], None] | None = None
    """Called with prompt index and prompt when an environment has added its first observation to a prompt."""


def samplings_of(
    prompts: Sequence[Prompt], num_generations: int, sampling: Sampling | Sequence[Sampling]
) -> list[Sampling]:
    """The sampling settings of each prompt, from the arguments of ``Sampler.generate``.

    Raises:
        ConfigError: ``num_generations`` is below 1, or the settings are neither one nor one per prompt.
    """
    if num_generations < 1:
        raise ConfigError(f"num_generations must be at least 1, got {num_generations}")
    samplings = [sampling] * len(prompts) if isinstance(sampling, Sampling) else list(sampling)
    if len(samplings) != len(prompts):
        raise ConfigError(f"{len(samplings)} sampling settings for {len(prompts)} prompts: give one, or one each")
    return samplings


class Sampler(Protocol):
    """What the loop and the evaluation sample from: an engine, or ``environments.EpisodeSampler`` over one."""

    def generate(
        self,
        prompts: Sequence[Prompt],
        num_generations: int,
        sampling: Sampling | Sequence[Sampling],
        key: RNGKey,
        watch: Watch | None = None,
    ) -> list[Group]:
        """``num_generations`` completions for each prompt, in the order of the prompts."""

    def metrics(self) -> dict[str, float]:
        """Numbers of what was sampled since the last call, by metric name."""
        return {}


class Engine(Sampler, Protocol):
    """Samples trajectories from the current policy.

    A trajectory is submitted, decoded, and handed back by ``stream`` when its turn ends. One whose request
    ``continues`` is then parked: it waits, with what was computed for it, until ``extend`` gives it tokens to go on
    after or ``release`` ends it. Each draw is a function of the request's ``RNGKey``, prompt, sample and position
    alone: the same requests under the same weights give the same tokens, whatever else is decoded at the same time (up
    to the rounding of matrix products of another shape).

    Classes that inherit from this protocol get ``generate`` and, if they have ``_advance``, ``stream``.
    """

    capabilities: ClassVar[Capabilities]
    sleeps: bool = False
    """Whether the trainer lets it ``sleep`` during updates."""
    together: bool = False
    """Whether every rank has to call ``generate``, one without prompts too."""
    _ended: deque[EndedTurn]
    """Turns that have ended and are not yet handed back."""
    _streaming: bool

    @property
    def unfinished(self) -> int:
        """Number of trajectories that are queued, being decoded or parked."""

    def submit(self, requests: Sequence[Request]) -> list[int]:
        """Queue trajectories; returns their numbers. Requests of one prompt that follow each other share its prefill.

        Raises:
            DataError: a prompt is empty, has unknown token ids, or exceeds the model's context with its completion.
            ConfigError: a grammar does not compile, or a forced token is unknown.
        """

    def stream(self, watch: Watch | None = None) -> Generator[EndedTurn]:
        """Decode, and yield each turn when it ends.

        Ends when nothing is left to decode: every trajectory has ended, is parked, or waits for memory that parked ones
        hold. Call it again after ``extend``, ``release`` or ``submit``; they may also be called while it is suspended.
        """
        if self._streaming:
            raise ConfigError("this engine is sampling already: use its stream, or a second engine")
        watch = watch or Watch()
        self._streaming = True
        try:
            while self._ended or self._advance(watch):
                while self._ended:
                    yield self._ended.popleft()
        except GeneratorExit:
            raise
        except BaseException:
            self.reset()
            raise
        finally:
            self._streaming = False

    def _advance(self, watch: Watch) -> bool:
        """Decode for a while, and append the turns that have ended to ``_ended``; False: nothing is left to decode."""

    def extend(self, trajectory: int, token_ids: Sequence[int], *, rewrite: bool = False) -> None:
        """Continue a parked trajectory after given tokens, which are not drawn and get no log-probabilities.

        End tokens and stop strings in given tokens have no effect.

        Args:
            trajectory: its number.
            token_ids: what follows the tokens so far.
            rewrite: ``token_ids`` replace all tokens so far instead. The trajectory continues in a new segment, which
                follows the prompt.

        Raises:
            ConfigError: the trajectory is not parked.
            DataError: no room is left for a drawn token, a token id is unknown, or a rewrite gives no tokens.
        """

    def release(self, trajectory: int) -> None:
        """End a parked trajectory and free what was kept for it. No effect on one that is not parked."""

    def reset(self) -> None:
        """Drop all trajectories."""

    def update_weights(self, version: int) -> None:
        """Sample with the trainer's present weights from now on, and report them as ``version``.

        Raises:
            ConfigError: trajectories are unfinished; what was computed for them belongs to the previous weights.
        """

    def sleep(self) -> None:
        """Free memory between rollouts, as far as the engine can; ``update_weights`` undoes it. Raises ``ConfigError``
        if trajectories are unfinished."""

    def close(self) -> None:
        """Drop all trajectories and free everything that the engine holds. Idempotent."""

    def session(self) -> AbstractContextManager[None]:
        """A block around each ``generate``. An engine over several ranks tells them in it when one fails."""
        return nullcontext()

    def generate(
        self,
        prompts: Sequence[Prompt],
        num_generations: int,
        sampling: Sampling | Sequence[Sampling],
        key: RNGKey,
        watch: Watch | None = None,
    ) -> list[Group]:
        """``num_generations`` completions of one turn for each prompt, in the order of the prompts.

        Args:
            prompts: what to complete.
            num_generations: completions per prompt.
            sampling: one for all prompts, or one per prompt.
            key: of the random numbers.
            watch: callbacks.

        Raises:
            DataError, ConfigError: see ``submit``; or the engine has unfinished trajectories.
        """
        with self.session():
            samplings = samplings_of(prompts, num_generations, sampling)
            if self.unfinished:
                raise ConfigError(
                    f"this engine is sampling already ({self.unfinished} unfinished trajectories): generate() is not "
                    "reentrant; do not call it from a Watch callback, or use a second engine"
                )
            on_completion = watch.on_completion if watch else None
            completions: list[dict[int, Completion]] = [{} for _ in prompts]
            try:
                self.submit(
                    [
                        Request(prompt, sample, one, key, prompt_index=index)
                        for index, (prompt, one) in enumerate(zip(prompts, samplings, strict=True))
                        for sample in range(num_generations)
                    ]
                )
                with closing(self.stream(watch)) as turns:
                    for turn in turns:
                        index, sample = turn.request.prompt_index, turn.request.sample
                        completions[index][sample] = turn.completion
                        never_begun = turn.completion.finish_reason is FinishReason.CANCELLED and not turn.num_drawn
                        if on_completion and not never_begun:
                            on_completion(index, sample, turn.completion)
            except BaseException:
                self.reset()
                raise
            return [
                Group(prompt, tuple(done[sample] for sample in sorted(done)))
                for prompt, done in zip(prompts, completions, strict=True)
            ]
