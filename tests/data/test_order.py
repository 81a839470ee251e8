"""The order of prompts: passes, mixtures by weights, curricula."""

import copy
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.config import DataConfig, Source
from cohort.data import DataCursor, InMemoryLoader, LengthLimit, PromptSet, load_data
from cohort.data.loader import ReadPosition
from cohort.data.mixture import Turns
from cohort.data.order import pass_order
from cohort.errors import DataError
from cohort.policy import load_tokenizer
from tests.conftest import DEMO_MODEL

TOKENIZER = load_tokenizer(str(DEMO_MODEL))
SHUFFLED = DataConfig()
SEQUENTIAL = DataConfig(order="sequential")
MEASURED = DataConfig(order="curriculum", curriculum="measured")


def stream(given, config=SHUFFLED, seed=0):
    rows = [{"prompt": str(n)} for n in range(given)] if isinstance(given, int) else given
    return InMemoryLoader(PromptSet(load_data(rows, config), TOKENIZER, config), seed=seed, config=config)


def mixture(sizes, weights, config=SHUFFLED, seed=0):
    sources = [
        Source(path=[{"prompt": "1", "n": n} for n in range(size)], name=str(i), weight=weight)
        for i, (size, weight) in enumerate(zip(sizes, weights, strict=True))
    ]
    return stream(sources, config, seed)


def rows_of(prompts):
    return [prompt.row_index for prompt in prompts]


@given(st.integers(1, 30), st.integers(1, 9), st.integers(0, 5))
@settings(deadline=None)
def test_every_row_occurs_once_in_each_pass(num_rows, per_step, seed):
    prompts = stream(num_rows, seed=seed)
    steps = -(-3 * num_rows // per_step)
    taken = [prompt for step in range(steps) for prompt in prompts.fetch(DataCursor(step * per_step), per_step)]
    for epoch in range(3):
        rows = Counter(rows_of(taken[epoch * num_rows : (epoch + 1) * num_rows]))
        assert set(rows.values()) == {1}
    assert [prompt.uid for prompt in taken] == list(range(len(taken)))


def test_order_depends_on_seed_epoch_and_lane_alone():
    assert pass_order(50, 0, 0).tolist() == pass_order(50, 0, 0).tolist()
    orders = {tuple(pass_order(50, seed, epoch, lane)) for seed in (0, 1) for epoch in (0, 1) for lane in (0, 1)}
    assert len(orders) == 8


def test_sequential_is_the_files_order():
    prompts = stream(5, SEQUENTIAL)
    assert [row for step in range(3) for row in rows_of(prompts.fetch(DataCursor(2 * step), 2))] == [0, 1, 2, 3, 4, 0]


WEIGHTS = st.lists(st.fractions(Fraction(1, 50), 50, max_denominator=60), min_size=1, max_size=5)


@given(WEIGHTS, st.integers(1, 400))
@settings(deadline=None)
def test_a_source_is_never_a_whole_prompt_away_from_its_share(weights, count):
    turns = Turns(weights)
    counts = [0] * len(weights)
    for place in range(count):
        source, before = turns.at(place)
        assert before == counts[source]
        counts[source] += 1
        for own, weight in zip(counts, weights, strict=True):
            assert abs(own - (place + 1) * weight / sum(weights)) < 1


@given(WEIGHTS, st.integers(0, 10**12))
@settings(deadline=None)
def test_turns_are_a_function_of_the_place(weights, place):
    fresh = Turns(weights)
    period = sum(fresh._weights)
    place = place % period % 3000 + place // 3000 * period  # far out, but early in its cycle: nothing long is computed
    source, count = fresh.at(place)
    assert (source, count) == Turns([7 * weight for weight in weights]).at(place)
    cycles, within = divmod(place, period)
    first_source, first_count = Turns(weights).at(within)
    assert (source, count) == (first_source, first_count + cycles * fresh._weights[source])


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 9)), min_size=2, max_size=4), st.integers(0, 3))
@settings(deadline=None, max_examples=40)
def test_an_epoch_of_a_mixture_is_over_when_every_row_was_used(sources, seed):
    sizes, weights = zip(*sources, strict=True)
    prompts = mixture(sizes, [weight / 4 for weight in weights], seed=seed)
    length = prompts.epoch_length
    assert length == max(-(-size * sum(weights) // weight) for size, weight in sources)
    taken = prompts.fetch(DataCursor(), 2 * length)
    for number, size in enumerate(sizes):
        own = [prompt.row_index for prompt in taken if prompt.source == str(number)]
        assert set(own[: sum(prompt.source == str(number) for prompt in taken[:length])]) == set(range(size))
        for begin in range(0, len(own) - size + 1, size):  # each source is an endless stream of passes of its own
            assert sorted(own[begin : begin + size]) == list(range(size))


def test_two_sources_of_the_same_rows_have_orders_of_their_own():
    prompts = mixture([20, 20], [1.0, 1.0])
    taken = prompts.fetch(DataCursor(), 40)
    first, second = (rows_of(prompt for prompt in taken if prompt.source == name) for name in "01")
    assert sorted(first) == sorted(second)
    assert first != second


def test_without_weights_every_row_of_every_source_is_used_once():
    prompts = mixture([3, 5], [None, None])
    assert prompts.epoch_length == 8
    assert Counter((p.source, p.row_index) for p in prompts.fetch(DataCursor(), 8)) == Counter(
        [("0", n) for n in range(3)] + [("1", n) for n in range(5)]
    )


def test_a_mixture_in_words():
    weighted = mixture([3, 5], [3.0, 1.0]).describe()
    assert weighted == [
        "data: 2 sources, taking turns by their weights",
        "  0: 3 rows, 75.0% of the prompts",
        "  1: 5 rows, 25.0% of the prompts",
        "prompts: 8; 1 to 1 tokens, median 1, 99% at most 1",
        "order: a new order for each epoch",
    ]
    assert mixture([3, 5], [None, None]).describe()[:2] == [
        "data: 2 sources, one after another, every row once per epoch",
        "  0: 3 rows",
    ]


LEVELS = [{"prompt": str(n), "level": level} for n, level in enumerate([3, 1, 2, 1, 2, "0.5", 1])]


def by(column, seed=0, rows=LEVELS):
    return stream(rows, DataConfig(order="curriculum", curriculum=column), seed)


def test_a_curriculum_by_a_column():
    orders = set()
    for seed in range(20):
        prompts = by("level", seed)
        for epoch in range(2):
            rows = rows_of(prompts.fetch(DataCursor(epoch * 7), 7))
            assert [float(LEVELS[row]["level"]) for row in rows] == [0.5, 1, 1, 1, 2, 2, 3]
            orders.add(tuple(rows))
    assert len(orders) == 12  # ties are broken by seed and epoch: 3! x 2! orders
    assert [float(LEVELS[row]["level"]) for row in rows_of(by("-level").fetch(DataCursor(), 7))] == [
        3,
        2,
        2,
        1,
        1,
        1,
        0.5,
    ]
    assert by("-level").describe()[-1] == "order: by -level, of equal ones a new order for each epoch"


def test_a_curriculum_of_what_is_left():
    levels = [9, 1, 7, 3, 5]
    rows = [{"prompt": "1" * (8 if n == 2 else 2), "level": level} for n, level in enumerate(levels)]
    config = DataConfig(order="curriculum", curriculum="-level")
    data = load_data([Source(path=rows), Source(path=rows, filter={"level": {"min": 4}})], config)
    limit = LengthLimit(4, "data.max_prompt_length", "drop")
    prompts = InMemoryLoader(PromptSet(data, TOKENIZER, config, limit=limit), seed=0, config=config)
    assert [prompt.columns["level"] for prompt in prompts.fetch(DataCursor(), 6)] == [9, 9, 5, 5, 3, 1]
    assert Counter((p.source, p.row_index) for p in prompts.fetch(DataCursor(), 6))[("source 1", 4)] == 1


@pytest.mark.parametrize("value", [None, "hard", float("nan"), True])
def test_a_curriculum_needs_a_number_in_every_row(value):
    with pytest.raises(
        DataError, match="the training data, row 1: data.curriculum needs a number in column 'level', got"
    ):
        by("level", rows=[{"prompt": "1", "level": 1}, {"prompt": "2", "level": value}])
    with pytest.raises(DataError, match="data.curriculum names column 'lvl'; there are: prompt, level"):
        by("lvl")


def steps(prompts, count, per_step, reward, cursor=None):
    """Steps of a run whose rewards are a function of the row and the step; the rows of each, and the cursor."""
    cursor, fetched = cursor or DataCursor(), []
    for step in range(count):
        some = prompts.fetch(cursor, per_step)
        assert prompts.fetch(cursor, per_step - 1, skip=1) == some[1:]  # fetching changes nothing
        cursor, _ = prompts.advance(cursor, per_step, {p.uid: reward(p.row_index, step) for p in some})
        fetched.append(rows_of(some))
    return fetched, cursor


def test_a_measured_curriculum_goes_from_the_highest_reward_to_the_lowest():
    prompts = stream(6, MEASURED)
    taken, _ = steps(prompts, 6, 3, lambda row, step: row if step < 2 else -row)
    assert sorted(taken[0] + taken[1]) == list(range(6))
    assert taken[0] + taken[1] == rows_of(stream(6).fetch(DataCursor(), 6))  # the first pass is shuffled
    assert taken[2] + taken[3] == [5, 4, 3, 2, 1, 0]  # by what the first pass measured
    assert taken[4] + taken[5] == [0, 1, 2, 3, 4, 5]  # by what the second one did
    assert "from the highest mean reward measured to the lowest" in prompts.describe()[-1]


def test_what_could_not_be_measured_comes_last():
    prompts = stream(6, MEASURED)
    taken, _ = steps(prompts, 4, 3, lambda row, step: np.nan if row in (1, 4) else row)
    assert (taken[2] + taken[3])[:4] == [5, 3, 2, 0]


@given(st.integers(1, 12), st.integers(1, 7), st.integers(1, 12), st.integers(0, 9), st.booleans())
@settings(deadline=None, max_examples=60)
def test_a_measured_curriculum_goes_on_where_it_was(num_rows, per_step, count, stop, weighted):
    def reward(row, step):
        return float(np.random.default_rng([row, step]).integers(4))

    def fresh():
        sizes = [num_rows, max(1, num_rows // 2)]
        return mixture(sizes, [1.0, 2.0], MEASURED, seed=3) if weighted else stream(num_rows, MEASURED, seed=3)

    stop = min(stop, count)
    whole, _ = steps(fresh(), count, per_step, reward)
    before = fresh()
    first, cursor = steps(before, stop, per_step, reward)
    before.fetch(cursor, per_step)  # a step that was begun and never completed
    cursor = DataCursor.from_state(copy.deepcopy(cursor.state_dict()))
    rest, _ = steps(fresh(), count - stop, per_step, lambda row, step: reward(row, step + stop), cursor)
    assert first + rest == whole
    if not weighted:
        flat = [row for rows in whole for row in rows]
        for begin in range(0, len(flat) - num_rows + 1, num_rows):
            assert sorted(flat[begin : begin + num_rows]) == list(range(num_rows))


def test_a_cursor_is_written_and_read_back():
    cursor = DataCursor(3, ReadPosition([3], 1), np.array([1.0, np.nan]), {0: (1, np.array([1, 0]))})
    other = DataCursor.from_state(cursor.state_dict())
    assert (other.position, other.read, other.orders) == (3, ReadPosition([3], 1), cursor.orders)
    np.testing.assert_array_equal(other.rewards, cursor.rewards)


def test_the_length_of_an_epoch_is_known_without_a_tokenizer():
    prompts = mixture([2, 10], [10.0, 1.0])
    assert prompts.prompts.data.epoch_length == prompts.epoch_length == 110
    assert load_data([{"prompt": "1"}] * 3, SHUFFLED).epoch_length == 3
    assert load_data([{"prompt": "1"}] * 3, DataConfig(streaming=True)).epoch_length is None
