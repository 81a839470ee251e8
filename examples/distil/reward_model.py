"""Train a small reward model on comparisons, and save it as a folder that [reward] functions can name:

python reward_model.py [FOLDER]

It takes the place of the large reward model that you have: a sequence-classification model with one label.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from cohort.demo.task import problems, solution
from cohort.shipped import MODELS

BASE = MODELS["cohort:demo"]
STEPS, PAIRS = 120, 32


def comparisons(count: int) -> Iterator[tuple[str, str, str]]:
    """Questions with a right solution, which is preferred, and one in which carries were forgotten."""
    rng = random.Random(0)
    for row in problems(3 * count, held_out=False, seed=1):
        a, b = map(int, row["question"].split("+"))
        if (wrong := solution(a, b, forget_carry=0.5, rng=rng)) != (right := solution(a, b)):
            yield row["question"], right, wrong


def train(folder: str, steps: int = STEPS) -> float:
    """Fit P(better) = sigmoid(score of better - score of worse), and return the share that the model has right of the
    comparisons of the last tenth of the steps, measured before the step."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    model = AutoModelForSequenceClassification.from_pretrained(BASE, num_labels=1, dtype=torch.float32)
    model.config.pad_token_id = tokenizer.pad_token_id
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.0)
    pairs, right = comparisons(2 * steps * PAIRS), []
    for step in range(steps):
        batch = [next(pairs) for _ in range(PAIRS)]
        better, worse = scores(model, tokenizer, batch).chunk(2)
        right.append(float((better > worse).float().mean()))
        optimizer.param_groups[0]["lr"] = 5e-4 * (1 - step / steps)
        optimizer.zero_grad()
        (-logsigmoid(better - worse).mean()).backward()
        optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    last = right[-max(1, steps // 10) :]
    return sum(last) / len(last)


def scores(model: Any, tokenizer: Any, batch: Sequence[tuple[str, str, str]]) -> torch.Tensor:
    """The scores of the better completions, then those of the worse ones."""
    turns = [(row[0], row[which]) for which in (1, 2) for row in batch]
    talks = [[{"role": "user", "content": q}, {"role": "assistant", "content": text}] for q, text in turns]
    texts = [tokenizer.apply_chat_template(talk, tokenize=False) for talk in talks]
    inputs = tokenizer(texts, add_special_tokens=False, padding=True, padding_side="right", return_tensors="pt")
    logits: torch.Tensor = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
    return logits[:, 0]


if __name__ == "__main__":
    folder = sys.argv[1] if len(sys.argv) > 1 else "reward_model"
    print(f"{folder}: {train(folder):.1%} of the last comparisons right")
