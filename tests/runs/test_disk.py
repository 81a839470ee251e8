"""A run whose disk fails for a while: the training waits, and everything is written once the disk is well."""

import logging
import os
import resource
import shutil
import subprocess

import pytest

from cohort.errors import DiskError
from cohort.runs import writer
from tests.train.harness import ROWS, checkpoints_of, make_trainer, same_parameters, untimed_metrics_of, untimed_rows_of

SETTINGS = {"max_steps": 5, "save_steps": 1, "save_total_limit": 2, "eval_steps": 1, "eval_on_start": True}
EVALUATED = SETTINGS | {"eval_rows": ROWS[:2], "metric_for_best_model": "eval/length/mean"}


@pytest.fixture
def size_limit():
    """A function that sets the largest size of a file, as a quota does: from there on, writes fail."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (before[0] if size is None else size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


class Works(logging.Handler):
    """Makes the disk work once the training waits for it."""

    def __init__(self, works):
        super().__init__()
        self.works = works

    def emit(self, record):
        if self.works and "Training waits" in record.getMessage():
            works, self.works = self.works, None
            works()


def train_while(trainer, fails, works):
    """Train with a disk that fails after the first step until the training waits."""
    handler = Works(works)
    logging.getLogger("cohort.runs").addHandler(handler)
    try:
        for metrics in trainer.steps():
            if metrics["step"] == 1:
                trainer.folder.settle()  # it is written by then
                fails()
    finally:
        logging.getLogger("cohort.runs").removeHandler(handler)


@pytest.fixture
def straight(tmp_path, demo_tokenizer):
    trainer = make_trainer(demo_tokenizer, tmp_path / "straight", **EVALUATED)
    trainer.train()
    return trainer


def check_same(trainer, straight):
    """Check that a run has left what another one has."""
    folder, other = trainer.folder.path, straight.folder.path
    assert same_parameters(trainer, straight)
    assert untimed_metrics_of(folder) == untimed_metrics_of(other)
    assert [untimed_rows_of(folder, n) for n in range(1, 6)] == [untimed_rows_of(other, n) for n in range(1, 6)]
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in other.iterdir())
    assert len(list((folder / "evaluations").iterdir())) == 6
    assert checkpoints_of(folder)[-1] == "step-5"
    best = [(one / "best" / "model.safetensors").read_bytes() for one in (folder, other)]
    assert best[0] == best[1]


def test_a_full_disk(straight, tmp_path, demo_tokenizer, monkeypatch, caplog, size_limit):
    monkeypatch.setattr(writer, "RETRY_SECONDS", 0.01)
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", **EVALUATED)
    train_while(trainer, lambda: size_limit(0), lambda: size_limit(None))
    check_same(trainer, straight)
    warned, *_, well = [record.message for record in caplog.records if record.name == "cohort.runs"]
    assert "File too large. Training " in warned
    assert well.startswith("everything is written again")


def test_a_disk_that_stays_full_ends_the_run(tmp_path, demo_tokenizer, monkeypatch, size_limit):
    monkeypatch.setattr(writer, "RETRY_SECONDS", 0.01)
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", stop_when_unsaved_minutes=0, **SETTINGS)
    with pytest.raises(DiskError, match="metrics of step 2: File too large"):
        train_while(trainer, lambda: size_limit(0), None)
    size_limit(None)
    resumed = make_trainer(demo_tokenizer, tmp_path / "run", **SETTINGS)
    assert resumed.train(resume=True)["steps"] == 5
    straight = make_trainer(demo_tokenizer, tmp_path / "straight", **SETTINGS)
    straight.train()
    assert same_parameters(resumed, straight)


def mounts():
    """Whether this process may mount file systems."""
    return os.geteuid() == 0 and shutil.which("mount") is not None


def call(*command):
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def disk(tmp_path):
    """A file system of 4 MB, mounted as ``disk`` and as ``aside``."""
    disk, aside = tmp_path / "disk", tmp_path / "aside"
    disk.mkdir()
    aside.mkdir()
    try:
        call("mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk))
    except subprocess.CalledProcessError:
        pytest.skip("mounting is not permitted")
    call("mount", "--bind", str(disk), str(aside))
    yield disk
    while disk.is_mount():
        call("umount", "-l", str(disk))
    call("umount", "-l", str(aside))
    assert [path for path in disk.rglob("*") if path.is_file()] == []  # nothing was written beside the disk


@pytest.mark.slow
@pytest.mark.skipif(not mounts(), reason="only root may mount file systems")
@pytest.mark.parametrize("fault", ["full", "read-only", "gone"])
def test_a_real_disk(straight, tmp_path, disk, demo_tokenizer, monkeypatch, caplog, fault):
    monkeypatch.setattr(writer, "RETRY_SECONDS", 0.01)
    folder, aside = disk / "run", tmp_path / "aside"

    def fill():
        with (disk / "ballast").open("wb", buffering=0) as file:
            for size in (2**16, 2**12, 1):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError:
                    continue

    def read_only():  # a second mount, since the first has a file that is open for writing: the lock
        call("mount", "--bind", str(disk), str(disk))
        call("mount", "-o", "remount,bind,ro", str(disk))

    faults = {
        "full": (fill, (disk / "ballast").unlink),
        "read-only": (read_only, lambda: call("umount", "-l", str(disk))),
        "gone": (lambda: call("umount", "-l", str(disk)), lambda: call("mount", "--bind", str(aside), str(disk))),
    }
    trainer = make_trainer(demo_tokenizer, folder, **EVALUATED)
    train_while(trainer, *faults[fault])
    check_same(trainer, straight)
    reason = {"full": "No space left on device", "read-only": "Read-only file system", "gone": "the run folder is gone"}
    assert reason[fault] in caplog.text
