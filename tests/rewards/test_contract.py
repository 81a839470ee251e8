"""The contract of reward functions: arguments, names, options, results, and every way to break it."""

import asyncio
import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cohort import reward
from cohort.errors import RewardError
from cohort.rewards import RewardRunner, TrainerState, environment_reward
from cohort.rewards.contract import call_arguments, call_options
from cohort.rewards.functions import unique_names
from cohort.types import Episode, FinishReason, Group, Turn
from tests.conftest import each
from tests.rewards.conftest import completion, prompt, rollout

CHAT = [{"role": "user", "content": "2?"}]
STATE = TrainerState(global_step=3)


def groups():
    text = Group(prompt(0, prompt="a column", n=1), (completion("x", ids=(3, 1)), completion("y", ids=(3, 1))))
    cut = completion("z", FinishReason.LENGTH, ids=(7,))
    return [text, Group(prompt(1, CHAT, prefill="<think>", n=2), (cut, completion("w", ids=(3, 1))))]


def test_the_arguments_of_a_call():
    assert call_arguments("batch", groups(), STATE) == {
        "prompts": ["0?", "0?", CHAT, CHAT],
        "completions": ["x", "y", [{"role": "assistant", "content": "z"}], [{"role": "assistant", "content": "w"}]],
        "completion_ids": [[3, 1], [3, 1], [7], [3, 1]],
        "prompt": ["a column", "a column", None, None],
        "n": [1, 1, 2, 2],
        "finish_reasons": ["eos", "eos", "length", "eos"],
        "prefills": ["", "", "<think>", "<think>"],
        "trainer_state": STATE,
    }

    _, second = groups()  # per group and per sample: the values of the row
    shared = {"prompt": CHAT, "prefill": "<think>", "n": 2, "trainer_state": STATE}
    first = Group(second.prompt, second.completions[:1])
    assert call_arguments("sample", [first], STATE) == shared | {
        "completion": "z",
        "completion_ids": [7],
        "finish_reason": "length",
    }
    assert call_arguments("group", [second], STATE) == shared | {
        "completions": ["z", "w"],
        "completion_ids": [[7], [3, 1]],
        "finish_reasons": ["length", "eos"],
    }


def acted(n_turns, reward=None, **state):
    """A completion of an episode whose turns end with an answer of a tool."""
    turns = tuple(
        Turn(1, FinishReason.EOS, ({"role": "assistant", "content": f"turn {k}"}, {"role": "tool", "content": f"{k}!"}))
        for k in range(n_turns)
    )
    return replace(completion("all of it"), episode=Episode(turns, reward, state))


def transcript(n_turns):
    return [m for k in range(n_turns) for m in ({"role": "assistant", "content": f"turn {k}"}, tool(f"{k}!"))]


def tool(text):
    return {"role": "tool", "content": text}


def test_functions_per_batch_see_whole_episodes():
    talk = Group(prompt(0, CHAT, n=1), (acted(2, 1.5, score=3, board=[1]), acted(1)))
    text = Group(prompt(1, n=2), (acted(3, 0.0),))
    got = call_arguments("batch", [talk, text], STATE)
    assert got["transcripts"] == [transcript(2), transcript(1), transcript(3)]
    assert got["completions"] == [transcript(2), transcript(1), "turn 2"]
    assert got["environments"] == [SimpleNamespace(score=3, board=[1]), SimpleNamespace(), SimpleNamespace()]
    assert got["environment_rewards"] == [1.5, None, 0.0]
    assert [len(turns) for turns in got["turns"]] == [2, 1, 3]
    assert got["turns"][0][1] == talk.completions[0].episode.turns[1]


def test_functions_per_group_and_per_sample_see_whole_episodes():
    group = Group(prompt(0, CHAT, n=1), (acted(2, 1.5, score=3), acted(1)))
    got = call_arguments("group", [group], STATE)
    assert got["completions"] == ["turn 1", "turn 0"]
    assert got["transcripts"] == [transcript(2), transcript(1)]
    assert (got["environments"][0].score, got["environment_rewards"]) == (3, [1.5, None])
    assert [len(turns) for turns in got["turns"]] == [2, 1]
    one = call_arguments("sample", [replace(group, completions=group.completions[:1])], STATE)
    assert one["completion"] == "turn 1"
    assert one["transcript"] == transcript(2)
    assert (one["environment_state"], one["environment_reward"], len(one["turns"])) == ({"score": 3}, 1.5, 2)
    assert not {"transcripts", "environments", "environment_rewards"} & one.keys()


def test_a_column_named_turns_goes_before_the_turns():
    for per in ("sample", "group"):
        assert call_arguments(per, [Group(prompt(turns=9), (acted(1),))], STATE)["turns"] == 9
    assert call_arguments("batch", [Group(prompt(turns=9), (acted(1),))], STATE)["turns"] == [9]


def test_a_turn_that_only_calls_has_an_empty_answer():
    call = ({"role": "assistant", "content": None, "tool_calls": [{}]},)
    silent = replace(completion("raw"), episode=Episode((Turn(1, FinishReason.TURNS, call),)))
    assert call_arguments("sample", [Group(prompt(), (silent,))], STATE)["completion"] == ""
    failed = replace(completion("raw"), episode=Episode(()))
    assert call_arguments("sample", [Group(prompt(), (failed,))], STATE)["completion"] == "raw"


def test_messages_of_an_episode_are_copies():
    one = acted(1)
    call_arguments("sample", [Group(prompt(), (one,))], STATE)["transcript"][0]["content"] = "changed"
    assert one.episode.messages == transcript(1)


def test_the_reward_of_the_environment():
    groups = [Group(prompt(0), (acted(1, 1.5), acted(2))), Group(prompt(1), (acted(1, -2.0), acted(1, 0.0)))]
    scores = RewardRunner([environment_reward]).score(groups)
    assert scores.names == ("environment_reward",)
    assert scores.rewards_S.isnan().tolist() == [False, True, False, False]
    assert scores.rewards_S[[0, 2, 3]].tolist() == [1.5, -2.0, 0.0]
    with pytest.raises(RewardError, match="needs the argument 'environment_reward'; it can have: .*completion_ids"):
        RewardRunner([environment_reward]).score(rollout(["no episode"]))


def test_the_dry_run_of_episodes_leaves_out_what_reads_an_environment():
    called = []

    def reads(environments):
        raise AssertionError

    def reads_one(completion, environment_state):
        raise AssertionError

    def counts(completion, turns, environment_reward, transcript):
        called.append((len(turns), environment_reward, [message["role"] for message in transcript]))
        return 1.0

    RewardRunner([reads, reads_one, counts]).dry_run([prompt()], episodes=True)
    assert called == [(1, 0.0, ["assistant"])] * 2
    RewardRunner([reads]).dry_run([prompt()], episodes=True)
    with pytest.raises(RewardError, match="needs the argument 'environments'"):
        RewardRunner([reads]).dry_run([prompt()])


def test_every_call_gets_its_own_copy_of_the_messages():
    seen = []

    def appends(prompt, completion):
        seen.append(len(prompt))
        prompt.append({"role": "assistant", "content": completion})
        return 1.0

    RewardRunner([appends]).score([Group(prompt(messages=CHAT), (completion("a"), completion("bb")))])
    assert seen == [1, 1]


def test_a_function_receives_the_arguments_that_it_names_or_all_of_them():
    def by_name(completions, n):
        return n

    def all_of_them(completions, **columns):
        given = {"prompts", "completion_ids", "finish_reasons", "prefills", "trainer_state", "log_extra", "log_metric"}
        assert set(columns) == given | {"prompt", "n"}
        return [0] * len(completions)

    runner = RewardRunner([by_name, all_of_them])
    assert runner.score(groups()).by_function_SK.tolist() == [[1, 0], [1, 0], [2, 0], [2, 0]]


def test_a_column_with_the_name_of_the_object_is_not_passed_to_its_method():
    class Judge:
        def __call__(self, completion, **columns):
            return float(columns == {**columns, "cls": 1, "function": 2} and "self" not in columns)

        def score(this, completion, **columns):  # noqa: N805
            return float(columns == {**columns, "self": 3} and "this" not in columns)

    row = prompt(self=3, this=4, cls=1, function=2)
    scores = RewardRunner([Judge(), Judge().score]).score([Group(row, (completion("a"),))])
    assert scores.by_function_SK.tolist() == [[1, 1]]


def test_objects_partials_and_async_functions():
    class Judge:
        async def __call__(self, completion, bonus=0, **_):
            return len(completion) + bonus

    @reward(per="batch")
    async def batch(completions, **_):
        return [len(c) for c in completions]

    functions = [Judge(), partial(Judge(), bonus=5), batch, lambda **given: batch(**given)]
    scores = RewardRunner(functions).score(rollout(["a", "bb"]))
    assert scores.by_function_SK.tolist() == [[1, 6, 1, 1], [2, 7, 2, 2]]
    assert scores.names == ("Judge", "Judge_2", "batch", "<lambda>")

    async def notebook():  # has an event loop of its own, which is not used
        return RewardRunner(functions).score(rollout(["a", "bb"]))

    assert asyncio.run(notebook()).by_function_SK.tolist() == scores.by_function_SK.tolist()
    assert unique_names([max, Judge(), max, partial(max, 1), min]) == ["max", "Judge", "max_2", "max_3", "min"]


def test_options_of_functions_classes_and_partials():
    @reward(per="group", timeout=9.0)
    class Judge:
        async def __call__(self, completion):
            return [2.0]

    options = call_options(Judge())
    assert (options.per, options.timeout, options.isolated) == ("group", 9.0, None)

    assert call_options(lambda completions, completion=None: [1.0]).per == "batch"

    def ranks(completions, k):
        return [k] * len(completions)

    decorated = reward(per="group")(partial(ranks, k=2))
    runner = RewardRunner([decorated, partial(decorated)])
    assert runner.score(rollout(["a"], ["b"])).by_function_SK.tolist() == [[2, 2], [2, 2]]


def test_impossible_options_are_refused():
    class Judge:
        def score(self, completion): ...

    def plain(completion): ...

    async def judge(completion): ...

    for message, attempt in {
        "isolated=True is for plain functions": lambda: reward(isolated=True)(judge),
        "cannot be stopped: remove its timeout": lambda: reward(isolated=False, timeout=1.0)(plain),
        "cannot attach options to <bound method": lambda: reward(per="sample")(Judge().score),
        "per must be 'sample', 'group' or 'batch', got 'token'": lambda: reward(per="token"),
        "timeout must be above 0": lambda: reward(timeout=0),
    }.items():
        with pytest.raises(RewardError, match=message):
            attempt()


def test_any_sequence_of_numbers_is_accepted():
    for results in ((1.0, 2, 3, 4), np.arange(1, 5), torch.tensor([1.0, 2, 3, 4]), [True, 2, np.float32(3), 4]):
        assert RewardRunner([lambda results=results, **_: results]).score(groups()).rewards_S.tolist() == [1, 2, 3, 4]


def needs_more(completions, ground_truth): ...


def positional(completions, /): ...


def broken(**_):
    raise KeyError("gold")


@each(
    ("function", "message"),
    [
        (needs_more, "needs_more needs the argument 'ground_truth'; it can have: prompt, n, prompts"),
        (positional, "takes 'completions' by position"),
        (broken, r"broken failed on 4 of 4 .*the first: raised KeyError: 'gold' \(test_contract.py, line \d+\)"),
        (lambda **_: [0, 1], "one reward per completion: 4, got 2"),
        (lambda **_: 1.0, "must return a list of numbers, got float"),
        (lambda completion_ids: 1, "no parameter 'completion', so it is called once per rollout: add 'completion' to"),
        (lambda completions: 1.0, "got float$"),
        (lambda **_: "abcd", "must return a list of numbers, got str"),
        (lambda **_: b"abcd", "must return a list of numbers, got bytes"),
        (lambda **_: dict.fromkeys(range(4)), "must return a list of numbers, got dict"),
        (lambda **_: (n for n in "ab"), "must return a list of numbers, got generator"),
        (lambda **_: torch.tensor(1.0), "must return a list of numbers, got Tensor"),
        (lambda **_: [0, 1, "2", 3], "must return numbers or None; result 2"),
        (lambda **_: [0, 1, 2, 10**400], "must return numbers or None; result 3"),
        (lambda **_: [0, 1, [2], 3], "returned a list as result 2: expected a number; rewards per token need"),
        (lambda **_: [math.nan] * 4, "returned nan: expected a finite number, or None"),
        (lambda **_: [-math.inf] * 4, "returned -inf: expected a finite number"),
    ],
)
def test_broken_functions_are_named(function, message):
    with pytest.raises(RewardError, match=message):
        RewardRunner([function]).score(groups())


def test_the_dry_run_finds_broken_functions(caplog):
    def sometimes(completion, n):
        return math.nan if n == 1 else 1.0

    def strips(completions):
        return [float(bool(text.strip())) for text in completions]

    def strip(completion):
        return float(bool(completion.strip()))

    rows = [group.prompt for group in groups()]
    for function, message in {
        broken: r"raised KeyError.*\(tried on 2 rows with a made completion\)",
        sometimes: "sometimes failed on 2 of 4 completions",
        needs_more: "needs the argument 'ground_truth'; it can have: prompt, n, ",
        strips: r"no attribute 'strip'.*; completions of conversations are lists of messages",
    }.items():
        with pytest.raises(RewardError, match=message):
            RewardRunner([function]).dry_run(rows)
    RewardRunner([lambda completion: None, strip]).dry_run(rows)
    (record,) = caplog.records
    assert "<lambda> returned None for each of the 2 rows that were tried" in record.getMessage()
    RewardRunner([strip]).dry_run(rows)  # per sample, a completion is text in conversations too


def test_invalid_runners_and_negative_rewards_are_refused():
    runner = RewardRunner([lambda completion: None if completion == "a" else -1.0], not_negative="scale 'x'")
    with pytest.raises(RewardError, match=r"negative reward, which does not go with objective\.scale 'x'"):
        runner.score(rollout(["a", "b"]))
    for functions, weights, message in (
        ([], None, "no reward function"),
        ([3], None, "must be callable"),
        ([broken], [1, 2], "2 numbers for 1"),
    ):
        with pytest.raises(RewardError, match=message):
            RewardRunner(functions, weights)


def test_none_leaves_a_function_out_of_the_weighted_sum():
    def first(completions):
        return [1, None, 3, None]

    def second(completions):
        return [10, 20, None, None]

    scores = RewardRunner([first, second], [2.0, 0.5]).score(groups())
    assert scores.rewards_S.tolist()[:3] == [7.0, 10.0, 6.0]
    assert math.isnan(scores.rewards_S[3])
    scores = RewardRunner([first, second], [1, 0]).score(groups())
    assert scores.rewards_S.isnan().tolist() == [False, True, False, True]  # weight 0: not the 0 of 20 x 0
    assert scores.by_function_SK[:2, 1].tolist() == [10, 20]
    assert RewardRunner([second], [0]).score(groups()).rewards_S.tolist()[:2] == [0, 0]
    scores = RewardRunner([lambda completion: 0.1, lambda completion: 1e-12], [0.3, 1]).score(groups())
    assert scores.rewards_S.tolist() == [0.3 * 0.1 + 1e-12] * 4  # in double precision


def test_rewards_per_token():
    def steps(completion, completion_ids):
        return {"bb": ValueError("no steps"), "c": None}.get(completion, [0.1, None, 0.2][: len(completion_ids)])

    scores = RewardRunner([steps], per_token=True).score(rollout(["aaa", "bb", "c"]))
    tokens = scores.token_rewards_N
    assert tokens[[0, 2]].tolist() == [0.1, 0.2]
    assert tokens.isnan().tolist() == [False, True, False, True, True, True]
    assert scores.rewards_S[0] == math.fsum([0.1, 0.2])
    assert scores.rewards_S[1:].isnan().all()
    rounds = scores + RewardRunner([steps], per_token=True).score(rollout(["a"]))
    assert rounds.token_rewards_N.nan_to_num(9).tolist() == [0.1, 9, 0.2, 9, 9, 9, 0.1]
    with pytest.raises(AssertionError, match="both rounds reward tokens"):
        _ = scores + RewardRunner([lambda completion: 1.0]).score(rollout(["a"]))
    for result, got in ((1.0, "1.0"), ([1.0], "1 values")):
        with pytest.raises(RewardError, match=rf"a list of 3 numbers or None as result 0 .*, got {got}"):
            RewardRunner([lambda completion, result=result: result], per_token=True).score(rollout(["aaa"]))


def test_unusable_completions_are_passed_to_no_function():
    @reward(per="group")
    def group(completions, **_):
        assert completions == ["a", "ccc"]
        return [1, 2]

    def length(completion):
        return len(completion)

    made = (completion("a"), completion("bb", FinishReason.ERROR), completion("ccc"))
    scores = RewardRunner([group, length]).score([Group(prompt(), made)])
    assert scores.by_function_SK.isnan().tolist() == [[False] * 2, [True] * 2, [False] * 2]
    assert scores.rewards_S[[0, 2]].tolist() == [2, 5]
    assert scores.errors == {}
    assert RewardRunner([group, length]).score([Group(prompt(), made[1:2])]).rewards_S.isnan().all()


def test_trainer_state_and_logs():
    def sample(completion, trainer_state, log_extra, log_metric):
        log_extra("answer", completion.upper())
        log_metric("letters", len(completion))
        return trainer_state.global_step

    def batch(completions, log_extra, **_):
        log_extra("answer", [1] * len(completions))
        log_extra("index", list(range(len(completions))))
        return [0] * len(completions)

    scores = RewardRunner([sample, batch]).score(rollout(["a", "bb"]), STATE)
    assert scores.by_function_SK[:, 0].tolist() == [3, 3]
    assert scores.extras == {"answer/sample": ["A", "BB"], "answer/batch": [1, 1], "index/batch": [0, 1]}
    assert scores.logged == {"letters": [1, 2]}


def test_the_name_and_length_of_a_logged_column():
    def first(completion, log_extra):
        if completion == "a":
            log_extra("answer", 1)
        return 0

    def second(completions, log_extra):
        log_extra("answer", [2] * len(completions[0]))
        return [0] * len(completions)

    def neither(completion, **_):
        return 0

    runner = RewardRunner([first, second, neither])  # names do not depend on which functions have logged something
    assert runner.score(rollout(["b"])).extras == {"answer/second": [2]}
    assert runner.score(rollout(["a"])).extras == {"answer/first": [1], "answer/second": [2]}
    assert RewardRunner([first, neither]).score(rollout(["a"])).extras == {"answer": [1]}
    with pytest.raises(RewardError, match=r"second must log one value per completion as 'answer': 2, got \[2\]"):
        runner.score(rollout(["a", "bb"]))
