"""The examples that wrap OpenEnv and TextArena, with stand-ins that have the interface of these packages."""

import asyncio
import random
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import pytest

from cohort.config import EnvironmentConfig
from cohort.environments.calls import ParsedTurn
from cohort.environments.host import Host
from cohort.environments.shapes import find_environments
from cohort.environments.tools import Toolbox
from cohort.types import Prompt

EXAMPLES = Path(__file__).parents[1] / "examples"


@dataclass
class StepResult:
    """As in openenv 0.10."""

    observation: dict
    reward: float | None = None
    done: bool = False
    metadata: dict | None = None


class GenericEnvClient:
    """As in openenv 0.10: a session of a server, which prints what programs print and rewards "42"."""

    sessions: ClassVar = Counter()

    def __init__(self, base_url):
        assert base_url == "http://localhost:8000"
        self.seed = None

    async def connect(self):
        self.sessions["opened"] += 1
        return self

    async def reset(self, **arguments):
        self.seed = arguments["seed"]
        return StepResult({"stdout": "", "stderr": "", "exit_code": 0})

    async def step(self, action, **_):
        await asyncio.sleep(0)
        assert action.keys() == {"code"}
        right = action["code"].strip() == "print(42)"
        return StepResult({"stdout": "42" if right else "", "stderr": "" if right else "error"}, float(right), right)

    async def close(self):
        self.sessions["closed"] += 1


class Game:
    """As in textarena 0.7: a number is guessed. Its random numbers are the global ones."""

    def reset(self, num_players, seed=None):
        assert num_players == 1
        random.seed(seed)
        self.number, self.rewards = random.randint(1, 20), None
        self.unread = [(-1, f"Guess {random.randint(1, 20)}.", "PROMPT")]

    def get_observation(self):
        unread, self.unread = self.unread, []
        return 0, unread

    def step(self, action):
        self.unread.append((0, action, "PLAYER_ACTION"))
        if int(action.strip("[]")) == self.number:
            self.rewards = {0: 1}
        else:
            self.unread.append((-1, f"No; here is {random.randint(1, 20)}.", "GAME_MESSAGE"))
        return self.rewards is not None, {}

    def close(self):
        return self.rewards, {0: {"reason": "You won."}}


@pytest.fixture
def play(monkeypatch):
    """Plays episodes turn by turn together, each with its texts: what they show, their rewards, how they end."""
    core, textarena = ModuleType("openenv.core"), ModuleType("textarena")
    core.GenericEnvClient = GenericEnvClient
    textarena.make = lambda game: {"GuessTheNumber-v0-raw": Game, "Hard-v0-raw": Game}[game]()
    for name, module in {"openenv": ModuleType("openenv"), "openenv.core": core, "textarena": textarena}.items():
        monkeypatch.setitem(sys.modules, name, module)

    def run(factory, texts, seeds, row):
        host = Host(Toolbox(), find_environments(f"{EXAMPLES}/{factory}"), EnvironmentConfig())
        prompt = Prompt(0, 0, (), "", [{"role": "user", "content": "?"}], row)
        shown = [[host.begin(n, prompt, seed).result(30)] for n, seed in enumerate(seeds)]
        for turn in zip(*texts, strict=True):
            for n, text in enumerate(turn):
                shown[n].append(host.answer(n, ParsedTurn(text, (), {})).result(30))
        ends = [host.end(n).result(30) for n in range(len(seeds))]
        host.close()
        contents = [["".join(m["content"] for m in answer.messages) for answer in one] for one in shown]
        return contents, [[(answer.reward, answer.done) for answer in one[1:]] for one in shown], ends

    return run


def test_an_openenv_server(play):
    texts = ["I try:\n```python\nprint(41)\n```", "print(42)"], ["```python\nprint(42)\n```", "```python\nprint(0)```"]
    shown, steps, _ = play("openenv_environment.py:CodingEnv", texts, (3, 4), {"answer": 42})
    assert shown == [["", "error", "42"], ["", "42", "error"]]
    assert steps == [[(0.0, False), (1.0, True)], [(1.0, True), (0.0, False)]]
    assert GenericEnvClient.sessions == {"opened": 2, "closed": 2}


@pytest.mark.parametrize("row", [{}, {"game": "Hard-v0", "answer": 1}])
def test_a_game_of_textarena(play, row):
    random.seed(3)
    number, opening, hint = (random.randint(1, 20) for _ in range(3))
    wrong = f"[{number % 20 + 1}]"
    random.seed(99)
    before = random.getstate()
    texts = [wrong, f"[{number}]"], [wrong, wrong]
    shown, steps, ends = play("textarena_environment.py:TextArenaGame", texts, (3, 3), row)
    assert random.getstate() == before
    # The hints of both games are those of their seed, although they are played at the same time in one process.
    assert shown[0] == [f"Guess {opening}.", f"No; here is {hint}.", "You won."]
    assert shown[1][:2] == shown[0][:2]
    assert steps == [[(0.0, False), (1.0, True)], [(0.0, False), (0.0, False)]]
    assert [end.state for end in ends] == [{"reason": "You won."}, {}]


@pytest.mark.parametrize("name", ["openenv_environment.py", "textarena_environment.py"])
def test_the_examples_are_short(name):
    assert len((EXAMPLES / name).read_text().splitlines()) < 80
