"""Reading rows: files, folders, data sets by name, and objects in memory."""

import gzip
import json

import numpy
import pandas
import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset, DatasetDict, IterableDataset

from cohort.config import DataConfig, Source
from cohort.data import load_data, load_rows
from cohort.errors import ConfigError, DataError

ROWS = [{"question": "1+2", "answer": "3"}, {"question": "4+5", "answer": "9"}]
LINES = "\n".join(map(json.dumps, ROWS)) + "\n\n"


def rows_of(given, **settings):
    data = load_data(given, DataConfig(**settings))
    return [dict(row) for part in data.parts for row in part.rows]


def write_zst(path, text):
    with pyarrow.output_stream(str(path), compression="zstd") as stream:
        stream.write(text.encode())


def test_every_kind_of_file(tmp_path):
    (tmp_path / "a.jsonl").write_text(LINES)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(LINES.encode()))
    write_zst(tmp_path / "a.jsonl.zst", LINES)
    (tmp_path / "a.json").write_text(json.dumps(ROWS, indent=1))
    (tmp_path / "columns.json").write_text(json.dumps({"question": ["1+2", "4+5"], "answer": ["3", "9"]}))
    (tmp_path / "data.json").write_text(json.dumps({"data": ROWS}))
    (tmp_path / "packed.json.gz").write_bytes(
        gzip.compress(json.dumps({"data": {"question": ["1+2", "4+5"], "answer": ["3", "9"]}}).encode())
    )
    (tmp_path / "a.csv").write_text("question,answer\n1+2,3\n\n4+5,9\n")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    files = sorted(tmp_path.iterdir())
    assert len(files) == 9
    for path in files:
        assert rows_of(path) == ROWS, path
        assert list(load_rows(str(path), limit=1)) == ROWS[:1]
        if ".json" not in path.suffixes:
            stream = load_data(str(path), DataConfig(streaming=True)).parts[0].stream
            assert list(stream) == list(enumerate(ROWS)), path


def test_a_column_called_data_is_a_column(tmp_path):
    (tmp_path / "a.json").write_text('{"data": ["x", "y"]}')
    assert rows_of(tmp_path / "a.json") == [{"data": "x"}, {"data": "y"}]


def test_text_that_is_not_plain_utf8(tmp_path):
    # A mark first; a line separator inside.
    (tmp_path / "bom.jsonl").write_bytes(b'\xef\xbb\xbf{"a": "\xe2\x80\xa8"}\n')
    assert rows_of(tmp_path / "bom.jsonl") == [{"a": "\u2028"}]
    (tmp_path / "bom.csv").write_bytes(b"\xef\xbb\xbfa,b\r\n1,2\r\n")
    assert rows_of(tmp_path / "bom.csv") == [{"a": "1", "b": "2"}]


def test_values_of_a_csv_file_are_what_stands_there(tmp_path):
    (tmp_path / "a.csv").write_text('q,answer,n\n"1, and ""2""\nthen",007,\n"x",3.50,NA\n')
    assert rows_of(tmp_path / "a.csv") == [
        {"q": '1, and "2"\nthen', "answer": "007", "n": ""},
        {"q": "x", "answer": "3.50", "n": "NA"},
    ]
    (tmp_path / "long.csv").write_text(f"a\n{'x' * 200_000}\n")  # more than the csv module takes by default
    assert len(rows_of(tmp_path / "long.csv")[0]["a"]) == 200_000


def test_parquet_keeps_its_types(tmp_path):
    rows = [{"prompt": [{"role": "user", "content": "hi"}], "n": 1, "x": None}, {"prompt": [], "n": 2, "x": 0.5}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert rows_of(tmp_path / "a.parquet") == rows
    assert rows_of(tmp_path / "a.parquet", select="1:") == rows[1:]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.jsonl", None, "no data file missing.jsonl .looked in"),
        ("./missing", None, "no data file missing .looked in"),
        ("bad.jsonl", '{"a": 1}\n{"a": \n', "bad.jsonl, line 2: not valid JSON: Expecting value"),
        ("list.jsonl", "[1]\n", "line 1: expected an object with columns, got list"),
        ("empty.jsonl", "\n", "empty.jsonl has no rows"),
        ("latin.jsonl", b'{"a": 1}\n{"a": "\xe9"}\n', "latin.jsonl, line 2: not UTF-8 text: .* at byte 7"),
        ("bad.parquet", "not parquet", "cannot read bad.parquet"),
        ("bad.jsonl.gz", "not packed", "cannot read bad.jsonl.gz: Not a gzipped file"),
        ("short.jsonl.gz", gzip.compress(LINES.encode())[:-9], "cannot read short.jsonl.gz: Compressed file ended"),
        ("bad.jsonl.zst", "not packed", "cannot read bad.jsonl.zst"),
        ("data.txt", "a", "cannot read data.txt: expected a .jsonl, .json, .csv or .parquet file"),
        ("rows.parquet.gz", "a", "cannot read rows.parquet.gz: expected a"),
        ("bad.json", "{", "bad.json: not valid JSON"),
        ("number.json", "5", "expected a list of objects, an object of columns .* got int"),
        ("object.json", '{"a": 1}', "expected a list of objects, an object of columns .* got an object"),
        ("strings.json", '["a"]', "strings.json, item 0: expected an object with columns, got str"),
        ("ragged.json", '{"a": [1], "b": [1, 2]}', "columns are of different lengths: a 1, b 2"),
        ("empty.json", "[]", "empty.json has no rows"),
        ("ragged.csv", "a,b\n1,2\n3\n", r"ragged.csv, line 3: 1 values for 2 columns \(a, b\)"),
        ("wide.csv", "a,b\n1,2,3\n", "wide.csv, line 2: 3 values for 2 columns"),
        ("quote.csv", 'a,b\n"1,2\n', "quote.csv, line 2: not valid CSV"),
        ("twice.csv", "a,a\n1,2\n", "the header must name each column once"),
        ("nameless.csv", "a,\n1,2\n", "the header must name each column once"),
        ("empty.csv", "a,b\n", "empty.csv has no rows"),
        ("nothing.csv", "", "nothing.csv has no rows"),
        (
            "no/such-dataset",
            None,
            "cannot load the data set 'no/such-dataset', split 'train' .there is no file or folder of that name .* only what is cached",
        ),
    ],
)
def test_files_that_cannot_be_used(tmp_path, name, content, message, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message):
        load_data(name, DataConfig())


def test_a_folder_of_files(tmp_path):
    (tmp_path / "b.jsonl").write_text('{"a": 3, "c": 1}\n')
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"a": 4, "d": "x"}]), tmp_path / "c.parquet")
    (tmp_path / "README.md").write_text("not data")
    (tmp_path / ".hidden").write_text("not data")
    data = load_data(tmp_path, DataConfig())
    assert [dict(row) for row in data.parts[0].rows] == [{"a": 1}, {"a": 2}, {"a": 3, "c": 1}, {"a": 4, "d": "x"}]
    assert data.parts[0].rows.columns == ("a", "c", "d")
    streamed = load_data(tmp_path, DataConfig(streaming=True))
    assert [row["a"] for _, row in streamed.parts[0].stream] == [1, 2, 3, 4]


def test_a_folder_of_parquet_files_unites_their_columns(tmp_path):
    for name, row in (("1", {"a": 1, "b": "x"}), ("2", {"a": 2, "c": 0.5})):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / f"{name}.parquet")
    assert rows_of(tmp_path) == [{"a": 1, "b": "x", "c": None}, {"a": 2, "b": None, "c": 0.5}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"a": "one"}]), tmp_path / "3.parquet")
    with pytest.raises(DataError, match="the files of .* do not go together"):
        rows_of(tmp_path)


def test_a_folder_with_splits_gives_the_split(tmp_path):
    (tmp_path / "set" / "data").mkdir(parents=True)
    for name, value in (("train-00000", 1), ("train-00001", 2), ("test-00000", 3), ("validation", 4)):
        (tmp_path / "set" / "data" / f"{name}.jsonl").write_text(json.dumps({"a": value}))
    assert rows_of(tmp_path / "set") == [{"a": 1}, {"a": 2}]
    assert rows_of(tmp_path / "set", train_split="valid") == [{"a": 4}]
    data = load_data(None, DataConfig(eval=tmp_path / "set"), evaluation=True)
    assert [row["a"] for row in data.parts[0].rows] == [3]
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "train.jsonl").write_text("{}")
    with pytest.raises(DataError, match=r"has no split 'test'; it has: train"):  # not the training rows once more
        load_data(None, DataConfig(eval=tmp_path / "only"), evaluation=True)
    assert rows_of(tmp_path / "set", train_split="dev") == [{"a": 4}]  # as others call it
    with pytest.raises(DataError, match=r"has no split 'extra'; it has: test, train, validation. Set data.train_split"):
        rows_of(tmp_path / "set", train_split="extra")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "has no data files: expected .jsonl, .json, .csv or .parquet files"),
        (["a.jsonl", "notes.txt"], "cannot read .*notes.txt: every file of a data folder must be a .jsonl"),
        (["main/a.jsonl", "socratic/a.jsonl"], r"has subfolders \(main, socratic\): give the one with the data"),
        (["a.jsonl", "more/a.jsonl"], r"has subfolders \(more\): give the one with the data"),
    ],
)
def test_folders_that_cannot_be_used(tmp_path, files, message):
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"a": 1}')
    with pytest.raises(DataError, match=message):
        rows_of(tmp_path)


def test_what_datasets_wrote(tmp_path):
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "one")
    DatasetDict({"train": Dataset.from_list(ROWS), "test": Dataset.from_list(ROWS[:1])}).save_to_disk(tmp_path / "both")
    assert rows_of(tmp_path / "one") == ROWS
    assert rows_of(tmp_path / "both") == ROWS
    assert rows_of(tmp_path / "both", train_split="test") == ROWS[:1]
    stream = load_data(tmp_path / "one", DataConfig(streaming=True)).parts[0].stream
    assert list(stream) == list(enumerate(ROWS))
    with pytest.raises(DataError, match="has no split 'dev'; it has: train, test"):
        rows_of(tmp_path / "both", train_split="dev")


class Sized:
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return ROWS[index]


def test_rows_in_memory():
    table = pandas.DataFrame(ROWS)
    for given in (
        ROWS,
        tuple(ROWS),
        Dataset.from_list(ROWS),
        table,
        table.set_index("answer", drop=False),
        Sized(),
        pyarrow.Table.from_pylist(ROWS),
    ):
        assert rows_of(given) == ROWS
        assert rows_of(Source(path=given)) == ROWS
    numbers = Dataset.from_dict({"n": [1, 2]}).with_format("numpy")
    assert [type(row["n"]) for row in rows_of(numbers)] == [int, int]
    both = DatasetDict({"train": Dataset.from_list(ROWS), "test": Dataset.from_list(ROWS[:1])})
    assert rows_of(both) == ROWS
    missing = pandas.DataFrame({"a": ["x", None], "n": [1.5, numpy.nan]})
    assert rows_of(missing) == [{"a": "x", "n": 1.5}, {"a": None, "n": None}]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "the training data has no rows"),
        (["a"], "must hold one mapping of columns per row; row 0 is str"),
        ([*ROWS, 5], "row 2 is int"),
        (iter(ROWS), "must have a length"),
        ({"train": ROWS}, "got dict"),
        ({1: ROWS}.values(), "must have a length and rows by index"),
        (DatasetDict({"test": Dataset.from_list(ROWS)}), "the training data has no split 'train'; it has: test"),
        ([Source(path=ROWS), ROWS[0]], "expected sources only, or rows only; among sources is {'question'"),
        (pandas.DataFrame({"a": []}), "has no rows"),
    ],
)
def test_objects_that_are_no_rows(given, message):
    with pytest.raises(DataError, match=message):
        load_data(given, DataConfig())


def test_nothing_is_no_data():
    assert load_data(None, DataConfig()) is None
    assert load_data(None, DataConfig(), evaluation=True) is None


def test_an_evaluation_of_a_stream_needs_a_number_of_rows():
    stream = IterableDataset.from_generator(lambda: iter(ROWS))
    with pytest.raises(DataError, match="the evaluation data: a IterableDataset has no length: set data.eval_rows"):
        load_data(stream, DataConfig(), evaluation=True)
    data = load_data(stream, DataConfig(eval_rows=1), evaluation=True)
    assert list(data.parts[0].rows) == ROWS[:1]


def test_a_name_with_a_configuration_and_a_split(monkeypatch):
    asked = []

    def load_dataset(*arguments, **settings):
        asked.append((arguments, settings))
        found = Dataset.from_list(ROWS)
        return found.to_iterable_dataset() if settings["streaming"] else found

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    assert rows_of("some/name:main", train_split="train[:2]") == ROWS
    stream = load_data([Source(path="name", split="dev")], DataConfig(streaming=True)).parts[0].stream
    assert list(stream) == list(stream) == list(enumerate(ROWS))  # pass after pass
    assert asked == [
        (("some/name", "main"), {"split": "train[:2]", "streaming": False}),
        (("name", None), {"split": "dev", "streaming": True}),
    ]


def test_splits_are_never_mixed(tmp_path):
    for name in ("train", "test", "dev", "eval-1"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"a": name}))
    assert [rows_of(tmp_path, train_split=split) for split in ("train", "test", "dev", "eval")] == [
        [{"a": "train"}], [{"a": "test"}], [{"a": "dev"}], [{"a": "eval-1"}],
    ]  # fmt: skip
    assert rows_of(tmp_path, train_split="validation") == [{"a": "dev"}]
    (tmp_path / "more.jsonl").write_text('{"a": 1}')
    with pytest.raises(
        DataError,
        match=r"names of some files begin with a split's \(dev.jsonl, eval-1.jsonl, test.jsonl, train.jsonl\), those of "
        r"others do not \(more.jsonl\)",
    ):
        rows_of(tmp_path)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_split_of_a_folder_without_splits(tmp_path, streaming):
    (tmp_path / "part-1.jsonl").write_text('{"a": 1}')
    assert rows_of(tmp_path) == [{"a": 1}]
    with pytest.raises(DataError, match=r"has no splits .*part-1.jsonl.* so it has no 'dev'"):
        load_data(tmp_path, DataConfig(train_split="dev", streaming=streaming))


def test_a_number_of_too_many_digits(tmp_path):
    for name, text in (("a.jsonl", '{"a": 1}\n{"n": %s}'), ("a.json", '[{"n": %s}]')):
        (tmp_path / name).write_text(text % ("1" * 5000))
        with pytest.raises(DataError, match=rf"{name}.*: not valid JSON: Exceeds the limit"):
            rows_of(tmp_path / name)


@pytest.mark.parametrize("name", ["~nosuchuser/a.jsonl", "x" * 5000, "a/" + "x" * 300 + ".jsonl"])
def test_paths_that_no_file_can_have(name):
    for streaming in (False, True):
        with pytest.raises(DataError, match="cannot look for a file|no data file|cannot load"):
            load_data(name, DataConfig(streaming=streaming))


def test_a_source_with_mistakes_in_it():
    with pytest.raises(ConfigError, match="unknown setting wieght") as caught:
        Source(path="a", wieght=1)
    assert "pydantic" not in str(caught.value)
    with pytest.raises(ConfigError, match="weight: input should be greater than 0, got 0.0"):
        Source(path="a", weight=0.0)


def test_columns_have_names_once_that_are_strings():
    for given in ([{0: "a", 1: "b"}], pandas.DataFrame([["1", "2"]])):
        with pytest.raises(DataError, match="the training data: column names must be strings, got 0"):
            load_data(given, DataConfig())
    for given in (
        pandas.DataFrame([["1", "2"]], columns=["a", "a"]),
        pyarrow.table([pyarrow.array(["1"]), pyarrow.array(["2"])], names=["a", "a"]),
    ):
        with pytest.raises(DataError, match="the training data has two columns 'a'"):
            load_data(given, DataConfig())


def test_pandas_rows_with_arrays_are_lists(tmp_path):
    rows = [{"tools": [{"name": "f", "of": ["x"]}], "labels": ["x"]}] * 2
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert rows_of(pandas.read_parquet(tmp_path / "a.parquet")) == rows
    assert rows_of(pandas.Series(ROWS)) == ROWS


def test_a_data_set_with_a_transform():
    given = Dataset.from_dict({"q": ["1", "2"]})
    added = given.with_transform(lambda batch: {"task": [q + "+1" for q in batch["q"]]})
    assert rows_of(added, columns={"prompt": "task"}) == [{"prompt": "1+1"}, {"prompt": "2+1"}]

    def fails(batch):
        raise RuntimeError("boom")

    with pytest.raises(DataError, match="reading rows of the data set raised RuntimeError: boom"):
        load_data(given.with_transform(fails), DataConfig())


def test_an_evaluation_of_a_stream_is_filtered_before_rows_are_counted():
    rows = [{"q": str(n), "n": n} for n in range(40)]
    stream = Dataset.from_list(rows).to_iterable_dataset()
    source = {"columns": {"prompt": "q"}, "filter": {"n": {"min": 5}}, "select": "1::2", "rows": 3}
    for given in (stream, rows):
        (part,) = load_data(Source(path=given, **source), DataConfig(), evaluation=True).parts
        assert [(row["prompt"], part.rows.number(index)) for index, row in enumerate(part.rows)] == [
            ("6", 6), ("8", 8), ("10", 10),
        ]  # fmt: skip
    with pytest.raises(DataError, match="no row is left by data.filter and data.select"):
        load_data(Source(path=stream, filter={"n": 99}, rows=3), DataConfig(), evaluation=True)
