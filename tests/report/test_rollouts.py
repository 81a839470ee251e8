"""The reader of the store: old files, parts of files, and files that are not what they claim to be."""

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from cohort.errors import RunFolderError
from cohort.report import rollouts
from cohort.report.rollouts import StoredStep
from cohort.runs.tables import UsedRows, with_facts, write_table

COLUMNS = {
    "group": [7, 7, 9],
    "completion": ["a", "<b>", "c"],
    "token_ids": [[1, 2, 3], [4], [5, 6]],
    "drawn": [[True, False, True], [True], [True, True]],
    "segment_lengths": [[1, 2], [1], [2]],
    "sampler_logps": [[-0.5, -1.0], [-2.0], [-3.0, -4.0]],
    "logps": pyarrow.array([[-0.5, -1.5], None, [-3.0, float("nan")]], pyarrow.list_(pyarrow.float32())),
    "no_gradient": [[None, "clipped_high"], ["no_advantage"], None],
    "turn_rewards": [[None, 1.0], [], []],
    "extra/answer": ["x", None, "y"],
    "unknown": [{"a": 1}, None, None],
}


def written(folder, facts=None, name="step-3.parquet", **changes):
    columns = {key: value for key, value in (COLUMNS | changes).items() if value is not None}
    table = pyarrow.table(columns) if facts is None else with_facts(columns, facts)
    write_table(table, folder / name)
    return folder / name


def test_columns_rows_and_facts(tmp_path):
    step = StoredStep.read(written(tmp_path, {"step": 4, "groups": 2}))
    assert (step.step, step.num_rows, len(step)) == (4, 3, 3)
    assert "unknown" not in step.names
    assert step.values("no_gradient") == COLUMNS["no_gradient"]
    logps = step.arrays("logps")
    assert logps[0].dtype == np.float32
    assert (logps[0].tolist(), logps[1], str(logps[2][1])) == ([-0.5, -1.5], None, "nan")
    part = StoredStep.read(step.path, columns=["group", "logps", "ratio"], rows=[2, 0])
    assert (part.rows, part.values("group"), part.names) == ([0, 2], [7, 9], step.names)
    assert (part.values("completion"), part.arrays("ratio")) == ([None, None], [None, None])
    assert [len(one) for one in part.arrays("logps")] == [2, 2]
    assert len(StoredStep.read(step.path, rows=[]).values("group")) == 0


def test_a_file_without_facts_and_with_fewer_columns(tmp_path):
    path = written(tmp_path, logps=None, no_gradient=None, drawn=None, segment_lengths=None, sampler_logps=None)
    step = StoredStep.read(path)
    assert (step.step, dict(step.facts)) == (3, {})
    assert "logps" not in step
    assert step.values("logps") == step.arrays("logps") == [None] * 3


def test_many_rows_are_read_in_batches(tmp_path, monkeypatch):
    monkeypatch.setattr(rollouts, "BATCH_ROWS", 7)
    ids = [[row] * (row % 3) for row in range(50)]
    write_table(pyarrow.table({"group": range(50), "token_ids": ids}), tmp_path / "step-1.parquet")
    step = StoredStep.read(tmp_path / "step-1.parquet", rows=range(3, 40))
    assert step.values("group") == list(range(3, 40))
    assert [one.tolist() for one in step.arrays("token_ids")] == ids[3:40]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group": ["a", "b", "c"]}, "column 'group' holds string; expected whole numbers"),
        ({"logps": [1.0, 2.0, 3.0]}, "column 'logps' holds double; expected lists of numbers"),
        ({"rewards/f": [[1.0]] * 3}, "column 'rewards/f' holds .*; expected numbers"),
        ({"logps": [[1.0], [1.0], [1.0]]}, "column 'logps' does not fit sampler_logps, no_gradient, drawn: 1 and 2"),
        ({"token_ids": [[1], [1], [1]]}, "column 'drawn' does not fit token_ids"),
        ({"segment_lengths": [[4], [1], [2]]}, "column 'segment_lengths' does not fit token_ids, drawn: 4 and 3"),
        ({"segment_lengths": [[5, -2], [1], [2]]}, "a length is negative"),
        ({"token_ids": [[1, 2, None], [1], [1, 2]]}, "column 'token_ids' has lists with null entries"),
        ({"sampler_logps": [[None, 1.0], [1.0], [1.0, 2.0]]}, "'sampler_logps' has lists with null entries"),
        ({"completion": pyarrow.array([b"\xff", b"", b""]).view("string")}, "UTF"),
    ],
)
def test_columns_of_another_form_are_refused(tmp_path, changes, message):
    path = written(tmp_path, **changes)
    with pytest.raises(RunFolderError, match=f"cannot read .*step-3.parquet: .*{message}"):
        StoredStep.read(path)


def test_files_that_cannot_be_read(tmp_path, monkeypatch):
    path = written(tmp_path, {"step": 3})
    whole = path.read_bytes()
    for data, message in ((whole[:-20], ""), (b"", ""), (b"PAR1" * 9, ""), (whole.replace(b"PAR1", b"PAR2"), "")):
        path.write_bytes(data)
        with pytest.raises(RunFolderError, match=f"cannot read .*{message}"):
            StoredStep.read(path)
    middle = len(whole) // 3
    path.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    with pytest.raises(RunFolderError, match="cannot read"):
        StoredStep.read(path)  # a page's checksum
    for missing in (tmp_path / "step-9.parquet", tmp_path):
        with pytest.raises(RunFolderError, match="it is missing|it is not a file"):
            StoredStep.read(missing)
    path.write_bytes(whole)
    with pytest.raises(RunFolderError, match="row 3 was asked for, and it has 3 rows"):
        StoredStep.read(path, rows=[0, 3])
    monkeypatch.setattr(rollouts, "MAX_BYTES", 300)
    with pytest.raises(RunFolderError, match="more than 300 bytes: read fewer columns or rows"):
        StoredStep.read(path)
    assert StoredStep.read(path, columns=["group"]).values("group") == [7, 7, 9]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"cohort_store_version": "2"}, "its version is 2, of a newer Cohort"),
        ({"cohort_store_version": "x"}, "cannot read"),
        ({"cohort_step": "[]"}, "expected the facts of the step as a JSON object, got list"),
        ({"cohort_step": "[" * 9_999}, "cannot read"),
    ],
)
def test_metadata_that_cannot_be_read(tmp_path, metadata, message):
    table = pyarrow.table({"group": [1]}).replace_schema_metadata(metadata)
    write_table(table, tmp_path / "step-1.parquet")
    with pytest.raises(RunFolderError, match=message):
        StoredStep.read(tmp_path / "step-1.parquet")


def test_a_file_that_claims_another_number_of_rows(tmp_path):
    """Its rows stood beside the wrong ones of the same length."""
    path = written(tmp_path)
    content = path.read_bytes()
    rows = b"\x16\x06\x19"  # in the footer: 3 rows, as a number of Thrift, before the list of row groups
    assert content.count(rows) == 1
    path.write_bytes(content.replace(rows, b"\x16\x08\x19"))
    with pytest.raises(RunFolderError, match="it says that it has 4 rows, and 3 can be read"):
        StoredStep.read(path)


def test_a_small_file_that_claims_to_be_large(tmp_path):
    """A million equal lists take a few bytes in the file."""
    lists = pyarrow.ListArray.from_arrays(np.arange(0, 2**20 + 1, 2**10, dtype=np.int32), np.zeros(2**20))
    write_table(pyarrow.table({"weight": lists}), tmp_path / "step-1.parquet")
    assert (tmp_path / "step-1.parquet").stat().st_size < 10_000
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollouts, "MAX_BYTES", 2**19)
        with pytest.raises(RunFolderError, match="it holds more than"):
            StoredStep.read(tmp_path / "step-1.parquet")


def test_rows_that_no_update_used_are_null():
    used = UsedRows(np.array([0, 3]), np.array([2, 1]), 4)
    assert used.column(np.array([5, -1], np.int32)).to_pylist() == [5, None, None, None]
    values = np.array([1.0, 2.0, 3.0], np.float32)
    assert used.lists(values, np.array([True, True])).to_pylist() == [[1.0, 2.0], None, None, [3.0]]
    assert used.lists(values, np.array([False, True])).to_pylist() == [None, None, None, [3.0]]
