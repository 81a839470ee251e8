"""What it takes to read, check, render, tokenize and measure a data set before the first step.

    python benchmarks/data.py [--rows 100000] [--file FILE.jsonl --column COLUMN]

The whole way from a file to prompts with known lengths, and the tokenizer's own time for the same texts in the same
batches, take turns in one run; what is beyond the tokenizer's time is Cohort's. Without a file the rows are made: a
question of 40 to 120 words and an answer. The tokenizer is a byte-pair encoding trained on some of them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from cohort.config import DataConfig
from cohort.data import LengthLimit, PromptSet, load_data
from cohort.data.source import BATCH

CHAT = """{%- if messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{%- endif %}
{%- for m in messages %}{%- if m.role != 'system' or not loop.first %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"""


def made_rows(count: int) -> list[dict[str, str]]:
    draw = random.Random(0)
    letters = "etaoinshrdlucmfwypvbgk"
    words = ["".join(draw.choices(letters, k=draw.randint(1, 9))) for _ in range(5000)]
    rows = []
    for _ in range(count):
        question = " ".join(draw.choices(words, k=draw.randint(40, 120)))
        rows.append({"question": f"{question} {draw.randint(0, 9999)}?", "answer": f"#### {draw.randint(0, 9999)}"})
    return rows


def trained_tokenizer(texts: list[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=8000,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.chat_template = CHAT
    return fast


Seconds = tuple[float, float]
"""By the clock, and of all cores together: the second is fair on a machine that others use too."""


def now() -> Seconds:
    return time.perf_counter(), time.process_time()


def since(start: Seconds) -> Seconds:
    end = now()
    return end[0] - start[0], end[1] - start[1]


def tokenizer_seconds(tokenizer: Any, texts: list[str], *, special: bool) -> Seconds:
    start = now()
    for first in range(0, len(texts), BATCH):
        batch = texts[first : first + BATCH]
        tokenizer(batch, add_special_tokens=special, return_attention_mask=False, return_token_type_ids=False)
    return since(start)


def cohort_seconds(path: Path, tokenizer: Any, config: DataConfig) -> tuple[Seconds, PromptSet]:
    start = now()
    data = load_data(str(path), config)
    assert data is not None
    prompts = PromptSet(data, tokenizer, config, limit=LengthLimit(100_000, "data.max_prompt_length"))
    prompts.describe_lengths()
    return since(start), prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--file", type=Path)
    parser.add_argument("--column", default="question")
    options = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    rows = made_rows(options.rows)
    if options.file is not None:
        read = [json.loads(line) for line in options.file.read_text(encoding="utf-8").splitlines()]
        rows = [read[index % len(read)] for index in range(options.rows)]
    tokenizer = trained_tokenizer([row[options.column] for row in rows[:5000]])
    print(f"{len(rows):,} rows from .jsonl; median of {options.repeats}\n")
    print("| prompts | tokens | all, s | the tokenizer alone, s | beyond it, s | beyond it, CPU s | ratio of CPU s |")
    print("|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        for name in ("text", "chat"):
            config = DataConfig(prompt_column=options.column, format=name, overlong_prompts="drop")
            texts = [row[options.column] for row in rows]
            if name == "chat":
                talks = [[{"role": "user", "content": text}] for text in texts]
                texts = tokenizer.apply_chat_template(talks, tokenize=False, add_generation_prompt=True)
            ours, alone = [], []
            for _ in range(options.repeats):
                seconds, prompts = cohort_seconds(path, tokenizer, config)
                ours.append(seconds)
                alone.append(tokenizer_seconds(tokenizer, texts, special=name == "text"))
            whole, own = ([statistics.median(clock) for clock in zip(*side, strict=True)] for side in (ours, alone))
            beyond = [f"{mine - theirs:.1f}" for mine, theirs in zip(whole, own, strict=True)]
            total, ratio = int(prompts.lengths.sum()), whole[1] / own[1]
            print(f"| {name} | {total:,} | {whole[0]:.1f} | {own[0]:.1f} | {beyond[0]} | {beyond[1]} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
