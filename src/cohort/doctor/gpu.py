"""``cohort doctor --gpu``: whether a GPU computes what it should, and how fast, in about a minute.

Needs no model, data or settings: tensors and weights are random. A check is a function of the device and returns
findings with their numbers. On a CPU the same checks run, with smaller models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.utils.benchmark import Timer
from transformers import Qwen3Config, Qwen3ForCausalLM

from cohort.config import OptimConfig, VLLMConfig
from cohort.doctor.checks import EXPECTED, check_sampler
from cohort.doctor.examine import check_names
from cohort.doctor.finding import Finding, Numbers, Status, size, skipped
from cohort.errors import ConfigError
from cohort.objective import PRESETS
from cohort.policy import Policy, Precision
from cohort.policy.attention import packed_attention
from cohort.policy.device import kind_of, release_memory
from cohort.policy.flash import can_flash
from cohort.policy.layout import Layout
from cohort.rollout import LocalEngine, RNGKey, Sampling, ServedEngine
from cohort.rollout.served.colocated import Colocated, missing
from cohort.runs.changes import machine, versions
from cohort.train import NonFinite, Optimizer, StepContext, TokenBudget, lay_out, part_of, update
from cohort.train.sweep import CACHED, most_gap, sampler_gap
from cohort.types import Prompt, TokenBatch

REPORT = "open an issue with all lines of this output"
SEQUENCES, PROMPTS, WIDTH = (150, 5, 260, 1, 70, 33), (200, 7, 90), 128
"""Lengths of attention's sequences and prompts, some of them longer than the kernel's tiles; its head dimension."""
CASES = list(product((None, (0, 0, 1, 1, 2, 2), (2, 0, 0, 2, 2, 0)), (None, 48), (False, True)))
"""The prompt that each sequence continues, the window, and whether there are sinks."""
COMPARED = ("output", "queries", "keys", "values", "prompts' keys", "prompts' values", "sinks")
MOST_ERROR = 2**-5
"""Of attention in bfloat16, which rounds by up to 2^-9 of a number: a gradient is a product of rounded factors."""
LEAST_COSINE, MOST_NORM = 0.99, 0.05
"""Of a gradient in bfloat16 beside that in float32: the cosine of their angle, and the distance of their norms' ratio
from 1."""
FLAT = 200 * 2**20
"""Bytes that may be lost from one sleep of vLLM to the next."""


def examine_gpu(device: torch.device, vllm: VLLMConfig | None = None, skip: Sequence[str] = ()) -> Iterator[Finding]:
    """Describe a device, make all checks of it, and yield what they find as soon as it is known.

    Args:
        device: a GPU, or the CPU.
        vllm: settings of vLLM. None: the defaults.
        skip: names of checks to leave out.

    Raises:
        ConfigError: there is no GPU, or no such check.
    """
    checks = {"kernels": check_kernels, "decode": check_decode, "update": check_update, "speed": check_speed}
    checks["sleep"] = partial(check_sleep, vllm=vllm or VLLMConfig())
    check_names(skip, checks)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "doctor --gpu needs a GPU that torch can use, and torch.cuda.is_available() is False: install a driver "
            f"(nvidia-smi shows it), and the build of torch that pytorch.org has for it; this is {torch.__version__}"
        )
    yield Finding("machine", Status.PASS, describe(device))
    for name, check in checks.items():
        try:
            yield from skipped(name, "left out") if name in skip else check(device)
        except Exception as error:
            yield Finding(name, Status.FAIL, f"{type(error).__name__}: {error}", REPORT)


def describe(device: torch.device) -> str:
    """Versions, the device and its driver."""
    found = f"{versions(('triton', 'vllm'))}\n{machine(device)}"
    if device.type == "cuda":
        of, drivers = torch.cuda.get_device_properties(device), Path("/proc/driver/nvidia").glob("version")
        found += f", capability {of.major}.{of.minor}, {size(of.total_memory)}"
        found += "".join(f"\n{driver.read_text(encoding='utf-8').splitlines()[0]}" for driver in drivers)
    return found


def judged(check: str, right: bool, found: str, numbers: Numbers, otherwise: Status = Status.FAIL) -> list[Finding]:
    """The finding of a check that is right, or what it is otherwise."""
    return [Finding(check, Status.PASS if right else otherwise, found, "" if right else REPORT, numbers)]


def check_kernels(device: torch.device) -> list[Finding]:
    """Attention and its gradients in bfloat16 against the formula in float64, in all ``CASES``."""
    found = {case: attention_errors(device, *case) for case in CASES}
    most = {name: max(errors[name] for errors in found.values()) for name in COMPARED}
    used = kind_of(device) == "cuda" and can_flash(*torch.empty(3, 1, 1, WIDTH, dtype=torch.bfloat16, device=device))
    text = f"attention in bfloat16 ({'flash kernels' if used else 'no flash kernels, which need a GPU from Ampere on'})"
    text += f" and its gradients: relative errors of at most {max(most.values()):.2g}"
    for (of, window, sinks), errors in found.items():
        if wrong := ", ".join(f"{name} {error:.2g}" for name, error in errors.items() if not error <= MOST_ERROR):
            text += f"; after prompts {of}, window {window}, sinks {sinks}: {wrong}"
    return judged("kernels", ";" not in text, text, most)


def attention_errors(
    device: torch.device, of: Sequence[int] | None, window: int | None, has_sinks: bool
) -> dict[str, float]:
    """``|found - right| / |right|`` of the output and of the gradients of what it is made of, by the names in
    ``COMPARED``; 0 for what there is none of. Keys and values of prompts are float32 leaves, as in training."""
    generator, results = torch.Generator().manual_seed(0), []
    shapes = [(heads, sum(SEQUENCES), WIDTH) for heads in (4, 2, 2)] + [(2, sum(PROMPTS), WIDTH)] * 2 + [(4,)]
    made = [torch.randn(shape, dtype=torch.float32, generator=generator).bfloat16().to(device) for shape in shapes]
    layout = Layout(SEQUENCES, device, of, PROMPTS if of else ())
    for own, others in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):  # in float64: the formula
        dtypes = [own] * 3 + [others] * 3
        leaves = [part.to(dtype, copy=True).requires_grad_() for part, dtype in zip(made, dtypes, strict=True)]
        q, k, v, *prefix, sinks = leaves
        both, sinks_A = (prefix[0], prefix[1]) if of else None, sinks if has_sinks else None
        out = packed_attention(q, k, v, layout, scaling=WIDTH**-0.5, prefix=both, window=window, sinks=sinks_A)
        weights = torch.arange(out.numel(), device=device).double().cos().bfloat16().view_as(out)
        results.append([out.detach(), *torch.autograd.grad((out * weights).sum(), leaves, materialize_grads=True)])
    pairs = zip(COMPARED, *results, strict=True)
    return {name: float((one - other).norm() / other.norm().clamp(min=1e-9)) for name, one, other in pairs}


def context_of(device: torch.device, compute: torch.dtype) -> StepContext:
    """A step of a Qwen3 with random weights, always the same ones, large enough for distributions far from uniform."""
    torch.manual_seed(0)
    times = 4 if device.type == "cuda" else 1
    widths = {"hidden_size": 128 * times, "intermediate_size": 384 * times, "head_dim": 64, "vocab_size": 4096 * times}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 4, "tie_word_embeddings": True}
    model = Qwen3ForCausalLM(Qwen3Config(**widths, **heads, initializer_range=0.1)).to(device)
    optimizer = Optimizer(model, OptimConfig(), 1)
    policy = Policy(model, Precision(torch.float32, compute))
    return StepContext(policy, optimizer, PRESETS["default"], Sampling(16 * times), TokenBudget(128 * times))


def drawn(context: StepContext) -> tuple[TokenBatch, float]:
    """Eight completions of full length for each of four prompts, and the seconds that drawing them takes."""
    engine = LocalEngine(context.policy, SimpleNamespace(decode=lambda *_, **__: ""), ())
    prompts = [Prompt(uid, uid, tuple(range(2, 12 + 9 * uid)), "", "", {}) for uid in range(4)]
    draw = partial(engine.generate, prompts, 8, context.sampling, RNGKey(0, 0))
    return lay_out(draw(), context.policy.device), seconds(draw)


def check_decode(device: torch.device) -> list[Finding]:
    """The sampler's log-probs in bfloat16 against the trainer's."""
    context = context_of(device, torch.bfloat16)
    batch, spent = drawn(context)
    steps = context.sampling.max_completion_length / spent
    speed = {"steps_per_second": steps, "tokens_per_second": batch.num_tokens / spent}
    (found,) = check_sampler(sampler_gap(context, batch), most_gap(context.policy), "bfloat16", CACHED)
    text = f"{found.found}; {steps:,.0f} steps/s of {batch.num_sequences} rows, 4 layers"
    return [replace(found, check="decode", found=text, numbers={**found.numbers, **speed})]


def check_update(device: torch.device) -> list[Finding]:
    """Log-probs and gradient of an update in bfloat16 against those in float32."""
    both = [context_of(device, compute) for compute in (torch.bfloat16, torch.float32)]
    batch, _ = drawn(both[0])
    batch = replace(batch, advantages_N=1.0 - 2.0 * (batch.sequence_N % 2).double())
    part = part_of(batch, range(batch.num_sequences))
    found = []
    for context in both:
        result = update(context, batch, part)
        if isinstance(result, NonFinite):
            return judged("update", False, result.message, {})
        grad = torch.cat([p.grad.double().flatten() for p in context.optimizer.parameters if p.grad is not None])
        found.append((result.logps_N, grad, result.grad_norm))
    (logps, grad, norm), (right_logps, right_grad, right_norm) = found
    gap, cosine = float((logps - right_logps).abs().mean()), float(torch.cosine_similarity(grad, right_grad, 0))
    ratio, speed = norm / right_norm, batch.num_tokens / seconds(partial(update, both[0], batch, part))
    right = gap <= EXPECTED["bfloat16"] and cosine >= LEAST_COSINE and abs(ratio - 1) <= MOST_NORM
    text = f"log-probs in bfloat16 are {gap:.2g} nats off float32's on average, the gradients' cosine is {cosine:.4f}, "
    text += f"the ratio of their norms {ratio:.3f}; {speed:,.0f} drawn tokens/s"
    return judged(
        "update", right, text, {"gap": gap, "cosine": cosine, "norm_ratio": ratio, "tokens_per_second": speed}
    )


def check_speed(device: torch.device) -> list[Finding]:
    """Launches, products, copies, peak memory so far. Warns if a GPU is no faster in bfloat16 than in float32."""
    side, one = 8192 if device.type == "cuda" else 512, torch.zeros(1, dtype=torch.float32, device=device)
    single = torch.randn(side, side, dtype=torch.float32, device=device)
    half, other = single.bfloat16(), torch.empty_like(single)
    found = {
        "launch_us": 1e6 * seconds(partial(one.add_, 1), 1000),
        "bfloat16_tflops": 2e-12 * side**3 / seconds(partial(torch.mm, half, half)),
        "float32_tflops": 2e-12 * side**3 / seconds(partial(torch.mm, single, single)),
        "copy_gb_per_second": 2e-9 * single.nbytes / seconds(partial(other.copy_, single)),
        "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0,
    }
    text = f"{{launch_us:.1f}} us a small kernel; products of {side}: {{bfloat16_tflops:.3g}} TFLOP/s in bfloat16, "
    text += "{float32_tflops:.3g} in float32; copies: {copy_gb_per_second:,.0f} GB/s; peak of these checks: "
    right = device.type == "cpu" or found["bfloat16_tflops"] > found["float32_tflops"]
    text = text.format(**found) + size(found["peak_bytes"])
    return judged("speed", right, text if right else f"bfloat16 is no faster than float32: {text}", found, Status.WARN)


def check_sleep(device: torch.device, vllm: VLLMConfig) -> list[Finding]:
    """Memory that is left on the GPU while vLLM sleeps in this process, after it got weights. What the first of three
    rounds allocates may stay."""
    if why := missing():
        return skipped("sleep", why)
    policy, free = context_of(device, torch.bfloat16).policy, []
    turns = Colocated(policy, None, vllm, context=512, sleeps=True, probe=None)
    with closing(ServedEngine(policy, None, (), turns)) as engine:
        for _ in range(3):
            policy.version += 1
            engine.update_weights(policy.version)
            engine.sleep()
            release_memory()
            free.append(torch.cuda.mem_get_info(device)[0])
    lost = free[1] - free[2]
    text = f"with vLLM asleep {size(free[2])} are free, {lost:,} bytes less than before"
    return judged("sleep", lost <= FLAT, text, {"lost_bytes": lost})


def seconds(run: Callable[[], object], times: int = 5) -> float:
    """The mean of some calls, after two to warm up; a GPU is waited for before and after all of them."""
    return float(Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads()).timeit(times).mean)
