"""Streamed data: the shuffle buffer, epochs, dropped rows, mixtures, and continuing from a cursor."""

import copy
import itertools
import json
from collections import Counter

import numpy as np
import pytest
from datasets import Dataset, IterableDataset
from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.config import DataConfig, Source
from cohort.data import DataCursor, LengthLimit, PromptSet, load_data, prompt_loader
from cohort.data.streaming import StreamingLoader, buffer_shuffled
from cohort.errors import DataError
from tests.data.templates import byte_tokenizer

TOKENIZER = byte_tokenizer(bos=False)
START = DataCursor()
DROP = LengthLimit(4, "data.max_prompt_length", "drop")


def streamed(given, limit=None, seed=0, **settings):
    config = DataConfig(**({"streaming": True} | settings))
    prompts = prompt_loader(PromptSet(given, TOKENIZER, config, limit=limit), config, seed=seed)
    assert isinstance(prompts, StreamingLoader)
    return prompts


def numbers(count):
    return [{"prompt": str(n), "n": n} for n in range(count)]


def rows_of(prompts):
    return [prompt.row_index for prompt in prompts]


@given(st.integers(0, 60), st.integers(1, 80), st.integers(0, 3))
@settings(max_examples=50)
def test_a_buffer_loses_nothing_and_moves_nothing_forward_by_more_than_its_size(count, size, seed):
    shuffled = list(buffer_shuffled(iter(range(count)), size, np.random.default_rng(seed)))
    assert sorted(shuffled) == list(range(count))
    assert all(item < index + size for index, item in enumerate(shuffled))


def test_a_buffer_of_all_items_makes_every_order_equally_likely():
    orders = Counter(tuple(buffer_shuffled(iter(range(3)), 5, np.random.default_rng(seed))) for seed in range(3000))
    assert len(orders) == 6
    # Of 3000 draws each order has 500 +- 20 (one standard deviation); five of them are no accident.
    assert all(abs(count - 500) < 5 * 20 for count in orders.values())


@given(st.integers(1, 25), st.integers(1, 30), st.integers(0, 3), st.integers(0, 70), st.integers(1, 9))
@settings(deadline=None, max_examples=25)
def test_every_row_once_per_epoch_and_the_same_from_any_position(num_rows, buffer, seed, start, count):
    rows = numbers(num_rows)
    fetched = streamed(rows, seed=seed, shuffle_buffer=buffer).fetch(START, 80)
    assert [prompt.uid for prompt in fetched] == list(range(80))
    for begin in range(0, 80 - num_rows + 1, num_rows):
        assert sorted(rows_of(fetched[begin : begin + num_rows])) == list(range(num_rows))
    other = streamed(rows, seed=seed, shuffle_buffer=buffer)
    assert other.fetch(START, count, skip=start) == fetched[start : start + count]
    assert other.fetch(START, 2) == fetched[:2]  # back again
    assert other.fetch(DataCursor(start), count) == fetched[start : start + count]  # without a read position


def test_the_order_of_a_seed_never_changes():
    # A resumed run would read other prompts.
    assert rows_of(streamed(numbers(6), shuffle_buffer=3).fetch(START, 6)) == [0, 3, 1, 4, 2, 5]


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
    sources = [
        Source(path=[{"prompt": "1" * (9 if n % every == 1 else 2)} for n in range(11)], name=name, weight=weight)
        for every, name, weight in ((2, "a", weights[0]), (5, "b", weights[1]))
    ]
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
        DataError, match="the training data: every prompt of the first 1,000 rows .checked before the run. has"
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
        (
            {"prompt": [{"role": "user", "content": "1"}]},
            "mixed: the prompts of the training data, row 1000 and of the training data, row 0",
        ),
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
    rows = rows_of(prompt for prompt in fetched if prompt.source == "a")
    assert all(sorted(rows[begin : begin + 4]) == [0, 1, 2, 3] for begin in range(0, 24, 4))
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
    ],
)
def test_what_cannot_be_streamed(given, settings, message):
    with pytest.raises(DataError, match=message):
        streamed(given, **settings)


def test_a_json_file_cannot_be_streamed(tmp_path):
    (tmp_path / "a.json").write_text("[]")
    with pytest.raises(DataError, match="cannot stream .*a.json, a single JSON value: write it as .jsonl"):
        streamed(str(tmp_path / "a.json"))
