"""Where and when reward functions are called, and what happens when a call fails."""

import asyncio
import logging
import math
import os
import re
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from cohort import reward
from cohort.errors import RewardError
from cohort.rewards import TrainerState
from cohort.types import Episode, Group
from tests.rewards.conftest import completion, prompt, rollout
from tests.test_workers import alive

length = lambda completion, **_: float(len(completion))  # sent to workers by value: they need not import this module


@pytest.fixture
def picky():
    """Fails on some texts, in each way that a call can fail."""

    def picky(completion, **_):
        match completion:
            case "raise":
                raise KeyError("gold")
            case "nan":
                return math.nan
            case "slow":
                time.sleep(60)
            case "die":
                os._exit(4)
            case "exit":
                sys.exit(3)
            case "exception":
                return ValueError("no tests")
            case "mute":
                raise type("MuteError", (Exception,), {"__str__": lambda error: 1 / 0})
        return float(len(completion))

    return picky


# Where and when.


def test_rewards_do_not_depend_on_where_functions_run(runner_of):
    @reward(per="group")
    def rank(completions, log_extra, **_):
        log_extra("rank", [sorted(completions).index(c) for c in completions])
        return [len(completions)] * len(completions)

    def batch(completions, answer, **_):
        return [float(a) for a in answer]

    async def length_async(completion):
        return len(completion)

    groups = rollout(["a", "bb", "c"], ["d", "e", "ffff"])
    for settings in ({}, {"workers": 2}):
        scores = runner_of(length, rank, batch, length_async, weights=[1, 0.5, 2, 0], **settings).score(groups)
        assert scores.rewards_S.tolist() == [2.5, 3.5, 2.5, 4.5, 4.5, 7.5]
        assert scores.extras == {"rank": [0, 1, 2, 0, 1, 2]}


def test_plain_functions_run_in_workers_if_asked_or_if_they_must_be_stoppable(runner_of):
    @reward(isolated=True, timeout=9.0)
    def always(completion): ...

    @reward(isolated=False)
    def never(completion): ...

    def plain(completion): ...

    async def judge(completion): ...

    for settings, in_background in (
        ({}, [True, False, False, True]),
        ({"workers": 1}, [True, False, True, True]),
        ({"timeout": 1.0}, [True, False, True, True]),
    ):
        runner = runner_of(always, never, plain, judge, **settings)
        assert [function.in_background for function in runner.functions] == in_background
        assert [function.timeout for function in runner.functions] == [9.0] + [settings.get("timeout")] * 3
    assert "plain x 1 (per sample, in " in runner.describe()
    assert "never x 1 (per sample, here, after sampling)" in runner.describe()


@pytest.mark.parametrize("limit", [64, 3])
def test_async_calls_run_together_up_to_the_limit(runner_of, limit):
    running, most = 0, 0

    async def judge(completion, **_):
        nonlocal running, most
        running += 1
        most = max(most, running)
        while most < limit:  # waits for the others: calls one after another would never end
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.001)
        running -= 1
        return 1.0

    scores = runner_of(judge, timeout=20.0, max_concurrent=limit).score(rollout(*[["a"] * 8] * 8))
    assert scores.rewards_S.tolist() == [1.0] * 64
    assert most == limit


def test_scoring_begins_when_a_completion_ends(runner_of):
    begun = {name: threading.Event() for name in ("sample", "group")}
    scored, called = [], []

    async def sample(completion, **_):
        scored.append(completion)
        begun["sample"].set()
        return 1.0

    @reward(per="group")
    async def group(completions, **_):
        begun["group"].set()
        return [1.0] * len(completions)

    def here(completion, **_):
        called.append(completion)
        return 1.0

    groups = rollout(["a", "bb"], ["c", "d"])
    scoring = runner_of(sample, group, here).begin([g.prompt for g in groups], 2)
    scoring.on_completion(0, 1, groups[0].completions[1])
    assert begun["sample"].wait(10)
    assert not begun["group"].is_set()
    scoring.on_completion(0, 0, groups[0].completions[0])
    assert begun["group"].wait(10)
    assert called == []  # a plain function would delay the sampler
    scores = scoring.finish(groups)
    assert scores.rewards_S.tolist() == [3.0] * 4
    assert called == sorted(scored) == ["a", "bb", "c", "d"]


def test_unfinished_calls_are_cancelled_when_something_else_fails(runner_of, tmp_path):
    def slow(completion, **_):
        (tmp_path / f"{completion}-{os.getpid()}").touch()
        time.sleep(60)

    cancelled = threading.Event()

    async def slow_async(completion, **_):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    runner = runner_of(slow, slow_async, workers=1)
    groups = rollout(["a", "bb"])

    def started(count):
        end = time.monotonic() + 60
        while len(files := list(tmp_path.iterdir())) < count:
            assert time.monotonic() < end
            time.sleep(0.01)
        return files

    def interrupted():
        with runner.begin([group.prompt for group in groups], 2) as scoring:
            scoring.on_completion(0, 0, groups[0].completions[0])
            started(1)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    (file,) = started(1)
    assert cancelled.wait(10)
    assert not alive(int(file.name.partition("-")[2]))
    runner.begin([groups[0].prompt], 2).on_completion(0, 1, groups[0].completions[1])  # starts a new worker
    started(2)


# What fails.


@pytest.mark.parametrize("where", ["here", "worker", "async", "awaitable"])
def test_a_completion_that_a_function_fails_on_is_unscored(runner_of, caplog, picky, where):
    reasons = {
        "raise": r'raise KeyError\("gold"\)',
        "nan": "returned nan: expected a finite number",
        "exception": "returned ValueError: no tests",
        "mute": "MuteError",
        "exit": "SystemExit: 3",
    }
    if where in ("worker", "async"):
        reasons["slow"] = "took more than 1 s"
    if where == "worker":
        reasons["die"] = r"lost its worker process \(exit code 4\)"

    async def picky_async(completion, **_):
        if completion == "slow":
            await asyncio.sleep(60)
        return picky(completion)

    async_functions = {"async": picky_async, "awaitable": lambda completion: picky_async(completion)}
    function = async_functions.get(where, picky)
    settings = {"timeout": 1.0, "workers": 1} if where in ("worker", "async") else {}
    groups = rollout(["a", *reasons], ["bb", "c"])
    other = reward(isolated=False)(lambda completion: float(len(completion)))
    with caplog.at_level(logging.WARNING, "cohort.rewards"):
        scores = runner_of(function, other, **settings).score(groups)
    failed = range(1, 1 + len(reasons))
    assert [s for s, unscored in enumerate(scores.rewards_S.isnan()) if unscored] == list(failed)
    assert scores.by_function_SK[failed].isnan().all()  # the other function's too: a sum needs all of its terms
    assert scores.rewards_S[[0, -2, -1]].tolist() == [2, 4, 2]
    assert list(scores.errors) == list(failed)
    for reason, error in zip(reasons.values(), scores.errors.values(), strict=True):
        assert re.search(reason, error)
    name = scores.names[0]
    assert scores.counts[f"rewards/{name}/failed"] == len(reasons)
    assert scores.counts[f"rewards/{name}/timeouts"] == ("slow" in reasons)
    assert f"{name} failed on {len(reasons)} of {3 + len(reasons)} completions" in caplog.text


def test_failures_that_stop_the_run(runner_of, picky):
    with pytest.raises(RewardError, match=r"picky failed on 1 of 2 completions; the first: returned nan"):
        runner_of(picky, on_error="stop").score(rollout(["a", "nan"]))
    with pytest.raises(RewardError, match=r"picky failed on 2 of 2 completions; the first: raised KeyError: 'gold'"):
        runner_of(picky, length).score(rollout(["raise"], ["raise"]))
    with pytest.raises(RewardError, match="must return numbers or None; result 0 is {}"):  # never only a failure
        runner_of(lambda completion: {}, workers=1).score(rollout(["a", "bb"]))
    runner = runner_of(picky)  # a single prompt that fails stops the run the third time in a row
    for texts in (["raise"], ["raise"], ["a", "raise"], ["raise"], ["raise"]):
        assert runner.score(rollout(texts)).rewards_S[-1].isnan()
    with pytest.raises(RewardError, match="failed on 1 of 1"):
        runner.score(rollout(["raise"]))


def test_failed_calls_are_made_again(runner_of):
    tries = {}

    def flaky(completion, **_):
        tries[completion] = tries.get(completion, 0) + 1
        if completion == "bb" and tries["bb"] == 1:
            raise OSError("busy")
        return {2: math.nan, 3: ValueError("not yet")}.get(tries[completion], 1.0)

    async def flaky_async(completion, **_):
        return flaky(completion)

    for function in (flaky, flaky_async):
        for retries in (3, 2):
            tries.clear()
            scores = runner_of(function, retries=retries).score(rollout(["a", "bb"]))
            assert scores.rewards_S.isnan().tolist() == [False, retries == 2]
            assert tries == {"a": 1, "bb": retries + 1}


def test_async_functions_that_block_the_loop_or_ignore_their_cancellation(runner_of):
    release = threading.Event()

    async def blocking(completion, **_):
        release.wait(30)
        return 1.0

    async def stubborn(completion, **_):
        while completion == "bb" and not release.is_set():
            try:
                await asyncio.sleep(0.05)
            except BaseException:
                continue
        return 1.0

    try:
        scores = runner_of(stubborn, timeout=0.3).score(rollout(["a", "bb"]))
        assert scores.rewards_S.isnan().tolist() == [False, True]
        assert scores.counts["rewards/stubborn/timeouts"] == 1
        with pytest.raises(RewardError, match=r"\(blocking\) did nothing for 0.3 s: one of them blocks"):
            runner_of(blocking, timeout=0.3).score(rollout(["a", "bb"]))
    finally:
        release.set()


# The cache.


def test_the_cache_depends_on_the_whole_row_and_not_on_the_progress_of_the_run(runner_of):
    def first(completion, grid, **rest):
        assert "trainer_state" not in rest
        return float(grid[2500])

    grids = [np.zeros(5000), np.eye(1, 5000, 2500)[0]]  # numpy prints both in the same way
    groups = [Group(prompt(grid=grid), (completion("a"),)) for grid in grids]
    runner = runner_of(first, cache=True)
    for _ in range(2):
        scores = runner.score(groups)
        assert scores.rewards_S.tolist() == [0, 1]
    assert scores.counts["seconds/reward/first"] == 0


def test_episodes_are_not_cached(runner_of):
    runner = runner_of(lambda completion, environment_reward: environment_reward, cache=True)
    for number in (1.0, 2.0):
        acted = replace(completion("a"), episode=Episode((), number))
        assert runner.score([Group(prompt(), (acted,))]).rewards_S.tolist() == [number]


def test_only_results_of_single_completions_are_cached(runner_of):
    calls = []

    def sample(completion, answer, log_extra):
        calls.append((completion, answer))
        log_extra("seen", completion)
        return math.nan if completion == "nan" else len(completion)

    def uses_the_state(completion, trainer_state):
        calls.append("state")
        return trainer_state.global_step

    def batch(completions, **_):
        calls.append("batch")
        return [0] * len(completions)

    runner = runner_of(sample, uses_the_state, batch, cache=True)
    for step in (1, 2):
        scores = runner.score(rollout(["a", "a"], ["a", "nan"]), TrainerState(step))
        assert scores.by_function_SK[:3].tolist() == [[1, step, 0]] * 3
        assert scores.extras == {"seen": ["a", "a", "a", "nan"]}
        assert list(scores.errors) == [3]
    # Results are cached when the rollout ends, so both equal completions of the first one are scored. Failures never are.
    first, second = [("a", "0"), ("a", "0"), ("a", "1"), ("nan", "1")], [("nan", "1")]
    assert [call for call in calls if isinstance(call, tuple)] == first + second
    assert (calls.count("state"), calls.count("batch")) == (8, 2)
