"""The order of prompts in memory: epochs, weighted mixtures, curricula, and the cursor."""

import copy
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.config import DataConfig, Source
from cohort.data import DataCursor, LengthLimit, PromptSet, load_data, prompt_loader
from cohort.data.load import Turns
from cohort.data.loader import ReadPosition
from cohort.data.order import Reached
from cohort.errors import DataError
from tests.data.templates import byte_tokenizer

TOKENIZER = byte_tokenizer(bos=False)
SHUFFLED = DataConfig()
MEASURED = DataConfig(order="curriculum", curriculum="measured")
START = DataCursor()


def loader(given, config=SHUFFLED, seed=0, limit=None):
    rows = [{"prompt": str(n)} for n in range(given)] if isinstance(given, int) else given
    return prompt_loader(PromptSet(rows, TOKENIZER, config, limit=limit), config, seed=seed)


def mixture(sizes, weights, config=SHUFFLED, seed=0):
    sources = [
        Source(path=[{"prompt": "1", "n": n} for n in range(size)], name=str(i), weight=weight)
        for i, (size, weight) in enumerate(zip(sizes, weights, strict=True))
    ]
    return loader(sources, config, seed)


def rows_of(prompts):
    return [prompt.row_index for prompt in prompts]


@given(st.integers(1, 30), st.integers(1, 9), st.integers(0, 5))
@settings(deadline=None, max_examples=30)
def test_every_row_occurs_once_per_epoch(num_rows, per_step, seed):
    prompts = loader(num_rows, seed=seed)
    fetched = [
        prompt
        for position in range(0, 3 * num_rows, per_step)
        for prompt in prompts.fetch(DataCursor(position), per_step)
    ]
    for epoch in range(3):
        assert sorted(rows_of(fetched[epoch * num_rows : (epoch + 1) * num_rows])) == list(range(num_rows))
    assert [prompt.uid for prompt in fetched] == list(range(len(fetched)))
    assert prompts.fetch(START, per_step, skip=num_rows) == prompts.fetch(DataCursor(num_rows), per_step)


def test_the_order_depends_on_seed_epoch_and_lane():
    orders = set()
    for seed in (0, 1):
        fetched = mixture([20, 20], [1.0, 1.0], seed=seed).fetch(START, 80)
        for name in "01":
            rows = rows_of(prompt for prompt in fetched if prompt.source == name)
            orders |= {tuple(rows[:20]), tuple(rows[20:])}
    assert len(orders) == 8
    # The order of a seed must never change: a resumed run would read other prompts.
    assert rows_of(loader(6).fetch(START, 6)) == [0, 5, 1, 2, 4, 3]


def test_sequential_is_the_order_of_the_file():
    assert rows_of(loader(5, DataConfig(order="sequential")).fetch(START, 6)) == [0, 1, 2, 3, 4, 0]


WEIGHTS = st.lists(st.fractions(Fraction(1, 50), 50, max_denominator=60), min_size=1, max_size=5)


@given(WEIGHTS, st.integers(1, 400))
@settings(deadline=None, max_examples=50)
def test_a_source_is_never_a_whole_prompt_away_from_its_share(weights, count):
    turns = Turns(weights)
    counts = [0] * len(weights)
    for position in range(count):
        source, before = turns.at(position)
        assert before == counts[source]
        counts[source] += 1
        for used, weight in zip(counts, weights, strict=True):
            assert abs(used - (position + 1) * weight / sum(weights)) < 1


@given(WEIGHTS, st.integers(0, 10**12))
@settings(deadline=None, max_examples=50)
def test_turns_are_a_function_of_the_position(weights, position):
    fresh = Turns(weights)
    period = sum(fresh._weights)
    # Far out, but early in its cycle: nothing long is computed.
    position = position % period % 3000 + position // 3000 * period
    source, count = fresh.at(position)
    assert (source, count) == Turns([7 * weight for weight in weights]).at(position)
    cycles, within = divmod(position, period)
    first_source, first_count = Turns(weights).at(within)
    assert (source, count) == (first_source, first_count + cycles * fresh._weights[source])


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 9)), min_size=2, max_size=4), st.integers(0, 3))
@settings(deadline=None, max_examples=25)
def test_an_epoch_of_a_mixture_ends_when_every_row_was_used(sources, seed):
    sizes, weights = zip(*sources, strict=True)
    prompts = mixture(sizes, [weight / 4 for weight in weights], seed=seed)
    length = prompts.prompts.epoch_length
    assert length == prompts.prompts.data.epoch_length()  # which is known without a tokenizer
    assert length == max(-(-size * sum(weights) // weight) for size, weight in sources)
    fetched = prompts.fetch(START, 2 * length)
    for number, size in enumerate(sizes):
        rows = [prompt.row_index for prompt in fetched if prompt.source == str(number)]
        assert set(rows[: sum(prompt.source == str(number) for prompt in fetched[:length])]) == set(range(size))
        for begin in range(0, len(rows) - size + 1, size):  # each source has epochs of its own
            assert sorted(rows[begin : begin + size]) == list(range(size))


def test_without_weights_every_row_of_every_source_is_used_once():
    prompts = mixture([3, 5], [None, None])
    assert prompts.prompts.epoch_length == 8
    expected = [("0", n) for n in range(3)] + [("1", n) for n in range(5)]
    assert sorted((p.source, p.row_index) for p in prompts.fetch(START, 8)) == expected
    assert prompts.describe()[:2] == ["data: 2 sources, one after another, every row once per epoch", "  0: 3 rows"]


def test_a_mixture_in_words():
    assert mixture([3, 5], [3.0, 1.0]).describe() == [
        "data: 2 sources, taking turns by their weights",
        "  0: 3 rows, 75.0% of the prompts",
        "  1: 5 rows, 25.0% of the prompts",
        "prompts: 8; 1 to 1 tokens, median 1, 99% at most 1",
        "order: a new order for each epoch",
    ]


def test_a_weighted_source_whose_prompts_are_all_dropped_is_refused():
    sources = [
        Source(path=[{"prompt": "1"}] * 5, name="a", weight=1.0),
        Source(path=[{"prompt": "1" * 9}] * 5, name="b", weight=3.0),
    ]
    for streaming, seen in ((False, ""), (True, r" of the first 5 rows .checked before the run.")):
        with pytest.raises(DataError, match=f"source 'b': data.overlong_prompts has dropped every prompt{seen}, and"):
            loader(sources, DataConfig(streaming=streaming), limit=LengthLimit(4, "data.max_prompt_length", "drop"))


LEVELS = [{"prompt": str(n), "level": level} for n, level in enumerate([3, 1, 2, 1, 2, "0.5", 1])]


def by(column, seed=0, rows=LEVELS):
    return loader(rows, DataConfig(order="curriculum", curriculum=column), seed)


def test_a_curriculum_by_a_column():
    orders = set()
    for seed in range(20):
        rows = rows_of(by("level", seed).fetch(START, 14))
        for epoch in (rows[:7], rows[7:]):
            assert [float(LEVELS[row]["level"]) for row in epoch] == [0.5, 1, 1, 1, 2, 2, 3]
            orders.add(tuple(epoch))
    assert len(orders) == 12  # seed and epoch break the ties: 3! x 2! orders
    assert [float(LEVELS[row]["level"]) for row in rows_of(by("-level").fetch(START, 7))] == [3, 2, 2, 1, 1, 1, 0.5]
    assert by("-level").describe()[-1] == "order: by -level, ties in a new order for each epoch"
    assert by("-level").fingerprint != by("level").fingerprint


def test_a_curriculum_of_filtered_and_dropped_rows():
    levels = [9, 1, 7, 3, 5]
    rows = [{"prompt": "1" * (8 if n == 2 else 2), "level": level} for n, level in enumerate(levels)]
    sources = [Source(path=rows), Source(path=rows, filter={"level": {"min": 4}})]
    config = DataConfig(order="curriculum", curriculum="-level")
    prompts = loader(sources, config, limit=LengthLimit(4, "data.max_prompt_length", "drop")).fetch(START, 6)
    assert [prompt.columns["level"] for prompt in prompts] == [9, 9, 5, 5, 3, 1]
    assert Counter((prompt.source, prompt.row_index) for prompt in prompts)["source 1", 4] == 1


@pytest.mark.parametrize("value", [None, "hard", float("nan"), True])
def test_a_curriculum_needs_a_number_in_every_row(value):
    rows = [{"prompt": "1", "level": 1}, {"prompt": "2", "level": value}]
    config = DataConfig(order="curriculum", curriculum="level")
    with pytest.raises(DataError, match="row 1: data.curriculum needs a number in column 'level', got"):
        load_data(rows, config)
    load_data(rows, config, evaluation=True)  # which has no order
    with pytest.raises(DataError, match="data.curriculum names column 'lvl'; there are: prompt, level"):
        by("lvl")


def steps(prompts, count, per_step, reward, cursor=START):
    """The rows of ``count`` steps whose rewards are a function of the row and the step, and the cursor after them."""
    fetched = []
    for step in range(count):
        some = prompts.fetch(cursor, per_step)
        assert prompts.fetch(cursor, per_step - 1, skip=1) == some[1:]  # fetching changes nothing
        cursor, _ = prompts.advance(cursor, per_step, {p.uid: reward(p.row_index, step) for p in some})
        fetched.append(rows_of(some))
    return fetched, cursor


def test_a_measured_curriculum_goes_from_the_highest_reward_to_the_lowest():
    prompts = loader(6, MEASURED)
    fetched, _ = steps(prompts, 6, 3, lambda row, step: row if step < 2 else -row)
    assert fetched[0] + fetched[1] == rows_of(loader(6).fetch(START, 6))  # the first epoch is shuffled
    assert fetched[2] + fetched[3] == [5, 4, 3, 2, 1, 0]  # by the rewards of the first epoch
    assert fetched[4] + fetched[5] == [0, 1, 2, 3, 4, 5]  # by those of the second
    assert "from the highest measured mean reward to the lowest" in prompts.describe()[-1]


def test_a_prompt_without_a_reward_comes_last():
    fetched, _ = steps(loader(6, MEASURED), 4, 3, lambda row, step: np.nan if row in (1, 4) else row)
    assert sorted(fetched[0] + fetched[1]) == list(range(6))
    assert (fetched[2] + fetched[3])[:4] == [5, 3, 2, 0]
    # Its earlier reward stays, if it had one.
    fetched, _ = steps(loader(6, MEASURED), 6, 3, lambda row, step: np.nan if row == 5 and step > 1 else row)
    assert fetched[4] + fetched[5] == [5, 4, 3, 2, 1, 0]


@given(st.integers(1, 12), st.integers(1, 7), st.integers(1, 12), st.integers(0, 9), st.booleans())
@settings(deadline=None, max_examples=30)
def test_a_measured_curriculum_continues_from_its_cursor(num_rows, per_step, count, stop, weighted):
    def reward(row, step):
        return float(np.random.default_rng([row, step]).integers(4))

    def fresh():
        sizes = [num_rows, max(1, num_rows // 2)]
        return mixture(sizes, [1.0, 2.0], MEASURED, seed=3) if weighted else loader(num_rows, MEASURED, seed=3)

    stop = min(stop, count)
    whole, _ = steps(fresh(), count, per_step, reward)
    before = fresh()
    first, cursor = steps(before, stop, per_step, reward)
    before.fetch(cursor, per_step)  # a step that begins and is never complete
    cursor = DataCursor.from_state(copy.deepcopy(cursor.state_dict()))
    rest, _ = steps(fresh(), count - stop, per_step, lambda row, step: reward(row, step + stop), cursor)
    assert first + rest == whole
    if not weighted:
        flat = [row for rows in whole for row in rows]
        for begin in range(0, len(flat) - num_rows + 1, num_rows):
            assert sorted(flat[begin : begin + num_rows]) == list(range(num_rows))


def test_the_state_of_a_cursor():
    assert Reached is ReadPosition  # by its earlier name, older checkpoints are read
    cursor = DataCursor(3, ReadPosition([3], 1), np.array([1.0, np.nan]), {0: (1, np.array([1, 0]))})
    state = cursor.state_dict()
    assert list(state) == ["taken", "reached", "rewards", "passes"]  # the keys of checkpoints
    other = DataCursor.from_state(state)
    assert (other.position, other.read, other.orders) == (3, ReadPosition([3], 1), cursor.orders)
    np.testing.assert_array_equal(other.rewards, cursor.rewards)
