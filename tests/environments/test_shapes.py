"""The shapes of environments, and answers of wrong ones."""

import asyncio
import functools
import random
import re
from collections import namedtuple

import numpy as np
import pytest
import torch

from cohort.environments.contract import Answer, EpisodeFailed, Step
from cohort.environments.shapes import LIVE, choose, find_environments, perform, recognise, run_plain
from cohort.environments.tools import text_of
from cohort.errors import ConfigError, DataError
from tests.conftest import each
from tests.environments.worlds import AsyncWorld, Desk, World


class Gym:
    def reset(self, *, seed=None, options=None):
        return f"seed {seed}", {"info": 1}

    def step(self, action):
        return action, 1, False, True, {}

    def render(self):
        raise AssertionError


GYM = Gym()


class Untyped:
    def reset(self): ...

    def look(self, where):
        """Looks."""


def test_shapes_are_recognised_from_classes_and_functions(tmp_path):
    log = tmp_path / "log"
    world = recognise(functools.partial(World, log))
    assert (world.name, world.steps, world.is_async, len(world.tools)) == ("World", True, False, 0)
    assert (world.columns, world.required, world.seeded) == ({"plan", "seed"}, {"plan"}, True)
    assert not log.exists()  # a class is not made to be inspected
    made = recognise(lambda: AsyncWorld(log))
    assert (made.name, made.steps, made.is_async) == ("AsyncWorld", True, True)
    assert sorted(line.split()[0] for line in log.read_text().splitlines()) == ["closed", "closed", "made", "made"]
    assert not recognise(Gym).tools


def test_a_probe_with_an_async_close_is_closed_also_in_a_notebook():
    import asyncio

    closed = []

    class Made(Gym):
        async def close(self):
            closed.append(self)

    async def notebook():
        return recognise(lambda: Made())

    assert asyncio.run(notebook()).is_async
    assert len(closed) == 2


def test_a_probe_that_cannot_be_closed_is_refused():
    class Stuck(Gym):
        def close(self):
            raise OSError("in use")

    with pytest.raises(ConfigError, match=r"Stuck cannot be closed: close raised OSError: in use"):
        recognise(lambda: Stuck())


@each(
    ("factory", "message"),
    [
        (type("Bare", (), {}), "Bare has no method reset: write `def reset"),
        (type("Mute", (), {"reset": Gym.reset}), "Mute has neither a method step .*write `def step"),
        (type("Odd", (), {"reset": Gym.reset, "step": lambda self: None}), "Odd: step must accept the policy's text"),
        (
            type("Wide", (), {"reset": lambda self, row, /: 0, "step": Gym.step}),
            "Wide: reset gets the columns .* by name",
        ),
        (World, r"World must be made without arguments \(missing a required argument: 'log'\)"),
        (Gym(), "a class or a function that makes .* got an object of the class Gym"),
        (lambda: GYM, "factory <lambda> returned the same object twice: each completion needs its own"),
        (lambda: None, "NoneType has no method reset"),
        ("Game", "unknown environment 'Game': expected 'module:function' or 'file.py:function'"),
        (lambda: 1 / 0, r"factory <lambda> raised ZeroDivisionError: division by zero \(test_shapes"),
        (Untyped, r"Untyped: its public methods are tools .* underscore\. .*'where' has no type hint"),
        ("nowhere.py:Game", "no environment file nowhere.py"),
    ],
)
def test_what_is_no_environment_is_refused_with_what_to_write(factory, message):
    with pytest.raises(ConfigError, match=message):
        find_environments(factory)


def test_an_async_factory_is_refused():
    async def factory():
        return Gym()

    with pytest.raises(ConfigError, match="factory must not be async: connect in `async def reset`"):
        recognise(factory)


def test_factories_from_files_and_by_name(tmp_path):
    (tmp_path / "mine.py").write_text("class Game:\n    def reset(self): ...\n    def step(self, text): ...\n")
    shapes = find_environments({"game": f"{tmp_path}/mine.py:Game", "gym": Gym})
    assert {name: shape.name for name, shape in shapes.items()} == {"game": "Game", "gym": "Gym"}
    assert choose(shapes, {"environment": "gym"}) is shapes["gym"]
    for name in ("chess", None, ["gym"]):
        with pytest.raises(DataError, match=r"must name one of game, gym; a row has "):
            choose(shapes, {"environment": name})
    single = find_environments(Gym)
    assert choose(single, {"environment": "anything"}) is single[""]
    assert not find_environments("")
    assert choose({}, {}) is None


def test_arguments_of_reset():
    row = {"prompt": "p", "options": 3}
    assert recognise(Gym).arguments(row, 7) == {"seed": 7, "options": 3}
    assert recognise(Gym).arguments({"seed": 1}, 7) == {"seed": 1}  # the row's own seed

    class All(Gym):
        def reset(self, **row): ...

    assert recognise(All).arguments(row, 7) == row
    given = recognise(All).arguments(shared := {"boards": [[0]]}, 7)
    given["boards"][0].append(1)  # an episode does not change the row of the others
    assert shared == {"boards": [[0]]}
    with pytest.raises(DataError, match=r"World.reset needs the column 'plan'; the data has prompt, options\."):
        choose(find_environments(functools.partial(World, "")), row)


def test_reset_takes_columns_of_any_name_but_that_of_the_environment():
    class World:
        def reset(this, **row):  # noqa: N805
            this.row = row

        def step(this, text):  # noqa: N805
            return text

    (shape,) = find_environments(World).values()
    row = dict.fromkeys(["self", "this", "function", "cls", "environment", "method", "number", "given"], 1)
    assert shape.arguments(row, 0) == {name: 1 for name in row if name != "this"}
    run_plain(perform, World, True, 1, "reset", shape.arguments(row, 0))
    assert LIVE.pop(1).row == shape.arguments(row, 0)


def test_an_episode_without_any_reward_has_the_sum_if_the_environment_answers_turns():
    """Such as one that ended before its first `step`: unscored, it would be missing in its group's mean."""

    def ended(environment, steps):
        run_plain(perform, environment, steps, -1, "reset", {})
        found = run_plain(perform, environment, steps, -1, "get_reward", {})
        run_plain(perform, environment, steps, -1, "close", {})
        return found.reward

    assert ended(Gym, steps=True) == 0.0
    assert ended(Desk, steps=False) is not None
    assert ended(type("Silent", (), {"reset": lambda self: None}), steps=False) is None


def answer_of(returned, method="step", steps=True):
    """What becomes of the value that an environment returns."""
    environment = type("Env", (), {"reset": lambda self: returned, "step": lambda self, text: returned})
    answer = run_plain(perform, environment, steps, -1, "reset", {})
    if method == "step":
        answer = run_plain(perform, environment, steps, -1, "step", {"text": ""})
    run_plain(perform, environment, steps, -1, "close", {})
    assert not LIVE
    if isinstance(answer, EpisodeFailed):
        raise answer
    return answer


def user(text):
    return ({"role": "user", "content": text},)


Named = namedtuple("Named", "observation reward terminated truncated info")


@each(
    ("returned", "answer"),
    [
        (Step("go on"), Answer(user("go on"))),
        (Step(), Answer()),
        (Step("", 1, True), Answer((), 1.0, True)),
        (("o", 0.5, False, True, {}), Answer(user("o"), 0.5, True)),
        (Named("o", np.float32(0.5), np.False_, False, {}), Answer(user("o"), 0.5, False)),
        (("o", 2, True, {}), Answer(user("o"), 2.0, True)),
        ((None, None, False, {}), Answer()),
        ({"observations": [{"role": "user", "content": "o"}], "reward": 1, "done": False, "metadata": {}}, Answer(user("o"), 1.0)),
        (Step("half \ud83d"), Answer(user(text_of("half \ud83d")))),  # tokenizers take no half of a surrogate pair
    ],
)  # fmt: skip
def test_answers_in_all_forms(returned, answer):
    assert answer_of(returned) == answer


@each(
    ("returned", "message"),
    [
        (("o", 1.0, False), r"Env.step returned a tuple of 3: expected Step\(observation, reward, done\), "),
        ("text", r"returned 'text': expected Step.* A tool of the policy needs another name"),
        (None, "returned None: expected Step"),
        ({"observations": []}, r"returned {'observations': \[\]}: expected Step"),
        (Step("o", float("nan")), "Env.step gave the reward nan: expected a finite number or None"),
        (Step("o", "1"), "gave the reward '1'"),
        (Step("o", 1 + 2j), "gave the reward"),
        (Step(b"bytes"), "gave the observation b'bytes': expected text or messages"),
        (Step({"board": 1}), "gave the observation {'board': 1}"),
        (
            Step([{"role": "user", "content": ["image"]}]),
            "gave the message .*: expected a dict with the texts role and",
        ),
        (Step(["o"]), "gave the message 'o'"),
        (("o", 1.0, "no", {}), "gave 'no' for whether the episode is over"),
        (Step("x" * 10**7, float("inf")), "gave the reward inf"),
    ],
)
def test_answers_of_wrong_shapes(returned, message):
    with pytest.raises(EpisodeFailed, match=message) as raised:
        answer_of(returned)
    assert len(str(raised.value)) < 400


def test_first_observations():
    assert answer_of(None, "reset") == Answer()
    assert answer_of("hello", "reset") == answer_of(("hello", {"info": 1}), "reset") == Answer(user("hello"))
    assert answer_of("text for the prompt", "reset", steps=False) == Answer(user("text for the prompt"))
    with pytest.raises(EpisodeFailed, match=re.escape("Env.reset returned ['image']: expected text for the prompt")):
        answer_of(["image"], "reset", steps=False)
    assert answer_of(Step("hello", done=True), "reset") == Answer(user("hello"), done=True)
    with pytest.raises(EpisodeFailed, match=r"observation Step\(.*: expected text or messages"):
        answer_of(Step("hello", 1.0), "reset")  # a reward is for a turn
    with pytest.raises(EpisodeFailed, match="observation 3: expected text or messages"):
        answer_of(3, "reset")


def test_an_awaitable_from_a_plain_method_is_refused_by_name():
    async def later():
        return Step("o")

    with pytest.raises(EpisodeFailed, match="step raised TypeError: it returned an awaitable, but is no `async def`"):
        answer_of(later())


class Draws:
    """Draws at random where it is made and reset."""

    def __init__(self):
        self.made = random.random()

    def reset(self):
        return f"{self.made} {random.random()} {np.random.random()} {torch.rand(1).item()}"

    def step(self, text):
        return Step(str(random.random()), 0.0, True)


class DrawsAsync(Draws):
    async def reset(self):
        first = super().reset()
        for _ in range(3):
            await asyncio.sleep(0)
            first += f" {random.random()}"
        return first


def start(environment, seed):
    """What it shows first, and what the caller draws afterwards from its own generators."""
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    answer = run_plain(perform, environment, True, -1, "reset", {}, seed)
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
    run_plain(perform, environment, True, -1, "close", {})
    return answer.messages[0]["content"]


def test_what_an_environment_draws_at_its_start_is_a_function_of_the_seed():
    random.seed(3)
    first = start(Draws, 7)
    random.seed(4)
    assert start(Draws, 7) == first != start(Draws, 8)
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)
    assert first == Draws().reset()


def test_async_environments_that_start_together_draw_as_if_alone():
    async def begin(number, seed):
        answer = await perform(DrawsAsync, True, number, "reset", {}, seed)
        await perform(DrawsAsync, True, number, "close", {})
        return answer.messages[0]["content"]

    async def together():
        return await asyncio.gather(*(begin(-number, seed) for number, seed in enumerate([7, 8, 7, 9], 1)))

    alone = [asyncio.run(begin(-1, seed)) for seed in (7, 8, 9)]
    random.seed(5)
    before = random.getstate()
    assert asyncio.run(together()) == [alone[0], alone[1], alone[0], alone[2]]
    assert random.getstate() == before


def test_a_start_that_is_cancelled_or_fails_leaves_the_generators():
    class Sleeps(Draws):
        async def reset(self):
            try:
                await asyncio.sleep(60)
            finally:
                random.random()

    async def cancelled():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(perform(Sleeps, True, -1, "reset", {}, 7), 0.01)

    class Fails(Draws):
        def reset(self):
            random.random()
            raise ValueError("no")

    before = random.getstate()
    asyncio.run(cancelled())
    assert "no" in str(run_plain(perform, Fails, True, -2, "reset", {}, 7))
    assert random.getstate() == before
