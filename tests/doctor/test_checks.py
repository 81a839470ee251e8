"""Each check on plain values or on a small run: what passes, what warns, what fails, and the number in its words."""

import json
import math
from types import SimpleNamespace as Made
from unittest.mock import patch

import pytest
import torch

from cohort.config import GRPOConfig
from cohort.doctor import Run, checks
from cohort.doctor.answers import Told, check_answers, try_answers
from cohort.doctor.checks import (
    CHECKS,
    check_cut,
    check_distinct,
    check_optimizer,
    check_reference,
    check_rewards,
    check_sampler,
    check_sampling,
    check_signal,
    check_time,
)
from cohort.rewards import RewardRunner
from cohort.types import Prompt
from tests.conftest import each
from tests.rewards.conftest import prompt

NAN = math.nan


def config(**settings):
    return GRPOConfig(**settings)


class Prompts(list):
    """Stands in for a ``PromptSet``; prompts are equal if their uids are."""

    columns, longest, dropped, truncated, spelt = (), 9, 0, 0, ()

    def __init__(self, uids=(), *sources, **known):
        super().__init__(known.pop("some", None) or [prompt(uid) for uid in uids])
        data = Made(sources=[Made(rows=rows, config=Made(format="auto")) for rows in sources or [[]]])
        vars(self).update({"data": data} | known)

    def keys(self):
        return [one.uid for one in self]


class Tokenizer:
    """Stands in for a tokenizer of ten tokens."""

    bos_token, bos_token_id, unk_token_id, pad_token, chat_template = "<s>", 1, 0, None, None

    def __init__(self, **known):
        vars(self).update({"after": []} | known)

    def __len__(self):
        return 10

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [5, *self.after] if add_special_tokens else [5]}

    def convert_ids_to_tokens(self, ids):
        return [self.convert_ids_to_tokens(one) for one in ids] if isinstance(ids, list) else {2: "</s>"}[ids]


def found(check, prompts=(), settings=(), **parts):
    """What a check finds in a run with only the parts that it looks at."""
    return CHECKS[check](Run(Made(prompts=Made(prompts=prompts), **parts), None, config(**dict(settings)), None))


def columns(functions, *sources):
    """The check of sources of rows whose columns functions read: name -> columns, or default parameters."""
    calls = []
    for name, parameters in functions.items():
        space = {}
        exec(f"def {name}(completion, {', '.join(parameters)}): ...", space)
        calls.append(space[name])
    rows = [
        [dict(zip(source, cells, strict=True)) for cells in zip(*source.values(), strict=True)] for source in sources
    ]
    return found("columns", Prompts((), *rows, columns=[*sources[0]]), rewards=RewardRunner(calls))


def prompts(uids, **held_out):
    sets = {name: Prompts(some) for name, some in held_out.items()}
    return found("prompts", Prompts(uids), evaluator=Made(sets=sets))


def lengths(count, **known):
    model = Made(model=Made(config=Made(max_position_embeddings=2048)))
    return found("lengths", Prompts(range(count), **known), {"max_completion_length": 9}, policy=model)


def text(token_ids=(5,), asked="first prompt", tokenizer=None, **known):
    some = [Prompt(0, 0, token_ids, "first prompt", asked, {})]
    return found("text", Prompts(some=some, **known), tokenizer=tokenizer or Tokenizer())


def ends(ids, turn=None, *, size=10, textless=(0, 0.0)):
    parts = {"engine": Made(end_token_ids=ids), "policy": Made(vocab_size=size), "tokenizer": Tokenizer()}
    asked = Prompts(some=[prompt(messages=[{"role": "user", "content": "0?"}])])
    with patch.multiple(checks, turn_end=lambda _: turn, textless=lambda _: textless):
        return found("ends", asked, **parts)


def told(right, wrong, told, below=0, *, named=True):
    return check_answers([Told("math", "answer", r"\boxed{ANSWER}", 4, told, below, right, wrong, named)], {})


def memory(free=100, gradients=10, passes=60, cache=5, weights=0):
    """The check of a run on a CPU, in bytes."""
    model, trained = torch.nn.Module(), torch.zeros(gradients, dtype=torch.uint8)
    model.weight = torch.nn.Parameter(torch.zeros(weights, dtype=torch.uint8), requires_grad=False)
    parts = {
        "policy": Made(device=torch.device("cpu"), model=model),
        "optimizer": Made(rules=(), parameters=[trained]),
        "budget": Made(predicted_bytes=passes),
    }
    with patch.multiple(checks, free_bytes=lambda _: free, _cache_bytes=lambda *_: cache):
        return found("memory", (), {"lag": 1}, **parts)


def time(phases=None, **changes):
    pieces = {"steps": 60, "evaluation": 30.0, "evaluations": 2} | changes
    return check_time(phases or {"generate": 6.0, "reward": 1.0, "update": 3.0}, 16, **pieces)


HALF, DEAD = [1.0, 0.0, 1.0, 0.0], [0.0] * 4
HEALTHY = {
    "sampling": lambda: check_sampling(config(top_p=0.9)),
    "optimizer": lambda: check_optimizer(config(warmup_steps=5, lr_scheduler_type="linear"), 100, 10**9),
    "columns": lambda: columns({"math": ["answer", "scale=1"]}, {"q": ["x", "y"], "answer": ["1", "2"]}),
    "prompts": lambda: prompts([1, 2, 3], **{"": [4, 5]}),
    "lengths": lambda: lengths(90, dropped=10),
    "text": text,
    "ends": lambda: ends([2], (2, "</s>")),
    "answers": lambda: told(1.0, 0.0, 4),
    "sampler": lambda: check_sampler(1e-6, 0.1, "float32", "advice"),
    "reference": lambda: check_reference(0.0, "float32"),
    "signal": lambda: check_signal([HALF] * 3 + [DEAD], 1.0),
    "rewards": lambda: check_rewards({"math": [1.0, 0.0], "format": [0.5, 0.2]}, {"math": 1.0, "format": 0.0}),
    "duplicates": lambda: check_distinct([8, 7], 8),
    "cut": lambda: check_cut(1, 16, 256, masked=True),
    "memory": memory,
    "time": time,
}


def test_a_mixture_and_a_constant_that_is_no_answer_are_healthy():
    """Each source has a column of its own for its rewards, and a column says which source it is."""
    values = {"answer": [["1", "2"], [None] * 2], "tests": [[None] * 2, ["a", "b"]], "source": [["gsm8k"] * 2] * 2}
    sources = [{name: cells[index] for name, cells in values.items()} for index in range(2)]
    (finding,) = columns({"both": [*values]}, *sources)
    assert str(finding.status) == "pass"


def test_an_answer_that_is_an_object_is_tried_as_json_and_never_warned_about():
    def fields(completion, answer):
        return float(completion == json.dumps(answer))

    def city(completion, answer):
        return float(completion == answer["city"])

    prompts = [prompt(uid, answer={"city": name, "count": uid}) for uid, name in enumerate(("Turku", "Cork"))]
    for function, told in ((fields, 2), (city, 0)):
        (found,), _ = try_answers(RewardRunner([function]), prompts, {function.__name__: ["answer"]}, Tokenizer())
        assert (found.told, found.rows, found.named) == (told, 2, False)
        assert [str(one.status) for one in check_answers([found], {})] == ["pass"]


def test_a_penalty_with_a_negative_weight_tells_right_answers_from_wrong_ones():
    def penalty(completion, answer):
        return float(completion != answer)

    prompts = [prompt(uid, answer=str(uid)) for uid in range(4)]
    for weight, right, wrong, told in ((-1.0, 0.0, -1.0, 4), (1.0, 0.0, 1.0, 0)):
        (found,), _ = try_answers(RewardRunner([penalty], [weight]), prompts, {"penalty": ["answer"]}, Tokenizer())
        assert (found.right, found.wrong, found.told, found.below) == (right, wrong, told, 4 - told)
        assert math.copysign(1.0, found.right) == 1.0  # shown as 0.00


@each("name", HEALTHY)
def test_a_healthy_run_passes_in_one_finding(name):
    (finding,) = HEALTHY[name]()
    assert (finding.check, str(finding.status), finding.advice) == (name, "pass", "")


ILL = [
    ("sampling", "fail", "rollout.top_k is 1: all 8 completions", lambda: check_sampling(config(top_k=1))),
    ("sampling", "fail", "temperature is 0.01: all 8", lambda: check_sampling(config(temperature=0.01))),
    ("sampling", "warn", "rollout.temperature is 0.1", lambda: check_sampling(config(temperature=0.1))),
    (
        *("sampling", "warn", "no completion can end"),
        lambda: check_sampling(config(min_completion_length=9, max_completion_length=9)),
    ),
    ("sampling", "warn", "replay_sampling is off", lambda: check_sampling(config(top_p=0.9, replay_sampling=False))),
    ("optimizer", "fail", "learning_rate is 0", lambda: check_optimizer(config(learning_rate=0), 100, 9)),
    (
        *("optimizer", "warn", "0.002 for 1,000,000 trained parameters: more than 0.001 destroys"),
        lambda: check_optimizer(config(learning_rate=2e-3), 100, 10**6),
    ),
    ("optimizer", "warn", "more than 0.01", lambda: check_optimizer(config(learning_rate=0.1), 100, 999)),
    ("optimizer", "warn", "adapters need", lambda: check_optimizer(config(lora={"rank": 8}), 100, 9)),
    (
        "optimizer",
        "warn",
        "is 0.001 for 500,000,000",
        lambda: check_optimizer(config(learning_rate=1e-3), 9, 5 * 10**8),
    ),
    (
        *("optimizer", "warn", "warmup_steps is 10, and the run has 10 updates"),
        lambda: check_optimizer(config(warmup_steps=10, lr_scheduler_type="linear"), 10, 9),
    ),
    (
        *("columns", "warn", "has a parameter 'answers', and the data has 'answer'"),
        lambda: columns({"own": ["answers=None"]}, {"q": ["x"], "answer": ["1"]}),
    ),
    (
        *("columns", "warn", "column 'answer', which math reads, is empty in 2 of 4 rows"),
        lambda: columns({"math": ["answer"]}, {"answer": ["1", "", None, "3"]}),
    ),
    (
        *("columns", "warn", "column 'tests', which code reads, is empty in 1 of 2 rows"),
        lambda: columns({"code": ["tests"]}, {"tests": [None] * 9}, {"tests": ["a", None]}, {"tests": ["a", "b"]}),
    ),
    (
        *("columns", "warn", "column 'answer', which math reads, is empty in 3 of 3 rows"),
        lambda: columns({"math": ["answer"]}, {"answer": [None]}, {"answer": ["", ""]}),
    ),
    (
        *("columns", "warn", "is 'A' in each of 3 rows"),
        lambda: columns({"math": ["answer"]}, {"answer": ["A"]}, {"answer": ["A"] * 2}),
    ),
    ("prompts", "warn", "5 of 10 prompts are repeated", lambda: prompts([1, 2, 3, 4, 5] * 2)),
    ("prompts", "warn", "1 of the 2 evaluation prompts of aime", lambda: prompts([1, 2], aime=[2, 3])),
    ("lengths", "warn", "7 of 90 prompts are cut", lambda: lengths(90, truncated=7)),
    ("lengths", "warn", "30 of 100 prompts are drop", lambda: lengths(70, dropped=30)),
    (
        "text",
        "warn",
        "plain text, and the model has a chat template",
        lambda: text(tokenizer=Tokenizer(chat_template="{}")),
    ),
    ("text", "warn", "begin with '<s>' twice", lambda: text((1, 1, 5))),
    ("text", "warn", "puts '</s>' after every prompt", lambda: text(tokenizer=Tokenizer(after=[2]))),
    (
        "text",
        "warn",
        "messages of 2 rows spell control tokens of the chat template ('<e>' in",
        lambda: text(spelt=["'<e>' in row 3", "'<e>' in row 4"]),
    ),
    ("text", "warn", "a message is not in its decoded prompt as it was written: 'Héllo'", lambda: text(asked="Héllo")),
    ("text", "warn", "20% of the prompts' tokens are the unknown", lambda: text((5,) * 8 + (0, 0))),
    ("ends", "warn", "every completion runs to 256 tokens", lambda: ends([])),
    ("ends", "warn", "turn with '<end>' (7), which is not an end token", lambda: ends([2], (7, "<end>"))),
    ("ends", "warn", "the tokenizer has 10 tokens and the model 9", lambda: ends([2], size=9)),
    (
        "ends",
        "warn",
        "2 of the model's 12 tokens are of no text, and 20.0% of",
        lambda: ends([2], size=12, textless=(2, 0.2)),
    ),
    (
        "answers",
        "warn",
        "math gives a right answer (column 'answer') more than wrong ones on only 1 of 4",
        lambda: told(0.2, 0, 1),
    ),
    ("answers", "fail", "math rewards wrong answers more", lambda: told(0.0, 1.0, 0, 4)),
    ("sampler", "warn", "differ by 0.01 nats", lambda: check_sampler(0.01, 0.1, "float32", "advice")),
    ("sampler", "fail", "differ by 0.2 nats", lambda: check_sampler(0.2, 0.1, "bfloat16", "advice")),
    ("sampler", "fail", "differ by nan nats", lambda: check_sampler(NAN, 0.1, "float32", "advice")),
    ("reference", "fail", "by up to 0.3 nats", lambda: check_reference(0.3, "float32")),
    ("reference", "fail", "by up to nan nats", lambda: check_reference(NAN, "float32")),
    ("signal", "fail", "88% of groups (7 of 8) have equal", lambda: check_signal([DEAD] * 7 + [HALF], 1.0)),
    ("signal", "warn", "67% of groups (2 of 3) have equal", lambda: check_signal([DEAD, HALF, DEAD], 1.0)),
    ("signal", "warn", "will use most of its 10 rounds", lambda: check_signal([DEAD], 1.0, rounds=10)),
    ("signal", "fail", "all completions have equal", lambda: check_signal([[1.0], [1.0]], 1.0, group_relative=False)),
    (
        "signal",
        "warn",
        "it comes from brief, format: right is 0 for all 4 completions",
        lambda: check_signal([HALF], 1.0, by_function={"right": [0] * 4, "brief": HALF, "format": [1] * 4}),
    ),
    ("signal", "fail", "no completion was scored", lambda: check_signal([[NAN, NAN]], 1.0)),
    (
        "rewards",
        "warn",
        "format gave 1 to each of 2",
        lambda: check_rewards({"a": [0, 1], "format": [1, 1]}, {"a": 1, "format": 1}),
    ),
    ("rewards", "warn", "a did not score 50% of 2", lambda: check_rewards({"a": [0, NAN]}, {"a": 1})),
    ("duplicates", "fail", "all 8 completions of each prompt", lambda: check_distinct([1, 1], 8)),
    ("duplicates", "warn", "of 8 completions of a prompt, 1.5 differ", lambda: check_distinct([1, 2], 8)),
    ("cut", "warn", "50% of completions are cut at 256", lambda: check_cut(8, 16, 256, masked=True)),
    ("cut", "fail", "100% of completions are cut at 256 tokens, and", lambda: check_cut(16, 16, 256, masked=True)),
    (
        *("cut", "fail", "100% of completions are cut at 256 tokens, and their rewards do not differ"),
        lambda: check_cut(16, 16, 256, masked=False, no_signal=True),
    ),
    ("cut", "warn", "100% of completions are cut", lambda: check_cut(16, 16, 256, masked=False)),
    ("cut", "warn", "88% of completions are cut", lambda: check_cut(14, 16, 256, masked=False, no_signal=True)),
    ("memory", "fail", "the run needs 130 bytes more; 100 bytes free", lambda: memory(cache=120)),
    ("memory", "warn", "the run needs 95 bytes more", lambda: memory(passes=95)),
    ("memory", "warn", "7 bytes on top while a checkpoint", lambda: memory(passes=85, weights=7)),
    ("time", "warn", "rewards take 53% of a step", lambda: time(phases={"generate": 8.0, "reward": 9.0})),
    ("time", "warn", "11 d 13 h in all", lambda: time(steps=10**5)),
]


@each(("name", "status", "words", "check"), ILL, ids=[f"{one[0]}-{one[2][:30]}" for one in ILL])
def test_each_illness_has_its_number_and_an_advice(name, status, words, check):
    problems = [finding for finding in check() if str(finding.status) != "pass"]
    (finding,) = problems
    assert (finding.check, str(finding.status)) == (name, status)
    assert words in finding.found
    assert finding.advice


@pytest.mark.parametrize(
    ("rewards", "advice"),
    [
        ([DEAD] * 9 + [HALF], "hardly any completion is rewarded: ease the data, warm up"),
        ([[1.0] * 4] * 9 + [HALF], "the full reward: use harder prompts"),
        ([[0.5] * 4] * 9 + [HALF], "raise rollout.num_generations, ease the data"),
    ],
)
def test_the_advice_depends_on_where_the_equal_rewards_lie(rewards, advice):
    assert advice in check_signal(rewards, 1.0)[0].advice


def test_the_signal_by_hand():
    (finding,) = check_signal([HALF, [1.0, NAN, 1.0, 1.0], [3.0, 0.0, 0.0, 0.0]], 1.0)
    # standard deviations of the groups: 1/2, 0, sqrt(27/16); 11 scored rewards that add up to 8
    assert finding.numbers == pytest.approx(
        {"dead_share": 1 / 3, "mean_reward": 8 / 11, "within_group_std": (0.5 + math.sqrt(27) / 4) / 3}
    )


def test_costs_by_hand():
    assert memory()[0].numbers["needed"] == 60  # the pass is larger than gradients and cache
    assert memory(cache=55)[0].numbers["needed"] == 10 + 55
    numbers = time()[0].numbers
    assert (numbers["step"], numbers["run"]) == (10.0, 600.0 + 60.0)
    assert time(lag=1)[0].numbers["step"] == 7.0  # sampling and scoring hide the update
