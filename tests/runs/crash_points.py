"""Run by ``test_system_calls``, with crash.c preloaded: ends a process before each system call of a save in turn, and
checks from what a run would go on. Prints the number of system calls.

    python -m tests.runs.crash_points FOLDER CRASH.so [--every N]
"""

import argparse
import ctypes
import os
import shutil
from pathlib import Path

import torch

from cohort.config import OptimConfig
from cohort.config.schema import RunConfig
from cohort.policy import Policy, Precision, load_tokenizer
from cohort.runs.checkpoints import NEEDED, Models, SavedState, load_checkpoint, random_state
from cohort.runs.durable import check_whole, recover
from cohort.runs.folder import RunFolder
from cohort.train import Optimizer
from tests.conftest import DEMO_MODEL, tiny_llama


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("library")
    parser.add_argument("--every", type=int, default=1)
    options = parser.parse_args()
    crash = ctypes.CDLL(options.library)
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(str(DEMO_MODEL))
    model = tiny_llama(vocab_size=len(tokenizer))
    models = Models(Policy(model, Precision(torch.float32, torch.float32)), None, tokenizer)
    optimizer = Optimizer(model, OptimConfig(), 2)
    base = options.folder / "base"
    save(base, 1, models, optimizer, RunConfig())
    weights = [models.policy.model.lm_head.weight.clone()]
    with torch.no_grad():
        model.lm_head.weight += 1
    weights.append(model.lm_head.weight.clone())
    point, calls = 0, None
    while calls is None:
        journal = options.folder / "journal"
        folder = Path(shutil.copytree(base, options.folder / "run"))
        with journal.open("wb") as file:
            child = os.fork()
            if child == 0:
                crash.crash_arm(ctypes.c_long(point), file.fileno())
                save(folder, 2, models, optimizer, RunConfig(save_total_limit=1))
                os._exit(0)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        assert code in (0, 137), f"point {point}: {code}"
        calls = point if code == 0 else None
        unplugged = shutil.copytree(folder, options.folder / "unplugged")
        unplug(folder, unplugged, journal)
        for copy in (folder, Path(unplugged)):
            check(copy, models, weights, is_done=code == 0)
            shutil.rmtree(copy)
        point += options.every
    print(calls)


def save(path, step, models, optimizer, settings):
    """A line of metrics, the best model and a checkpoint."""
    folder = RunFolder(path, settings)
    path.mkdir(exist_ok=True)
    folder.append_metrics({"step": step})
    folder.save_best(models, {"step": step, "metric": "eval/reward/mean", "value": 0.5, "measured": {}})
    state = SavedState(
        step, optimizer.state_dict(), {key: {} for key in NEEDED} | {"random": [random_state()], "version": 0}
    )
    folder.save_checkpoint(models, state, wait=True)


def unplug(folder, copy, journal):
    """Empty the files whose content was not brought to the disk."""
    safe = {}
    for line in journal.read_text().splitlines():
        what, number = line.split()
        safe[int(number)] = what == "s"
    for path in folder.rglob("*"):
        if path.is_file() and not safe.get(path.stat().st_ino, True):
            (copy / path.relative_to(folder)).write_bytes(b"")


def check(path, models, weights, *, is_done):
    """Check that a whole checkpoint and best model are there, with the weights of their step."""
    folder = RunFolder(path)
    recover(path / "checkpoints", "step-*")
    recover(path, "best")
    step = folder._newest_whole()
    load_checkpoint(folder.checkpoint(step), models)
    assert torch.equal(models.policy.model.lm_head.weight, weights[step - 1])
    check_whole(folder.best)
    assert folder.best_record()["step"] >= step
    assert not is_done or (step == 2 and folder.checkpoint_steps() == [2])
    with torch.no_grad():
        models.policy.model.lm_head.weight.copy_(weights[1])


if __name__ == "__main__":
    main()
