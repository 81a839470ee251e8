"""What the objective costs: coefficients and diagnostics of a million tokens, and their share of a real update.

    python benchmarks/objective.py [--threads 2] [--repeats 7]

First table: seconds (median) and extra memory for 1,000,000 tokens in 4,000 completions, per preset. Second: what the
objective takes inside an update of the demo's model on a rollout of its own size; both timed in this run, as a ratio.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from common import laid_out

from cohort.config import OptimConfig
from cohort.demo.run import MODEL
from cohort.objective import PRESETS, Objective, UpdateTokens, coefficients, token_statistics, token_weights
from cohort.policy import Policy, load_model, resolve_precision
from cohort.rollout import Sampling
from cohort.train import Optimizer, StepContext, TokenBudget, part_of, update

update_module = importlib.import_module("cohort.train.update")  # the package's name for it is the function's
NAMES = ("default", "grpo", "dapo", "gspo", "gmpo", "cispo", "sapo", "vespo", "dppo_kl", "rloo")


def median_seconds(call: Callable[[], object], repeats: int) -> float:
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def tensors(completions: int, length: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    count = completions * length
    logps = -3 * torch.rand(count, generator=generator)
    return {
        "logps_N": logps,
        "old_logps_N": logps + 0.1 * torch.randn(count, generator=generator),
        "sampler_logps_N": logps + 0.1 * torch.randn(count, generator=generator),
        "ref_logps_N": logps + 0.3 * torch.randn(count, generator=generator),
        "advantages_N": torch.randn(completions, generator=generator).double().repeat_interleave(length),
        "entropy_N": torch.rand(count, generator=generator),
        "sequence_N": torch.arange(completions).repeat_interleave(length),
        "group_S": torch.arange(completions) // 8,
    }


def both(objective: Objective, t: dict[str, torch.Tensor]) -> None:
    """Denominators, coefficients and diagnostics, as an update calls them."""
    sequences = int(t["sequence_N"][-1]) + 1
    weights_N = token_weights(
        t["sequence_N"], sequences, aggregation=objective.aggregation, group_S=t["group_S"], length=256
    )
    policies = {key: t[key] for key in ("old_logps_N", "sampler_logps_N", "ref_logps_N")}
    terms = coefficients(objective, t["logps_N"], t["advantages_N"], weights_N, sequence_N=t["sequence_N"], **policies)
    tokens = UpdateTokens(
        logps_N=t["logps_N"],
        entropy_N=t["entropy_N"],
        collision_N=t["entropy_N"],
        advantages_N=t["advantages_N"],
        weights_N=weights_N,
        base_weights_N=weights_N,
        sequence_N=t["sequence_N"],
        coefficients=terms,
        **policies,
    )
    token_statistics(objective, tokens)


def with_kl(name: str) -> Objective:
    return PRESETS[name].replace(beta=PRESETS[name].beta or 0.04)


def in_own_process(name: str, threads: int, repeats: int, results: multiprocessing.Queue) -> None:
    torch.set_num_threads(threads)
    objective, t = with_kl(name), tensors(4000, 250)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    both(objective, t)
    extra = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    results.put((median_seconds(lambda: both(objective, t), repeats), extra / 1024))


def a_million_tokens(threads: int, repeats: int) -> None:
    print(f"1,000,000 tokens, {threads} threads\n")
    print("| preset | coefficients and diagnostics, s | extra memory, MiB |\n|---|---|---|")
    context = multiprocessing.get_context("spawn")
    for name in NAMES:
        results = context.Queue()
        process = context.Process(target=in_own_process, args=(name, threads, repeats, results))
        process.start()
        seconds, extra = results.get()
        process.join()
        print(f"| {name} | {seconds:.3f} | {extra:.0f} |", flush=True)


def share_of_an_update(repeats: int) -> None:
    completions, length = 256, 60  # the demo's rollout
    device = torch.device("cpu")
    precision = resolve_precision("float32", device)
    policy = Policy(load_model(str(MODEL), precision, device), precision)
    t = tensors(completions, length)
    vocabulary = policy.model.config.vocab_size
    ids = torch.randint(2, vocabulary, (completions, length), generator=torch.Generator().manual_seed(1)).tolist()
    batch = replace(
        laid_out([(1,) * 24] * len(t["group_S"].unique()), ids, [0.0] * completions),
        **{name: t[name] for name in ("sampler_logps_N", "advantages_N", "old_logps_N", "ref_logps_N")},
    )
    part = part_of(batch, range(completions))
    optimizer = Optimizer(policy.model, OptimConfig(), 1)
    spent = timed_inside_the_update()
    print(f"\nupdate of the demo's model, {completions} completions of {length} tokens, in microbatches\n")
    print("| preset | update, s | objective inside it, s | share |\n|---|---|---|---|")
    for name in ("default", "dapo", "gspo"):
        objective, shares = with_kl(name), []
        for _ in range(repeats + 1):
            spent.clear()
            start = time.perf_counter()
            update(StepContext(policy, optimizer, objective, Sampling(length), TokenBudget(4096)), batch, part)
            shares.append((time.perf_counter() - start, sum(spent)))
        whole, own = (statistics.median(column) for column in zip(*shares[1:], strict=True))
        print(f"| {name} | {whole:.3f} | {own:.4f} | {own / whole:.2%} |", flush=True)


def timed_inside_the_update() -> list[float]:
    """Make the update note the seconds of its denominators, coefficients and diagnostics."""
    spent: list[float] = []
    for function in ("minibatch_weights", "coefficients", "update_tokens", "token_statistics"):
        real = getattr(update_module, function)

        def timed(*arguments, real=real, **named):
            start = time.perf_counter()
            result = real(*arguments, **named)
            spent.append(time.perf_counter() - start)
            return result

        setattr(update_module, function, timed)
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    a_million_tokens(options.threads, options.repeats)
    share_of_an_update(options.repeats)


if __name__ == "__main__":
    main()
