"""Rooms of rows that grow with their lengths: the same draws in little memory, and rows by what lengths need."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.errors import ConfigError
from cohort.policy import Policy
from cohort.rollout import LocalEngine, RNGKey, Sampling
from cohort.rollout.local.backend import plan
from cohort.rollout.local.cache import GroupCache, Heads, Rows
from cohort.rollout.local.capacity import Capacity
from tests.families.configs import small_model
from tests.policy.plain import SINGLE
from tests.rollout.conftest import drawn_ids
from tests.rollout.test_continuation import GIVEN, PROMPTS, engine_of, play, requests
from tests.rollout.test_local_engine import LetterTokenizer

CPU = torch.device("cpu")


@pytest.fixture
def short(monkeypatch):
    """Rows begin with room for 32 tokens."""
    monkeypatch.setattr("cohort.rollout.local.capacity.FIRST_TOKENS", 32)


@pytest.fixture
def held(monkeypatch):
    """The most tokens of rows that a cache has had memory for at a time, and how often it was copied."""
    seen = {"most": 0, "copies": 0}
    fit = GroupCache._fit

    def counted(self, tokens):
        before = self._held
        fit(self, tokens)
        seen["copies"] += self._held != before
        seen["most"] = max(seen["most"], math.prod(self._held))

    monkeypatch.setattr(GroupCache, "_fit", counted)
    return seen


def drawn(groups):
    return [(drawn_ids(c), c.finish_reason, c.sampler_logps.tolist()) for group in groups for c in group.completions]


@pytest.mark.usefixtures("short")
@settings(max_examples=8, deadline=None, derandomize=True)
@given(extra=st.integers(0, 400), rows=st.integers(1, 12), samples=st.integers(1, 6), stops=st.booleans())
def test_a_small_cache_changes_no_draw(extra, rows, samples, stops):
    """Rows are preempted and read again; lengths differ, as end tokens come early or late."""
    sampling = Sampling(90, temperature=1.3, stop=("a",) if stops else ())
    expected = drawn(engine_of("lean").generate(PROMPTS, samples, sampling, RNGKey(0, 0)))
    least = 96 + 64  # a row of 90 tokens, the longest prompt
    engine = engine_of("lean", max_batch_size=rows, cache_tokens=least + extra)
    found = drawn(engine.generate(PROMPTS, samples, sampling, RNGKey(0, 0)))
    assert [one[:2] for one in found] == [one[:2] for one in expected]
    for one, other in zip(found, expected, strict=True):  # float64, sums in another order
        assert one[2] == pytest.approx(other[2], abs=1e-9)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("cache_tokens", [160, 200, 300, 500])
def test_turns_in_a_small_cache(cache_tokens, held):
    sampling, replies = Sampling(90, temperature=0.9, max_turn_length=9), [GIVEN * 3, GIVEN[:2], GIVEN * 4]
    expected = play(engine_of("lean"), sampling, replies)
    held |= {"most": 0, "copies": 0}
    found = play(engine_of("lean", cache_tokens=cache_tokens), sampling, replies)
    for mine, theirs in zip(found, expected, strict=True):
        assert [drawn_ids(turn.completion) for turn in mine] == [drawn_ids(turn.completion) for turn in theirs]
    assert held["most"] <= cache_tokens - 32  # and a prompt


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("cache_tokens", [200, 300, 600])
def test_turns_that_are_extended_together(cache_tokens, held):
    """Rows are parked when they go on, and no longer fit at once."""

    def played(engine):
        engine.submit(requests(Sampling(90, temperature=0.9, max_turn_length=4)))
        turns = []
        while ended := list(engine.stream()):
            for turn in ended:
                if turn.room > 50 and turn.trajectory not in {number for number, _ in turns}:
                    engine.extend(turn.trajectory, GIVEN * 10)
                else:
                    engine.release(turn.trajectory)
                turns.append((turn.trajectory, drawn_ids(turn.completion)))
        return sorted(turns)

    expected = played(engine_of("lean"))
    held |= {"most": 0, "copies": 0}
    assert played(engine_of("lean", cache_tokens=cache_tokens)) == expected
    assert held["most"] <= cache_tokens - 32


@pytest.mark.parametrize("family", ["mamba2"])
def test_a_model_without_attention_keeps_its_states(family):
    policy = Policy(small_model(family), SINGLE)
    assert "without a cache" not in LocalEngine(policy, LetterTokenizer(), (1,)).backend.description


@pytest.mark.usefixtures("short")
def test_memory_is_what_the_lengths_need(held):
    """Completions of up to 8,000 tokens that end after a few dozen: all rows at a time, in a hundredth of the memory
    that rows times the longest would take, and at most twice what the longest row needs."""
    sampling = Sampling(8000, temperature=1.0, stop=("a", "b", "c"))
    engine = engine_of("lean", cache_tokens=20_000)
    engine.policy.model.config.max_position_embeddings = 10_000
    groups = engine.generate(PROMPTS, 16, sampling, RNGKey(0, 0))
    longest = max(len(drawn_ids(c)) for group in groups for c in group.completions)
    assert longest < 300
    assert held["most"] <= 48 * max(32, 2 * (longest + 32))
    assert held["most"] < 48 * 8000 / 10


SIZES = {"max_rows": 256, "token_multiple": 32, "device": CPU}


def test_the_plan_admits_rows_by_their_first_tokens():
    whole = {"max_tokens": 50_000, "token_bytes": 100, **SIZES}
    old = plan([100] * 8, 64, 100, 8000, **whole)
    new = plan([100] * 8, 64, 100, 8000, **whole, grows=True)
    assert old.rows == 6
    assert (new.rows, new.prompts, new.row_tokens) == (64, 8, 50_000 - 8 * 128)
    # Of 50 rows of 960 tokens 51 fit; of 4,000 tokens 12.
    assert (new.rows_of(960), new.rows_of(4000), new.rows_of(8000)) == (51, 12, 6)
    # Long prompts get no more than rows do: 12 prompts of 4,096 tokens, and 8 rows of each.
    long = plan([4096] * 32, 256, 4096, 8192, **whole | {"max_tokens": 100_000}, grows=True)
    assert (long.rows, long.prompts, long.row_tokens) == (48, 12, 100_000 - 12 * 4096)
    few = plan([100] * 8, 64, 100, 200, **whole, grows=True)
    assert few.row_tokens == 64 * 224  # no more than all of them need


def test_one_completion_must_fit_at_full_length():
    with pytest.raises(ConfigError, match="needs keys and values of 8128 tokens, and rollout.cache_tokens is 8127"):
        plan([100], 4, 100, 8000, max_tokens=8127, token_bytes=100, **SIZES, grows=True)
    assert plan([100], 4, 100, 8000, max_tokens=8128, token_bytes=100, **SIZES, grows=True).rows == 4


def test_rooms_grow_with_what_they_hold():
    """By hand: two rows of a head of one number, copied twice, the second time after another row took the place of one that ended."""
    capacity = Capacity(4, 1, 32, 1024, 2048)
    cache = GroupCache(capacity, {3: Heads(1, 1, 1, 1)}, dtype=torch.float32, device=CPU)

    def room():
        keys, values = cache.own[3]
        assert keys.shape == values.shape
        return keys.shape

    def given(values):
        return {3: [sign * torch.tensor(values, dtype=torch.float32).view(1, -1, 1) for sign in (1, -1)]}

    assert room() == (4, 1, 256, 1)
    cache.add_prompts([0], [1], given([7]))
    cache.add_rows([0, 1, 2], [0, 0, 0])
    cache.append([2, 1], [300, 2], given([*range(300), 1000, 1001]))
    assert room() == (4, 1, 512, 1)
    cache.remove_rows([(2, 0)], 2)
    cache.append([0], [700], given([5] * 700))
    assert room() == (2, 1, 1024, 1)  # two rows of 1,024 are all that fit
    for place, text in ((0, [7, *range(300), *[5] * 700]), (1, [7, 1000, 1001])):
        k, v = cache.text(3, place)
        assert (k.flatten().tolist(), (-v).flatten().tolist()) == (text, text)


def test_the_last_rows_fill_gaps():
    rows = Rows()
    assert rows.add([7, 3, 5, 9, 4]) == [0, 1, 2, 3, 4]
    assert rows.release([3, 9]) == [(4, 1)]
    assert rows.places([7, 4, 5]) == [0, 1, 2]
    assert rows.add([5, 9]) == [2, 3]
    assert rows.release([9, 7, 4, 5]) == []
    assert len(rows) == 0


@pytest.mark.filterwarnings("ignore:out of memory in sampling")
def test_a_halved_batch_grows_again(monkeypatch):
    """After one call without a failure, or more the oftener memory has run out."""
    monkeypatch.setattr("cohort.rollout.local.engine.release_memory", lambda: None)
    engine, limit = engine_of("lean", max_batch_size=8), [4]
    add_rows = engine.backend.add_rows

    def checked(slots, prompts):
        if len(prompts) > limit[0]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        add_rows(slots, prompts)

    monkeypatch.setattr(engine.backend, "add_rows", checked)
    sizes = []
    for _ in range(9):
        engine.generate(PROMPTS, 4, Sampling(3), RNGKey(0, 0))
        sizes.append(engine.max_batch_size)
    # Fails in the first call; two without failure later 8 are tried, which fail; then it takes four.
    assert sizes == [4, 4, 8, 4, 4, 4, 4, 8, 4]
    limit[0] = 100
    for _ in range(12):
        engine.generate(PROMPTS, 4, Sampling(3), RNGKey(0, 0))
    assert engine.max_batch_size == 8
