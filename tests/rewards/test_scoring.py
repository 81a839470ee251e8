"""Where and when reward functions are called, and what becomes of calls that fail."""

import asyncio
import logging
import math
import os
import re
import sys
import threading
import time
from functools import partial

import pytest
import torch

from cohort import reward
from cohort.config import RewardConfig
from cohort.errors import RewardError
from cohort.rewards import RewardRunner, TrainerState
from cohort.types import Completion, FinishReason, Group, Prompt
from tests.test_workers import alive


def ended(text, reason=FinishReason.EOS):
    return Completion(tuple(range(len(text))) or (0,), (0.0,) * max(1, len(text)), reason, text, 0)


def prompt(uid=0, **columns):
    return Prompt(uid, uid, (uid,), f"{uid}?", f"{uid}?", columns, prefill="<think>")


def rollout(*texts):
    return [Group(prompt(uid, answer=str(uid)), tuple(map(ended, group))) for uid, group in enumerate(texts)]


@pytest.fixture
def runner_of():
    made = []

    def make(*functions, weights=None, per_token=False, **settings):
        made.append(RewardRunner(functions, weights, RewardConfig(**settings), per_token=per_token))
        return made[-1]

    yield make
    for runner in made:
        runner.close()


def length(completion, **_):
    return float(len(completion))


def picky(completion, **_):
    """Fails on one text in each way that a call can."""
    match completion:
        case "raise":
            raise KeyError("gold")
        case "nan":
            return math.nan
        case "slow":
            time.sleep(60)
        case "die":
            import os

            os._exit(3)
        case "given":
            return ValueError("no tests")
    return float(len(completion))


async def picky_async(completion, **_):
    if completion == "slow":
        await asyncio.sleep(60)
    return picky(completion)


# What a call sees.


def test_samples_groups_and_batches():
    seen = []

    def sample(completion, answer, finish_reason, prefill, prompt, completion_ids):
        seen.append(("sample", completion, answer, finish_reason, prefill, prompt, len(completion_ids)))
        return 1

    @reward(per="group")
    def group(completions, answer, prompt, **_):
        seen.append(("group", completions, answer, prompt))
        return range(len(completions))

    def batch(completions, answer, prefills, **_):
        seen.append(("batch", completions, answer, prefills))
        return [10] * len(completions)

    scores = RewardRunner([sample, group, batch]).score(rollout(["a", "bb"], ["ccc", "d"]))
    assert scores.by_function_SK.tolist() == [[1, 0, 10], [1, 1, 10], [1, 0, 10], [1, 1, 10]]
    assert seen == [
        ("sample", "a", "0", "eos", "<think>", "0?", 1),
        ("sample", "bb", "0", "eos", "<think>", "0?", 2),
        ("sample", "ccc", "1", "eos", "<think>", "1?", 3),
        ("sample", "d", "1", "eos", "<think>", "1?", 1),
        ("group", ["a", "bb"], "0", "0?"),
        ("group", ["ccc", "d"], "1", "1?"),
        ("batch", ["a", "bb", "ccc", "d"], ["0", "0", "1", "1"], ["<think>"] * 4),
    ]


def test_objects_partials_and_async_ones():
    class Judge:
        async def __call__(self, completion, bonus=0, **_):
            return len(completion) + bonus

    @reward(per="batch")
    async def batch(completions, **_):
        return [len(c) for c in completions]

    scores = RewardRunner([Judge(), partial(Judge(), bonus=5), batch, lambda **k: batch(**k)]).score(
        rollout(["a", "bb"])
    )
    assert scores.by_function_SK.tolist() == [[1, 6, 1, 1], [2, 7, 2, 2]]
    assert scores.names == ("Judge", "Judge_2", "batch", "<lambda>")


def test_rewards_are_kept_in_double_precision(runner_of):
    scores = runner_of(lambda completion: 0.1, lambda completion: 1e-12, weights=[0.3, 1]).score(rollout(["a", "b"]))
    assert scores.by_function_SK.tolist() == [[0.1, 1e-12]] * 2
    assert scores.rewards_S.tolist() == [0.3 * 0.1 + 1e-12] * 2
    tokens = runner_of(lambda completion, completion_ids: [0.1] * len(completion_ids), per_token=True)
    assert tokens.score(rollout(["aaa"])).token_rewards_N.tolist() == [0.1] * 3


def test_completions_that_failed_are_shown_to_nobody(runner_of):
    groups = [Group(prompt(), (ended("a"), ended("bb", FinishReason.ERROR), ended("ccc")))]

    @reward(per="group")
    def group(completions, **_):
        assert completions == ["a", "ccc"]
        return [1, 2]

    scores = runner_of(group, length).score(groups)
    assert torch.equal(scores.by_function_SK.isnan(), torch.tensor([[False] * 2, [True] * 2, [False] * 2]))
    assert scores.rewards_S[[0, 2]].tolist() == [2, 5]
    assert scores.errors == {}


def test_a_rollout_without_a_usable_completion_is_scored_by_nobody(runner_of):
    scores = runner_of(length).score([Group(prompt(), (ended("a", FinishReason.ERROR),) * 2)])
    assert scores.rewards_S.isnan().all()


def test_trainer_state_and_logs():
    state = TrainerState(global_step=7, max_steps=9, epoch=0.5)

    def sample(completion, trainer_state, log_extra, log_metric):
        log_extra("answer", completion.upper())
        log_metric("letters", len(completion))
        return trainer_state.global_step

    def batch(completions, log_extra, **_):
        log_extra("answer", [1] * len(completions))
        log_extra("place", list(range(len(completions))))
        return [0] * len(completions)

    scores = RewardRunner([sample, batch]).score(rollout(["a", "bb"]), state)
    assert scores.by_function_SK[:, 0].tolist() == [7, 7]
    assert scores.extras == {"answer/sample": ["A", "BB"], "answer/batch": [1, 1], "place/batch": [0, 1]}
    assert scores.logged == {"letters": [1, 2]}


def test_whose_column_it_is_does_not_depend_on_who_logs_it():
    def first(completion, log_extra):
        if completion == "a":
            log_extra("answer", 1)
        return 0

    def second(completion, log_extra):
        log_extra("answer", 2)
        return 0

    runner = RewardRunner([first, second, length])
    assert runner.score(rollout(["b"])).extras == {"answer/second": [2]}
    assert runner.score(rollout(["a"])).extras == {"answer/first": [1], "answer/second": [2]}
    assert RewardRunner([first, length]).score(rollout(["a"])).extras == {"answer": [1]}


def test_a_logged_column_of_another_length_is_refused():
    def batch(completions, log_extra):
        log_extra("answer", [1])
        return [0] * len(completions)

    with pytest.raises(RewardError, match=r"batch must log one value per completion as 'answer': 2, got \[1\]"):
        RewardRunner([batch]).score(rollout(["a", "bb"]))


# Where and when.


@pytest.mark.parametrize("where", [{}, {"workers": 2}, {"timeout": 30.0}])
def test_the_rewards_do_not_depend_on_where_they_are_computed(runner_of, where):
    @reward(per="group")
    def rank(completions, log_extra, **_):
        log_extra("rank", [sorted(completions).index(c) for c in completions])
        return [len(completions)] * len(completions)

    def batch(completions, answer, **_):
        return [float(a) for a in answer]

    groups = rollout(["a", "bb", "c"], ["d", "e", "ffff"])
    scores = runner_of(length, rank, batch, picky_async, weights=[1, 0.5, 2, 0], **where).score(groups)
    assert scores.rewards_S.tolist() == [2.5, 3.5, 2.5, 4.5, 4.5, 7.5]
    assert scores.extras == {"rank": [0, 1, 2, 0, 1, 2]}


def test_plain_functions_are_called_in_workers_when_asked_or_when_they_must_be_stoppable(runner_of):
    @reward(isolated=True)
    def always(completion): ...

    @reward(isolated=False)
    def never(completion): ...

    def plain(completion): ...

    functions = (always, never, plain, picky_async)
    for settings, elsewhere in (
        ({}, [True, False, False, True]),
        ({"workers": 1}, [True, False, True, True]),
        ({"timeout": 1.0}, [True, False, True, True]),
    ):
        runner = runner_of(*functions, **settings)
        assert [function.in_background for function in runner.functions] == elsewhere
    assert "plain x 1 (per sample, in " in runner.describe()
    assert "never x 1 (per sample, here, after sampling)" in runner.describe()


def test_async_calls_run_together(runner_of):
    under_way, most = 0, 0

    async def judge(completion, **_):
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        while most < 64:  # each waits for all the others: one after another would never end
            await asyncio.sleep(0.001)
        under_way -= 1
        return 1.0

    scores = runner_of(judge, timeout=20.0).score(rollout(*[["a"] * 8] * 8))
    assert scores.rewards_S.tolist() == [1.0] * 64


def test_no_more_async_calls_at_a_time_than_allowed(runner_of):
    under_way, most = 0, 0

    async def judge(completion, **_):
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.01)
        under_way -= 1
        return 1.0

    runner_of(judge, max_concurrent=3).score(rollout(["a"] * 8))
    assert most == 3


def test_scoring_begins_when_a_completion_ends(runner_of):
    begun = {name: threading.Event() for name in ("sample", "group")}

    async def sample(completion, **_):
        begun["sample"].set()
        return 1.0

    @reward(per="group")
    async def group(completions, **_):
        begun["group"].set()
        return [1.0] * len(completions)

    called = []

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
    assert called == []  # a plain function would slow the sampler: it waits
    scores = scoring.finish(groups)
    assert scores.rewards_S.tolist() == [3.0] * 4
    assert called == ["a", "bb", "c", "d"]


def test_a_notebooks_event_loop_is_left_alone(runner_of):
    async def notebook():
        return runner_of(picky_async, lambda completion: picky_async(completion)).score(rollout(["a", "bb"]))

    assert asyncio.run(notebook()).rewards_S.tolist() == [2, 4]


# What fails.


@pytest.mark.parametrize(
    ("function", "text", "why", "timeouts"),
    [
        (picky, "raise", r'raise KeyError\("gold"\)', 0),
        (picky, "nan", "returned nan: expected a finite number", 0),
        (picky, "given", "returned ValueError: no tests", 0),
        (picky, "slow", "took more than 1 s", 1),
        (picky, "die", r"its worker process died \(exit code 3\)", 0),
        (picky_async, "raise", "KeyError: 'gold'", 0),
        (picky_async, "slow", "took more than 1 s", 1),
    ],
)
def test_a_completion_that_a_function_fails_on_is_unscored(runner_of, caplog, function, text, why, timeouts):
    groups = rollout(["a", text], ["bb", "c"])
    with caplog.at_level(logging.WARNING, "cohort.rewards"):
        scores = runner_of(function, length, timeout=1.0).score(groups)
    assert scores.rewards_S.isnan().tolist() == [False, True, False, False]
    assert scores.by_function_SK[1].isnan().all()  # the other function's reward would be a sum without a term
    assert scores.rewards_S[[0, 2, 3]].tolist() == [2, 4, 2]
    assert list(scores.errors) == [1]
    assert re.search(why, scores.errors[1])
    name = function.__name__
    assert scores.counts[f"rewards/{name}/failed"] == 1
    assert scores.counts[f"rewards/{name}/timeouts"] == timeouts
    assert f"{name} failed on 1 of 4 completions" in caplog.text


def test_a_traceback_is_kept(runner_of):
    for settings in ({}, {"workers": 1}):
        scores = runner_of(picky, **settings).score(rollout(["a", "raise"]))
        assert 'raise KeyError("gold")' in scores.errors[1]


def test_the_settings_can_stop_the_run(runner_of):
    with pytest.raises(RewardError, match=r"picky failed on 1 of 2 completions; the first: returned nan"):
        runner_of(picky, on_error="stop").score(rollout(["a", "nan"]))


def test_a_function_that_fails_on_everything_stops_the_run(runner_of):
    with pytest.raises(RewardError, match=r"picky failed on 2 of 2 completions; the first: raised KeyError: 'gold'"):
        runner_of(picky, length).score(rollout(["raise"], ["raise"]))


def test_a_broken_contract_is_no_failure_of_a_sample(runner_of):
    with pytest.raises(RewardError, match="must return numbers or None; result 0 is 'good'"):
        runner_of(lambda completion: "good").score(rollout(["a", "bb"]))
    with pytest.raises(RewardError, match="must return numbers or None"):
        runner_of(lambda completion: {}, workers=1).score(rollout(["a", "bb"]))


def test_calls_that_failed_are_made_again(runner_of):
    tries = {}

    def flaky(completion, **_):
        tries[completion] = tries.get(completion, 0) + 1
        if completion == "bb" and tries[completion] < 3:
            raise OSError("busy")
        return 1.0

    async def flaky_async(completion, **_):
        return flaky(completion)

    for function in (flaky, flaky_async):
        tries.clear()
        assert runner_of(function, retries=2).score(rollout(["a", "bb"])).rewards_S.tolist() == [1, 1]
        assert tries == {"a": 1, "bb": 3}
        tries.clear()
        assert runner_of(function, retries=1).score(rollout(["a", "bb"])).rewards_S.isnan().tolist() == [False, True]


def test_an_async_function_that_blocks_is_found_out(runner_of):
    release = threading.Event()

    async def blocking(completion, **_):
        release.wait(30)
        return 1.0

    try:
        with pytest.raises(RewardError, match=r"\(blocking\) did nothing for 0.3 s: one of them blocks"):
            runner_of(blocking, timeout=0.3).score(rollout(["a", "bb"]))
    finally:
        release.set()


def test_an_async_function_that_swallows_its_cancellation_is_left_behind(runner_of):
    released = threading.Event()

    async def stubborn(completion, **_):
        if completion == "bb":
            while not released.is_set():
                try:
                    await asyncio.sleep(0.05)
                except BaseException:
                    continue
        return 1.0

    try:
        scores = runner_of(stubborn, timeout=0.3).score(rollout(["a", "bb"]))
        assert scores.rewards_S.isnan().tolist() == [False, True]
        assert scores.counts["rewards/stubborn/timeouts"] == 1
    finally:
        released.set()


@pytest.mark.parametrize("settings", [{}, {"workers": 1}])
def test_a_function_that_would_end_the_program_fails(runner_of, settings):
    def leaves(completion, **_):
        return sys.exit(3) if completion == "bb" else 1.0

    async def leaves_async(completion, **_):
        return leaves(completion)

    for function in (leaves, leaves_async, lambda completion: leaves_async(completion)):
        for _ in range(2):  # and the loop is there still
            scores = runner_of(function, **settings).score(rollout(["a", "bb"]))
            assert scores.rewards_S.isnan().tolist() == [False, True]
            assert "SystemExit" in scores.errors[1] or "exit code 3" in scores.errors[1]


def test_a_function_without_weight_scores_nothing(runner_of):
    def sometimes(completion):
        return None if completion == "bb" else 1.0

    scores = runner_of(sometimes, length, weights=[1, 0]).score(rollout(["a", "bb"]))
    assert scores.rewards_S[0] == 1
    assert scores.rewards_S[1].isnan()  # not the 0 that the other's 2.0 times 0 would be
    assert scores.by_function_SK[:, 1].tolist() == [1, 2]
    assert runner_of(length, weights=[0]).score(rollout(["a", "bb"])).rewards_S.tolist() == [0, 0]


def test_numbers_that_are_none_are_asked_for_again(runner_of):
    tries = []

    def twice(completion):
        tries.append(completion)
        return {1: math.nan, 2: ValueError("not yet")}.get(len(tries), 1.0)

    assert runner_of(twice, retries=2).score(rollout(["a"])).rewards_S.tolist() == [1]
    assert tries == ["a"] * 3


def test_what_is_under_way_is_called_off_when_something_else_fails(runner_of, tmp_path):
    def slow(completion, answer):
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

    def interrupted():
        with runner.begin([group.prompt for group in groups], 2) as scoring:
            scoring.on_completion(0, 0, groups[0].completions[0])
            while not list(tmp_path.iterdir()):
                time.sleep(0.01)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    (begun,) = tmp_path.iterdir()
    assert cancelled.wait(10)
    assert not alive(int(begun.name.partition("-")[2]))
    assert (
        runner._caller.submit(runner.functions[0], {"completion": "c", "answer": ""}) is not None
    )  # a worker starts afresh
    end = time.monotonic() + 60
    while len(list(tmp_path.iterdir())) < 2:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_function_may_fail_on_a_single_prompt(runner_of):
    runner = runner_of(picky)
    for _ in range(2):
        assert runner.score(rollout(["raise", "raise"])).rewards_S.isnan().all()
    runner.score(rollout(["a", "raise"]))
    for _ in range(2):
        runner.score(rollout(["raise", "raise"]))
    with pytest.raises(RewardError, match="failed on 2 of 2"):  # the third time in a row
        runner.score(rollout(["raise", "raise"]))


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (torch.tensor(1.0), "must return a list of numbers, got Tensor"),
        ({1.0}, "must return a list of numbers, got set"),
        (b"ab", "must return a list of numbers, got bytes"),
        ((n for n in "ab"), "must return a list of numbers, got generator"),
        ([10**400, 1], "must return numbers or None; result 0"),
    ],
)
def test_results_that_are_no_list_of_numbers(runner_of, result, message):
    with pytest.raises(RewardError, match=message):
        runner_of(lambda completions: result).score(rollout(["a", "bb"]))


def test_an_exception_without_text_is_named(runner_of):
    class MuteError(Exception):
        def __str__(self):
            raise RuntimeError

    def mute(completion):
        if completion == "bb":
            raise MuteError
        return 1.0

    assert "MuteError" in runner_of(mute).score(rollout(["a", "bb"])).errors[1]


def test_a_function_that_takes_messages_for_text_is_told(runner_of):
    def strips(completions):
        return [float(bool(text.strip())) for text in completions]

    def strip(completion):
        return float(bool(completion.strip()))

    chat = Prompt(0, 0, (0,), "?", [{"role": "user", "content": "?"}], {})
    with pytest.raises(
        RewardError, match=r"no attribute 'strip'.*; completions of conversations are lists of messages"
    ):
        runner_of(strips).dry_run([chat])
    runner_of(strip).dry_run([chat])  # to functions per sample a completion is its text


def test_messages_are_each_calls_own(runner_of):
    seen = []

    def appends(prompt, completion):
        seen.append(len(prompt))
        prompt.append({"role": "assistant", "content": completion})
        return 1.0

    chat = Prompt(0, 0, (0,), "?", [{"role": "user", "content": "?"}], {})
    runner_of(appends).score([Group(chat, (ended("a"), ended("bb")))])
    assert seen == [1, 1]


def test_a_mark_on_a_partial_holds(runner_of):
    def ranks(completions, k):
        return [k] * len(completions)

    marked = reward(per="group", timeout=9.0)(partial(ranks, k=2))
    runner = runner_of(marked, partial(marked))
    assert [(f.per, f.timeout) for f in runner.functions] == [("group", 9.0)] * 2
    assert runner.score(rollout(["a"], ["b"])).by_function_SK.tolist() == [[2, 2], [2, 2]]


def test_marks_that_cannot_be(runner_of):
    class Judge:
        def score(self, completion):
            return 1.0

    async def judge(completion): ...

    with pytest.raises(RewardError, match="isolated=True is for plain functions"):
        reward(isolated=True)(judge)
    with pytest.raises(RewardError, match="cannot be stopped: remove its timeout"):
        reward(isolated=False, timeout=1.0)(length)
    with pytest.raises(RewardError, match="cannot attach options to <bound method"):
        reward(per="sample")(Judge().score)
    with pytest.raises(RewardError, match="per must be 'sample', 'group' or 'batch', got 'token'"):
        reward(per="token")
    with pytest.raises(RewardError, match="timeout must be above 0"):
        reward(timeout=0)


def test_the_cache_knows_the_whole_row_and_not_the_run(runner_of):
    import numpy as np

    def first(completion, grid, **rest):
        assert "trainer_state" not in rest
        return float(grid[2500])

    grids = [np.zeros(5000), np.ones(5000)]  # whose printed forms are equal
    groups = [Group(Prompt(0, 0, (0,), "?", "?", {"grid": grid}), (ended("a"),)) for grid in grids]
    runner = runner_of(first, cache=True)
    for _ in range(2):
        scores = runner.score(groups)
        assert scores.rewards_S.tolist() == [0, 1]
    assert scores.counts["seconds/reward/first"] == 0


def test_what_was_scored_before_is_not_scored_again(runner_of):
    calls = []

    def sample(completion, answer, log_extra):
        calls.append((completion, answer))
        log_extra("seen", completion)
        return len(completion)

    def of_the_run(completion, trainer_state):
        calls.append("run")
        return trainer_state.global_step

    def batch(completions, **_):
        calls.append("batch")
        return [0] * len(completions)

    runner = runner_of(sample, of_the_run, batch, cache=True)
    for step in (1, 2):
        scores = runner.score(rollout(["a", "a"], ["a", "bb"]), TrainerState(step))
        assert scores.by_function_SK.tolist() == [[1, step, 0], [1, step, 0], [1, step, 0], [2, step, 0]]
        assert scores.extras == {"seen": ["a", "a", "a", "bb"]}
    # The first rollout's two equal completions are both scored: what is kept is kept at its end.
    assert [call for call in calls if isinstance(call, tuple)] == [("a", "0"), ("a", "0"), ("a", "1"), ("bb", "1")]
    assert calls.count("run") == 8
    assert calls.count("batch") == 2


def test_failures_are_not_kept(runner_of):
    runner = runner_of(picky, cache=True)
    for _ in range(2):
        assert list(runner.score(rollout(["a", "nan"])).errors) == [1]


def test_rewards_per_token_of_a_failed_completion(runner_of):
    def steps(completion, completion_ids, **_):
        return ValueError("no steps") if completion == "bb" else [1.0] * len(completion_ids)

    scores = runner_of(steps, per_token=True).score(rollout(["aaa", "bb"]))
    assert scores.token_rewards_N.tolist()[:3] == [1, 1, 1]
    assert scores.token_rewards_N[3:].isnan().all()
    assert scores.rewards_S[0] == 3


def test_the_dry_run_knows_no_unscored(runner_of):
    def sometimes(completion, answer, **_):
        return math.nan if answer == "1" else 1.0

    with pytest.raises(RewardError, match=r"sometimes failed on 2 of 4 completions.*tried on 2 rows"):
        runner_of(sometimes).dry_run([prompt(0, answer="0"), prompt(1, answer="1")])
    with pytest.raises(RewardError, match="needs the argument 'gold'; it can have: answer, prompt, prefill"):
        runner_of(lambda completion, gold: 1.0).dry_run([prompt(0, answer="0")])
