"""The reward contract: arguments, names, results, and every way to break it."""

import math
from functools import partial

import numpy as np
import pytest
import torch

from cohort.errors import RewardError
from cohort.rewards import RewardRunner, resolve_reward
from cohort.rewards.contract import TrainerState
from cohort.rewards.contract import call_arguments as arguments
from cohort.rewards.functions import unique_names
from cohort.rewards.mathematics import final_number, gsm8k
from cohort.types import Completion, FinishReason, Group, Prompt


def completion(text, ids=(3, 1)):
    return Completion(ids, (0.0,) * len(ids), FinishReason.EOS, text, 0)


def groups():
    chat = [{"role": "user", "content": "2?"}]
    return [
        Group(
            Prompt(0, 0, (5,), "1?", "1?", {"prompt": "1?", "answer": "a", "n": 1}), (completion("x"), completion("y"))
        ),
        Group(Prompt(1, 9, (6,), "2?", chat, {"answer": "b", "n": 2}), (completion("z", (7,)), completion("w"))),
    ]


def test_arguments_are_one_entry_per_completion_in_group_order():
    state = TrainerState(global_step=3)
    chat = [{"role": "user", "content": "2?"}]
    assert arguments("batch", groups(), state) == {
        "prompts": ["1?", "1?", chat, chat],
        "completions": [
            "x",
            "y",
            [{"role": "assistant", "content": "z"}],
            [{"role": "assistant", "content": "w"}],
        ],
        "completion_ids": [[3, 1], [3, 1], [7], [3, 1]],
        "prompt": ["1?", "1?", None, None],
        "answer": ["a", "a", "b", "b"],
        "n": [1, 1, 2, 2],
        "finish_reasons": ["eos"] * 4,
        "prefills": [""] * 4,
        "trainer_state": state,
    }


def test_arguments_of_a_sample_and_of_a_group_are_the_rows_own():
    state, second = TrainerState(), groups()[1]
    rest = {"prompt": [{"role": "user", "content": "2?"}], "prefill": "", "answer": "b", "n": 2, "trainer_state": state}
    one = Group(second.prompt, second.completions[:1])
    assert arguments("sample", [one], state) == rest | {
        "completion": "z",
        "completion_ids": [7],
        "finish_reason": "eos",
    }
    assert arguments("group", [second], state) == rest | {
        "completions": ["z", "w"],
        "completion_ids": [[7], [3, 1]],
        "finish_reasons": ["eos", "eos"],
    }


def test_a_function_may_leave_out_what_it_does_not_use():
    def by_keyword(completions, n):
        return n

    def by_kwargs(completions, **columns):
        given = {"prompts", "completion_ids", "finish_reasons", "prefills", "trainer_state", "log_extra", "log_metric"}
        assert set(columns) == given | {"prompt", "answer", "n"}
        return [0] * len(completions)

    runner = RewardRunner([by_keyword, by_kwargs])
    assert runner.score(groups()).by_function_SK.tolist() == [[1, 0], [1, 0], [2, 0], [2, 0]]


def test_none_is_unscored_and_weights_weigh():
    def first(completions, **_):
        return [1, None, 3, None]

    def second(completions, **_):
        return [10, 20, None, None]

    scores = RewardRunner([first, second], [2.0, 0.5]).score(groups())
    assert scores.rewards_S.tolist()[:3] == [7.0, 10.0, 6.0]
    assert math.isnan(scores.rewards_S[3])
    assert scores.names == ("first", "second")


@pytest.mark.parametrize(
    "results",
    [
        [1, 2, 3, 4],
        (1.0, 2.0, 3.0, 4.0),
        np.array([1, 2, 3, 4]),
        torch.tensor([1.0, 2, 3, 4]),
        [True, 2, np.float32(3), 4],
    ],
)
def test_any_sequence_of_numbers_will_do(results):
    assert RewardRunner([lambda **_: results]).score(groups()).rewards_S.tolist() == [1, 2, 3, 4]


def needs_more(completions, ground_truth):
    return [0] * 4


def positional(completions, /):
    return [0] * 4


def broken(**_):
    raise KeyError("gold")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (needs_more, "needs_more needs the argument 'ground_truth'; it can have: prompt, answer, n, prompts"),
        (positional, "takes 'completions' by position"),
        (broken, "broken failed on 4 of 4 completions; the first: raised KeyError: 'gold'"),
        (lambda **_: [0, 1], "one reward per completion: 4, got 2"),
        (lambda **_: 1.0, "must return a list of numbers, got float"),
        (lambda **_: None, "must return a list of numbers, got NoneType"),
        (lambda **_: "abcd", "must return a list of numbers, got str"),
        (lambda **_: [0, 1, "2", 3], "result 2"),
        (lambda **_: [0, 1, [2], 3], "returned a list as result 2"),
        (lambda **_: [math.nan] * 4, "returned nan: expected a finite number, or None"),
    ],
)
def test_broken_functions_are_named(function, message):
    with pytest.raises(RewardError, match=message):
        RewardRunner([function]).score(groups())


def test_the_dry_run_says_what_it_tried():
    with pytest.raises(RewardError, match=r"raised KeyError.*tried on 2 rows with a made completion"):
        RewardRunner([broken]).dry_run([group.prompt for group in groups()])


def test_names_are_unique():
    class Judge:
        def __call__(self, **_):
            return []

    names = unique_names([gsm8k, Judge(), gsm8k, Judge(), partial(gsm8k, strict=True)])
    assert names == ["gsm8k", "Judge", "gsm8k_2", "Judge_2", "gsm8k_3"]


def test_runner_refuses_nonsense():
    with pytest.raises(RewardError, match="no reward function"):
        RewardRunner([])
    with pytest.raises(RewardError, match="must be callable"):
        RewardRunner([3])
    with pytest.raises(RewardError, match="2 numbers for 1"):
        RewardRunner([gsm8k], [1, 2])


def test_functions_by_name(tmp_path, monkeypatch):
    (tmp_path / "mine_reward.py").write_text("import helper_mod\ndef f(completions, **_):\n    return helper_mod.x\n")
    (tmp_path / "helper_mod.py").write_text("x = [1]\n")
    assert resolve_reward("gsm8k") is gsm8k
    assert resolve_reward("cohort.rewards.mathematics:gsm8k") is gsm8k
    assert resolve_reward(f"{tmp_path}/mine_reward.py:f")(completions=[]) == [1]
    (tmp_path / "mine_module.py").write_text("def g(**_): return [2]\n")
    monkeypatch.chdir(tmp_path)
    assert resolve_reward("mine_module:g")() == [2]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gsm9k", "unknown reward 'gsm9k' .did you mean 'gsm8k'.*: built in are math, reasoning_answer, gsm8k, "),
        ("nowhere.py:f", "no reward file nowhere.py"),
        ("no_such_module_x:f", "cannot import reward module"),
        ("cohort.rewards.mathematics:gsm9k", "has no function 'gsm9k'; it has: .*gsm8k"),
        ("cohort.rewards.builtin:BUILTIN_REWARDS", "has no function"),
    ],
)
def test_names_that_lead_nowhere(spec, message):
    with pytest.raises(RewardError, match=message):
        resolve_reward(spec)


def test_a_reward_file_that_fails_to_load(tmp_path):
    (tmp_path / "bad_reward.py").write_text("1/0\n")
    with pytest.raises(RewardError, match="failed to load: ZeroDivisionError"):
        resolve_reward(f"{tmp_path}/bad_reward.py:f")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 72", "72"),
        ("a\n####72", "72"),
        ("#### 1,234", "1234"),
        ("#### $1,234.50", "1234.50"),
        ("#### $ 5", "5"),
        ("#### -3", "-3"),
        ("#### -$3", "-3"),
        ("#### 5.", "5"),
        ("#### .5", ".5"),
        ("#### 5 apples", "5"),
        ("#### 1\n#### 2", "2"),
    ],
)
def test_final_numbers(text, number):
    from decimal import Decimal

    assert final_number(text) == Decimal(number)


@pytest.mark.parametrize("text", ["", "72", "####", "#### x 5", "### 5"])
def test_texts_without_a_final_number(text):
    assert final_number(text) is None


def test_gsm8k_compares_values_and_takes_conversations():
    assert gsm8k("#### 1,200.0", "#### 1200") == 1.0
    assert gsm8k([{"role": "assistant", "content": "#### 3"}], "#### 3") == 1.0
    assert gsm8k("3", "#### 3", prefill="#### ") == 1.0
    assert [gsm8k("#### 3", gold) for gold in ("no number", None)] == [None, None]


def test_an_exception_is_placed():
    with pytest.raises(RewardError, match=r"raised KeyError: 'gold' \(test_rewards.py, line \d+\)"):
        RewardRunner([broken]).score(groups())
