"""Every key that a run logs stands in docs/metrics.md. Runs a few steps of small random models under objectives that
between them log everything.

python scripts/check_metrics.py
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM

from cohort import GRPOConfig, GRPOTrainer
from cohort.environments import Step
from cohort.policy import load_tokenizer

ROOT = Path(__file__).parents[1]
DEMO_MODEL = ROOT / "src" / "cohort" / "demo" / "model"
OBJECTIVES: tuple[dict[str, Any], ...] = (
    {"preset": "default"},
    {"preset": "dapo", "beta": 0.1, "num_iterations": 2},
    {"preset": "grpo_v32", "entropy": {"coefficient": 0.01}, "term_norms_steps": 1},
    {"preset": "gspo_token", "mismatch": ["weight", "veto"]},
    {"preset": "default", "max_turns": 2, "format": "chat", "max_completion_length": 64},
)


class Counter:
    """An environment of two turns."""

    def reset(self) -> None:
        """Begin an episode."""
        self.turns = 0

    def step(self, _text: str) -> Step:
        """Answer a turn."""
        self.turns += 1
        return Step("Again.", reward=1.0, done=self.turns == 2)


def reward(
    completions: list[Any], log_extra: Callable[..., None], log_metric: Callable[..., None], **_: Any
) -> list[float]:
    """Something that a random model scores differently on, and something logged of each kind."""
    log_extra("answer", completions)
    log_metric("reward", 1.0)
    return [sum(character.isdigit() for character in str(text)) / (len(text) + 1) for text in completions]


def logged_keys(objective: dict[str, Any], folder: Path, *, named: bool) -> set[str]:
    """The keys of two steps and their evaluations, of a set with a name or without."""
    tokenizer = load_tokenizer(str(DEMO_MODEL))
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **shape))
    rows = [{"prompt": f"{number}+1"} for number in range(8)]
    config = GRPOConfig(
        prompts_per_step=2,
        num_generations=3,
        precision="float32",
        device="cpu",
        max_steps=2,
        progress=False,
        output_dir=str(folder / "run"),
        num_generations_eval=2,
        maj_at_k=[1],
        **{"max_completion_length": 6, "minibatches": 1} | objective,
    )
    sets = {"small": rows[:2]} if named else rows[:2]
    factory = Counter if "max_turns" in objective else None
    trainer = GRPOTrainer(model, reward, config, rows, sets, tokenizer, environment_factory=factory)
    return {key for metrics in trainer.steps() for key in metrics}


def documented_as(key: str) -> str:
    """A key with names of the user's own put in capitals."""
    key = re.sub(r"^mismatch/[^/]+/", "mismatch/RULE/", key.replace("eval/small/", "eval/"))
    key = re.sub(r"(pass|maj)@\d+", r"\1@K", key)
    return re.sub("(rewards?|custom)/reward", r"\1/NAME", key)


def main() -> int:
    documented = set(re.findall(r"`([^`\n]+)`", (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")))
    keys: set[str] = set()
    for number, objective in enumerate(OBJECTIVES):
        with tempfile.TemporaryDirectory() as folder:
            keys |= logged_keys(objective, Path(folder), named=number == 0)
    missing = sorted(key for key in keys if documented_as(key) not in documented)
    print("\n".join(f"docs/metrics.md lacks {key}" for key in missing) or f"metrics: all {len(keys)} keys documented")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
