"""Rows of reasoning-gym: their ranges, what is held out, and what is refused. Their scores: tests/rewards."""

import ast
import sys

import pytest

from cohort.config import DataConfig
from cohort.data import check_held_out, load_data, load_rows, load_sets
from cohort.data.source import open_source
from cohort.errors import DataError

SUM = "reasoning_gym:chain_sum?size={}&offset={}&seed={}"


@pytest.fixture
def package():
    return pytest.importorskip("reasoning_gym")


def data(train, evaluation="", **settings):
    config = DataConfig(train=train, eval=evaluation, **settings)
    return load_data(None, config), load_sets(None, config)


def test_rows_are_the_items_of_their_indices(package):
    expected = package.create_dataset("chain_sum", seed=5, size=7, max_terms=3)
    rows = load_rows("reasoning_gym:chain_sum?size=4&offset=3&seed=5&max_terms=3")
    assert [row["prompt"] for row in rows] == [expected[index]["question"] for index in range(3, 7)]
    assert [row["answer"] for row in rows] == [expected[index]["answer"] for index in range(3, 7)]
    assert [row["reasoning_gym_index"] for row in rows] == [3, 4, 5, 6]
    assert ast.literal_eval(rows[0]["reasoning_gym"]) == {"name": "chain_sum", "seed": 5, "max_terms": 3, "size": 7}
    assert list(open_source("reasoning_gym:chain_sum?size=4&offset=3&seed=5&max_terms=3", "data", "train")()) == list(
        rows
    )
    assert len(load_rows("reasoning_gym:chain_sum")) == 500


def test_values_are_literals_or_text(package):
    source = "reasoning_gym:chain_sum?size=2&allow_negation=true&min_terms=2"
    assert ast.literal_eval(load_rows(source)[0]["reasoning_gym"])["allow_negation"] is True
    source = "reasoning_gym:basic_arithmetic?size=2&operators=('+', '-')&format_style=simple"
    settings = ast.literal_eval(load_rows(source)[0]["reasoning_gym"])
    assert (settings["operators"], settings["format_style"]) == (("+", "-"), "simple")


def test_another_seed_is_not_held_out(package):
    # The trap: seeds 0 and 1 share all items but one.
    first, second = (load_rows(SUM.format(10, 0, seed)) for seed in (0, 1))
    assert [row["prompt"] for row in first][1:] == [row["prompt"] for row in second][:-1]
    with pytest.raises(DataError, match=r"data and the evaluation data have .* 0 to 9 and 1 to 10: set offset=9 or"):
        check_held_out(*data(SUM.format(10, 0, 0), SUM.format(10, 0, 1)))


@pytest.mark.parametrize(
    ("train", "evaluation", "message"),
    [
        ((10, 0, 0), (5, 9, 0), "0 to 9 and 9 to 13: set offset=10 or more"),
        ((10, 0, 0), (5, 10, 0), None),
        ((10, 20, 3), (20, 0, 3), None),
        ((10, 20, 3), (20, 1, 3), "23 to 32 and 4 to 23: set offset=30"),
        ((10, 0, 50), (5, 0, 0), None),
    ],
)
def test_ranges_that_overlap_are_refused(package, train, evaluation, message):
    loaded = data(SUM.format(*train), {"sums": SUM.format(*evaluation)})
    if message is None:
        check_held_out(*loaded)
        return
    with pytest.raises(DataError, match=f"the evaluation data 'sums' .*reasoning_gym:chain_sum in common.* {message}"):
        check_held_out(*loaded)


def test_other_settings_other_data_and_unused_rows_are_held_out(package):
    source = SUM.format(10, 0, 0)
    check_held_out(*data(source, source + "&max_terms=3"))
    check_held_out(*data(source, "reasoning_gym:lcm?size=10"))
    check_held_out(*data(source, SUM.format(5, 5, 0), select=":5"))
    with pytest.raises(DataError, match="in common"):
        check_held_out(*data(source, SUM.format(5, 5, 0), select=":6"))
    with pytest.raises(DataError, match="in common"):  # of a stream, all items may come
        check_held_out(*data(source, SUM.format(5, 5, 0), select=":5", streaming=True))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("chain_sums", "has no data set 'chain_sums'; it has: .*chain_sum, "),
        ("composite", "has no data set 'composite'"),
        ("chain_sum?size=0", "size must be a whole number of at least 1, got 0"),
        ("chain_sum?offset=-1", "offset must be a whole number of at least 0, got -1"),
        ("chain_sum?seed=a", "seed must be a whole number of at least 0, got 'a'"),
        ("chain_sum?terms=3", "chain_sum has no setting 'terms'; it has: size, offset, seed, min_terms, "),
        ("chain_sum?size", "expected SETTING=VALUE, got 'size'"),
        ("chain_sum?min_terms=9&max_terms=2", "AssertionError"),
        ("knight_swap", "the items of knight_swap are not the same in every process$"),
        ("word_ladder", "not the same in every process: set the environment variable PYTHONHASHSEED"),
    ],
)
def test_what_cannot_be_made_is_refused(package, monkeypatch, source, message):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(DataError, match=f"^reasoning_gym:.*{message}"):
        load_rows(f"reasoning_gym:{source}")


def test_a_known_order_of_sets_is_enough(package, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert len(load_rows("reasoning_gym:ransom_note?size=2")) == 2


def test_an_item_that_cannot_be_made_is_named(package, monkeypatch):
    dataset = type(package.create_dataset("chain_sum", size=1))
    monkeypatch.setattr(dataset, "__getitem__", lambda self, index: 1 // (1 - index))
    with pytest.raises(DataError, match="making item 1 raised ZeroDivisionError"):
        load_rows("reasoning_gym:chain_sum?offset=1&size=1")


def test_the_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(DataError, match=r"chain_sum needs reasoning-gym: pip install 'cohort-rl\[reasoning-gym\]'"):
        load_rows("reasoning_gym:chain_sum")
