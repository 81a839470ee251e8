"""Where and when reward functions are called, and what becomes of calls that fail."""

import asyncio
import logging
import math
import re
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
    assert scores.extras == {"answer": ["A", "BB"], "answer/batch": [1, 1], "place": [0, 1]}
    assert scores.logged == {"letters": [1, 2]}


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

    @reward(isolated=False, timeout=3.0)
    def never(completion): ...

    def plain(completion): ...

    functions = (always, never, plain, picky_async)
    for settings, elsewhere in (
        ({}, [True, False, False, True]),
        ({"workers": 1}, [True, False, True, True]),
        ({"timeout": 1.0}, [True, False, True, True]),
    ):
        runner = runner_of(*functions, **settings)
        assert [runner.runs_elsewhere(function) for function in runner.functions] == elsewhere
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
    scoring.take(0, 1, groups[0].completions[1])
    assert begun["sample"].wait(10)
    assert not begun["group"].is_set()
    scoring.take(0, 0, groups[0].completions[0])
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
        (picky, "given", "gave ValueError: no tests", 0),
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
        runner_of(picky, length).score(rollout(["raise", "raise"]))


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
