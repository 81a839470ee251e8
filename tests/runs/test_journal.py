"""Rollouts in files: what is loaded equals what was saved."""

import json
import math
from collections import defaultdict
from dataclasses import fields, is_dataclass, replace
from datetime import UTC, date, datetime
from decimal import Decimal

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from safetensors.numpy import save

from cohort.errors import RunFolderError
from cohort.rewards.runner import Scores
from cohort.runs.journal import DIGEST, EXACT, TREE, StoredRollout, Unstorable, digest, encode_rollout, load_rollout
from cohort.types import Completion, Episode, FinishReason, Group, Prompt, Segment, Support, Turn


def same(one, other):
    """Whether two values are equal: arrays bit for bit and of one dtype, NaN equal to NaN."""
    if is_dataclass(one):
        return type(one) is type(other) and all(same(getattr(one, f.name), getattr(other, f.name)) for f in fields(one))
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and same(one.numpy(), other.numpy())
    if isinstance(one, np.ndarray | np.generic):
        alike = type(one) is type(other) and (one.dtype, one.shape) == (other.dtype, other.shape)
        return alike and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return (
            isinstance(other, list | tuple)
            and isinstance(one, tuple) is isinstance(other, tuple)
            and len(one) == len(other)
            and all(map(same, one, other))
        )
    if isinstance(one, float) and math.isnan(one):
        return math.isnan(other)
    return type(one) is type(other) and one == other and repr(one) == repr(other)  # -0.0 is not 0.0


text = st.text(st.characters(), max_size=8) | st.text(st.sampled_from("a\ud83d\ude00\udfff\x00é"), max_size=6)
number = st.floats(width=64) | st.sampled_from([math.nan, -0.0, math.inf])
leaves = st.none() | st.booleans() | st.integers() | number | text | st.binary(max_size=4)
leaves |= st.datetimes().map(lambda moment: moment.replace(fold=0))  # which the ISO format does not hold
plain = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(text | st.just("$"), inner, max_size=3)
        | st.dictionaries(st.integers() | st.tuples(st.integers(), text), inner, max_size=2)
    ),
    max_leaves=6,
)
columns = st.dictionaries(text, plain, max_size=3)


@st.composite
def segments(draw):
    length = draw(st.integers(0, 5))
    ids = np.array(draw(st.lists(st.integers(0, 2**40), min_size=length, max_size=length)), np.int64)
    flags = draw(st.none() | st.lists(st.booleans(), min_size=length, max_size=length))
    return Segment(ids, None if flags is None else np.array(flags, np.bool_))


@st.composite
def supports(draw, count):
    counts = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    ids = np.arange(sum(counts), dtype=np.int32)
    excluded = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    return Support(ids, np.array(counts, np.int32), np.array(excluded, np.bool_))


messages = st.lists(columns, max_size=2).map(tuple)
reasons = st.sampled_from(FinishReason)
turns = st.builds(Turn, st.integers(0, 9), reasons, messages, reward=st.none() | number, seconds=number)
episodes = st.builds(Episode, st.lists(turns, max_size=3).map(tuple), st.none() | number, columns, text)


@st.composite
def completions(draw):
    some = tuple(draw(st.lists(segments(), min_size=1, max_size=3)))  # several: a rewritten history
    count = sum(int(segment.is_drawn.sum()) for segment in some)
    logps = st.lists(number, min_size=count, max_size=count).map(lambda numbers: np.array(numbers, np.float64))
    return Completion(
        some,
        draw(logps),
        draw(reasons),
        draw(text),
        draw(st.integers(0, 99)),
        full_logps=draw(st.none() | logps),
        support=draw(st.none() | supports(count)),
        episode=draw(st.none() | episodes),
    )


prompts = st.builds(
    Prompt,
    uid=st.integers(0),
    row_index=st.integers(0),
    token_ids=st.lists(st.integers(0, 99), max_size=4).map(tuple),
    text=text,
    prompt=text | st.lists(columns, max_size=2),
    columns=columns,
    prefill=text,
    source=text,
    template_arguments=columns,
)
groups = st.lists(st.builds(Group, prompts, st.lists(completions(), max_size=3).map(tuple)), max_size=3)


@st.composite
def rollouts(draw):
    some = draw(groups)
    count = sum(len(group.completions) for group in some)
    numbers = st.lists(number, min_size=count, max_size=count)
    scores = Scores(
        rewards_S=torch.tensor(draw(numbers), dtype=torch.float64),
        by_function_SK=torch.tensor([draw(numbers), draw(numbers)], dtype=torch.float64).T,
        names=("one", draw(text)),
        weights=draw(st.none() | st.just((1.0, 0.25))),
        token_rewards_N=draw(st.none() | st.just(torch.tensor([1.5, math.nan], dtype=torch.float64))),
        extras={"answer": [draw(plain) for _ in range(count)]},
        errors={s: draw(text) for s in range(min(count, 1))},
        counts={"seconds/reward/one": draw(number)},
        logged={"metric": draw(numbers)},
    )
    return StoredRollout(some, draw(st.none() | st.just(scores)), draw(columns))


def loaded(folder, rollout):
    (folder / "one").write_bytes(encode_rollout(rollout))
    return load_rollout(folder / "one")


@given(rollouts())
@hypothesis_settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_a_loaded_rollout_equals_the_saved_one(tmp_path, rollout):
    expected = replace(rollout, facts={**rollout.facts, EXACT: True})
    assert same(loaded(tmp_path, rollout), expected)


ODD = [
    defaultdict(int, a=1),
    np.float32(math.nan),
    np.bool_(True),
    np.arange(6, dtype=np.uint16).reshape(2, 3)[:, ::2],
    np.array(2.5),
    np.zeros((0, 3), np.float16),
    torch.tensor([[1, 2]], dtype=torch.int16),
    datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC),
    date(2026, 1, 2),
    Decimal("1.10"),
    frozenset({1, "a"}),
    2**200,
    1 + 2j,
    {"$": "tuple", "of": []},
]


@pytest.mark.parametrize("value", ODD, ids=lambda value: type(value).__name__)
def test_values_of_other_types(tmp_path, value):
    found = loaded(tmp_path, StoredRollout([], facts={"value": value})).facts["value"]
    assert same(found, dict(value) if isinstance(value, defaultdict) else value)


def test_an_object_of_another_class_becomes_its_text(tmp_path):
    class Board:
        def __str__(self):
            return "x|o"

    class Mute:
        def __str__(self):
            raise ValueError("no")

    values = [Board(), np.array(["a"]), torch.ones(1).bfloat16(), Mute()]
    episode = Episode((), state={"values": values})
    completion = replace(Completion.of_tokens([1], [-1.0], FinishReason.EOS), episode=episode)
    rollout = loaded(tmp_path, StoredRollout([Group(Prompt(0, 0, (1,), "a", "a", {}), (completion,))]))
    assert not rollout.facts[EXACT]
    board, letters, _, mute = rollout.groups[0].completions[0].episode.state["values"]
    assert (board, str(board), str(letters)) == (Unstorable("x|o"), "x|o", "['a']")
    assert str(mute) == "an object of Mute"


def test_a_file_makes_no_object_of_a_class_that_is_not_listed(tmp_path):
    tree = json.dumps({"groups": [], "scores": None, "facts": {"$": "Path", "of": "/"}})
    numbers = {TREE: np.frombuffer(tree.encode(), np.uint8)}
    (tmp_path / "one").write_bytes(save(numbers, {DIGEST: digest(numbers)}))
    with pytest.raises(RunFolderError, match="Path"):
        load_rollout(tmp_path / "one")


@pytest.mark.parametrize("where", [0, 7, 60, 0.5, -1])
def test_a_damaged_file_is_named(tmp_path, where):
    """A bit of the length, of the header, of the tree and of the numbers; and every cut."""
    segment = Segment(np.arange(9), None)
    completion = Completion((segment,), np.linspace(-1, 0, 9), FinishReason.EOS, "text", 0)
    whole = encode_rollout(StoredRollout([Group(Prompt(0, 0, (1,), "a", "a", {}), (completion,))]))
    at = where if isinstance(where, int) else int(where * len(whole))
    damaged = bytearray(whole)
    damaged[at] ^= 1
    for content in (bytes(damaged), whole[:at]):
        (tmp_path / "one").write_bytes(content)
        with pytest.raises(RunFolderError, match="one"):
            load_rollout(tmp_path / "one")
