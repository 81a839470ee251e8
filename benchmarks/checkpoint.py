"""Seconds of a checkpoint with random weights, by default in the shape of Qwen2.5-0.5B with AdamW in float32 (6 GB).

    python benchmarks/checkpoint.py
    python benchmarks/checkpoint.py --layers 2 --vocabulary 4096

Alternates ``RunFolder.save_checkpoint`` (safetensors and JSON, hashed, brought to the disk) with ``torch.save`` of the
same tensors, also brought to the disk, and prints medians of seconds: "waiting" is what a step waits, "copy" the part
of it that copies the tensors, "beyond" the rest; "written" is until the checkpoint is on the disk. While it is written,
a loop of small products stands for the training; its longest pause is printed. Then the seconds to check the hashes and
to load.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from cohort.config import OptimConfig
from cohort.policy import Policy, Precision
from cohort.runs import folder as folders
from cohort.runs.checkpoints import NEEDED, Models, SavedState, check_checkpoint, copied, load_checkpoint, random_state
from cohort.runs.folder import RunFolder
from cohort.train import Optimizer


class NoTokenizer:
    """Stands for a tokenizer, whose files are small."""

    def save_pretrained(self, path: Path) -> None:
        """Write nothing."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: the folder of temporary files")
    options = parser.parse_args()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=options.vocabulary,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=options.layers,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
    )
    single = Precision(torch.float32, torch.float32)
    models = Models(Policy(Qwen2ForCausalLM(config), single), None, NoTokenizer())
    optimizer = Optimizer(models.policy.model, OptimConfig(), 10)
    for parameter in optimizer.parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        measure(Path(name), models, optimizer, options.repeats)


def measure(folder: Path, models: Models, optimizer: Optimizer, repeats: int) -> None:
    """Save in turns, then check and load; print the seconds."""
    run = RunFolder(folder)
    names = ("torch.save", "copy", "waiting", "beyond", "written", "pause")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    state = SavedState(1, optimizer.state_dict(), dict.fromkeys(NEEDED) | {"random": [random_state()], "version": 0})
    for _repeat in range(repeats):
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        seconds["torch.save"].append(timed(lambda: plain(folder / "plain.pt", models, optimizer)))
        (folder / "plain.pt").unlink()
        start = time.perf_counter()
        with mock.patch.object(folders, "copied", timing_copied(seconds["copy"])):
            run.save_checkpoint(models, state)
        seconds["waiting"].append(time.perf_counter() - start)
        seconds["beyond"].append(seconds["waiting"][-1] - seconds["copy"][-1])
        seconds["pause"].append(longest_pause(run))
        run.close()
        seconds["written"].append(time.perf_counter() - start)
    written = run.checkpoint(1)
    gigabytes = sum(path.stat().st_size for path in written.rglob("*") if path.is_file()) / 1e9
    parameters = sum(parameter.numel() for parameter in optimizer.parameters)
    print(f"{parameters / 1e6:,.0f} million parameters, {gigabytes:.2f} GB")
    medians = {name: statistics.median(some) for name, some in seconds.items()}
    for name, median in medians.items():
        print(f"{name:16} {median:6.2f} s")
    print(f"written / torch.save    {medians['written'] / medians['torch.save']:6.2f}")
    print(f"check            {timed(lambda: check_checkpoint(written)):6.2f} s")
    load = timed(lambda: optimizer.load_state_dict(load_checkpoint(written, models).optimizer))
    print(f"load             {load:6.2f} s")


def timing_copied(seconds: list[float]) -> Callable[..., Any]:
    """``checkpoints.copied``, with its seconds appended to a list."""

    def copy(*arguments: Any, **options: Any) -> Any:
        start = time.perf_counter()
        content = copied(*arguments, **options)
        seconds.append(time.perf_counter() - start)
        return content

    return copy


def longest_pause(run: RunFolder) -> float:
    """The longest time between two small products while a checkpoint is being written."""
    matrix, last, longest = torch.randn(64, 64), time.perf_counter(), 0.0
    while not run.checkpoint(1).exists():
        matrix @ matrix
        now = time.perf_counter()
        last, longest = now, max(longest, now - last)
    return longest


def plain(path: Path, models: Models, optimizer: Optimizer) -> None:
    """What a checkpoint stores, by ``torch.save``, brought to the disk."""
    with path.open("wb") as file:
        torch.save([models.policy.model.state_dict(), optimizer.state_dict()], file)
        file.flush()
        os.fsync(file.fileno())


def timed(work: Callable[[], Any]) -> float:
    """The seconds of some work."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
