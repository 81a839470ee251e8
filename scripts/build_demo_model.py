"""Build the demos' models: small Llamas that have learnt bad habits from examples.

    python scripts/build_demo_model.py                     # writes src/cohort/demo/model, a few minutes on 2 cores
    python scripts/build_demo_model.py tool                # writes src/cohort/demo/tool_model
    python scripts/build_demo_model.py [tool] --out DIR    # ... elsewhere

The model of ``cohort demo`` is trained by imitation on solutions whose writer forgets more than half of the carries. So
it has every step of the method, but its habit is wrong: sampled, it solves a good third of the problems; greedily, only
those that need no carry. The model of ``cohort demo tool`` imitates a writer who asks the calculator for easy sums,
guesses products, and garbles some of the calls. That is the state GRPO starts from in practice: the right behaviour is
in the policy, not its habit.

The same machine writes the same file: the seed is fixed, and the problems the demos hold out are never seen here
either.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from cohort.demo.task import DIGITS, is_held_out, solution
from cohort.demo.tool_task import Kind, numbers, question
from cohort.environments.calls import CallParser
from cohort.environments.shapes import error_text
from cohort.environments.tools import Toolbox, calculator

FORGET_CARRY = 0.55
EASY_SHARE = 0.65
"""Share of sums among the problems of the tool model."""
CALL_SHARE = {"easy": 0.4, "hard": 0.25}
"""Shares of problems for which the writer calls the calculator."""
GARBLED_SHARE = 0.15
"""Share of calls that the writer garbles."""
MISTAKE_SHARE = 0.03
"""Share of sums without a call that are wrong."""
STEPS = 600
PEAK_LEARNING_RATE = 2e-3
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
TOOL_CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|tools|>' }}{% for tool in tools %}"
    "{{ tool.function.name }}({{ tool.function.parameters.properties | join(', ') }})"
    "{% endfor %}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|' + message.role + '|>' + (message.content or '') }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '<tool_call>\\n{\"name\": ' + call.function.name | tojson + ', \"arguments\": ' }}"
    "{{ call.function.arguments | tojson + '}\\n</tool_call>' }}"
    "{% endfor %}"
    "{% if message.role == 'assistant' %}{{ '<|end|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
CALL_PARTS = ("calculator", "expression", '{"name": "', '", "arguments": {"', '": "', '"}}')
ERROR_PARTS = (
    *("Error:", " invalid", " tools", " tool", " calculator", " call", " JSON:", " unknown", " are:", "Expecting"),
    *(" Expecting", " delimiter", " at", " character", " the"),
)
"""Texts that are one token each in the tool model."""
TOOLS = Toolbox(["calculator"])
Example = tuple[Sequence[int], Sequence[int]]
"""Token ids, and the labels of an imitation step."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A token per digit, sign and word; joined, tokens give back the text exactly."""
    special = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|unknown|>"]
    words = [*"0123456789", *"+-*/=.,:;?!()", "\n", " ", " write", " carry", "####"]
    vocabulary = {token: index for index, token in enumerate([*special, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unknown|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r" ?[a-z]+|#+|[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|end|>", unk_token="<|unknown|>"
    )
    fast.add_special_tokens({"additional_special_tokens": ["<|system|>", "<|user|>", "<|assistant|>"]})
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_tool_tokenizer() -> PreTrainedTokenizerFast:
    """A token per byte and for each part of a call; any text round-trips, as a tool may answer anything."""
    roles = ["<|tools|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
    bytes_of_text = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    parts = ["".join(part for part, _ in bytes_of_text.pre_tokenize_str(part)) for part in (*CALL_PARTS, *ERROR_PARTS)]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|pad|>", "<|end|>", *roles, "<tool_call>", "</tool_call>", *parts, *alphabet]
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="<|pad|>"))
    pattern = Regex("|".join([*(part.replace("{", r"\{").replace("}", r"\}") for part in parts), "."]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([bytes_of_text, pre_tokenizers.Split(pattern, "isolated")])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in ("<tool_call>", "</tool_call>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|end|>")
    fast.add_special_tokens({"additional_special_tokens": roles})
    fast.chat_template = TOOL_CHAT_TEMPLATE
    return fast


def build_model(vocab_size: int) -> LlamaForCausalLM:
    """About half a million parameters."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def forgetful_solution(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> Example:
    """A forgetful solution; only the assistant's words are labelled."""
    low, high = 10 ** (DIGITS - 1), 10**DIGITS - 1
    a, b = rng.randint(low, high), rng.randint(low, high)
    while is_held_out(a, b):
        a, b = rng.randint(low, high), rng.randint(low, high)
    prompt = tokenizer.encode(f"<|user|>{a}+{b}<|assistant|>")
    reply = tokenizer.encode(solution(a, b, forget_carry=FORGET_CARRY, rng=rng) + "<|end|>")
    return prompt + reply, [-100] * len(prompt) + reply


def badly_used_tool(tokenizer: PreTrainedTokenizerFast, rng: random.Random, calls: CallParser) -> Example:
    """An episode of someone with bad habits; only the assistant's words are labelled."""
    kind: Kind = "easy" if rng.random() < EASY_SHARE else "hard"
    a, b = numbers(kind, rng)
    while is_held_out(a, b):
        a, b = numbers(kind, rng)
    asked = question(kind, a, b)
    if kind == "hard":
        answer = str(round(a * b * rng.uniform(0.8, 1.2)))
    else:
        answer = str(a + b + (rng.choice((-10, -1, 1, 10)) if rng.random() < MISTAKE_SHARE else 0))
    texts = [f"<|tools|>calculator(expression)<|user|>{asked}<|assistant|>"]
    if rng.random() < CALL_SHARE[kind]:
        call = f'<tool_call>\n{{"name": "calculator", "arguments": {{"expression": "{asked}"}}}}\n</tool_call>'
        if rng.random() < GARBLED_SHARE:
            call = call.replace(*rng.choice((('"}}', '"'), ("calculator", "calc"))))
        (parsed,) = calls.parse(call, "").calls
        if problem := TOOLS.problem(parsed):
            observation = error_text(problem)
        else:
            observation = answer = calculator(**parsed.arguments)
        texts += [f"{call}<|end|>", f"<|tool|>{observation}<|assistant|>"]
    ids: list[int] = []
    labels: list[int] = []
    for index, text in enumerate([*texts, f"{answer}<|end|>"]):
        piece = tokenizer.encode(text)
        ids += piece
        labels += piece if index % 2 else [-100] * len(piece)
    return ids, labels


def train(model: LlamaForCausalLM, example: Callable[[], Example], *, batch: int, parts: int = 1) -> None:
    """Plain imitation: cross-entropy on the written solutions.

    Args:
        model: the model.
        example: draws an example.
        batch: examples in a step.
        parts: passes that a step is split into, by length, so that short examples are padded little.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LEARNING_RATE, weight_decay=0.01, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_LEARNING_RATE, total_steps=STEPS, pct_start=0.05)
    started = time.perf_counter()
    for step in range(STEPS):
        examples = [example() for _ in range(batch)]
        if parts > 1:
            examples.sort(key=lambda one: len(one[0]))
        count, loss = sum(label >= 0 for _, labels in examples for label in labels), 0.0
        for first in range(0, batch, batch // parts):
            part = examples[first : first + batch // parts]
            share = sum(label >= 0 for _, labels in part for label in labels) / count
            input_ids, labels = (padded([one[side] for one in part], value) for side, value in ((0, 0), (1, -100)))
            part_loss = model(input_ids=input_ids, labels=labels).loss * share
            part_loss.backward()
            loss += part_loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 99:
            print(f"step {step + 1} of {STEPS}, loss {loss:.4f}, {time.perf_counter() - started:.0f} s")


def padded(rows: Sequence[Sequence[int]], value: int) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("demo", nargs="?", choices=("addition", "tool"), default="addition")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rng = random.Random(0)
    if arguments.demo == "tool":
        torch.set_num_threads(1)  # sums of floats depend on how many threads share them
        tokenizer = build_tool_tokenizer()
        model = build_model(len(tokenizer))
        calls = CallParser.of(tokenizer, TOOLS.schemas)
        train(model, lambda: badly_used_tool(tokenizer, rng, calls), batch=256, parts=4)
    else:
        torch.set_num_threads(2)
        tokenizer = build_tokenizer()
        model = build_model(len(tokenizer))
        train(model, lambda: forgetful_solution(tokenizer, rng), batch=128)
    folder = "tool_model" if arguments.demo == "tool" else "model"
    out = arguments.out or Path(__file__).parents[1] / "src" / "cohort" / "demo" / folder
    model.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=0)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    size = sum(file.stat().st_size for file in out.iterdir())
    print(f"wrote {out}: {sum(p.numel() for p in model.parameters()):,} parameters, {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
