"""An environment of letters without a chat template, so that tests can play many turns on tiny random models."""

import itertools
import random
import threading
from concurrent.futures import Future

from cohort.config import EnvironmentConfig
from cohort.environments.contract import Answer, Ended, EpisodeFailed
from cohort.environments.episode import EpisodeSampler, TurnFormat
from tests.rollout.test_local_engine import LetterTokenizer

END = 1
OPENING = 3
"""The generation prompt: one token."""


class LetterBridge:
    """What follows a turn: an end token if there was none, the letters of the answer, an opening token."""

    def after(self, messages, *, last_token, prompt):
        letters = [ord(letter) - 95 for message in messages for letter in message["content"]]
        return [*([] if last_token == END else [END]), *letters, OPENING]


class LetterHost:
    """Answers turn n of a trajectory with letters that depend on what the policy wrote.

    Args:
        turns: turns of an episode.
        length: letters of an answer.
        latency: maximum number of seconds until an answer is there; drawn at random for each.
        fails: called with prompt index, sample and turn: whether the environment raises.
    """

    def __init__(self, turns, length=3, latency=0.0, fails=lambda p, g, turn: False, seed=0):
        self.turns, self.length, self.latency, self.fails = turns, length, latency, fails
        self.random = random.Random(seed)
        self.played = {}
        self.ended = []

    def begin(self, episode, prompt, seed):
        assert episode not in self.played
        self.played[episode] = 0
        return self._soon(lambda: Answer())

    def answer(self, episode, parsed):
        self.played[episode] += 1
        turn = self.played[episode]

        def answer():
            if self.fails(episode.prompt_index, episode.sample, turn):
                raise EpisodeFailed("raised ValueError: broken")
            shift = sum(map(ord, parsed.content)) + turn
            text = "".join(chr(97 + (shift + n) % 20) for n in range(self.length))
            messages = ({"role": "user", "content": text},)
            return Answer(messages, reward=float(turn), done=turn == self.turns)

        return self._soon(answer)

    def end(self, episode):
        self.ended.append(episode)
        return self._soon(lambda: Ended())

    def _soon(self, function):
        future = Future()

        def run():
            try:
                future.set_result(function())
            except EpisodeFailed as failure:
                future.set_exception(failure)

        if self.latency:
            threading.Timer(self.random.uniform(0, self.latency), run).start()
        else:
            run()
        return future


def sampler(engine, host, **settings):
    turn_format = TurnFormat(LetterTokenizer(), LetterBridge(), None)
    return EpisodeSampler(engine, host, turn_format, EnvironmentConfig(**{"max_turns": 100} | settings))


def completions_of(groups):
    return list(itertools.chain.from_iterable(group.completions for group in groups))
