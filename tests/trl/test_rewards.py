"""TRL's reward functions over the built-in ones: called as TRL calls them, and in a run."""

from functools import partial

import cloudpickle
import pytest

from cohort.config import RewardConfig
from cohort.errors import RewardError
from cohort.rewards.contract import TrainerState, call_arguments
from cohort.rewards.functions import Function, unique_names
from cohort.trl import rewards
from cohort.types import Completion, FinishReason, Group, Prompt
from tests.conftest import each

TEXTS = [r"<think>3*4</think>\boxed{12}", "<think>3*4</think>The answer is 13.", "12"]
IDS = [[1] * 10, [2, 3] * 10, [4] * 30]
FUNCTIONS = {
    "accuracy_reward": (rewards.accuracy_reward, [1.0, 0.0, 0.0]),
    "reasoning_accuracy_reward": (rewards.reasoning_accuracy_reward, [1.0, 0.0, 0.0]),
    "think_format_reward": (rewards.think_format_reward, [1.0, 1.0, 0.0]),
    "soft_overlong_punishment_reward": (rewards.get_soft_overlong_punishment(24, 8), [0.0, -0.5, -1.0]),
    "repetition_penalty_reward": (rewards.get_repetition_penalty_reward(2), [-8 / 9, -17 / 19, -28 / 29]),
    "cosine_scaled_reward": (rewards.get_cosine_scaled_reward(max_len=20), [0.75, -0.5, -0.5]),
}


def turns(texts):
    return [[{"role": "assistant", "content": text}] for text in texts]


@each("name", FUNCTIONS)
def test_with_lists(name):
    function, expected = FUNCTIONS[name]
    given = {"completions": turns(TEXTS), "completion_ids": IDS, "solution": ["12"] * 3}
    assert function(prompts=["3*4"] * 3, trainer_state=None, **given) == pytest.approx(expected)
    assert function.__name__ == name


@each("name", FUNCTIONS)
def test_in_a_run(name):
    """One completion per call, in another process: the same scores."""
    sent, expected = FUNCTIONS[name]
    function = Function(cloudpickle.loads(cloudpickle.dumps(sent)), name, 1.0, RewardConfig())
    assert function.per == "sample"
    assert function.in_background == ("accuracy" in name or "cosine" in name)
    prompt = Prompt(0, 0, (1,), "3*4", "3*4", {"solution": "12", "answer": "a column that no function reads"})
    made = [Completion.of_tokens(ids, [0.0] * len(ids), FinishReason.EOS, t) for ids, t in zip(IDS, TEXTS, strict=True)]
    given = [call_arguments("sample", [Group(prompt, (one,))], TrainerState()) for one in made]
    assert [function.recorded(**function.accepted(one)).returned for one in given] == pytest.approx(expected)


def test_names_of_metrics():
    assert unique_names([function for function, _ in FUNCTIONS.values()]) == list(FUNCTIONS)


def test_values_are_logged_in_lists():
    logged = {}
    rewards.accuracy_reward(turns(TEXTS), ["12"] * 3, log_extra=logged.__setitem__)
    assert logged == {"answer": ["12", "13", None]}


def test_a_solution_that_cannot_be_read_and_other_delimiters():
    assert rewards.accuracy_reward([r"\boxed{1}"], [None]) == [None]
    function = partial(rewards.reasoning_accuracy_reward, reasoning_delimiters=["</a>", "</b>"])
    assert function([r"\boxed{1}</b>\boxed{2}</a>\boxed{3}"] * 2, ["2", "3"]) == [0.0, 1.0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rewards.accuracy_reward([r"\boxed{1}"]), "accuracy_reward needs the argument 'solution'"),
        (lambda: rewards.get_repetition_penalty_reward(max_penalty=0.5), "max_penalty must be at most 0"),
    ],
)
def test_mistakes(call, message):
    with pytest.raises(RewardError, match=message):
        call()
