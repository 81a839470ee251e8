"""A stand-in for the hub: folders named like the models and data sets that public GRPO scripts use.

    python benchmarks/trl_hub.py FOLDER

Libraries prefer a folder to a hub id of the same name, so a script that runs in FOLDER reads these. The model is a
Qwen2 of 200 thousand parameters. It has learnt to answer sums of small numbers in the formats that scripts ask for:
half of the time in the format, half of the time right. Training can improve both.
"""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

POLICIES = ("Qwen/Qwen2-0.5B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct")
REWARD_MODEL = "OpenAssistant/reward-model-deberta-v3-large-v2"
SYSTEM_PROMPTS = (
    "Respond in the following format:\n<reasoning>\n...\n</reasoning>\n<answer>\n...\n</answer>\n",
    "You are a helpful assistant. You first think about the reasoning process and then give the answer, "
    "within <think> </think> and <answer> </answer> tags.",
    "Put your final answer within \\boxed{}.",
)
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
ROWS = 256


def words(a: int, b: int) -> str:
    """A sum as a question."""
    return f"Tom has {a} apples and buys {b} more. How many apples does he have?"


def product(a: int, b: int) -> str:
    """A product, for which a tool is needed."""
    return f"What is {a} times {b}?"


def answers(result: int) -> tuple[str, ...]:
    """The formats of an answer."""
    return (
        f"<reasoning>\nI add them.\n</reasoning>\n<answer>\n{result}\n</answer>\n",
        f"<think>I add them.</think>\n<answer>{result}</answer>",
        f"<think>I add them.</think>\nThe answer is \\boxed{{{result}}}.",
        f"The answer is \\boxed{{{result}}}.",
        f"He has {result} apples.",
        f"I add them.\n#### {result}",
    )


def conversations(rng: random.Random, tools: bool) -> Iterator[tuple[list[dict[str, Any]], list[Any] | None]]:
    """Conversations to learn from, with the tools of each."""
    while True:
        a, b = rng.randint(1, 4), rng.randint(1, 4)
        if tools and rng.random() < 0.15:
            call = {"type": "function", "function": {"name": "multiply", "arguments": {"a": a, "b": b}}}
            called = rng.random() < 0.5
            messages: list[dict[str, Any]] = [{"role": "user", "content": product(a, b)}]
            if called:
                messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
                messages.append({"role": "tool", "name": "multiply", "content": str(a * b)})
            guess = a * b if called else rng.randint(1, 16)
            yield [*messages, {"role": "assistant", "content": f"The answer is {guess}."}], [multiply]
            continue
        result = a + b if rng.random() < 0.5 else rng.randint(2, 8)
        system = rng.choice([None, *SYSTEM_PROMPTS])
        head = [] if system is None else [{"role": "system", "content": system}]
        said = {"role": "assistant", "content": rng.choice(answers(result))}
        yield [*head, {"role": "user", "content": words(a, b)}, said], None


def multiply(a: int, b: int) -> int:
    """Multiplies two numbers.

    Args:
        a: The first number.
        b: The second number.

    Returns:
        The product.
    """
    return a * b


def template() -> str | None:
    """Qwen2.5's chat template as the installed TRL has it, which knows how to read its calls of tools."""
    found = importlib.util.find_spec("trl")
    path = Path(found.origin).parent / "chat_templates" / "qwen2_5.jinja" if found and found.origin else None
    return path.read_text(encoding="utf-8") if path and path.exists() else None


def make_tokenizer() -> Any:
    """Byte-level BPE that was trained on the conversations."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    texts = [(template() or CHATML).replace("\\n", "\n"), *SYSTEM_PROMPTS, words(1, 2), product(1, 2), *answers(3)]
    backend.train_from_iterator(texts * 3, trainer)
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    backend.add_tokens([AddedToken(text, normalized=False) for text in ("<tool_call>", "</tool_call>")])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=1024
    )
    tokenizer.chat_template = template() or CHATML
    return tokenizer


def make_model(tokenizer: Any, kind: str = "Qwen2ForCausalLM", **more: Any) -> Any:
    """A Qwen2 with random weights."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **more,
    )
    return getattr(transformers, kind)(config)


def learn(model: Any, tokenizer: Any, steps: int) -> None:
    """Train the model on the assistant's turns of the conversations."""
    source = conversations(random.Random(0), tools=template() is not None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for step in range(steps):
        pairs = [_ids_and_labels(tokenizer, *next(source)) for _ in range(8)]
        longest = max(len(ids) for ids, _ in pairs)
        ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in pairs])
        labels = torch.tensor([labels + [-100] * (longest - len(labels)) for _, labels in pairs])
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 49:
            print(f"stand-in model, step {step + 1} of {steps}: loss {loss.item():.3f}", file=sys.stderr, flush=True)


def _ids_and_labels(tokenizer: Any, messages: list[Any], tools: list[Any] | None) -> tuple[list[int], list[int]]:
    """A conversation; labels are -100 except for what the assistant writes, the end of its turn included."""

    def render(count: int, *, prompt: bool) -> list[int]:
        return list(
            tokenizer.apply_chat_template(
                messages[:count], tools=tools, add_generation_prompt=prompt, return_dict=False
            )
        )

    ids = render(len(messages), prompt=False)
    labels = [-100] * len(ids)
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            start, stop = len(render(index, prompt=True)), len(render(index + 1, prompt=False))
            stop = start + ids[start:stop].index(tokenizer.eos_token_id) + 1
            labels[start:stop] = ids[start:stop]
    return ids, labels


# ---- data sets


def data_sets() -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Rows by data set and split, with the columns that the data sets of these names have."""
    rng = random.Random(1)
    pairs = [(rng.randint(1, 4), rng.randint(1, 4)) for _ in range(ROWS)]
    sums = [{"question": words(a, b), "answer": f"{a} + {b} = {a + b}\n#### {a + b}"} for a, b in pairs]
    problems = [{"problem": words(a, b), "solution": f"$\\boxed{{{a + b}}}$"} for a, b in pairs]
    chats = [{"prompt": [{"role": "user", "content": words(a, b)}], "solution": f"${a + b}$"} for a, b in pairs]
    posts = [{"prompt": f"POST: {words(a, b)}\n\nTL;DR:", "completion": " He has some."} for a, b in pairs]
    countdown = [{"nums": [a, b], "target": a + b} for a, b in pairs]
    products = [{"a": a, "b": b, "answer": a * b} for a, b in pairs]
    return {
        "openai/gsm8k": {"train": sums, "test": sums[:32]},
        "AI-MO/NuminaMath-TIR": {"train": problems, "test": problems[:32]},
        "trl-lib/DeepMath-103K": {"train": chats},
        "trl-lib/tldr": {"train": posts, "validation": posts[:32]},
        "Jiayi-Pan/Countdown-Tasks-3to4": {"train": countdown},
        "acme/products": {"train": products},
    }


def write_data(folder: Path, splits: dict[str, list[dict[str, Any]]], config: str) -> None:
    """A data set as JSON lines, with a card that names its configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    card = ["---", "configs:", f"- config_name: {config}", "  data_files:"]
    for split, rows in splits.items():
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(lines, encoding="utf-8")
        card += [f"  - split: {split}", f"    path: {split}.jsonl"]
    (folder / "README.md").write_text("\n".join([*card, "---", ""]), encoding="utf-8")


def build(folder: Path, steps: int = 360) -> None:
    """Make all models and data sets.

    Args:
        folder: where to make them.
        steps: steps of the policy's pretraining; 0: random weights.
    """
    for name, splits in data_sets().items():
        write_data(folder / name, splits, "main" if name == "openai/gsm8k" else "default")
    tokenizer = make_tokenizer()
    policy = make_model(tokenizer)
    if steps:
        learn(policy, tokenizer, steps)
    for name in POLICIES:
        policy.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    make_model(tokenizer, "Qwen2ForSequenceClassification", num_labels=1).save_pretrained(folder / REWARD_MODEL)
    tokenizer.save_pretrained(folder / REWARD_MODEL)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
