"""bfloat16 over float32 weights against float32, in an update and in sampling: what ``model.precision`` decides.

    python benchmarks/precision.py --width 256 --layers 6

Alternates the two in one process and prints medians and their ratio (above 1: bfloat16 is faster). The update is on 32
completions of 128 tokens, sampling is 4 prompts of 32 tokens, 8 completions of 64 tokens each.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from common import laid_out
from transformers import LlamaConfig, LlamaForCausalLM

from cohort.config import OptimConfig
from cohort.objective import PRESETS
from cohort.policy import Policy, Precision, resolve_precision
from cohort.rollout import LocalEngine, RNGKey, Sampling
from cohort.train import Optimizer, StepContext, TokenBudget, part_of, update
from cohort.types import Prompt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=options.width,
        intermediate_size=3 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=options.width // 32,
        num_key_value_heads=max(1, options.width // 64),
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).to(device)
    ids = torch.randint(0, 4096, (options.sequences, options.length)).tolist()
    batch = laid_out([(1, 2, 3, 4)], ids, torch.randn(options.sequences).tolist(), device)
    part = part_of(batch, range(options.sequences))
    optimizer = Optimizer(model, OptimConfig(), 1)
    policies = {name: Policy(model, Precision(torch.float32, getattr(torch, name))) for name in ("float32", "bfloat16")}
    prompts = [Prompt(uid, uid, tuple(range(2, 34)), "", "", {}) for uid in range(options.sequences // 8)]
    engines = {name: LocalEngine(policy, TokenNames(), ()) for name, policy in policies.items()}
    seconds: dict[tuple[str, str], list[float]] = {
        (what, name): [] for what in ("update", "sample") for name in policies
    }
    for _repeat in range(options.repeats + 1):
        for name, policy in policies.items():
            start = time.perf_counter()
            update(StepContext(policy, optimizer, PRESETS["default"], Sampling(64), TokenBudget(16_384)), batch, part)
            wait(device)
            seconds["update", name].append(time.perf_counter() - start)
            start = time.perf_counter()
            engines[name].generate(prompts, 8, Sampling(64), RNGKey(0, 0))
            wait(device)
            seconds["sample", name].append(time.perf_counter() - start)
    print(f"width {options.width}, {options.layers} layers, {torch.get_num_threads()} threads, {device}", end=": ")
    for what in ("update", "sample"):
        float32, bfloat16 = (statistics.median(seconds[what, name][1:]) for name in ("float32", "bfloat16"))
        print(f"{what} {float32:.3f} s and {bfloat16:.3f} s, ratio {float32 / bfloat16:.2f}", end="; ")
    print(f"auto takes {resolve_precision('auto', device)}")


class TokenNames:
    """Stands in for a tokenizer: a token's text is its number."""

    def decode(self, ids: list[int], **_: object) -> str:
        return " ".join(map(str, ids))


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
