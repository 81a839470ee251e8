"""A script for TRL's GRPOTrainer with its import changed, and reward functions that config.toml uses as well."""

import re
from pathlib import Path
from typing import Any

from cohort.trl import GRPOConfig, GRPOTrainer  # was: from trl import GRPOConfig, GRPOTrainer


def answers(completions: list[Any]) -> list[str]:
    """The digits after #### at the end of each completion; empty if it does not end so."""
    found = [re.search(r"#### (\d+)\s*$", completion[0]["content"]) for completion in completions]
    return [match[1] if match else "" for match in found]


def correct(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """1 if the answer is right."""
    return [float(found == gold) for found, gold in zip(answers(completions), answer, strict=True)]


def digits(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """0.5, times the share of the digits that are right."""
    pairs = zip(answers(completions), answer, strict=True)
    return [0.5 * sum(map(str.__eq__, found, gold)) / len(gold) for found, gold in pairs]


def main() -> None:
    """Train."""
    from datasets import load_dataset

    args = GRPOConfig(
        output_dir="sums-grpo",
        learning_rate=2e-4,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=4,
        num_generations=8,
        max_completion_length=96,
        max_steps=40,
        save_steps=20,
        logging_steps=1,
        bf16=False,
    )
    trainer = GRPOTrainer(
        model="cohort:demo",  # yours stays as it is: a folder or a hub id
        reward_funcs=[correct, digits],
        args=args,
        train_dataset=load_dataset("json", data_files=str(Path(__file__).parent / "data.jsonl"), split="train"),
    )
    trainer.train()


if __name__ == "__main__":
    main()
