"""Build the demo's model: a small Llama that has learnt column addition from forgetful examples.

    python scripts/build_demo_model.py            # writes src/cohort/demo/model, a few minutes on 2 cores
    python scripts/build_demo_model.py --out DIR  # ... elsewhere

The model is trained by imitation on solutions whose writer forgets more than half of the carries. So it has every step
of the method, but its habit is wrong: sampled, it solves a good third of the problems; greedily, only those that
need no carry. That is the state GRPO starts from in practice: the right behaviour is in the policy, not its habit.

The same machine writes the same file: the seed is fixed, and the problems the demo holds out are never seen here
either.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from cohort.demo.task import DIGITS, is_held_out, solution

FORGET_CARRY = 0.55
STEPS = 600
BATCH = 128
PEAK_LEARNING_RATE = 2e-3
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


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


def training_batch(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels of forgetful solutions; only the assistant's words are labelled."""
    rows: list[torch.Tensor] = []
    labels: list[torch.Tensor] = []
    low, high = 10 ** (DIGITS - 1), 10**DIGITS - 1
    while len(rows) < BATCH:
        a, b = rng.randint(low, high), rng.randint(low, high)
        if is_held_out(a, b):
            continue
        prompt = tokenizer.encode(f"<|user|>{a}+{b}<|assistant|>")
        reply = tokenizer.encode(solution(a, b, forget_carry=FORGET_CARRY, rng=rng) + "<|end|>")
        rows.append(torch.tensor(prompt + reply))
        labels.append(torch.tensor([-100] * len(prompt) + reply))
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(rows, batch_first=True), pad(labels, batch_first=True, padding_value=-100)


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Plain imitation: cross-entropy on the written solutions."""
    rng = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LEARNING_RATE, weight_decay=0.01, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_LEARNING_RATE, total_steps=STEPS, pct_start=0.05)
    started = time.perf_counter()
    for step in range(STEPS):
        input_ids, labels = training_batch(tokenizer, rng)
        loss = model(input_ids=input_ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 99:
            print(f"step {step + 1} of {STEPS}, loss {loss.item():.4f}, {time.perf_counter() - started:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(__file__).parents[1] / "src" / "cohort" / "demo" / "model"
    parser.add_argument("--out", type=Path, default=default)
    out = parser.parse_args().out
    torch.manual_seed(0)
    torch.set_num_threads(2)  # sums of floats depend on how many threads share them
    tokenizer = build_tokenizer()
    model = build_model(len(tokenizer))
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    train(model, tokenizer)
    model.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=0)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    print(f"wrote {out}: {sum(f.stat().st_size for f in out.iterdir()) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
