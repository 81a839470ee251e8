"""Run folders made by hand: small, without training, as odd as a test wants them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

CONFIG = """
[model]
path = "tiny"
[rollout]
num_generations = 4
temperature = 0.7
[run]
output_dir = "somewhere"
"""
WORDS = ["<|end|>", "<|tool|>", "Ġthe", "Ġsum", "Ġis", "4", "2", "Ċ", "ðŁ", "ĺ", "Ģ", "<script>", "Ġxyz"]
"""A byte-level vocabulary. Tokens 8, 9 and 10 together are one emoji."""
END, TOOL, THE, SUM, IS, FOUR, TWO, LINE, *EMOJI = range(11)
SCRIPT, XYZ = 11, 12


def metrics(step: int) -> dict[str, Any]:
    """A line of ``metrics.jsonl``."""
    reward = 0.2 + 0.6 * step / 40 + 0.05 * math.sin(step)
    return {
        "step": step,
        "time": 1_700_000_000.0 + 3 * step,
        "tokens": 100 + step,
        "reward/mean": reward,
        "rewards/right": reward,
        "rewards/format": 0.9,
        "groups/dead_share": 0.25,
        "entropy": 0.8 - 0.01 * step,
        "entropy/q05": 0.1,
        "entropy/q95": 1.4,
        "length/mean": 20.0,
        "length/min": 5,
        "length/max": 32,
        "grad_norm": 0.1 * (1 + math.cos(step) ** 2),
        "update_kl": 1e-4,
        "learning_rate": 1e-5,
        "updates": 1,
        "updates_skipped": 0,
        "groups/rounds": 1,
        "seconds/generate": 1.5,
        "seconds/update": 0.5,
        "seconds/step": 2.0,
        "tokens_per_second": 900.0,
        "kl/k1": 0.001,
        "kl/k3": None,
        **(
            {"eval/reward/mean": reward, "eval/reward/low": reward - 0.1, "eval/reward/high": reward + 0.1}
            if step % 10 == 0
            else {}
        ),
    }


def make_run(
    folder: Path,
    *,
    steps: int = 40,
    stored: Mapping[int, Mapping[str, Sequence[Any]]] | None = None,
    lines: Sequence[Mapping[str, Any]] | None = None,
    config: str = CONFIG,
    summary: Mapping[str, Any] | None = None,
    tokenizer: bool = True,
) -> Path:
    """A run folder.

    Args:
        folder: where; it is created.
        steps: lines of metrics, unless ``lines`` gives them.
        stored: the columns of ``rollouts/step-N.parquet`` by step; by default those of ``completions`` for two steps.
        lines: the lines of ``metrics.jsonl``.
        config: ``config.toml``.
        summary: ``summary.json``; None: the run did not end.
        tokenizer: whether there is a checkpoint with a tokenizer.
    """
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.toml").write_text(config, encoding="utf-8")
    every = lines if lines is not None else [metrics(step) for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in every), encoding="utf-8")
    start = {"time": "2026-01-01T00:00:00+0000", "step": 0, "folder": "/home/me", "overrides": ["run.max_steps"]}
    facts = {"versions": "torch=2.10, transformers=5.10", "machine": "x86, 8 cores"}
    (folder / "starts.jsonl").write_text(json.dumps(start | {"missing": {}, "facts": facts}) + "\n")
    for step, columns in ({1: completions(), steps: completions()} if stored is None else stored).items():
        pyarrow.parquet.write_table(pyarrow.table(dict(columns)), folder / "rollouts" / f"step-{step}.parquet")
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    if tokenizer:
        (folder / "checkpoints" / f"step-{steps}").mkdir(parents=True)
        write_tokenizer(folder / "checkpoints" / f"step-{steps}" / "tokenizer.json")
    return folder


def write_tokenizer(path: Path) -> None:
    """A byte-level ``tokenizer.json`` of ``WORDS``."""
    added = [{"id": number, "content": WORDS[number], "special": True} for number in (END, TOOL)]
    vocab = {word: number for number, word in enumerate(WORDS)}
    tokenizer = {"added_tokens": added, "decoder": {"type": "ByteLevel"}, "model": {"type": "BPE", "vocab": vocab}}
    path.write_text(json.dumps(tokenizer), encoding="utf-8")


def completions(
    texts: Sequence[str] = (" the sum is 42\n", " the sum is 4", " xyz 😀", " is"),
    token_ids: Sequence[Sequence[int]] = (
        [THE, SUM, IS, FOUR, TWO, LINE, END],
        [THE, SUM, IS, FOUR, END],
        [XYZ, *EMOJI, END],
        [IS, IS, IS, IS, IS],
    ),
    prompt: str = "What is 40 + 2?",
    **columns: Sequence[Any],
) -> dict[str, Any]:
    """The columns of a stored step with one group of completions and all columns of tokens; others may be added."""
    lengths = [len(ids) for ids in token_ids]
    rewards = [1.0 - 0.5 * number for number in range(len(texts))]
    advantages = [one - sum(rewards) / len(rewards) for one in rewards]
    logps = [[-0.01 * (at + 1) for at in range(length)] for length in lengths]
    causes = [
        [None] * (length - 1) + ["clipped_high" if row == 0 else "no_advantage"] for row, length in enumerate(lengths)
    ]
    return {
        "group": [7] * len(texts),
        "row": [3] * len(texts),
        "prompt": [prompt] * len(texts),
        "completion": list(texts),
        "finish_reason": ["length" if ids[-1] != END else "eos" for ids in token_ids],
        "weights_version": [0] * len(texts),
        "token_ids": [list(ids) for ids in token_ids],
        "reward": rewards,
        "rewards/right": rewards,
        "rewards/format": [0.5] * len(texts),
        "advantage": advantages,
        "sampler_logps": logps,
        "old_logps": logps,
        "logps": [[one + 0.002 for one in some] for some in logps],
        "ref_logps": [[one - 0.1 for one in some] for some in logps],
        "ratio": [[1.002] * length for length in lengths],
        "policy_coefficient": [
            [advantage / length] * length for advantage, length in zip(advantages, lengths, strict=True)
        ],
        "kl_coefficient": [[0.001] * length for length in lengths],
        "entropy": [[0.1 * (at % 5) for at in range(length)] for length in lengths],
        "no_gradient": causes,
    } | columns


def seeds(folder: Path) -> list[Path]:
    """Two settings with three seeds each; the second has less reward."""
    found = []
    for rate, less in (("1e-05", 0.0), ("2e-06", 0.1)):
        for seed in range(3):
            change = 0.01 * seed * (1 + less) - less
            names = [f"{name}{end}" for name in ("reward", "eval/reward") for end in ("/mean", "/low", "/high")]
            lines = [
                one | {key: one[key] + change for key in names if key in one} for one in map(metrics, range(1, 41))
            ]
            config = f"[optim]\nlearning_rate = {rate}\n[run]\nseed = {seed}\n"
            found.append(make_run(folder / f"{rate}-{seed}", lines=lines, stored={}, config=config, tokenizer=False))
    return found
