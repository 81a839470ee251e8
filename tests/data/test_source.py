"""Reading rows: files, folders, data sets by name, and objects in memory; and which of them are used."""

import gzip
import json

import numpy as np
import pandas
import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset, DatasetDict, IterableDataset

from cohort.config import DataConfig, Source
from cohort.data import load_data, load_rows
from cohort.errors import DataError
from tests.conftest import each

ROWS = [{"question": "1+2", "answer": "3"}, {"question": "4+5", "answer": "9"}]
COLUMNS = {"question": ["1+2", "4+5"], "answer": ["3", "9"]}
LINES = "\n".join(map(json.dumps, ROWS)) + "\n\n"


def load(given, *, evaluation=False, **settings):
    return load_data(given, DataConfig(prompt_template="any row is a prompt", **settings), evaluation=evaluation)


def rows_of(given, **settings):
    return [dict(row) for source in load(given, **settings).sources for row in source.rows]


def stream_of(given, **settings):
    return load(given, streaming=True, **settings).sources[0].stream


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def write_parquet(path, rows):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def test_every_kind_of_file(tmp_path):
    write(tmp_path / "a.jsonl", LINES)
    write(tmp_path / "a.jsonl.gz", gzip.compress(LINES.encode()))
    with pyarrow.output_stream(str(tmp_path / "a.jsonl.zst"), compression="zstd") as stream:
        stream.write(LINES.encode())
    write(tmp_path / "a.json", json.dumps(ROWS, indent=1))
    write(tmp_path / "columns.json", json.dumps(COLUMNS))
    write(tmp_path / "data.json", json.dumps({"data": ROWS}))
    write(tmp_path / "data.json.gz", gzip.compress(json.dumps({"data": COLUMNS}).encode()))
    write(tmp_path / "a.csv", "question,answer\n1+2,3\n\n4+5,9\n")
    write_parquet(tmp_path / "a.parquet", ROWS)
    files = sorted(tmp_path.iterdir())
    assert len(files) == 9
    for path in files:
        assert rows_of(path) == list(load_rows(str(path))) == ROWS, path
        if ".json" not in path.suffixes:
            assert list(stream_of(str(path))()) == list(enumerate(ROWS)), path


def test_text_is_read_as_it_is(tmp_path):
    # A byte order mark first; a line separator inside a string.
    write(tmp_path / "bom.jsonl", b'\xef\xbb\xbf{"a": "\xe2\x80\xa8"}\n')
    assert rows_of(tmp_path / "bom.jsonl") == [{"a": "\u2028"}]
    write(tmp_path / "bom.csv", b'\xef\xbb\xbfq,answer,n\r\n"1, and ""2""\nthen",007,\r\nx,3.50,NA\r\n')
    assert rows_of(tmp_path / "bom.csv") == [
        {"q": '1, and "2"\nthen', "answer": "007", "n": ""},
        {"q": "x", "answer": "3.50", "n": "NA"},
    ]
    write(tmp_path / "long.csv", f"a\n{'x' * 200_000}\n")  # the csv module's own limit is 131,072
    assert len(rows_of(tmp_path / "long.csv")[0]["a"]) == 200_000
    write(tmp_path / "column.json", '{"data": ["x", "y"]}')  # a column that is called data
    assert rows_of(tmp_path / "column.json") == [{"data": "x"}, {"data": "y"}]


def test_parquet_keeps_its_types(tmp_path):
    rows = [{"talk": [{"role": "user", "content": "hi"}], "n": 1, "x": None}, {"talk": [], "n": 2, "x": 0.5}]
    write_parquet(tmp_path / "a.parquet", rows)
    assert rows_of(tmp_path / "a.parquet") == rows
    assert rows_of(tmp_path / "a.parquet", select="1:") == rows[1:]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.jsonl", None, "no data file missing.jsonl .looked in"),
        ("./missing", None, "no data file missing .looked in"),
        ("/missing", None, "no data file /missing$"),
        ("bad.jsonl", '{"a": 1}\n{"a": \n', "bad.jsonl, line 2: not valid JSON: Expecting value: line 1 column 7"),
        ("digits.jsonl", '\n{"n": %s}' % ("1" * 5000), "digits.jsonl, line 2: not valid JSON: Exceeds the limit"),
        ("list.jsonl", "[1]\n", "line 1: expected an object with columns, got list"),
        ("empty.jsonl", "\n", "empty.jsonl has no rows"),
        ("latin.jsonl", b'{"a": 1}\n{"a": "\xe9"}\n', "latin.jsonl, line 2: not UTF-8: .* at byte 7"),
        ("bad.parquet", "not parquet", "cannot read bad.parquet"),
        ("bad.jsonl.gz", "not compressed", "cannot read bad.jsonl.gz: .*incorrect header"),
        (
            "short.jsonl.gz",
            gzip.compress(LINES.encode(), mtime=0)[:-9],
            "cannot read short.jsonl.gz: Truncated compressed",
        ),
        ("bad.jsonl.zst", "not compressed", "cannot read bad.jsonl.zst"),
        ("data.txt", "a", "cannot read data.txt: expected a .jsonl, .json, .csv or .parquet file"),
        ("rows.parquet.gz", "a", "cannot read rows.parquet.gz: expected a"),
        ("bad.json", "{", "bad.json: not valid JSON"),
        ("number.json", "5", "expected a list of objects, an object of columns .* got int"),
        ("object.json", '{"a": 1}', "expected a list of objects, an object of columns .* got an object"),
        ("strings.json", '["a"]', "strings.json, item 0: expected an object with columns, got str"),
        ("ragged.json", '{"a": [1], "b": [1, 2]}', "the columns have different lengths: a 1, b 2"),
        ("empty.json", "[]", "empty.json has no rows"),
        ("ragged.csv", "a,b\n1,2\n3\n", r"ragged.csv, line 3: 1 values for 2 columns \(a, b\)"),
        ("quote.csv", 'a,b\n"1,2\n', "quote.csv, line 2: not valid CSV"),
        ("twice.csv", "a,a\n1,2\n", "the header must name each column once"),
        ("nameless.csv", "a,\n1,2\n", "the header must name each column once"),
        ("empty.csv", "a,b\n", "empty.csv has no rows"),
        ("nothing.csv", "", "nothing.csv has no rows"),
        ("no/data-set", None, "cannot load the data set 'no/data-set', split 'train' .* only cached data sets"),
        ("~nosuchuser/a.jsonl", None, "cannot look for a file|no data file"),
        ("x" * 5000, None, "cannot look for a file|cannot load"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else None,
)
def test_files_that_cannot_be_used(tmp_path, name, content, message, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        write(tmp_path / name, content)
    with pytest.raises(DataError, match=message):
        load(name)


def test_a_folder_of_files(tmp_path):
    write(tmp_path / "b.jsonl", '{"a": 3, "c": 1}\n')
    write(tmp_path / "a.jsonl", '{"a": 1}\n{"a": 2}\n')
    write_parquet(tmp_path / "c.parquet", [{"a": 4, "d": "x"}])
    for ignored in ("README.md", ".hidden"):
        write(tmp_path / ignored, "not data")
    (found,) = load(tmp_path).sources
    assert [dict(row) for row in found.rows] == [{"a": 1}, {"a": 2}, {"a": 3, "c": 1}, {"a": 4, "d": "x"}]
    assert found.rows.columns == ("a", "c", "d")
    assert [row["a"] for _, row in stream_of(tmp_path)()] == [1, 2, 3, 4]
    for streaming in (False, True):
        with pytest.raises(DataError, match=r"has no split 'dev': no file name has one \(a.jsonl, "):
            load(tmp_path, train_split="dev", streaming=streaming)


def test_a_folder_of_parquet_files_unites_their_columns(tmp_path):
    write_parquet(tmp_path / "1.parquet", [{"a": 1, "b": "x"}])
    write_parquet(tmp_path / "2.parquet", [{"a": 2, "c": 0.5}])
    assert rows_of(tmp_path) == [{"a": 1, "b": "x", "c": None}, {"a": 2, "b": None, "c": 0.5}]
    write_parquet(tmp_path / "3.parquet", [{"a": "one"}])
    with pytest.raises(DataError, match="the files of .* do not go together"):
        rows_of(tmp_path)


def test_a_folder_with_splits_gives_the_split(tmp_path):
    folder = tmp_path / "set" / "data"
    for name in ("train-00000", "train-00001", "test", "dev", "eval-1"):
        write(folder / f"{name}.jsonl", json.dumps({"a": name}))
    for split, names in (
        ("train", ["train-00000", "train-00001"]),
        ("test", ["test"]),  # an exact match goes before its synonym eval
        ("eval", ["eval-1"]),
        ("validation", ["dev"]),
    ):
        assert [row["a"] for row in rows_of(tmp_path / "set", train_split=split)] == names
    assert [row["a"] for row in load(None, eval=tmp_path / "set", evaluation=True).sources[0].rows] == ["test"]
    with pytest.raises(DataError, match=r"has no split 'extra'; it has: test, train, validation. Set data.train_split"):
        rows_of(tmp_path / "set", train_split="extra")
    write(folder / "more.jsonl", '{"a": 1}')
    with pytest.raises(DataError, match=r"begin with a split \(dev.jsonl, .*\), others do not \(more.jsonl\)"):
        rows_of(tmp_path / "set")
    write(tmp_path / "only" / "train.jsonl", "{}")
    with pytest.raises(DataError, match="has no split 'test'; it has: train"):  # not the training rows again
        load(None, eval=tmp_path / "only", evaluation=True)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "has no data files: expected at least one .jsonl, .json, .csv or .parquet file"),
        (["a.jsonl", "notes.txt"], "cannot read .*notes.txt: every file of a data folder must be a .jsonl"),
        (["main/a.jsonl", "socratic/a.jsonl"], r"has subfolders \(main, socratic\): set one as the path"),
        (["a.jsonl", "more/a.jsonl"], r"has subfolders \(more\)"),
    ],
)
def test_folders_that_cannot_be_used(tmp_path, files, message):
    for name in files:
        write(tmp_path / name, '{"a": 1}')
    with pytest.raises(DataError, match=message):
        rows_of(tmp_path)


def test_folders_that_datasets_wrote(tmp_path):
    both = DatasetDict({"train": Dataset.from_list(ROWS), "test": Dataset.from_list(ROWS[:1])})
    both["train"].save_to_disk(tmp_path / "one")
    both.save_to_disk(tmp_path / "both")
    assert rows_of(tmp_path / "one") == rows_of(tmp_path / "both") == rows_of(both) == ROWS
    assert rows_of(tmp_path / "both", train_split="test") == ROWS[:1]
    assert list(stream_of(tmp_path / "one")()) == list(enumerate(ROWS))
    with pytest.raises(DataError, match="has no split 'dev'; it has: train, test"):
        rows_of(tmp_path / "both", train_split="dev")
    (tmp_path / "one" / "data-00000-of-00001.arrow").unlink()
    with pytest.raises(DataError, match="cannot load the data set"):
        rows_of(tmp_path / "one")


class Sized:
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return ROWS[index]


def test_rows_in_memory(tmp_path):
    table = pandas.DataFrame(ROWS)
    for given in (
        ROWS,
        tuple(ROWS),
        Dataset.from_list(ROWS),
        pyarrow.Table.from_pylist(ROWS),
        table.set_index("answer", drop=False),
        pandas.Series(ROWS),
        Sized(),
    ):
        assert rows_of(given) == rows_of(Source(path=given)) == ROWS
    numbers = Dataset.from_dict({"n": [1, 2]}).with_format("numpy")
    assert [type(row["n"]) for row in rows_of(numbers)] == [int, int]
    missing = pandas.DataFrame({"a": ["x", None], "n": [1.5, np.nan]})
    assert rows_of(missing) == [{"a": "x", "n": 1.5}, {"a": None, "n": None}]
    nested = [{"calls": [{"name": "f", "of": ["x"]}], "labels": ["x"]}] * 2  # pandas reads lists as arrays
    write_parquet(tmp_path / "a.parquet", nested)
    assert rows_of(pandas.read_parquet(tmp_path / "a.parquet")) == nested


def test_a_data_set_with_a_transform():
    given = Dataset.from_dict({"q": ["1", "2"]})
    added = given.with_transform(lambda batch: {"task": [q + "+1" for q in batch["q"]]})
    assert rows_of(added, columns={"text": "task"}) == [{"text": "1+1"}, {"text": "2+1"}]

    def fails(batch):
        raise RuntimeError("boom")

    with pytest.raises(DataError, match="reading rows of the data set raised RuntimeError: boom"):
        load(given.with_transform(fails))


@each(
    ("given", "message"),
    [
        ([], "the training data has no rows"),
        ([*ROWS, 5], "must hold one mapping of columns per row; row 2 is int"),
        (iter(ROWS), "must have a length"),
        ({"train": ROWS}, "got dict"),
        ({1: ROWS}.values(), "must have a length and rows by index"),
        (DatasetDict({"test": Dataset.from_list(ROWS)}), "the training data has no split 'train'; it has: test"),
        ([Source(path=ROWS), ROWS[0]], "expected only sources or only rows; one item among sources is {'question'"),
        (pandas.DataFrame({"a": []}), "has no rows"),
        ([{0: "a", 1: "b"}], "the training data: column names must be strings, got 0"),
        (pandas.DataFrame([["1", "2"]], columns=["a", "a"]), "the training data has two columns 'a'"),
        (pyarrow.table([pyarrow.array(["1"])] * 2, names=["a", "a"]), "the training data has two columns 'a'"),
    ],
)
def test_objects_that_hold_no_rows(given, message):
    with pytest.raises(DataError, match=message):
        load(given)


def test_an_evaluation_of_a_stream():
    assert load(None) is load(None, evaluation=True) is None
    rows = [{"q": str(n), "n": n} for n in range(40)]
    stream = IterableDataset.from_generator(lambda: iter(rows))
    with pytest.raises(DataError, match="the evaluation data: a IterableDataset has no length: set data.eval_rows"):
        load(stream, evaluation=True)
    # It is filtered before its rows are counted, as data in memory is.
    source = {"columns": {"text": "q"}, "filter": {"n": {"min": 5}}, "select": "1::2", "rows": 3}
    for given in (stream, rows):
        data = load(Source(path=given, **source), evaluation=True)
        (loaded,) = data.sources
        assert [row["text"] for row in loaded.rows] == ["6", "8", "10"]
        assert list(loaded.rows.numbers) == [6, 8, 10]
        assert not data.streams
    with pytest.raises(DataError, match="no row is left by data.filter and data.select"):
        load(Source(path=stream, filter={"n": 99}, rows=3), evaluation=True)


def test_a_name_with_a_configuration_and_a_split(monkeypatch):
    asked = []

    def load_dataset(*arguments, **settings):
        asked.append((arguments, settings))
        found = Dataset.from_list(ROWS)
        return found.to_iterable_dataset() if settings["streaming"] else found

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    assert rows_of("some/name:main", train_split="train[:2]") == ROWS
    stream = stream_of([Source(path="name", split="dev")])
    assert list(stream()) == list(stream()) == list(enumerate(ROWS))
    assert asked == [
        (("some/name", "main"), {"split": "train[:2]", "streaming": False}),
        (("name", None), {"split": "dev", "streaming": True}),
    ]


NUMBERED = [{"q": str(n), "level": ["easy", "medium", "hard"][n % 3], "rate": n / 10, "n": n} for n in range(12)]


def source(given=NUMBERED, **settings):
    return load(given, **settings).sources[0]


def numbers(given=NUMBERED, **settings):
    rows = source(given, **settings).rows
    assert [row["n"] for row in rows] == list(rows.numbers)
    return [row["n"] for row in rows]


@pytest.mark.parametrize("kind", [list, Dataset.from_list, pyarrow.Table.from_pylist])
def test_columns_then_filter_then_select_then_the_first(kind):
    rows = kind(NUMBERED)
    settings = {"columns": {"prompt": "q", "difficulty": "level"}, "filter": {"difficulty": ["easy", "hard"]}}
    settings |= {"select": "1::2", "train_rows": 3}
    # Of 0 2 3 5 6 8 9 11 every second: 2 5 8 11.
    assert numbers(rows, **settings) == [2, 5, 8]
    used = source(rows, **settings)
    assert used.rows.columns == tuple(used.rows[0]) == ("prompt", "difficulty", "rate", "n")
    assert used.rows[-1]["n"] == 8
    assert used.description == "12 rows; data.filter leaves 8; data.select (1::2) 4; the first 3 of these"
    assert source(kind([{"a": 1, "b": 2}]), columns={"a": "b", "b": "a"}).rows[0] == {"b": 1, "a": 2}


@each(
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


@each(
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


def test_the_filter_of_the_training_is_not_for_an_evaluation():
    config = DataConfig(columns={"prompt": "q"}, filter={"level": "hard"}, select=":2", train_rows=1, eval_rows=5)
    used = load_data(NUMBERED, config, evaluation=True).sources[0]
    assert [row["prompt"] for row in used.rows] == ["0", "1", "2", "3", "4"]
    filtered = load_data(Source(path=NUMBERED, filter={"level": "hard"}, select="1:", rows=2), config, evaluation=True)
    assert [row["prompt"] for row in filtered.sources[0].rows] == ["5", "8"]


def test_sources_have_settings_of_their_own():
    config = DataConfig(columns={"prompt": "q"}, filter={"level": "hard"}, prompt_template="{prompt}?")
    data = load_data(
        [
            Source(path=NUMBERED),
            Source(path=NUMBERED, name="second", columns={}, filter={"n": {"min": 10}}, prompt_column="q", rows=1),
            Source(path=[{"x": "1"}], columns={}, filter={"x": "1"}, prompt_template="{x}!"),
        ],
        config,
    )
    assert [source.name for source in data.sources] == ["source 0", "second", "source 2"]
    assert [[row.get("n") for row in source.rows] for source in data.sources] == [[2, 5, 8, 11], [10], [None]]
    assert [source.config.prompt_template for source in data.sources] == ["{prompt}?", None, "{x}!"]
    assert (len(data), data.weights) == (6, None)


@each(
    ("sources", "settings", "message"),
    [
        ([{"weight": 1.0}, {}], {}, "data.train: source 1 has no weight: give every source one, or none"),
        ([{}, {}], {"train_rows": 3}, "data.train_rows is for a single source: set rows in each source's table"),
        ([{}, {}], {"select": ":3"}, "data.select is for a single source: set select in each source's table"),
        ([{"name": "a"}, {"name": "a"}], {}, "two sources are called 'a': give each its own name"),
        ([{"weight": 1.0}], {"evaluation": True}, "weights are for training; an evaluation uses every row once"),
        ([{}, {"columns": {"x": "zzz"}}], {}, "the training data, source 'source 1': data.columns names column 'zzz'"),
    ],
)
def test_sources_that_do_not_go_together(sources, settings, message):
    with pytest.raises(DataError, match=message):
        load([Source(path=NUMBERED, **given) for given in sources], **settings)


def test_rows_of_a_table_in_chunks():
    whole = pyarrow.Table.from_pylist(NUMBERED)
    rows = source(pyarrow.concat_tables([whole[a:b] for a, b in ((0, 3), (3, 4), (4, 4), (4, 12))])).rows
    for indices in ([5], [0, 3, 4, 11], range(1, 12, 3), []):
        assert list(rows.select(indices)) == [NUMBERED[index] for index in indices]
    assert [rows[index] for index in range(12)] == NUMBERED


@pytest.mark.slow
def test_a_column_with_more_than_2_gb_of_text():
    # Its chunks cannot be joined: there are no offsets for 2.4 GB in one.
    text = pyarrow.array(["x" * 1_000_000] * 120)
    table = pyarrow.table({"n": range(2400), "tests": pyarrow.chunked_array([text] * 20)})
    rows = source(table, select="::300").rows
    assert [row["n"] for row in rows] == list(range(0, 2400, 300))
    assert len(rows[1]["tests"]) == 1_000_000


@pytest.mark.parametrize(("name", "text"), [("a.jsonl", '{"a": 1, "a": 2}'), ("a.json", '[{"p": [{"b": 1, "b": 1}]}]')])
def test_a_key_that_occurs_twice_is_refused(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match="the key '[ab]' occurs twice in an object"):
        load_rows(str(tmp_path / name))
