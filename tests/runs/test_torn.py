"""Files of a checkpoint that are not as they were written: nothing of it is used, and the one before is taken."""

import json
import shutil
from pathlib import Path

import pyarrow.parquet
import pytest

from cohort.cli import main
from cohort.errors import RunFolderError
from cohort.lock import Lock
from cohort.runs.durable import MANIFEST, write_manifest
from cohort.runs.folder import RunFolder
from tests.conftest import DEMO_MODEL, tiny_llama
from tests.train.harness import make_trainer, metrics_of, same_parameters

SETTINGS = {"save_steps": 1, "max_steps": 3, "beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1, "lag": 1}


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    from cohort.policy import load_tokenizer

    tokenizer = load_tokenizer(str(DEMO_MODEL))
    return lambda folder: make_trainer(tokenizer, folder, tiny_llama(vocab_size=len(tokenizer)), **SETTINGS)


@pytest.fixture(scope="module")
def run(make, tmp_path_factory):
    """A complete run's folder and its trainer."""
    trainer = make(tmp_path_factory.mktemp("torn") / "run")
    trainer.train()
    return trainer.folder.path, trainer


def flipped(content, _):
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def removed(*_):
    return None


def swapped(_, other):
    return other


@pytest.mark.parametrize("damage", [flipped, removed, swapped])
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_taken(run, damage, caplog):
    folder, trainer = run
    newest, before = (folder / "checkpoints" / f"step-{step}" for step in (3, 2))
    files = sorted(path.relative_to(newest) for path in newest.rglob("*") if path.is_file())
    assert {"model.safetensors", "state/optimizer.safetensors", "state/reference.safetensors", "state/loop.json"} <= {
        str(file) for file in files
    }
    used = []
    for file in files:
        content, other = (newest / file).read_bytes(), before / file
        damaged = damage(content, other.read_bytes() if other.exists() else None)
        if damaged == content or (damaged is None and damage is swapped):
            continue
        (newest / file).unlink()
        if damaged is not None:
            (newest / file).write_bytes(damaged)
        caplog.clear()
        used.append(RunFolder(folder).check_resumable(trainer.args))
        assert str(newest) in caplog.text
        assert (file.name == MANIFEST) or file.name in caplog.text or damage is swapped
        (newest / file).write_bytes(content)
    assert used == [2] * len(used)
    assert len(used) >= (5 if damage is swapped else len(files))
    assert RunFolder(folder).check_resumable(trainer.args) == 3


def test_no_flipped_byte_of_a_manifest_goes_unnoticed(run):
    folder, _ = run
    file = folder / "checkpoints" / "step-3" / MANIFEST
    content = file.read_bytes()
    for place in range(0, len(content), 31):
        file.write_bytes(content[:place] + bytes([content[place] ^ (1 << place % 8)]) + content[place + 1 :])
        assert RunFolder(folder)._newest_whole() == 2, content[place - 20 : place + 20]
    file.write_bytes(content)


def test_renamed_checkpoints(run, tmp_path):
    folder = shutil.copytree(run[0], tmp_path / "run")
    steps = folder / "checkpoints"
    shutil.rmtree(steps / "step-1")
    (steps / "step-3").rename(steps / "x")
    (steps / "step-2").rename(steps / "step-3")
    (steps / "x").rename(steps / "step-2")
    with pytest.raises(
        RunFolderError, match="step-3 is the checkpoint of step 2; .*step-2 is the checkpoint of step 3"
    ):
        RunFolder(folder)._newest_whole()


def test_a_run_goes_on_from_the_checkpoint_before_a_broken_one(run, make, tmp_path, capsys):
    folder, straight = run
    broken = shutil.copytree(folder, tmp_path / "run")
    shutil.rmtree(broken / "checkpoints" / "step-3" / "state")
    (broken / "summary.json").unlink()
    assert main(["verify", str(broken)]) == 1
    assert "broken  checkpoints/step-3: " in capsys.readouterr().out
    resumed = make(broken)
    resumed.train(resume=True)
    assert same_parameters(resumed, straight)
    assert [line["step"] for line in metrics_of(broken)] == [1, 2, 3]
    assert sorted(path.name for path in (broken / "checkpoints").iterdir())[-1] == "step-3.broken"
    shutil.rmtree(broken / "checkpoints" / "step-2")
    lock = Lock(broken)
    lock.take()  # as of a run that goes on
    assert main(["verify", str(broken)]) == 0
    *_, files, first, second = capsys.readouterr().out.splitlines()
    assert files == "whole   6 other files"
    assert first.startswith(f"note    run.lock: {broken} is being written by another trainer")
    assert second == "note    checkpoints/step-3.broken: being written, left by a killed process, or set aside"
    lock.release()


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("metrics.jsonl", b'{"step": 1}\n{"step": 2', "line 2 is damaged"),
        ("metrics.jsonl", b'{"step": 1}\n{"step": 3}\n', "line 2 is of step 3; the line before it is of step 1"),
        ("metrics.jsonl", b"[1]\n", "line 1, is damaged"),
        ("summary.json", b"{", "Expecting property name"),
        ("config.toml", b"[", "Invalid initial character"),
        ("rollouts/step-2.parquet", None, "CRC checksum verification failed"),
        ("rollouts/step-2.parquet", b"PAR1", "Parquet"),
    ],
)
def test_verify_names_other_damaged_files(run, tmp_path, file, content, problem, capsys):
    folder = tmp_path / "run"
    shutil.copytree(run[0], folder, ignore=shutil.ignore_patterns("checkpoints"))
    if content is None:
        content = bytearray((folder / file).read_bytes())
        prompts = pyarrow.parquet.ParquetFile(folder / file).metadata.row_group(0).column(2)
        content[prompts.data_page_offset - 1] ^= 1  # the last character of the column's values
    (folder / file).write_bytes(content)
    assert main(["verify", str(folder)]) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("broken")]
    assert line.startswith(f"broken  {file}: ")
    assert problem in line


def test_verify_reads_metrics_once(run, monkeypatch):
    read, real = [], Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(path.name) or real(path))
    assert main(["verify", str(run[0])]) == 0
    assert read.count("metrics.jsonl") == 1  # a run may write a line between two readings


def test_verify_of_one_checkpoint_and_of_something_else(run, tmp_path, capsys):
    assert main(["verify", str(run[0] / "checkpoints" / "step-3")]) == 0
    assert capsys.readouterr().out == "whole   step-3\n"
    assert main(["verify", str(tmp_path)]) == 2
    assert "is neither a run folder nor a checkpoint" in capsys.readouterr().err
    (tmp_path / "config.toml").touch()
    assert main(["verify", str(tmp_path)]) == 2
    assert "no run was started here" in capsys.readouterr().err


def test_verify_follows_no_link_that_leads_out_of_the_run(run, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(run[0], folder, ignore=shutil.ignore_patterns("checkpoints"))
    (folder / "summary.json").unlink()
    (folder / "summary.json").symlink_to("/dev/zero")
    assert main(["verify", str(folder)]) == 2
    assert "summary.json is a symbolic link to /dev/zero" in capsys.readouterr().err


def rewritten(folder, change):
    """Change files of a checkpoint, and write a manifest that agrees with them."""
    change(folder)
    write_manifest(folder)


def without(key):
    def change(folder):
        file = folder / "state" / "loop.json"
        file.write_text(
            json.dumps({name: value for name, value in json.loads(file.read_text()).items() if name != key})
        )

    return change


UNREADABLE = {
    "model.safetensors": lambda folder: (folder / "model.safetensors").write_bytes(b"no tensors"),
    "optimizer.safetensors": lambda folder: (folder / "state/optimizer.safetensors").write_bytes(b""),
    "loop.json": lambda folder: (folder / "state/loop.json").write_text("[]"),
    "loop.json without random": without("random"),
    "lost optimizer": lambda folder: (folder / "state/optimizer.safetensors").unlink(),
}


@pytest.mark.parametrize("change", UNREADABLE.values(), ids=UNREADABLE)
def test_a_file_that_cannot_be_read_though_the_manifest_agrees(run, tmp_path, caplog, capsys, change):
    folder, trainer = run
    copy = shutil.copytree(folder, tmp_path / "run", ignore=shutil.ignore_patterns("best", "rollouts"))
    rewritten(copy / "checkpoints" / "step-2", change)
    shutil.rmtree(copy / "checkpoints" / "step-3")
    assert RunFolder(copy).check_resumable(trainer.args) == 1
    assert "going on from step 1 instead" in caplog.text
    assert main(["verify", str(copy)]) == 1
    assert "broken  checkpoints/step-2: " in capsys.readouterr().out
