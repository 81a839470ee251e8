"""Reward functions that do what no reward function should: what happens is said, and never a traceback of Cohort's."""

import asyncio
import contextlib
import importlib
import os
import subprocess
import sys
import time
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch

from cohort.errors import CohortError, RewardError
from cohort.plugins import load_function
from cohort.rewards import resolve_reward
from cohort.types import Episode, Group, Turn
from tests.conftest import each
from tests.rewards.conftest import completion, prompt, rollout


class Stop(BaseException):
    """Not an Exception."""


class Bad:
    """Fails in every way that a value can be looked at."""

    def __float__(self):
        raise RuntimeError("no float")

    def __repr__(self):
        raise Stop

    def __len__(self):
        raise RuntimeError("no length")

    def __getitem__(self, index):
        return 1.0


# One function's arguments are not another's.


@pytest.mark.parametrize("per", ["sample", "batch", "async"])
def test_a_function_that_changes_its_arguments_changes_nobody_elses(runner_of, per):
    seen = []

    def see(answer, steps, turns, score):
        seen.append(deepcopy((answer[0], len(answer), steps, turns[0].messages[0]["content"], score)))

    def change(answer, steps, turns, score):
        answer.append("changed")
        steps["first"].append(0)
        turns[0].messages[0]["content"] = "changed"
        score.append(0)

    def sample(completion, answer, steps, turns, environment_state):
        see(answer, steps, turns, environment_state["score"])
        change(answer, steps, turns, environment_state["score"])
        return 1.0

    async def sample_async(completion, answer, steps, turns, environment_state):
        return sample(completion, answer, steps, turns, environment_state)

    def batch(completions, answer, steps, turns, environments):
        for one in zip(answer, steps, turns, (environment.score for environment in environments), strict=True):
            see(*one)
            change(*one)
        return [1.0] * len(completions)

    function = {"sample": sample, "batch": batch, "async": sample_async}[per]
    row = prompt(answer=["4", np.zeros(2)], steps={"first": []})
    turn = Turn(1, "eos", ({"role": "assistant", "content": "text"},))
    made = completion("text")
    made = replace(made, episode=Episode((turn,), state={"score": [2]}))
    runner_of(function, function, weights=[1, 1]).score([Group(row, (made, made))])
    assert seen == [("4", 2, {"first": []}, "text", [2])] * 4
    assert row.columns["steps"] == {"first": []}


def test_a_function_may_use_the_list_again_that_it_returns(runner_of):
    from cohort import reward

    class Reuses:
        def __init__(self):
            self.scores, self.array, self.logged = [0.0], torch.zeros(1), [0]

        def __call__(self, completions, log_extra, **_):
            self.scores[0] = self.array[0] = self.logged[0] = len(completions[0])
            log_extra("length", self.logged)
            return self.array if len(completions[0]) > 2 else self.scores

    scores = runner_of(reward(per="group")(Reuses())).score(rollout(["a"], ["bb"], ["ccc"]))
    assert scores.rewards_S.tolist() == [1.0, 2.0, 3.0]
    assert scores.extras["length"] == [1, 2, 3]


# Results.


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([b"1", b"1"], "must return numbers or None; result 0 is b'1'"),
        (Bad(), "reading the Bad raised RuntimeError: no length"),
        ([object(), "x" * 10**6], "result 0 is <object object"),
        ("1" * 10**6, "must return a list of numbers, got str"),
        ([[1] * 10**5] * 2, "returned a list as result 0"),
        (type("Lies", (list,), {"__len__": lambda _: 2})([1.0]), "one reward per completion: 2, got 1"),
        ([Stop("no"), Stop("no")], "failed on 2 of 2 completions; the first: returned Stop: no"),
        ([Bad(), Bad()], "returned a Bad whose __float__ raised RuntimeError: no float"),
    ],
)
def test_nonsense_is_named(runner_of, returned, message):
    with pytest.raises(RewardError, match=message) as raised:
        runner_of(lambda completions, **_: returned, on_error="stop").score(rollout(["a", "b"]))
    assert len(str(raised.value)) < 400


def test_a_value_that_cannot_be_shown_or_counted_is_named(runner_of):
    shows = type("Shows", (), {"__repr__": Bad.__repr__})
    with pytest.raises(RewardError, match="result 0 is <Shows>"):
        runner_of(lambda completions, **_: [shows()]).score(rollout(["a"]))

    def logs(completions, log_extra, **_):
        log_extra("column", Bad())
        return [1.0]

    with pytest.raises(RewardError, match="must log one value per completion as 'column': 1, got <Bad>"):
        runner_of(logs).score(rollout(["a"]))


@pytest.mark.parametrize("kind", [Stop, SystemExit, GeneratorExit, asyncio.CancelledError, MemoryError, RecursionError])
@pytest.mark.parametrize("is_async", [False, True])
def test_whatever_a_function_raises_leaves_one_completion_unscored(runner_of, kind, is_async):
    def plain(completion, **_):
        if completion == "b":
            raise kind("no")
        return 1.0

    async def judge(completion, **_):
        return plain(completion)

    scores = runner_of(judge if is_async else plain).score(rollout(["a", "b"], ["c", "d"]))
    assert scores.rewards_S.isnan().tolist() == [False, True, False, False]
    assert kind.__name__ in scores.errors[1]


def test_a_function_that_forks_goes_on_once():
    """The process that it has forked ends where the function returns, in this thread and on the event loop."""
    script = (
        "import os\nfrom cohort.calls import Calls, recorded\n"
        "def forks(x):\n    os.fork()\n    return x\n"
        "async def forks_async(x): return forks(x)\n"
        "for f in (forks, forks_async): print(Calls().submit(recorded(f), {'x': 1}, here=f is forks).result().returned)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "1\n1\n"


def test_a_function_that_swallows_its_cancellation_stalls_nobody(runner_of):
    async def stubborn(completion, **_):
        end = time.monotonic() + 5
        while completion == "b" and time.monotonic() < end:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.05)
        return 1.0

    start = time.monotonic()
    scores = runner_of(stubborn, timeout=0.3, max_concurrent=1).score(rollout(["a", "b"], ["c", "d"]))
    assert scores.rewards_S.isnan().tolist() == [False, True, False, False]
    assert time.monotonic() - start < 4


@pytest.mark.parametrize(
    "what", ["cancel all", "stop the loop", "exit in a task", "exit in a callback", "cancel itself"]
)
def test_a_function_that_ends_what_runs_beside_it_ends_no_run(runner_of, what):
    """Its neighbours are scored, or are not and are named; the next rollout is scored as ever."""
    hostile, tasks = True, []

    async def judge(completion, **_):
        loop = asyncio.get_running_loop()
        if completion == "a":
            return 1.0
        await asyncio.sleep(0.05)
        if hostile and completion == "b":
            if what == "cancel all":
                for task in asyncio.all_tasks():
                    task.cancel()
            elif what == "stop the loop":
                loop.stop()
            elif what == "exit in a task":
                tasks.append(loop.create_task(exits()))
            elif what == "exit in a callback":
                loop.call_soon(sys.exit)
            else:
                asyncio.current_task().cancel()
        await asyncio.sleep(0.05)
        return 1.0

    async def exits():
        raise SystemExit

    runner = runner_of(judge, timeout=20.0)
    scores = runner.score(rollout(["a", "b"], ["c", "d"]))
    unscored = {"cancel all": [False, True, True, True], "cancel itself": [False, True, False, False]}.get(
        what, [False] * 4
    )
    assert scores.rewards_S.isnan().tolist() == unscored
    assert all("was cancelled" in error or "CancelledError" in error for error in scores.errors.values())
    hostile = False
    assert runner.score(rollout(["a", "b"])).rewards_S.tolist() == [1.0, 1.0]


def test_megabytes_of_output_and_a_held_interpreter_lock(runner_of, capfd):
    def hostile(completion):
        if completion == "print":
            print("x" * 3_000_000)
        elif completion == "hold":
            __import__("re").match("(a+)+b", "a" * 60)
        return 1.0

    scores = runner_of(hostile, timeout=1.5, workers=1).score(rollout(["print", "hold"], ["c", "d"]))
    assert scores.rewards_S.isnan().tolist() == [False, True, False, False]
    assert scores.counts["rewards/hostile/timeouts"] == 1
    assert len(capfd.readouterr().out) == 3_000_001


# Names.


LONG = "a" * 5000
ODD_NAMES = ["a\0b", "a\0b.py:f", "a\0b:f", "math(\0)", "math(strict={{}})", "x.py:f(a={{}})", "~nosuch/x.py:f"]
ODD_NAMES += [
    f"math(a={'[' * 500}{']' * 500})",
    f"{LONG}.py:f",
    LONG,
    "..x:f",
    ":f",
    "x.py:",
    "",
    "\ud800.py:f",
]


@each("spec", ODD_NAMES, ids=range(len(ODD_NAMES)))
def test_odd_names_are_refused(spec):
    with pytest.raises(RewardError) as raised:
        resolve_reward(spec)
    assert len(str(raised.value)) < 12_000


def test_a_file_that_exits_when_it_is_loaded_is_refused(tmp_path, monkeypatch):
    (tmp_path / "exits.py").write_text("raise SystemExit(0)\n")
    monkeypatch.chdir(tmp_path)
    for spec in ("exits.py:f", "exits:f"):
        with pytest.raises(RewardError, match="failed to load: SystemExit: 0"):
            resolve_reward(spec)


def test_caches_of_imports_can_be_invalidated_after_a_file_was_loaded(tmp_path):
    """As transformers does for a model with code of its own."""
    (tmp_path / "mine.py").write_text("def f(): return 1\n")
    assert load_function(f"{tmp_path}/mine.py:f", what="reward")() == 1
    importlib.invalidate_caches()
    assert os.name


def test_the_home_of_an_unknown_user_is_no_reward_model():
    with pytest.raises(CohortError, match="no model folder ~nosuch/x"):
        resolve_reward("~nosuch/x")
