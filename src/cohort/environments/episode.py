"""Episodes: an engine draws the turns of trajectories, tools and environments answer them.

One episode, from its start to its end:

    begin     the host makes the environment and resets it; what it shows first is part of the group's prompt
    turn      the engine draws until an end token, a stop string, or a limit
    answer    the host makes the calls of the turn, or passes its text to the environment; meanwhile the engine draws
              for other trajectories
    extend    the answer is appended as tokens that the policy did not draw, and the next turn begins
    end       without a call, at the environment's word, or at a limit; the environment gives its reward and is closed
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any, TypeAlias

from cohort.calls import Settled, interruptible
from cohort.config import EnvironmentConfig
from cohort.environments.bridge import Bridge
from cohort.environments.calls import CallParser, ParsedTurn
from cohort.environments.contract import Answer, Ended, EpisodeFailed
from cohort.environments.host import Host
from cohort.errors import EpisodeError
from cohort.rollout import EndedTurn, Engine, Purpose, Request, RNGKey, Sampler, Sampling, Watch
from cohort.rollout.engine import samplings_of
from cohort.rollout.trajectory import decode
from cohort.types import Completion, Episode, FinishReason, Group, Message, Prompt, Turn
from cohort.watchdog import samples, waiting

# ----------------------------------------
# An episode under way, and the time that a rollout waits.


@dataclass(slots=True, eq=False)
class RunningEpisode:
    """An episode between its begin and its end."""

    prompt_index: int
    sample: int
    started: float = 0.0
    first: Answer | EpisodeFailed | None = None
    """What the environment showed first, or why it did not; None while that is awaited."""
    prompt: Prompt | None = None
    """The prompt with what the environment showed first; None before the trajectory is submitted."""
    number: int | None = None
    """The engine's number of the trajectory; None before it is submitted."""
    completion: Completion | None = None
    """The turns so far."""
    prefix: str = ""
    """The end of the text before the present turn."""
    message: Message = field(default_factory=dict)
    """What the policy wrote in the latest turn."""
    turn_ended: float = 0.0
    turns: list[Turn] = field(default_factory=list)
    pending: Future[Any] | None = None
    """What the episode waits for: its first observation, an answer, or its end."""
    ending: bool = False


@dataclass(slots=True)
class Waiting:
    """Wall-clock seconds of one or more rollouts."""

    seconds: float = 0.0
    """While at least one answer was awaited."""
    blocked: float = 0.0
    """While nothing could be decoded because every episode awaited an answer."""
    pending: int = 0
    since: float = 0.0

    def begin(self) -> None:
        """Count one more answer that is awaited."""
        if not self.pending:
            self.since = time.perf_counter()
        self.pending += 1

    def end(self) -> None:
        """Count one answer that has arrived."""
        self.pending -= 1
        if not self.pending:
            self.seconds += time.perf_counter() - self.since


# ----------------------------------------
# Turns as tokens, as messages and in print.


READ_PER_TOKEN = 16
"""Characters of a long answer that are tokenized at first, at its start and at its end, for each token that it may
have."""


@dataclass(frozen=True, slots=True)
class TurnFormat:
    """How turns are written as tokens, and read from them."""

    tokenizer: Any
    bridge: Bridge
    """What the chat template writes between turns."""
    parser: CallParser | None
    """Finds the calls in a turn. None: there are no tools."""
    rewrite: Callable[[list[Message]], list[Message]] | None = None
    """What the policy is to read instead of all messages so far; None: as ``environment.history`` says."""

    def describe(self) -> str:
        """What stands between turns, and how calls are found, for the start of the run."""
        lines = [self.bridge.describe()]
        if self.parser:
            lines.append(f"calls are found by {self.parser.name}")
        return "\n".join(lines)

    def parse(self, token_ids: Sequence[int], prefix: str) -> ParsedTurn:
        """What the policy wrote in a turn.

        Args:
            token_ids: the drawn tokens, without an end token.
            prefix: the text before them.
        """
        if self.parser is None:
            text = decode(self.tokenizer, token_ids)
            return ParsedTurn(text, (), {"role": "assistant", "content": text})
        return self.parser.parse(self.text(token_ids), prefix)

    def shortened(self, answer: Answer, limit: int) -> Answer:
        """The answer with at most about ``limit`` tokens of content in each message: a note replaces the middle."""
        return replace(answer, messages=tuple(self._shortened(message, limit) for message in answer.messages))

    def _shortened(self, message: Message, limit: int) -> Message:
        content = message.get("content")
        if not isinstance(content, str):
            return message
        reach, encode = READ_PER_TOKEN * limit, partial(self.tokenizer.encode, add_special_tokens=False)
        token_ids = encode(content[:reach])
        while reach < len(content) and len(token_ids) <= 2 * limit:  # a cut changes the tokens beside it, not so many
            reach *= 4
            token_ids = encode(content[:reach])
        if len(token_ids) <= limit:
            return message
        count, about, last_ids = len(token_ids), "", token_ids
        if reach < len(content):
            count, about, last_ids = count * len(content) // reach, "about ", encode(content[-reach:])
        head, tail = token_ids[: (limit + 1) // 2], last_ids[max(0, len(last_ids) - limit // 2) :]
        note = f"\n[{about}{count - limit:,} tokens are left out here]\n"
        return {**message, "content": f"{self.text(head)}{note}{self.text(tail)}"}

    def text(self, token_ids: Sequence[int]) -> str:
        """Token ids decoded, special tokens included."""
        return decode(self.tokenizer, token_ids, special=True)


def first_episode(groups: Sequence[Group], tokenizer: Any) -> str:
    """The first usable completion in words, its drawn tokens between ⟦ and ⟧; empty if there is none."""
    pairs = [(group.prompt, one) for group in groups for one in group.completions if one.finish_reason.usable]
    if not pairs:
        return ""
    prompt, completion = pairs[0]
    pieces = [prompt.text]
    for number, segment in enumerate(completion.segments):
        drawn = segment.is_drawn.tolist()
        pieces += ["\n--- rewritten:\n"] if number else []
        for is_drawn, run in groupby(range(len(drawn)), key=drawn.__getitem__):
            text = decode(tokenizer, segment.token_ids[list(run)].tolist(), special=True)
            pieces.append(f"⟦{text}⟧" if is_drawn else text)
    count = len(completion.episode.turns) if completion.episode else 1
    turns = "1 turn" if count == 1 else f"{count} turns"
    head = f"the first episode: {turns}, finish reason {completion.finish_reason}; the policy drew what is in ⟦ ⟧"
    return f"{head}\n{''.join(pieces)}"


log = logging.getLogger("cohort.environments")
PLACE = "tools and environments"
"""What the watchdog calls them."""
DIFFERENT = (
    "The mean of a group's rewards is then over different tasks: as a baseline it is as unbiased as ever, but does not "
    "know how hard each of them is. Where all rows are alike, objective.baseline = 'batch_mean' is over more of them"
)
"""What it means that episodes of a group begin differently."""
Then: TypeAlias = Callable[[RunningEpisode, Future[Any]], None]
POLL_SECONDS = 0.1
"""How often a rollout that only waits for answers looks whether it was cancelled."""


@dataclass(eq=False)
class EpisodeSampler(Sampler):
    """Samples completions of several turns."""

    engine: Engine
    host: Host
    format: TurnFormat
    """Of the model's chat template."""
    settings: EnvironmentConfig
    show: Callable[[str], None] | None = None
    """Called once, with the first usable episode in words."""
    told: bool = False
    """Whether it was said that episodes of a group begin differently."""
    waiting: Waiting = field(default_factory=Waiting)

    def generate(
        self,
        prompts: Sequence[Prompt],
        num_generations: int,
        sampling: Sampling | Sequence[Sampling],
        key: RNGKey,
        watch: Watch | None = None,
    ) -> list[Group]:
        """``num_generations`` episodes for each prompt, in the order of the prompts.

        The groups' prompts include what the environments showed first.

        Raises:
            EpisodeError: every episode failed, or the environments of a group showed different things first.
            DataError, ConfigError: as ``Engine.generate``.
        """
        limit = self.settings.max_turn_length
        samplings = [replace(one, max_turn_length=limit) for one in samplings_of(prompts, num_generations, sampling)]
        batch = EpisodeBatch(self, prompts, num_generations, samplings, key, watch or Watch())
        try:
            groups = batch.run()
            batch.report_failures(groups)
        except BaseException:
            self.engine.reset()
            raise
        finally:
            batch.abandon()
        if self.show and (text := first_episode(groups, self.format.tokenizer)):
            self.show(text)
            self.show = None
        return groups

    def metrics(self) -> dict[str, float]:
        """Seconds of waiting since the last call."""
        waiting, self.waiting = self.waiting, Waiting()
        return self.engine.metrics() | {
            "seconds/episodes_waiting": waiting.seconds,
            "seconds/episodes_blocked": waiting.blocked,
        }


class EpisodeBatch:
    """The episodes of one ``generate``. Every method runs in the thread that called it."""

    def __init__(
        self,
        sampler: EpisodeSampler,
        prompts: Sequence[Prompt],
        num_generations: int,
        samplings: Sequence[Sampling],
        key: RNGKey,
        watch: Watch,
    ) -> None:
        self._sampler, self._engine, self._host = sampler, sampler.engine, sampler.host
        self._settings, self._waiting = sampler.settings, sampler.waiting
        self._prompts, self._samplings, self._key, self._watch = list(prompts), samplings, key, watch
        self._groups = [[RunningEpisode(p, g) for g in range(num_generations)] for p in range(len(prompts))]
        self._episodes = [episode for group in self._groups for episode in group]
        self._running: dict[RunningEpisode, None] = {}  # in order, as a set has none
        self._by_number: dict[int, RunningEpisode] = {}
        self._ready: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._done: dict[RunningEpisode, Completion] = {}
        self._failures: list[EpisodeFailed] = []

    def run(self) -> list[Group]:
        """Play every episode to its end."""
        own_seeds = self._settings.starts == "own" and self._key.purpose is Purpose.TRAIN
        for episode in self._episodes:
            episode.started = time.perf_counter()
            self._running[episode] = None
            prompt = self._prompts[episode.prompt_index]
            seed = self._key.environment_seed(prompt.uid, episode.sample if own_seeds else 0)
            begin = partial(self._host.begin, episode, prompt, seed)
            self._ask(episode, begin, self._begun)
        # Memory is allocated for the trajectories that the engine knows, so it waits for what can begin now.
        can_begin = min(self._settings.max_environments, len(self._episodes))
        while self._running and sum(episode.first is not None for episode in self._episodes) < can_begin:
            self._wait()
        watch = Watch(self._watch.on_token, on_step=self._handle_ready, cancelled=self._watch.cancelled)
        while self._running:
            with closing(self._engine.stream(watch)) as turns:
                for turn in turns:
                    self._turn_ended(self._by_number[turn.trajectory], turn)
                    self._handle_ready()
            if self._running:
                self._wait()
        if self._settings.starts != "same":
            return list(map(self._joined, self._prompts, self._groups))
        return [
            Group(prompt, tuple(self._done[episode] for episode in group))
            for prompt, group in zip(self._prompts, self._groups, strict=True)
        ]

    def _joined(self, row: Prompt, episodes: Sequence[RunningEpisode]) -> Group:
        """The group of a row whose episodes may have begun differently."""
        prompts = [episode.prompt for episode in episodes]
        if len({prompt.token_ids[:1] for prompt in prompts if prompt}) > 1:
            raise EpisodeError(
                "the prompts of one group have no token in common, so they are no group: let the row's prompt, or the "
                "chat template, begin with a text"
            )
        return Group.of_starts(row, [(prompt, self._done[one]) for prompt, one in zip(prompts, episodes, strict=True)])

    def abandon(self) -> None:
        """Close the environments of episodes that have not ended."""
        for episode in self._running:
            if not episode.ending:
                self._host.end(episode)

    def _ask(self, episode: RunningEpisode, ask: Callable[[], Future[Any]], then: Then) -> None:
        """Ask the host, and call ``then`` once the answer is there: now, or by ``_handle_ready``. If a function in this
        thread is interrupted, because the run is to stop, the episode is cancelled."""
        try:
            with interruptible(), waiting(PLACE, partial(self._named, episode)):
                future = ask()
        except CancelledError:
            episode.ending = True
            if episode.number is not None:
                self._engine.release(episode.number)
            self._ended(episode, Settled(Ended()), reason=FinishReason.CANCELLED, failure=None)
        else:
            if future.done():
                then(episode, future)
                return
            self._waiting.begin()
            episode.pending = future

            def arrived() -> None:
                self._waiting.end()
                if episode.pending is future:  # else the episode has not waited for it
                    episode.pending = None
                    then(episode, future)

            future.add_done_callback(lambda _: self._ready.put(arrived))

    def _handle_ready(self) -> None:
        """Go on with the episodes whose answers have arrived, and end those whose time is up."""
        while not self._ready.empty():
            self._ready.get()()
        if self._settings.episode_timeout is not None:
            now = time.perf_counter()
            for episode in [one for one in self._running if one.pending is not None and self._deadline(one) <= now]:
                self._finish(episode, FinishReason.TIMEOUT, self._time_is_up())

    def _wait(self) -> None:
        """Wait for an answer: there is nothing to decode."""
        start = time.perf_counter()
        limits = [self._deadline(episode) - start for episode in self._running]
        limits += [POLL_SECONDS] if self._watch.cancelled else []
        limits += [self._settings.call_timeout] if self._settings.call_timeout else []
        limit = min(limits, default=math.inf)
        arrived = None
        with contextlib.suppress(queue.Empty), waiting(PLACE, self._named):
            arrived = self._ready.get(timeout=None if limit == math.inf else max(limit, 0.0))
        self._waiting.blocked += time.perf_counter() - start
        if arrived is not None:
            arrived()
        elif self._watch.cancelled and self._watch.cancelled():
            for episode in list(self._running):
                self._finish(episode, FinishReason.CANCELLED)
        elif self._settings.call_timeout:
            self._host.check()
        self._handle_ready()

    def _named(self, which: RunningEpisode | None = None) -> str:
        """An episode, or those whose tools or environments have not answered, by their numbers in the rollout."""
        numbered = enumerate(self._episodes)
        return samples(n for n, one in numbered if one is which or (which is None and one.pending is not None))

    def _deadline(self, episode: RunningEpisode) -> float:
        """When the time of an episode is up."""
        limit = self._settings.episode_timeout
        return math.inf if limit is None or episode.ending else episode.started + limit

    def _time_is_up(self) -> EpisodeFailed:
        return EpisodeFailed(f"it took more than environment.episode_timeout, {self._settings.episode_timeout:g} s")

    def _begun(self, episode: RunningEpisode, future: Future[Answer]) -> None:
        """Submit a group as soon as all its environments have been reset."""
        try:
            episode.first = future.result()
        except EpisodeFailed as failure:
            episode.first = failure
        self._submit_if_complete(episode.prompt_index)

    def _submit_if_complete(self, p: int) -> None:
        group = self._groups[p]
        if any(episode.first is None for episode in group):
            return
        shown, ready = list[tuple[Message, ...]](), list[RunningEpisode]()
        for episode in group:
            if episode not in self._running or episode.ending:
                continue
            if isinstance(episode.first, Answer) and not episode.first.done:
                shown.append(episode.first.messages)
                ready.append(episode)
            else:
                failure = EpisodeFailed("it ended in reset()") if isinstance(episode.first, Answer) else episode.first
                self._finish(episode, FinishReason.ENVIRONMENT, failure)
        if not ready:
            return
        starts = [messages for n, messages in enumerate(shown) if messages not in shown[:n]]
        if len(starts) > 1:
            self._check_starts(starts)
        row, bridge = self._prompts[p], self._sampler.format.bridge
        prompts = [bridge.opening(row, messages) if messages else row for messages in starts]
        for episode, messages in zip(ready, shown, strict=True):
            episode.prompt = prompts[starts.index(messages)]
        if self._settings.starts == "same" and shown[0]:
            self._prompts[p] = prompts[0]
            if self._watch.on_prompt:
                self._watch.on_prompt(p, prompts[0])
        ready = [
            episode for prompt in prompts for episode in ready if episode.prompt is prompt
        ]  # they share its prefill
        requests = [
            Request(_prompt_of(episode), episode.sample, self._samplings[p], self._key, p, continues=True)
            for episode in ready
        ]
        for episode, number in zip(ready, self._engine.submit(requests), strict=True):
            episode.number = number
            self._by_number[number] = episode

    def _check_starts(self, starts: Sequence[Sequence[Message]]) -> None:
        """Refuse that episodes of a group begin differently, or say what it means."""
        first, other = ("\n".join(str(message.get("content")) for message in shown) for shown in starts[:2])
        what = f"the environments of one group showed different things first, {first!r:.80} and {other!r:.80}"
        if self._settings.starts == "same":
            raise EpisodeError(
                f"{what}: rewards of a group are compared, so its episodes must begin alike. Draw what varies from the "
                "parameter `seed` of reset(), or in reset() from random, numpy.random or torch, which are seeded alike "
                'for all completions of a group; or set environment.starts to "any", to compare them all the same'
            )
        if self._settings.starts == "any" and not self._sampler.told:
            self._sampler.told = True
            log.warning("%s. %s", what, DIFFERENT)

    def _turn_ended(self, episode: RunningEpisode, turn: EndedTurn) -> None:
        """Parse what the policy wrote and ask the host for the answer, or end the episode."""
        episode.completion, episode.turn_ended = turn.completion, time.perf_counter()
        reason = turn.completion.finish_reason
        if not reason.usable:
            self._finish(episode, reason)
            return
        last = turn.completion.segments[-1].token_ids
        drawn = last[len(last) - turn.num_drawn :].tolist()
        if reason is FinishReason.EOS:
            drawn.pop()
        prefix = _prompt_of(episode).text if not episode.turns else episode.prefix
        parsed = self._sampler.format.parse(drawn, prefix)
        episode.message = parsed.message
        if reason is FinishReason.LENGTH:
            self._record(episode, turn)
            self._finish(episode, reason)
        elif self._deadline(episode) <= episode.turn_ended:
            self._record(episode, turn)
            self._finish(episode, FinishReason.TIMEOUT, self._time_is_up())
        else:
            self._ask(episode, partial(self._host.answer, episode, parsed), partial(self._answered, turn=turn))

    def _answered(self, episode: RunningEpisode, future: Future[Answer], *, turn: EndedTurn) -> None:
        """Extend the trajectory by the answer, or end the episode."""
        if episode not in self._running or episode.ending:
            return
        limit = self._settings.max_observation_tokens
        try:
            answer = future.result() if limit is None else self._sampler.format.shortened(future.result(), limit)
        except EpisodeFailed as failure:
            self._record(episode, turn)
            self._finish(episode, FinishReason.ENVIRONMENT, failure)
            return
        self._record(episode, turn, answer)
        if answer.done or not answer.messages:
            self._finish(episode, turn.completion.finish_reason)
        elif len(episode.turns) == self._settings.max_turns:
            self._finish(episode, FinishReason.TURNS)
        elif not self._extend(episode, turn, answer.messages):
            self._finish(episode, FinishReason.LENGTH)

    def _extend(self, episode: RunningEpisode, turn: EndedTurn, messages: Sequence[Message]) -> bool:
        """Give the trajectory the tokens of an answer; False if they leave no room for a drawn one."""
        if not turn.room:  # the engine has let it go, even where a rewrite would be shorter
            return False
        form, prompt = self._sampler.format, _prompt_of(episode)
        last = turn.completion.segments[-1].token_ids
        token_ids = form.bridge.after(messages, last_token=int(last[-1]), prompt=prompt)
        room, rewrite = turn.room, False
        if self._settings.history != "append":
            whole = [message for one in episode.turns for message in one.messages]
            so_far = [*last.tolist(), *token_ids]
            rewritten = form.bridge.rewritten(prompt, form.rewrite(whole) if form.rewrite else whole, so_far)
            if rewrite := rewritten != so_far:
                token_ids, room = rewritten, turn.request.sampling.max_completion_length
        if len(token_ids) >= room:
            return False
        self._engine.extend(turn.trajectory, token_ids, rewrite=rewrite)
        episode.prefix = form.text(token_ids) if form.parser else ""
        return True

    def _record(self, episode: RunningEpisode, turn: EndedTurn, answer: Answer | None = None) -> None:
        """Add a turn to the episode."""
        answer = answer or Answer()
        episode.turns.append(
            Turn(
                turn.num_drawn,
                turn.completion.finish_reason,
                (episode.message, *answer.messages),
                answer.calls,
                answer.failed_calls,
                answer.reward,
                time.perf_counter() - episode.turn_ended,
            )
        )

    def _finish(self, episode: RunningEpisode, reason: FinishReason, failure: EpisodeFailed | None = None) -> None:
        """Free the trajectory and end the environment."""
        if episode.ending:
            return
        episode.ending, episode.pending = True, None
        if episode.number is not None:
            self._engine.release(episode.number)
        elif episode.first is None:  # its group does not wait for it
            episode.first = failure or EpisodeFailed("cancelled")
            self._submit_if_complete(episode.prompt_index)
        self._ask(episode, partial(self._host.end, episode), partial(self._ended, reason=reason, failure=failure))

    def _ended(
        self, episode: RunningEpisode, future: Future[Ended], *, reason: FinishReason, failure: EpisodeFailed | None
    ) -> None:
        """Make the completion of an episode that has ended."""
        ended = Ended()
        try:
            ended = future.result()
        except EpisodeFailed as at_end:
            if reason.usable:
                reason, failure = FinishReason.ENVIRONMENT, at_end
        if failure:
            self._failures.append(failure)
        rewards = [turn.reward for turn in episode.turns if turn.reward is not None]
        if ended.reward is not None:
            rewards.append(ended.reward)
        reward = math.fsum(rewards) if rewards else None
        own = episode.prompt.prompt if episode.prompt and self._settings.starts != "same" else None
        record = Episode(
            tuple(episode.turns),
            reward,
            ended.state,
            failure.details if failure else "",
            None if isinstance(own, str) else own,
        )
        completion = episode.completion or Completion.of_tokens((), (), reason)
        self._done[episode] = completion = replace(completion, finish_reason=reason, episode=record)
        self._running.pop(episode)
        if self._watch.on_completion:
            self._watch.on_completion(episode.prompt_index, episode.sample, completion)

    def report_failures(self, groups: list[Group]) -> None:
        """Raise if every episode failed; log how many did otherwise."""
        if not self._failures:
            return
        count, first = f"{len(self._failures)} of {len(self._done)} episodes failed", self._failures[0]
        if len(self._failures) == len(self._done):
            error = EpisodeError(f"{count}, the first: {first}")
            error.failed = groups
            raise error from first
        log.warning("%s and are left out. The first:\n%s", count, first.details)


def _prompt_of(episode: RunningEpisode) -> Prompt:
    assert episode.prompt is not None, "the trajectory was submitted"
    return episode.prompt
