"""Data that changes or disappears while a run reads it."""

import json

import pytest

from cohort.errors import DataError
from tests.train.harness import ROWS, checkpoints_of, make_trainer, metrics_of

STREAM = {"rows": None, "streaming": True, "shuffle_buffer": 2, "num_generations": 2, "max_completion_length": 2}


@pytest.fixture
def rows(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS[:6]))
    return file


def change(file):
    file.write_text(file.read_text().replace("1", "2", 1))


@pytest.mark.parametrize("fault", ["changed", "gone"])
def test_streamed_data_ends_the_run_at_the_next_pass(demo_tokenizer, tmp_path, rows, fault):
    # 6 rows, 4 per step: the second pass begins within step 2.
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", train=rows, max_steps=4, save_steps=0, **STREAM)
    steps = trainer.steps()
    next(steps)
    change(rows) if fault == "changed" else rows.unlink()
    expected = "has changed since this run began to read it" if fault == "changed" else "cannot read .*No such file"
    with pytest.raises(DataError, match=f"{expected}.*a checkpoint of step 1 is kept"):
        next(steps)
    assert checkpoints_of(tmp_path / "run") == ["step-1"]
    assert [line["step"] for line in metrics_of(tmp_path / "run")] == [1]


def test_loaded_data_is_not_read_again(demo_tokenizer, tmp_path, rows):
    settings = {"train": rows, "rows": None, "max_steps": 3, "num_generations": 2, "max_completion_length": 2}
    steps = make_trainer(demo_tokenizer, tmp_path / "run", **settings).steps()
    next(steps)
    rows.unlink()
    assert [line["step"] for line in steps] == [2, 3]
