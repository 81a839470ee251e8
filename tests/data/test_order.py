"""The order of prompts, in memory and streamed: epochs, weighted mixtures, curricula, buffers, and the cursor."""

import copy
import itertools
import json
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from datasets import Dataset, IterableDataset
from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.config import DataConfig, Source
from cohort.data import DataCursor, LengthLimit, PromptSet, load_data, prompt_loader
from cohort.data.load import Interleaving
from cohort.data.loader import ReadPosition, StreamingLoader, buffer_shuffled
from cohort.errors import DataError
from tests.conftest import each
from tests.data.templates import byte_tokenizer

TOKENIZER = byte_tokenizer(bos=False)
SHUFFLED = DataConfig()
MEASURED = DataConfig(order="curriculum", curriculum="measured")
START = DataCursor()
DROP = LengthLimit(4, "data.max_prompt_length", "drop")


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


def check_epochs(rows, size):
    """Each row occurs once in each epoch."""
    for begin in range(0, len(rows) - size + 1, size):
        assert sorted(rows[begin : begin + size]) == list(range(size))


@given(st.integers(1, 30), st.integers(1, 9), st.integers(0, 5))
@settings(deadline=None, max_examples=30)
def test_every_row_occurs_once_per_epoch(num_rows, per_step, seed):
    prompts = loader(num_rows, seed=seed)
    positions = range(0, 3 * num_rows, per_step)
    fetched = [prompt for position in positions for prompt in prompts.fetch(DataCursor(position), per_step)]
    check_epochs(rows_of(fetched), num_rows)
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
    assert rows_of(streamed(numbers(6), shuffle_buffer=3).fetch(START, 6)) == [0, 3, 1, 4, 2, 5]
    assert rows_of(loader(5, DataConfig(order="sequential")).fetch(START, 6)) == [0, 1, 2, 3, 4, 0]


WEIGHTS = st.lists(st.fractions(Fraction(1, 50), 50, max_denominator=60), min_size=1, max_size=5)


@given(WEIGHTS, st.integers(1, 400))
@settings(deadline=None, max_examples=50)
def test_a_source_is_never_a_whole_prompt_away_from_its_share(weights, count):
    turns = Interleaving(weights)
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
    turns = Interleaving(weights)
    period = sum(turns._weights)
    cycles, within = position // 3000, position % period % 3000  # early in its cycle: nothing long is computed
    source, count = turns.at(within + cycles * period)
    assert (source, count) == Interleaving([7 * weight for weight in weights]).at(within + cycles * period)
    assert (source, count - cycles * turns._weights[source]) == Interleaving(weights).at(within)


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
        check_epochs(rows, size)  # each source has epochs of its own


def test_several_sources_in_words():
    prompts = mixture([3, 5], [None, None])
    assert prompts.prompts.epoch_length == 8
    expected = [("0", n) for n in range(3)] + [("1", n) for n in range(5)]
    assert sorted((p.source, p.row_index) for p in prompts.fetch(START, 8)) == expected
    assert prompts.describe()[:2] == ["data: 2 sources, one after another, every row once per epoch", "  0: 3 rows"]
    assert mixture([3, 5], [3.0, 1.0]).describe() == [
        "data: 2 sources, taking turns by their weights",
        "  0: 3 rows, 75.0% of the prompts",
        "  1: 5 rows, 25.0% of the prompts",
        "prompts: 8; 1 to 1 tokens, median 1, 99% at most 1",
        "order: a new order for each epoch",
    ]


def test_a_weighted_source_whose_prompts_are_all_dropped_is_refused():
    sources = [Source(path=[{"prompt": "1" * n}] * 5, name=name, weight=1.0) for n, name in ((1, "a"), (9, "b"))]
    for streaming, seen in ((False, ""), (True, r" of the first 5 rows .checked before the run.")):
        with pytest.raises(DataError, match=f"source 'b': data.overlong_prompts has dropped every prompt{seen}, and"):
            loader(sources, DataConfig(streaming=streaming), limit=DROP)


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
    prompts = loader(sources, config, limit=DROP).fetch(START, 6)
    assert [prompt.columns["level"] for prompt in prompts] == [9, 9, 5, 5, 3, 1]
    assert Counter((prompt.source, prompt.row_index) for prompt in prompts)["source 1", 4] == 1


@each("value", [None, "hard", float("nan"), True])
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
        check_epochs([row for rows in whole for row in rows], num_rows)


def test_the_state_of_a_cursor():
    cursor = DataCursor(3, ReadPosition([3], 1), np.array([1.0, np.nan]), {0: (1, np.array([1, 0]))})
    state = cursor.state_dict()
    assert state == json.loads(json.dumps(state, allow_nan=False))
    other = DataCursor.from_state(state)
    assert (other.position, other.read) == (3, ReadPosition([3], 1))
    assert other.orders.keys() == cursor.orders.keys()
    assert other.orders[0][0] == 1
    np.testing.assert_array_equal(other.orders[0][1], cursor.orders[0][1])
    np.testing.assert_array_equal(other.rewards, cursor.rewards)


def streamed(given, limit=None, seed=0, **settings):
    config = DataConfig(**({"streaming": True} | settings))
    prompts = prompt_loader(PromptSet(given, TOKENIZER, config, limit=limit), config, seed=seed)
    assert isinstance(prompts, StreamingLoader)
    return prompts


def test_streamed_rows_with_tokens_that_the_model_lacks_are_named():
    prompts = streamed([*numbers(5), {"prompt": "9"}], order="sequential")
    (nine,) = TOKENIZER("9", add_special_tokens=False)["input_ids"]
    prompts.prompts._flat = prompts.prompts._flat[:0]  # as of a stream whose first rows have no such token
    prompts.prompts.check_tokens(nine)
    assert rows_of(prompts.fetch(START, 5)) == [*range(5)]
    with pytest.raises(DataError, match=rf"row 5 holds token {nine} \('9'\)"):
        prompts.fetch(START, 6)


def numbers(count):
    return [{"prompt": str(n), "n": n} for n in range(count)]


@given(st.integers(0, 60), st.integers(1, 80), st.integers(0, 3))
@settings(max_examples=50, deadline=None)
def test_a_buffer_loses_nothing_and_moves_nothing_forward_by_more_than_its_size(count, size, seed):
    shuffled = list(buffer_shuffled(iter(range(count)), size, np.random.default_rng(seed)))
    assert sorted(shuffled) == list(range(count))
    assert all(item < index + size for index, item in enumerate(shuffled))


@given(st.integers(1, 25), st.integers(1, 30), st.integers(0, 3), st.integers(0, 70), st.integers(1, 9))
@settings(deadline=None, max_examples=25)
def test_every_row_once_per_epoch_and_the_same_from_any_position(num_rows, buffer, seed, start, count):
    rows = numbers(num_rows)
    fetched = streamed(rows, seed=seed, shuffle_buffer=buffer).fetch(START, 80)
    assert [prompt.uid for prompt in fetched] == list(range(80))
    check_epochs(rows_of(fetched), num_rows)
    other = streamed(rows, seed=seed, shuffle_buffer=buffer)
    assert other.fetch(START, count, skip=start) == fetched[start : start + count]
    assert other.fetch(START, 2) == fetched[:2]  # back again
    assert other.fetch(DataCursor(start), count) == fetched[start : start + count]  # without a read position


def test_files_are_streamed_through_all_settings(tmp_path):
    for name, begin in (("a", 0), ("b", 6)):
        lines = [json.dumps({"q": str(n), "n": n}) for n in range(begin, begin + 6)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    settings = {"columns": {"prompt": "q"}, "filter": {"n": {"min": 3}}, "select": "1::2", "train_rows": 3}
    prompts = streamed(str(tmp_path), order="sequential", **settings)
    # Of 3 4 ... 11 every second: 4 6 8 10; of these three.
    fetched = prompts.fetch(START, 4)
    assert [prompt.columns["n"] for prompt in fetched] == rows_of(fetched) == [4, 6, 8, 4]
    assert prompts.describe() == [
        f"data: {tmp_path}: streamed, data.filter, data.select",
        "prompts: streamed; of the first 3: 1 to 1 tokens, median 1, 99% at most 1",
        "order: in the order of the data",
    ]
    assert "order: shuffled within a buffer of 1,000 rows, anew for each epoch" in streamed(numbers(3)).describe()
    assert prompts.prompts.epoch_length is prompts.prompts.data.epoch_length() is None


def test_nothing_is_read_before_it_is_needed():
    read = []

    def rows():
        for n in itertools.count():
            read.append(n)
            yield {"prompt": str(n)}

    prompts = streamed(IterableDataset.from_generator(rows), shuffle_buffer=10, streaming=False)
    assert max(read) < 1100  # the first 1,000, and what the library reads ahead
    read.clear()
    assert len(set(rows_of(prompts.fetch(START, 5)))) == 5
    # The buffer's 10 and one block of random numbers.
    assert max(read) < 10 + 1024 + 100


def test_the_next_row_replaces_a_dropped_one():
    rows = [{"prompt": "1" * (9 if n % 3 == 1 else 2)} for n in range(7)]
    prompts = streamed(rows, DROP, order="sequential", max_prompt_length=4)
    assert [(prompt.uid, prompt.row_index) for prompt in prompts.fetch(START, 4)] == [(0, 0), (1, 2), (2, 3), (3, 5)]
    cursor, metrics = prompts.advance(START, 4, {})
    assert metrics == {"prompts/dropped": 2, "prompts/truncated": 0}
    assert rows_of(prompts.fetch(cursor, 2, skip=1)) == [0, 2]
    assert rows_of(prompts.fetch(cursor, 3)) == [6, 0, 2]
    assert prompts.advance(cursor, 3, {})[1] == {"prompts/dropped": 1, "prompts/truncated": 0}
    assert prompts.prompts.longest == 4
    assert streamed(rows, DROP).prompts.longest == 2  # of the first rows: a limit by the context says little
    cut = streamed([{"prompt": "123456"}], LengthLimit(4, "data.max_prompt_length", "truncate_left"))
    assert cut.fetch(START, 1)[0].text == "3456"
    assert cut.advance(START, 1, {})[1] == {"prompts/dropped": 0, "prompts/truncated": 1}


@pytest.mark.parametrize("weights", [(3.0, 1.0), (None, None)])
def test_a_stream_with_dropped_rows_continues_from_its_cursor(weights):
    rows = [[{"prompt": "1" * (9 if n % every == 1 else 2)} for n in range(11)] for every in (2, 5)]
    sources = [Source(path=rows[i], name="ab"[i], weight=weights[i]) for i in range(2)]
    straight, first, resumed = (streamed(sources, DROP, shuffle_buffer=4) for _ in range(3))
    expected = straight.fetch(START, 60)
    if weights[0]:
        assert Counter(prompt.source for prompt in expected) == {"a": 45, "b": 15}  # whatever is dropped
    cursor, dropped = START, 0
    for position in range(0, 40, 8):
        first.fetch(START, 1)  # back, between steps
        assert first.fetch(cursor, 8) == expected[position : position + 8]
        cursor, metrics = first.advance(cursor, 8, {})
        dropped += metrics["prompts/dropped"]
    assert dropped == straight.advance(START, 40, {})[1]["prompts/dropped"] > 0
    cursor = DataCursor.from_state(copy.deepcopy(cursor.state_dict()))
    tokenized = []
    renderer = resumed.prompts.renderers[0]
    token_ids, renderer.token_ids = renderer.token_ids, lambda *rows: tokenized.append(1) or token_ids(*rows)
    assert resumed.fetch(cursor, 20) == expected[40:60]
    assert 0 < len(tokenized) < 40  # no row before the cursor
    assert resumed.fetch(START, 3) == expected[:3]
    assert resumed.fetch(cursor, 5) == expected[40:45]


def test_when_all_rows_are_dropped():
    rows = [{"prompt": "1" * 9}] * 1000 + [{"prompt": "2"}] * 1000
    with pytest.raises(
        DataError, match="the training data: every prompt of the first 1,000 rows .checked before the r"
    ):
        streamed(rows, DROP)
    late = streamed([{"prompt": "1"}] * 10, DROP, order="sequential")
    late.prompts.limit = LengthLimit(0, "data.max_prompt_length", "drop")
    with pytest.raises(DataError, match="the training data: data.overlong_prompts drops every prompt of an epoch"):
        late.fetch(START, 1)


def test_a_generator_that_raises():
    def rows():
        yield {"prompt": "1"}
        raise KeyError("x")

    with pytest.raises(DataError, match="the training data, row 1: reading it raised KeyError: 'x'"):
        streamed(IterableDataset.from_generator(rows))
    with pytest.raises(DataError, match="the evaluation data, row 1: reading it raised KeyError: 'x'"):
        load_data(IterableDataset.from_generator(rows), DataConfig(eval_rows=5), evaluation=True)


@pytest.mark.parametrize("format", ["torch", "pandas"])
def test_a_stream_with_a_format(format):
    stream = Dataset.from_list(numbers(9)).to_iterable_dataset().with_format(format)
    fetched = streamed(stream, filter={"n": {"min": 3}}, order="sequential").fetch(START, 2)
    assert [prompt.columns for prompt in fetched] == [{"prompt": "3", "n": 3}, {"prompt": "4", "n": 4}]
    assert type(fetched[0].columns["n"]) is int


class IterableRows:
    """Re-iterable, without a length."""

    def __init__(self, rows):
        self._rows = rows

    def __iter__(self):
        return iter(self._rows)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "1" * 9}, "the training data: 1 of 1 prompts have more than 4 tokens .*row 1000, has 9"),
        ({"prompt": " "}, "the training data, row 1000: the prompt is empty"),
        ({"prompt": [{"role": "user", "content": "1"}]}, "mixed: the prompts of .*, row 1000 and of .*, row 0, are"),
        (5, "row 1000: expected a mapping of columns, got int"),
    ],
)
def test_a_row_is_checked_when_it_is_read(row, message):
    tokenizer = byte_tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}", bos=False)
    config = DataConfig(order="sequential")
    limit = LengthLimit(4, "data.max_prompt_length")
    rows = PromptSet(IterableRows([*[{"prompt": "1"}] * 1000, row]), tokenizer, config, limit=limit)
    prompts = prompt_loader(rows, config, seed=0)
    cursor, _ = prompts.advance(START, 1000, {})
    for _ in range(2):  # an error changes nothing either
        with pytest.raises(DataError, match=message):
            prompts.fetch(cursor, 1)


def test_a_mixture_of_streams_has_its_shares(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in numbers(4)))
    sources = [
        Source(path=str(tmp_path / "a.jsonl"), name="a", weight=3.0),
        Source(path=Dataset.from_list(numbers(5)).to_iterable_dataset(), name="b", weight=1.0),
        Source(path=numbers(3), name="c", weight=1.0),
    ]
    prompts = streamed(sources, shuffle_buffer=3)
    fetched = prompts.fetch(START, 40)
    assert Counter(prompt.source for prompt in fetched) == {"a": 24, "b": 8, "c": 8}
    check_epochs(rows_of(prompt for prompt in fetched if prompt.source == "a"), 4)
    assert streamed(sources, shuffle_buffer=3).fetch(START, 5, skip=17) == fetched[17:22]
    assert prompts.describe()[1] == f"  a: {tmp_path / 'a.jsonl'}: streamed, 60.0% of the prompts"


def test_sources_without_weights_follow_one_another():
    sources = [Source(path=numbers(2), name="a"), Source(path=numbers(3), name="b")]
    fetched = streamed(sources, order="sequential").fetch(START, 6)
    expected = [("a", 0), ("a", 1), ("b", 0), ("b", 1), ("b", 2), ("a", 0)]
    assert [(prompt.source, prompt.row_index) for prompt in fetched] == expected


@pytest.mark.parametrize(
    ("given", "settings", "message"),
    [
        (iter(numbers(3)), {}, "must have a length"),
        (IterableRows([]), {}, "the training data has no rows"),
        (numbers(3), {"select": "-2:"}, "data.select = '-2:' counts from the end, which a stream does not know"),
        (numbers(3), {"select": ":-1"}, "data.select = ':-1' counts from the end, which a stream does not know"),
        (numbers(3), {"select": "7:"}, "no row is left by data.filter and data.select"),
        (numbers(3), {"filter": {"n": 9}}, "no row is left by data.filter and data.select"),
        (numbers(3), {"filter": {"m": 9}}, "data.filter names column 'm'; there are: prompt, n"),
        (numbers(3), {"columns": {"x": "m"}}, "data.columns names column 'm'"),
        ("a.json", {}, "cannot stream a.json, a single JSON value: write it as .jsonl"),
    ],
)
def test_what_cannot_be_streamed(given, settings, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.json").write_text("[]")
    with pytest.raises(DataError, match=message):
        streamed(given, **settings)
