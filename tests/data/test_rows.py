"""Which rows are used: columns, filter, select, the first so many; and several sources."""

import numpy as np
import pyarrow
import pytest
from datasets import Dataset

from cohort.config import DataConfig, Source
from cohort.data import load_data
from cohort.data.rows import fetch
from cohort.errors import DataError

ROWS = [{"q": str(n), "level": ["easy", "medium", "hard"][n % 3], "rate": n / 10, "n": n} for n in range(12)]


def part(given=ROWS, **settings):
    return load_data(given, DataConfig(**settings)).parts[0]


def numbers(given=ROWS, **settings):
    rows = part(given, **settings).rows
    assert [row["n"] for row in rows] == [rows.number(index) for index in range(len(rows))]  # its place in the source
    return [row["n"] for row in rows]


@pytest.mark.parametrize("kind", [list, Dataset.from_list, pyarrow.Table.from_pylist])
def test_columns_then_filter_then_select_then_the_first(kind):
    rows = kind(ROWS)
    settings = {
        "columns": {"prompt": "q", "difficulty": "level"},
        "filter": {"difficulty": ["easy", "hard"]},
        "select": "1::2",
        "train_rows": 3,
    }
    # Of 0 2 3 5 6 8 9 11 every second: 2 5 8 11.
    assert numbers(rows, **settings) == [2, 5, 8]
    used = part(rows, **settings)
    assert used.rows.columns == ("prompt", "difficulty", "rate", "n")
    assert list(used.rows[0]) == ["prompt", "difficulty", "rate", "n"]
    assert used.said == "12 rows; data.filter leaves 8; data.select (1::2) 4; of these the first 3"


@pytest.mark.parametrize(
    ("conditions", "kept"),
    [
        ({"level": "hard"}, [2, 5, 8, 11]),
        ({"rate": {"min": 0.3, "max": 0.5}}, [3, 4, 5]),
        ({"rate": {"max": 0.1}}, [0, 1]),
        ({"level": "hard", "n": {"min": 6}}, [8, 11]),
        ({"n": [3, 4, 99]}, [3, 4]),
    ],
)
def test_conditions(conditions, kept):
    assert numbers(filter=conditions) == kept


def test_a_row_without_a_value_meets_no_condition():
    rows = [{"q": "a", "x": None}, {"q": "b"}, {"q": "c", "x": 1}, {"q": "d", "x": True}, {"q": "e", "x": ""}]
    assert [row["q"] for row in part(rows, filter={"x": 1}).rows] == ["c"]  # True is no 1
    assert [row["q"] for row in part(rows[:3], filter={"x": {"max": 5}}).rows] == ["c"]


def test_numbers_in_strings_are_numbers_to_a_range(tmp_path):
    (tmp_path / "a.csv").write_text("q,rate\na,0.05\nb,0.5\nc,\n")
    assert [row["q"] for row in part(tmp_path / "a.csv", filter={"rate": {"min": 0.1}}).rows] == ["b"]


def test_a_filter_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "def keep(row):\n    return row['n'] % 5 == 0\n"
        "def wrong(row):\n    return row['zzz']\n"
        "def number(row):\n    return row['n']\n"
    )
    assert numbers(filter="mine.py:keep") == [0, 5, 10]
    for name, message in (
        ("wrong", r"the training data, row 0: data.filter \(mine.py:wrong\) raised KeyError: 'zzz'"),
        ("number", r"row 0: data.filter \(mine.py:number\) must return True or False, got 0"),
        ("missing", "mine.py has no function 'missing'; it has: keep, wrong, number"),
    ):
        with pytest.raises(DataError, match=message):
            numbers(filter=f"mine.py:{name}")


@pytest.mark.parametrize(
    ("text", "kept"), [("2:4", [2, 3]), ("::5", [0, 5, 10]), ("-2:", [10, 11]), (":1", [0]), (" 3 : 5 ", [3, 4])]
)
def test_select_is_a_slice(text, kept):
    assert numbers(select=text) == kept


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"columns": {"prompt": "question"}}, "data.columns names column 'question'; there are: q, level, rate, n"),
        ({"columns": {"n": "q"}}, "data.columns calls a column 'n', and there is one of that name: rename it too"),
        ({"columns": {"a": "q", "b": "q"}}, "data.columns gives one column two new names"),
        ({"filter": {"lvl": "hard"}}, "data.filter names column 'lvl'; there are: q, level, rate, n"),
        ({"filter": {"level": {"min": 1}}}, "row 0: data.filter asks for a number in column 'level', got 'easy'"),
        (
            {"filter": {"level": "none"}},
            "data.filter leaves none of 12 rows .in the first rows level is 'easy', 'medium', 'hard'.",
        ),
        ({"filter": {"n": "3"}}, "leaves none of 12 rows .in the first rows n is 0, 1, 2, 3, 4, ..."),
        ({"select": "50:"}, "data.select = '50:' leaves no row: 12 rows"),
    ],
)
def test_settings_that_do_not_fit_the_rows(settings, message):
    with pytest.raises(DataError, match=message):
        part(**settings)


def test_columns_may_change_places():
    assert part([{"a": 1, "b": 2}], columns={"a": "b", "b": "a"}).rows[0] == {"b": 1, "a": 2}


def test_an_evaluation_has_no_filter_of_the_training():
    config = DataConfig(columns={"prompt": "q"}, filter={"level": "hard"}, select=":2", train_rows=1, eval_rows=5)
    used = load_data(ROWS, config, evaluation=True).parts[0]
    assert [row["prompt"] for row in used.rows] == ["0", "1", "2", "3", "4"]
    own = load_data(Source(path=ROWS, filter={"level": "hard"}, select="1:", rows=2), config, evaluation=True)
    assert [row["prompt"] for row in own.parts[0].rows] == ["5", "8"]


def test_sources_have_settings_of_their_own():
    config = DataConfig(columns={"prompt": "q"}, filter={"level": "hard"}, prompt_template="{prompt}?")
    data = load_data(
        [
            Source(path=ROWS),
            Source(path=ROWS, name="second", columns={}, filter={"n": {"min": 10}}, prompt_column="q", rows=1),
            Source(path=[{"x": "1"}], columns={}, filter={"x": "1"}, prompt_template="{x}!"),
        ],
        config,
    )
    assert [part.name for part in data.parts] == ["source 0", "second", "source 2"]
    assert [[row.get("n") for row in part.rows] for part in data.parts] == [[2, 5, 8, 11], [10], [None]]
    assert [part.config.prompt_template for part in data.parts] == ["{prompt}?", None, "{x}!"]
    assert len(data) == 6
    assert data.weights is None


@pytest.mark.parametrize(
    ("sources", "settings", "message"),
    [
        ([{"weight": 1.0}, {}], {}, "data.train: source 1 has no weight: give every source one, or none"),
        ([{}, {}], {"train_rows": 3}, "data.train_rows is for a single source: set rows in each source's table"),
        ([{}, {}], {"select": ":3"}, "data.select is for a single source: set select in each source's table"),
        ([{"name": "a"}, {"name": "a"}], {}, "two sources are called 'a': give them a name each"),
        ([{}, {"columns": {"x": "zzz"}}], {}, "the training data, source 'source 1': data.columns names column 'zzz'"),
    ],
)
def test_sources_that_do_not_go_together(sources, settings, message):
    with pytest.raises(DataError, match=message):
        load_data([Source(path=ROWS, **source) for source in sources], DataConfig(**settings))


def test_an_evaluation_has_no_weights():
    with pytest.raises(DataError, match="weights are for training; an evaluation uses every row once"):
        load_data([Source(path=ROWS, weight=1.0)], DataConfig(), evaluation=True)


def test_rows_of_a_table_in_pieces():
    whole = pyarrow.Table.from_pylist(ROWS)
    table = pyarrow.concat_tables([whole[a:b] for a, b in ((0, 3), (3, 4), (4, 4), (4, 12))])
    rows = part(table).rows
    for numbers in ([5], [0, 3, 4, 11], [11, 2, 2, 0], range(1, 12, 3), []):
        assert fetch(table, numbers) == [ROWS[number] for number in numbers]
    assert [rows[index]["n"] for index in range(12)] == list(range(12))


@pytest.mark.slow
def test_a_column_of_more_text_than_32_bits_count():
    # Taking rows of it by their numbers would need it in one piece, for whose 2.4 GB there are no offsets.
    text = pyarrow.array(["x" * 1_000_000] * 120)
    table = pyarrow.table({"prompt": ["1+1"] * 2400, "n": range(2400), "tests": pyarrow.chunked_array([text] * 20)})
    assert [row["n"] for row in fetch(table, [5, 2000])] == [5, 2000]
    assert len(part(table, select="::300").rows[1]["tests"]) == 1_000_000


def test_conditions_on_values_of_numpy():
    rows = [{"q": "a", "ok": np.bool_(True), "v": np.array([1, 2]), "n": np.int8(3)}]
    assert numbers_of(rows, {"ok": True}) == ["a"]
    assert numbers_of(rows, {"n": 3}) == ["a"]
    with pytest.raises(DataError, match=r"leaves none of 1 row \(in the first rows v is array"):
        numbers_of(rows, {"v": 1})


def numbers_of(rows, conditions):
    return [row["q"] for row in part(rows, filter=conditions).rows]


def test_a_filter_that_ends_the_program(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("import sys\ndef keep(row):\n    sys.exit('usage')\n")
    with pytest.raises(DataError, match=r"row 0: data.filter \(mine.py:keep\) raised SystemExit: usage"):
        part(filter="mine.py:keep")
