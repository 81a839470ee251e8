"""A game of TextArena for one player as an environment of Cohort.

    pip install textarena

    [environment]
    factory = "examples/textarena_environment.py:TextArenaGame"
    max_turns = 10

The rows choose the game, in the column ``game``; without one it is ``GuessTheNumber-v0``. Its rules are appended to the
row's prompt. The reward is the game's, at its end; a game that ``max_turns`` cuts off has 0.

- Some games download word lists when they are imported. For Wordle, do so once, before training:
  ``python -m nltk.downloader words averaged_perceptron_tagger_eng``.
- TextArena draws from Python's global random numbers and seeds them in ``reset``. Games of one process would draw from
  each other's numbers, so each keeps a state of its own here.
- The games named ``...-raw`` show each message once. The others repeat everything in every turn.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cohort.environments import Step


class TextArenaGame:
    """Plays the game that a row names."""

    def __init__(self) -> None:
        self._game: Any = None
        self._random = random.getstate()

    def reset(self, seed: int, game: str = "GuessTheNumber-v0") -> str:
        """Begin the game. Its seed is the same for all completions of a group."""
        import textarena

        with self._own_random_numbers():
            self._game = textarena.make(f"{game}-raw")
            self._game.reset(num_players=1, seed=seed)
        return self._news()

    def step(self, text: str) -> Step:
        """Make a move. An invalid one is answered with the reason, and a second one in a row ends the game."""
        with self._own_random_numbers():
            done, _ = self._game.step(text)
        if not done:
            return Step(self._news(), 0.0)
        rewards, info = self._game.close()
        self.reason = info[0].get("reason", "")  # reward functions see it as `environment_state["reason"]`
        return Step(self.reason, float(rewards[0]), done=True)

    def _news(self) -> str:
        """What the game has said since the last move, without the move itself."""
        player, messages = self._game.get_observation()
        return "\n".join(text for sender, text, _ in messages if sender != player)

    @contextmanager
    def _own_random_numbers(self) -> Iterator[None]:
        others = random.getstate()
        random.setstate(self._random)
        try:
            yield
        finally:
            self._random = random.getstate()
            random.setstate(others)
