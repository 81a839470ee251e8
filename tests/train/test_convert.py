"""Checkpoints of earlier versions, whose state is pickled, are converted, and nothing in them is run."""

import os
import random
import shutil

import numpy as np
import pytest
import torch

from cohort.cli import main
from cohort.lock import Lock
from cohort.runs.checkpoints import check_checkpoint
from tests.train.harness import make_trainer, same_parameters

SETTINGS = {"max_steps": 3, "save_steps": 1, "beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2}


class Evil:
    def __reduce__(self):
        return os.mkdir, ("pwned",)


def as_before(trainer, folder):
    """Replace the newest checkpoint's state, and remove the others: as an earlier version has written it."""
    checkpoint = folder / "checkpoints" / "step-2"
    shutil.rmtree(folder / "checkpoints" / "step-1")
    shutil.rmtree(checkpoint / "state")
    (checkpoint / "manifest.json").unlink()
    (checkpoint / "state").mkdir()
    parts, optimizer = trainer._parts, trainer.optimizer
    loop = {
        "step": 2,
        "version": trainer.policy.version,
        "place": {
            "taken": parts.cursor.position,
            "reached": None,
            "rewards": np.ones(2),
            "passes": {0: (1, np.arange(3))},
        },
        "adaptive": parts.adaptive.state_dict(),
        "best": parts.best.state_dict(),
        "identity": {"prompts": parts.facts["prompts"], "reward functions": "digits_reward"},
        "random": {
            "torch": torch.get_rng_state(),
            "cuda": [],
            "numpy": np.random.get_state(),
            "python": random.getstate(),
        },
    }
    state = {
        "rules": [rule.state_dict() for rule in optimizer.rules],
        "schedules": [schedule.state_dict() for schedule in optimizer.schedules],
    }
    torch.save(loop, checkpoint / "state" / "loop.pt")
    torch.save(state, checkpoint / "state" / "optimizer.pt")
    torch.save(parts.reference.model.state_dict(), checkpoint / "state" / "reference.pt")
    return checkpoint


def test_a_run_goes_on_from_a_converted_checkpoint(demo_tokenizer, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    straight = make_trainer(demo_tokenizer, folder, **SETTINGS)
    for metrics in (steps := straight.steps()):
        if metrics["step"] == 2:
            straight.folder.settle()
            checkpoint = as_before(straight, tmp_path / shutil.copytree(folder, tmp_path / "earlier"))
    del steps
    assert main(["convert", "earlier"]) == 2
    assert "add --unpickle: torch reads them with weights_only" in capsys.readouterr().err
    evil = shutil.copytree("earlier", "evil")
    torch.save({"step": Evil()}, tmp_path / evil / "checkpoints" / "step-2" / "state" / "loop.pt")
    assert main(["convert", "evil", "--unpickle"]) == 2
    assert "holds more than tensors and plain values" in capsys.readouterr().err
    assert not (tmp_path / "pwned").exists()

    (lock := Lock(tmp_path / "earlier")).take()
    assert main(["convert", "earlier", "--unpickle"]) == 2
    assert "is being written by another trainer" in capsys.readouterr().err
    lock.release()
    assert main(["convert", "earlier", "--unpickle"]) == 0
    check_checkpoint(checkpoint)
    assert (checkpoint.with_name("step-2.pickled") / "state" / "loop.pt").exists()
    assert main(["convert", "earlier", "--unpickle"]) == 2
    resumed = make_trainer(demo_tokenizer, tmp_path / "earlier", **SETTINGS)
    resumed.train(resume=True)
    assert same_parameters(resumed, straight)


def test_a_damaged_file_of_an_earlier_checkpoint(tmp_path, demo_tokenizer, capsys):
    state = tmp_path / "checkpoints" / "step-2" / "state"
    state.mkdir(parents=True)
    (tmp_path / "config.toml").touch()
    (state / "loop.pt").write_bytes(b"torn")
    assert main(["convert", str(tmp_path), "--unpickle"]) == 2
    assert "loop.pt is damaged, or holds more" in capsys.readouterr().err


@pytest.fixture(autouse=True)
def _generators():
    """The test uses the state of the global generators."""
    before = torch.get_rng_state()
    yield
    torch.set_rng_state(before)
