"""Streamed data: passes through a shuffle buffer, places, dropped rows, mixtures, and going on at a place."""

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
from cohort.data import DataCursor, LengthLimit, PromptSet, StreamingLoader, load_data, prompt_loader
from cohort.data.streaming import buffer_shuffled
from cohort.errors import DataError
from cohort.policy import load_tokenizer
from tests.conftest import DEMO_MODEL

TOKENIZER = load_tokenizer(str(DEMO_MODEL))


def streamed(given, limit=None, seed=0, **settings):
    config = DataConfig(**({"streaming": True} | settings))
    data = load_data(given, config)
    prompts = prompt_loader(PromptSet(data, TOKENIZER, config, limit=limit), TOKENIZER, config, limit, seed=seed)
    assert isinstance(prompts, StreamingLoader)
    return prompts


def numbers(count):
    return [{"prompt": str(n), "n": n} for n in range(count)]


def rows_of(prompts):
    return [prompt.row_index for prompt in prompts]


@given(st.integers(0, 60), st.integers(1, 80), st.integers(0, 3))
def test_a_buffer_loses_nothing_and_moves_nothing_forward_by_more_than_its_size(count, size, seed):
    shuffled = list(buffer_shuffled(iter(range(count)), size, np.random.default_rng(seed)))
    assert sorted(shuffled) == list(range(count))
    assert shuffled == list(buffer_shuffled(iter(range(count)), size, np.random.default_rng(seed)))
    assert all(item < place + size for place, item in enumerate(shuffled))


def test_a_buffer_of_all_items_makes_every_order_equally_likely():
    orders = Counter(tuple(buffer_shuffled(iter(range(3)), 5, np.random.default_rng(seed))) for seed in range(6000))
    assert len(orders) == 6
    # Of 6000 draws each order has 1000 +- 29 (one standard deviation); five of them are no accident.
    assert all(abs(count - 1000) < 5 * 29 for count in orders.values())


@given(st.integers(1, 25), st.integers(1, 30), st.integers(0, 3), st.integers(0, 70), st.integers(1, 9))
@settings(deadline=None, max_examples=60)
def test_every_row_once_per_pass_and_the_same_from_any_place(num_rows, buffer, seed, start, count):
    rows = numbers(num_rows)
    taken = streamed(rows, seed=seed, shuffle_buffer=buffer).fetch(DataCursor(), 80)
    assert [prompt.uid for prompt in taken] == list(range(80))
    for begin in range(0, 80 - num_rows + 1, num_rows):
        assert sorted(rows_of(taken[begin : begin + num_rows])) == list(range(num_rows))
    resumed = streamed(rows, seed=seed, shuffle_buffer=buffer)
    assert resumed.fetch(DataCursor(start), count) == taken[start : start + count]
    assert resumed.fetch(DataCursor(), 2) == taken[:2]  # looked back at
    assert resumed.fetch(DataCursor(start), count) == taken[start : start + count]


def test_sequential_streams_are_read_in_order():
    assert rows_of(streamed(numbers(3), order="sequential").fetch(DataCursor(1), 4)) == [1, 2, 0, 1]


def test_files_are_streamed_through_all_settings(tmp_path):
    for name, begin in (("a", 0), ("b", 6)):
        lines = [json.dumps({"q": str(n), "n": n}) for n in range(begin, begin + 6)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    prompts = streamed(
        str(tmp_path),
        columns={"prompt": "q"},
        filter={"n": {"min": 3}},
        select="1::2",
        train_rows=3,
        order="sequential",
    )
    # Of 3 4 ... 11 every second: 4 6 8 10; of these three.
    assert [prompt.columns["n"] for prompt in prompts.fetch(DataCursor(), 4)] == [4, 6, 8, 4]
    assert rows_of(prompts.fetch(DataCursor(), 4)) == [4, 6, 8, 4]
    assert prompts.describe() == [
        f"data: {tmp_path}: streamed, data.filter, data.select",
        "prompts: streamed; of the first 3: 1 to 1 tokens, median 1, 99% at most 1",
        "order: as the data is",
    ]


def test_nothing_is_read_before_it_is_needed():
    read = []

    def rows():
        for n in itertools.count():
            read.append(n)
            yield {"prompt": str(n)}

    prompts = streamed(IterableDataset.from_generator(rows), shuffle_buffer=10, streaming=False)
    assert max(read) < 1100  # the first 1,000 are looked at, some more by the library's own reading
    read.clear()
    assert len(set(rows_of(prompts.fetch(DataCursor(), 5)))) == 5
    # The buffer's 10 and one block of draws ahead.
    assert max(read) < 10 + 1024 + 100


def test_the_next_row_takes_the_place_of_a_dropped_one():
    rows = [{"prompt": "1" * (9 if n % 3 == 1 else 2)} for n in range(7)]
    limit = LengthLimit(4, "data.max_prompt_length", "drop")
    prompts = streamed(rows, limit, order="sequential", max_prompt_length=4)
    taken = prompts.fetch(DataCursor(), 4)
    assert [(prompt.uid, prompt.row_index) for prompt in taken] == [(0, 0), (1, 2), (2, 3), (3, 5)]
    cursor, metrics = prompts.advance(DataCursor(), 4, {})
    assert metrics == {"prompts/dropped": 2, "prompts/truncated": 0}
    assert rows_of(prompts.fetch(cursor, 2, skip=1)) == [0, 2]
    assert rows_of(prompts.fetch(cursor, 3)) == [6, 0, 2]
    assert prompts.advance(cursor, 3, {})[1] == {"prompts/dropped": 1, "prompts/truncated": 0}
    assert prompts.longest == 4
    assert streamed(rows, limit).longest == 2  # of those looked at; the context's end says nothing of the data
    cut = streamed([{"prompt": "123456"}], LengthLimit(4, "data.max_prompt_length", "truncate_left"))
    assert cut.fetch(DataCursor(), 1)[0].text == "3456"
    assert cut.advance(DataCursor(), 1, {})[1] == {"prompts/dropped": 0, "prompts/truncated": 1}


@pytest.mark.parametrize("weights", [(3.0, 1.0), (None, None)])
def test_a_stream_with_dropped_rows_goes_on_at_its_place(weights):
    sources = [
        Source(path=[{"prompt": "1" * (9 if n % every == 1 else 2)} for n in range(11)], name=name, weight=weight)
        for every, name, weight in ((2, "a", weights[0]), (5, "b", weights[1]))
    ]
    limit, buffer = LengthLimit(4, "data.max_prompt_length", "drop"), {"shuffle_buffer": 4}
    straight = streamed(sources, limit, **buffer)
    expected = straight.fetch(DataCursor(), 60)
    if weights[0]:
        assert Counter(prompt.source for prompt in expected) == {"a": 45, "b": 15}  # whatever is dropped
    first = streamed(sources, limit, **buffer)
    cursor, dropped = DataCursor(), 0
    for place in range(0, 40, 8):
        first.fetch(DataCursor(), 1)  # looked back at
        assert first.fetch(cursor, 8) == expected[place : place + 8]
        cursor, metrics = first.advance(cursor, 8, {})
        dropped += metrics["prompts/dropped"]
    assert dropped == straight.advance(DataCursor(), 40, {})[1]["prompts/dropped"] > 0
    resumed = streamed(sources, limit, **buffer)
    cursor = DataCursor.from_state(copy.deepcopy(cursor.state_dict()))
    rendered = resumed._renderers[0].token_ids
    resumed._renderers[0].token_ids = lambda *rows: rendered_rows.append(1) or rendered(*rows)
    rendered_rows = []
    assert resumed.fetch(cursor, 20) == expected[40:60]
    assert 0 < len(rendered_rows) < 40  # of the rows before, none
    assert resumed.fetch(DataCursor(), 3) == expected[:3]
    assert resumed.fetch(cursor, 5) == expected[40:45]


def test_a_source_that_is_dropped_as_a_whole_is_refused():
    sources = [
        Source(path=[{"prompt": "1"}] * 5, name="a", weight=1.0),
        Source(path=[{"prompt": "1" * 9}] * 5, name="b", weight=3.0),
    ]
    with pytest.raises(DataError, match="source 'b': data.overlong_prompts has dropped every prompt"):
        streamed(sources, LengthLimit(4, "data.max_prompt_length", "drop"))


def test_a_stream_whose_first_rows_are_all_dropped():
    rows = [{"prompt": "1" * 9}] * 1000 + [{"prompt": "2"}] * 1000
    with pytest.raises(DataError, match="the training data: every prompt of the first 1,000 rows, which are looked at"):
        streamed(rows, LengthLimit(4, "data.max_prompt_length", "drop"))


def test_a_generator_that_raises():
    def rows():
        yield {"prompt": "1"}
        raise KeyError("x")

    with pytest.raises(DataError, match="the training data, row 1: reading it raised KeyError: 'x'"):
        streamed(IterableDataset.from_generator(rows))
    with pytest.raises(DataError, match="the evaluation data, row 1: reading it raised KeyError: 'x'"):
        load_data(IterableDataset.from_generator(rows), DataConfig(eval_rows=5), evaluation=True)


@pytest.mark.parametrize("format", ["torch", "numpy", "arrow", "pandas"])
def test_a_stream_with_a_format(format):
    stream = Dataset.from_list(numbers(9)).to_iterable_dataset().with_format(format)
    taken = streamed(stream, filter={"n": {"min": 3}}, order="sequential").fetch(DataCursor(), 2)
    assert [prompt.columns for prompt in taken] == [{"prompt": "3", "n": 3}, {"prompt": "4", "n": 4}]
    assert type(taken[0].columns["n"]) is int


def test_a_row_is_looked_at_again_when_it_comes():
    many = [{"prompt": "1"}] * 1000
    late = streamed([*many, {"prompt": "1" * 9}], LengthLimit(4, "data.max_prompt_length"), order="sequential")
    late.fetch(DataCursor(), 1000)
    with pytest.raises(DataError, match="the training data: 1 of 1 prompts have more than 4 tokens .*row 1000, has 9"):
        late.fetch(DataCursor(1000), 1)
    empty = streamed([*many, {"prompt": " "}], order="sequential")
    with pytest.raises(DataError, match="the training data, row 1000: the prompt is empty"):
        empty.fetch(DataCursor(), 1001)
    mixed = streamed([*many, {"prompt": [{"role": "user", "content": "1"}]}], order="sequential")
    with pytest.raises(
        DataError, match="mixed: the prompts of the training data, row 1000 and of the training data, row 0"
    ):
        mixed.fetch(DataCursor(), 1001)
    wrong = streamed(IterableRows([*many, 5]), order="sequential")
    with pytest.raises(DataError, match="row 1000: expected a mapping of columns, got int"):
        wrong.fetch(DataCursor(), 1001)


class IterableRows:
    """Passes over rows can be begun; there is no length."""

    def __init__(self, rows):
        self._rows = rows

    def __iter__(self):
        return iter(self._rows)


def test_an_epoch_of_nothing_but_dropped_rows_ends():
    rows = [{"prompt": "1"}] * 1000 + [{"prompt": "1" * 9}] * 10
    prompts = streamed(rows, LengthLimit(4, "data.max_prompt_length", "drop"), order="sequential")
    prompts._limit = LengthLimit(0, "data.max_prompt_length", "drop")
    with pytest.raises(DataError, match="the training data: data.overlong_prompts drops every prompt of an epoch"):
        prompts.fetch(DataCursor(), 1)


def test_a_mixture_of_streams_has_its_shares(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in numbers(4)))
    sources = [
        Source(path=str(tmp_path / "a.jsonl"), name="a", weight=3.0),
        Source(path=Dataset.from_list(numbers(5)).to_iterable_dataset(), name="b", weight=1.0),
        Source(path=numbers(3), name="c", weight=1.0),
    ]
    prompts = streamed(sources, shuffle_buffer=3)
    taken = prompts.fetch(DataCursor(), 40)
    assert Counter(prompt.source for prompt in taken) == {"a": 24, "b": 8, "c": 8}
    own = rows_of(prompt for prompt in taken if prompt.source == "a")
    assert all(sorted(own[begin : begin + 4]) == [0, 1, 2, 3] for begin in range(0, 24, 4))
    assert streamed(sources, shuffle_buffer=3).fetch(DataCursor(17), 5) == taken[17:22]
    assert prompts.epoch_length is None
    assert prompts.describe()[1] == f"  a: {tmp_path / 'a.jsonl'}: streamed, 60.0% of the prompts"


def test_sources_without_weights_follow_one_another():
    sources = [Source(path=numbers(2), name="a"), Source(path=numbers(3), name="b")]
    taken = streamed(sources, order="sequential").fetch(DataCursor(), 6)
    assert [(prompt.source, prompt.row_index) for prompt in taken] == [
        ("a", 0), ("a", 1), ("b", 0), ("b", 1), ("b", 2), ("a", 0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "settings", "message"),
    [
        (iter(numbers(3)), {}, "must have a length"),
        (IterableRows([]), {}, "the training data has no rows"),
        (numbers(3), {"select": "-2:"}, "data.select = '-2:' counts from the end, which a stream lacks"),
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
    with pytest.raises(DataError, match="cannot stream .*a.json, which is one JSON value: write it as .jsonl"):
        streamed(str(tmp_path / "a.json"))
