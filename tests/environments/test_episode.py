"""The driver of episodes: how they end, and what happens when tools or environments fail."""

import re
import time
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest

from cohort import watchdog
from cohort.environments.contract import Answer, Ended, EpisodeFailed
from cohort.environments.episode import TurnFormat, first_episode
from cohort.errors import EpisodeError
from cohort.policy import Policy
from cohort.rollout import LocalEngine, RNGKey, Sampling, Watch
from cohort.types import Completion, FinishReason, Group, Segment
from tests.conftest import tiny_llama
from tests.environments.games import OPENING, LetterBridge, LetterHost, completions_of, sampler
from tests.environments.test_exact import FLOAT32, PROMPTS, STOPS
from tests.rollout.test_local_engine import LetterTokenizer

SAMPLING = Sampling(60, stop=STOPS)


@pytest.fixture(scope="module")
def engine():
    return LocalEngine(Policy(tiny_llama(), FLOAT32), LetterTokenizer(), (1,), max_batch_size=8)


def play(engine, host, samples=3, sampling=SAMPLING, watch=None, **settings):
    episodes = sampler(engine, host, **settings)
    try:
        return completions_of(episodes.generate(PROMPTS, samples, sampling, RNGKey(0, 3), watch))
    finally:
        assert engine.unfinished == 0
        assert len(host.ended) == len(host.played) == len(set(host.ended))  # each environment is closed once


def reasons(completions):
    return [str(completion.finish_reason) for completion in completions]


def test_an_episode_ends_when_the_environment_says_so(engine):
    completions = play(engine, LetterHost(turns=4))
    for completion in completions:
        assert completion.finish_reason in (FinishReason.STOP, FinishReason.EOS)
        turns = completion.episode.turns
        assert [turn.reward for turn in turns] == [1, 2, 3, 4]
        assert completion.episode.reward == 10
        assert sum(turn.num_drawn for turn in turns) == completion.num_tokens
        # The last answer is a message, but nothing was drawn after it, so it is no token.
        assert len(completion.episode.messages) == 8
        assert completion.segments[0].drawn[-1]
        assert all(turn.seconds < 1 for turn in turns)


def test_an_environment_that_hangs_is_named_by_the_watchdog(engine, caplog, monkeypatch):
    monkeypatch.setattr(watchdog, "_longest", {"tools and environments": 2.0})
    host, answer = LetterHost(turns=2), LetterHost.answer

    def hang(self, episode, parsed):
        if not caplog.records:
            watchdog._look(time.monotonic() + 61)
        return answer(self, episode, parsed)

    monkeypatch.setattr(LetterHost, "answer", hang)
    play(engine, host)
    assert re.match("tools and environments: 61 s so far, at most 2.0 s before, sample [0-9]+[.]", caplog.messages[0])


def test_max_turns(engine):
    completions = play(engine, LetterHost(turns=9), max_turns=2)
    assert set(reasons(completions)) == {"turns"}
    assert all([turn.reward for turn in completion.episode.turns] == [1, 2] for completion in completions)


def test_the_trajectory_and_the_turn_have_limits(engine):
    """Turns are cut, or the answer leaves no room for a drawn token: 59 tokens do not fit after the first."""
    for settings, sampling, length in (({"max_turn_length": 1}, Sampling(60), 1), ({}, SAMPLING, 57)):
        completions = play(engine, LetterHost(turns=9, length=length), sampling=sampling, **settings)
        assert set(reasons(completions)) == {"length"}
        assert all(len(completion.episode.turns) == 1 for completion in completions)
        assert all(completion.num_tokens == 1 for completion in completions if settings)


@pytest.mark.parametrize("latency", [0.0, 0.02])
def test_failed_environments_make_their_episodes_unusable(engine, latency, caplog):
    def fails(p, g, turn):
        return (p, g) == (1, 2) or (p, g, turn) == (0, 0, 3)

    completions = play(engine, LetterHost(turns=4, latency=latency, fails=fails))
    others = play(engine, LetterHost(turns=4))
    for n, (completion, other) in enumerate(zip(completions, others, strict=True)):
        if n in (0, 5):
            assert completion.finish_reason is FinishReason.ENVIRONMENT
            assert completion.episode.error == "raised ValueError: broken"
            assert len(completion.episode.turns) == (3 if n == 0 else 1)
        else:
            assert completion.segments == other.segments
    assert "2 of 9 episodes failed and are left out" in caplog.text


def test_a_rollout_without_any_usable_episode_is_an_error(engine):
    with pytest.raises(EpisodeError, match="9 of 9 episodes failed, the first: raised ValueError: broken"):
        play(engine, LetterHost(turns=4, fails=lambda p, g, turn: turn == 2))


class Silent(LetterHost):
    """The environments of the first prompt never answer, and fail at the end."""

    def answer(self, episode, parsed):
        return Future() if episode.prompt_index == 0 else super().answer(episode, parsed)

    def end(self, episode):
        super().end(episode)
        failure = EpisodeFailed("raised OSError: at the end")
        return self._soon(lambda: raised(failure) if episode.prompt_index == 0 else Ended())


def test_time_limits(engine):
    completions = play(engine, Silent(turns=4), episode_timeout=1)
    assert reasons(completions)[:3] == ["timeout"] * 3
    assert completions[0].episode.error == "it took more than environment.episode_timeout, 1 s"
    assert all(completion.finish_reason.usable for completion in completions[3:])


class Late(LetterHost):
    """The environment of the first episode has not been reset before it is ended."""

    def begin(self, episode, prompt, seed):
        future = super().begin(episode, prompt, seed)
        if len(self.played) > 1:
            return future
        self.first = Future()
        return self.first

    def end(self, episode):
        if (episode.prompt_index, episode.sample) == (0, 0):
            self.first.set_result(Answer())
        return super().end(episode)


def test_an_episode_that_times_out_in_reset_does_not_hold_its_group_and_counts_once(engine, monkeypatch):
    submitted, submit = [], engine.submit
    monkeypatch.setattr(engine, "submit", lambda requests: submitted.extend(requests) or submit(requests))
    until = time.monotonic() + 30  # a rollout that waits for the environment would never end
    watch = Watch(cancelled=lambda: time.monotonic() > until)
    # With nine environments, drawing would begin when all have been reset.
    completions = play(engine, Late(turns=2), watch=watch, episode_timeout=1, max_environments=8)
    assert [(one.prompt_index, one.sample) for one in submitted[-2:]] == [(0, 1), (0, 2)]
    assert len(submitted) == 8
    assert reasons(completions)[:3] == ["timeout"] * 3
    assert [len(one.episode.turns) for one in completions] == [0, 1, 1, *[2] * 6]
    assert completions[0].num_tokens == 0
    assert all(completion.finish_reason.usable for completion in completions[3:])


def test_an_event_loop_that_is_blocked_ends_the_rollout(engine):
    class Blocked(Silent):
        def check(self):
            raise EpisodeError("the async tools (f) did nothing for 0.2 s")

    with pytest.raises(EpisodeError, match=r"\(f\) did nothing"):
        play(engine, Blocked(turns=4), call_timeout=0.2)


def test_a_cancelled_rollout_gives_up_what_waits(engine):
    ended = []
    watch = Watch(on_completion=lambda *of: ended.append(of), cancelled=lambda: len(ended) >= 6)
    completions = play(engine, Silent(turns=4), watch=watch)
    assert reasons(completions)[:3] == ["cancelled"] * 3
    assert all(completion.finish_reason.usable for completion in completions[3:])


class Opening(LetterHost):
    """What environments show first."""

    def __init__(self, first, **settings):
        super().__init__(turns=1, **settings)
        self.first = first

    def begin(self, episode, prompt, seed):
        future = super().begin(episode, prompt, seed)
        answer = self.first(episode.prompt_index, episode.sample, seed)
        return self._soon(lambda: raised(answer) if isinstance(answer, Exception) else future.result() and answer)


def raised(error):
    raise error


def test_a_groups_environments_have_one_seed_and_groups_have_different_ones(engine):
    seeds = {}
    host = Opening(lambda p, g, seed: seeds.setdefault(p, set()).add(seed) or Answer())
    play(engine, host)
    assert [len(found) for found in seeds.values()] == [1, 1, 1]
    assert len(set.union(*seeds.values())) == 3


def test_environments_that_fail_or_end_in_reset_leave_the_rest_of_their_group(engine):
    failing = {(0, 0): EpisodeFailed("raised OSError: no"), (1, 1): Answer(done=True)}
    completions = play(engine, Opening(lambda p, g, seed: failing.get((p, g), Answer())))
    errors = {n: completion.episode.error for n, completion in enumerate(completions) if completion.episode.error}
    assert errors == {0: "raised OSError: no", 4: "it ended in reset()"}
    assert [completions[n].num_tokens for n in errors] == [0, 0]


def test_long_answers_are_shortened_in_the_middle():
    read = []

    class Words:
        def encode(self, text, add_special_tokens):
            read.append(len(text))
            return text.split()

        def decode(self, words, **_):
            return " ".join(words)

    answer = Answer(({"role": "tool", "content": "one two three four five six seven"},))
    turn_format = TurnFormat(Words(), None, None)
    assert turn_format.shortened(answer, 7) == answer
    short = turn_format.shortened(answer, 3).messages[0]["content"]
    assert short == "one two\n[4 tokens are left out here]\nseven"

    def shortened(text):
        read.clear()
        return turn_format.shortened(Answer(({"role": "tool", "content": text},)), 5).messages[0]["content"]

    long = " ".join(map(str, range(10_000, 110_000)))  # of a megabyte, few characters are tokenized
    assert re.fullmatch(
        r"10000 10001 10002\n\[about (9|1[01])\d,\d{3} tokens are left out here\]\n109998 109999", shortened(long)
    )
    assert sum(read) <= 2 * 5 * 16
    sparse = "one two three" + " " * 9_999 + "four five"
    assert shortened(sparse) == sparse
    assert shortened(sparse + " six") == "one two three\n[1 tokens are left out here]\nfive six"


class Rewriting(LetterBridge):
    """Writes every history anew, with so many tokens."""

    def __init__(self, length):
        self.length = length

    def rewritten(self, prompt, messages, tokens):
        return [OPENING] * self.length


@pytest.mark.parametrize("room", [1, 0, -1])
def test_a_rewritten_history_needs_room_for_one_token(engine, room):
    """Nothing follows a turn that fills the completion, whatever a rewrite would leave of it."""
    length = SAMPLING.max_completion_length - room
    episodes = sampler(engine, LetterHost(turns=4), history="template")
    episodes.format = TurnFormat(LetterTokenizer(), Rewriting(length), None)
    for completion in completions_of(episodes.generate(PROMPTS, 3, SAMPLING, RNGKey(0, 3))):
        assert completion.finish_reason is FinishReason.LENGTH
        assert len(completion.episode.turns) == len(completion.segments) == (2 if room > 0 else 1)
        if room > 0:
            assert completion.segments[1].token_ids[:-1].tolist() == [OPENING] * length
            assert completion.segments[1].is_drawn.sum() == completion.episode.turns[1].num_drawn == 1


def test_seconds_of_waiting_and_what_was_not_hidden(engine):
    episodes = sampler(engine, LetterHost(turns=2, latency=0.05))
    episodes.generate(PROMPTS[:1], 1, SAMPLING, RNGKey(0, 3))
    metrics = episodes.metrics()  # of one episode, during whose answers there is nothing to draw
    assert 0 < metrics["seconds/episodes_blocked"] <= metrics["seconds/episodes_waiting"]
    assert set(episodes.metrics().values()) == {0}


def test_the_first_episode_in_words_is_a_usable_one_with_its_rewritten_histories():
    failed = Completion.of_tokens((7,), (0.0,), FinishReason.ENVIRONMENT)
    segments = (
        Segment(np.array([4, 5, 6]), np.array([True, False, True])),
        Segment(np.array([8, 9]), np.array([False, True])),
    )
    played = replace(Completion.of_tokens((4, 6, 9), (0.0,) * 3, FinishReason.STOP), segments=segments)
    letters = LetterTokenizer()
    a, b, c, d, e = (letters.decode([token]) for token in (4, 5, 6, 8, 9))
    shown = first_episode([Group(PROMPTS[0], (failed, played))], letters)
    assert shown.splitlines()[0] == "the first episode: 1 turn, finish reason stop; the policy drew what is in ⟦ ⟧"
    assert shown.partition("\n")[2] == f"{PROMPTS[0].text}⟦{a}⟧{b}⟦{c}⟧\n--- rewritten:\n{d}⟦{e}⟧"
    assert not first_episode([Group(PROMPTS[0], (failed,))], letters)
