"""Which rows are used: columns, filter, select, the first rows; and several sources."""

import numpy as np
import pyarrow
import pytest
from datasets import Dataset

from cohort.config import DataConfig, Source
from cohort.data import load_data
from cohort.errors import DataError

ROWS = [{"q": str(n), "level": ["easy", "medium", "hard"][n % 3], "rate": n / 10, "n": n} for n in range(12)]
ANY = "any row is a prompt"


def source(given=ROWS, **settings):
    return load_data(given, DataConfig(prompt_template=ANY, **settings)).sources[0]


def numbers(given=ROWS, **settings):
    rows = source(given, **settings).rows
    assert [row["n"] for row in rows] == list(rows.numbers)
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
    used = source(rows, **settings)
    assert used.rows.columns == tuple(used.rows[0]) == ("prompt", "difficulty", "rate", "n")
    assert used.rows[-1]["n"] == 8
    assert used.description == "12 rows; data.filter leaves 8; data.select (1::2) 4; the first 3 of these"


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"filter": {"level": "hard", "n": {"min": 6}}}, [8, 11]),
        ({"filter": {"rate": {"min": 0.3, "max": 0.5}}}, [3, 4, 5]),
        ({"filter": {"rate": {"max": 0.1}}}, [0, 1]),
        ({"filter": {"n": [3, 4, 99]}}, [3, 4]),
        ({"select": "2:4"}, [2, 3]),
        ({"select": "::5"}, [0, 5, 10]),
        ({"select": "-2:"}, [10, 11]),
        ({"select": " :1 "}, [0]),
    ],
)
def test_filter_and_select(settings, kept):
    assert numbers(**settings) == kept


def test_what_meets_a_condition(tmp_path):
    def kept(rows, condition):
        return [row["q"] for row in source(rows, filter={"x": condition}).rows]

    rows = [{"q": "a", "x": None}, {"q": "b"}, {"q": "c", "x": 1}, {"q": "d", "x": True}, {"q": "e", "x": ""}]
    assert kept(rows, 1) == ["c"]  # True is not 1
    assert kept(rows[:3], {"max": 5}) == ["c"]
    assert kept([{"q": "a", "x": np.int8(3)}, {"q": "b", "x": np.bool_(True)}], 3) == ["a"]
    assert kept([{"q": "a", "x": np.bool_(True)}], True) == ["a"]
    with pytest.raises(DataError, match=r"leaves none of 1 row \(in the first rows x is array"):
        kept([{"q": "a", "x": np.array([1, 2])}], 1)
    (tmp_path / "a.csv").write_text("q,x\na,0.05\nb,0.5\nc,\n")  # numbers in strings
    assert kept(tmp_path / "a.csv", {"min": 0.1}) == ["b"]


def test_a_user_filter(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "import sys\n"
        "def keep(row):\n    return row['n'] % 5 == 0\n"
        "def wrong(row):\n    return row['zzz']\n"
        "def number(row):\n    return row['n']\n"
        "def ends(row):\n    sys.exit('usage')\n"
    )
    assert numbers(filter="mine.py:keep") == [0, 5, 10]
    for name, message in (
        ("wrong", r"the training data, row 0: data.filter \(mine.py:wrong\) raised KeyError: 'zzz'"),
        ("number", r"row 0: data.filter \(mine.py:number\) must return True or False, got 0"),
        ("ends", r"row 0: data.filter \(mine.py:ends\) raised SystemExit: usage"),
        ("missing", "mine.py has no function 'missing'; it has: keep, wrong, number, ends"),
    ):
        with pytest.raises(DataError, match=message):
            numbers(filter=f"mine.py:{name}")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"columns": {"prompt": "question"}}, "data.columns names column 'question'; there are: q, level, rate, n"),
        ({"columns": {"n": "q"}}, "data.columns renames a column to 'n', which exists: rename that one too"),
        ({"columns": {"a": "q", "b": "q"}}, "data.columns gives one column two new names"),
        ({"filter": {"lvl": "hard"}}, "data.filter names column 'lvl'; there are: q, level, rate, n"),
        ({"filter": {"level": {"min": 1}}}, "row 0: data.filter asks for a number in column 'level', got 'easy'"),
        ({"filter": {"level": "none"}}, "leaves none of 12 rows .in the first rows level is 'easy', 'medium', 'hard'."),
        ({"filter": {"n": "3"}}, "leaves none of 12 rows .in the first rows n is 0, 1, 2, 3, 4, ..."),
        ({"select": "50:"}, "data.select = '50:' leaves no row: 12 rows"),
    ],
)
def test_settings_that_do_not_fit_the_rows(settings, message):
    with pytest.raises(DataError, match=message):
        source(**settings)


def test_columns_may_be_exchanged():
    assert source([{"a": 1, "b": 2}], columns={"a": "b", "b": "a"}).rows[0] == {"b": 1, "a": 2}


def test_the_filter_of_the_training_is_not_for_an_evaluation():
    config = DataConfig(columns={"prompt": "q"}, filter={"level": "hard"}, select=":2", train_rows=1, eval_rows=5)
    used = load_data(ROWS, config, evaluation=True).sources[0]
    assert [row["prompt"] for row in used.rows] == ["0", "1", "2", "3", "4"]
    filtered = load_data(Source(path=ROWS, filter={"level": "hard"}, select="1:", rows=2), config, evaluation=True)
    assert [row["prompt"] for row in filtered.sources[0].rows] == ["5", "8"]


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
    assert [source.name for source in data.sources] == ["source 0", "second", "source 2"]
    assert [[row.get("n") for row in source.rows] for source in data.sources] == [[2, 5, 8, 11], [10], [None]]
    assert [source.config.prompt_template for source in data.sources] == ["{prompt}?", None, "{x}!"]
    assert (len(data), data.weights) == (6, None)


@pytest.mark.parametrize(
    ("sources", "settings", "message"),
    [
        ([{"weight": 1.0}, {}], {}, "data.train: source 1 has no weight: give every source one, or none"),
        ([{}, {}], {"train_rows": 3}, "data.train_rows is for a single source: set rows in each source's table"),
        ([{}, {}], {"select": ":3"}, "data.select is for a single source: set select in each source's table"),
        ([{"name": "a"}, {"name": "a"}], {}, "two sources are called 'a': give each its own name"),
        ([{}, {"columns": {"x": "zzz"}}], {}, "the training data, source 'source 1': data.columns names column 'zzz'"),
    ],
)
def test_sources_that_do_not_go_together(sources, settings, message):
    with pytest.raises(DataError, match=message):
        load_data([Source(path=ROWS, **given) for given in sources], DataConfig(prompt_template=ANY, **settings))


def test_an_evaluation_has_no_weights():
    with pytest.raises(DataError, match="weights are for training; an evaluation uses every row once"):
        load_data([Source(path=ROWS, weight=1.0)], DataConfig(prompt_template=ANY), evaluation=True)


def test_rows_of_a_table_in_chunks():
    whole = pyarrow.Table.from_pylist(ROWS)
    rows = source(pyarrow.concat_tables([whole[a:b] for a, b in ((0, 3), (3, 4), (4, 4), (4, 12))])).rows
    for indices in ([5], [0, 3, 4, 11], range(1, 12, 3), []):
        assert list(rows.select(indices)) == [ROWS[index] for index in indices]
    assert [rows[index] for index in range(12)] == ROWS


@pytest.mark.slow
def test_a_column_with_more_than_2_gb_of_text():
    # Its chunks cannot be joined: there are no offsets for 2.4 GB in one.
    text = pyarrow.array(["x" * 1_000_000] * 120)
    table = pyarrow.table({"n": range(2400), "tests": pyarrow.chunked_array([text] * 20)})
    rows = source(table, select="::300").rows
    assert [row["n"] for row in rows] == list(range(0, 2400, 300))
    assert len(rows[1]["tests"]) == 1_000_000
