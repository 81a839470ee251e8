"""A model of a GRPO step on several ranks: seconds of its parts from the costs of one rank.

``benchmarks/scale.py`` fits the costs on this machine and compares the model with measured steps; ``costs_on`` derives
them for GPUs from published figures. A step is, in order:

sampling   a rank's longest completion takes so many decode steps; tokens and context cost in addition; the slowest rank
           counts
exchange   every rank receives the whole rollout
control    scoring, advantages, layout and metrics of the whole rollout, on every rank
update     the rank with the largest share, and what does not depend on tokens (optimizer step, casts)
reduction  gradients are added up over the ranks, or weights gathered and gradients scattered
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, fields, replace

from cohort.parallel.world import imbalance, shares

GIGA = 1e9


@dataclass(frozen=True)
class Costs:
    """Of one rank. Seconds, unless the name says bytes."""

    decode_step: float
    """A decode step, whatever is decoded."""
    decode_token: float
    """A token, in addition; prompts are in it."""
    decode_context: float = 0.0
    """Each earlier token that a new token attends to."""
    train_token: float = 0.0
    """A token of a prompt or completion in an update."""
    update_step: float = 0.0
    """An update, whatever its tokens."""
    control_step: float = 0.0
    control_token: float = 0.0
    """A sampled token of the whole rollout, in everything between sampling and update."""
    gather_bytes: float = 0.0
    """Bytes that a sampled token takes when it is exchanged."""
    gather_byte: float = 0.0
    """A byte received."""
    latency: float = 0.0
    """An exchange of nothing."""
    reduce_byte: float = 0.0
    """A byte of gradients, added up between two ranks."""
    neighbour: float = 1.0
    """Sampling and update take so many times longer while other ranks of the machine compute."""


@dataclass(frozen=True)
class Load:
    """What a step computes."""

    prompt: int
    lengths: tuple[tuple[int, ...], ...]
    """Lengths of the completions of each prompt."""

    @property
    def tokens(self) -> int:
        return sum(map(sum, self.lengths))


@dataclass(frozen=True)
class Step:
    """Predicted seconds."""

    sampling: float
    exchange: float
    control: float
    update: float
    reduction: float

    @property
    def seconds(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def bound(self) -> str:
        """The part that takes longest."""
        return max((field.name for field in fields(self)), key=lambda name: float(getattr(self, name)))


def even_load(prompts: int, group: int, prompt: int, length: int) -> Load:
    """Completions of equal length."""
    return Load(prompt, ((length,) * group,) * prompts)


def random_load(prompts: int, group: int, prompt: int, mean: int, limit: int, spread: float = 0.7) -> Load:
    """Lengths of a log-normal distribution with a mean, cut at a limit."""
    draw, middle = random.Random(0), math.log(mean) - spread**2 / 2
    lengths = (min(limit, max(1, round(draw.lognormvariate(middle, spread)))) for _ in range(prompts * group))
    return Load(prompt, tuple(tuple(next(lengths) for _ in range(group)) for _ in range(prompts)))


def update_shares(load: Load, ranks: int) -> tuple[float, float]:
    """Tokens of the largest share of an update, and its cost over the mean."""
    costs = [load.prompt + sum(lengths) for lengths in load.lengths]
    divided = shares(costs, ranks)
    return max(sum(costs[item] for item in items) for items in divided), imbalance(costs, divided)


def sampling_seconds(costs: Costs, load: Load, ranks: int) -> float:
    """Of the slowest rank. Prompts are dealt out before their completions' lengths are known."""
    slowest = 0.0
    for rank in range(ranks):
        own = [length for lengths in load.lengths[rank::ranks] for length in lengths]
        context = sum(length * (load.prompt + length / 2) for length in own)
        tokens = costs.decode_token * sum(own) + costs.decode_context * context
        slowest = max(slowest, costs.decode_step * max(own, default=0) + tokens)
    return slowest


def simulate(costs: Costs, load: Load, ranks: int, gradient_bytes: float) -> Step:
    """A step's parts.

    Args:
        costs: of a rank.
        load: the step's.
        ranks: number of ranks.
        gradient_bytes: bytes that each rank reduces.
    """
    largest, _ = update_shares(load, ranks)
    slower = costs.neighbour if ranks > 1 else 1.0
    exchange = reduction = 0.0
    if ranks > 1:
        exchange = costs.latency + load.tokens * costs.gather_bytes * costs.gather_byte
        # A ring sends 2 (W - 1) / W of the bytes in 2 (W - 1) messages; the costs are those of W = 2.
        reduction = costs.latency * (ranks - 1) + gradient_bytes * costs.reduce_byte * 2 * (ranks - 1) / ranks
    return Step(
        sampling=slower * sampling_seconds(costs, load, ranks),
        exchange=exchange,
        control=costs.control_step + costs.control_token * load.tokens,
        update=slower * (costs.update_step + costs.train_token * largest),
        reduction=reduction,
    )


def fitted(few: dict[str, float], many: dict[str, float], few_load: Load, many_load: Load) -> Costs:
    """Costs from two measured steps on one rank, of loads that differ in the number of prompts: a line through both.

    Args:
        few: seconds of "generate", "update" and "other" with fewer prompts.
        many: with more prompts.
        few_load: what the first computed; completions of equal length.
        many_load: what the second computed.
    """

    def line(name: str, small: float, large: float) -> tuple[float, float]:
        slope = max(0.0, (many[name] - few[name]) / (large - small))
        return max(0.0, few[name] - slope * small), slope

    step, token = line("generate", few_load.tokens, many_load.tokens)
    update_step, train_token = line("update", update_shares(few_load, 1)[0], update_shares(many_load, 1)[0])
    control_step, control_token = line("other", few_load.tokens, many_load.tokens)
    steps = max(map(max, few_load.lengths))
    return Costs(step / steps, token, 0.0, train_token, update_step, control_step, control_token)


# ---- GPUs


@dataclass(frozen=True)
class Hardware:
    """A machine of several GPUs, by its maker's figures, and the shares of them that are assumed to be reached."""

    name: str
    flops: float
    memory: float
    memory_rate: float
    link: float
    """Bytes per second and direction of a GPU to the others of its machine."""
    network: float
    """To other machines, per GPU."""
    gpus: int
    train_share: float = 0.45
    decode_share: float = 0.6
    memory_share: float = 0.7
    link_share: float = 0.7
    filled: float = 0.8
    """Share of the memory for weights, gradients and optimizer; the rest is for caches and activations."""
    step_seconds: float = 3e-3
    """Of a decode step of vLLM besides reading weights: launches, sampling, the scheduler."""
    launch_seconds: float = 8e-6
    """Of the host for an operation of the local engine, Python included. An estimate: on one thread of a CPU, a step of
    28 layers of tiny width took 6.7 to 9.3 ms, in which little but calling takes time."""
    latency: float = 30e-6


H100 = Hardware("H100 SXM", 989e12, 80 * GIGA, 3350 * GIGA, 450 * GIGA, 50 * GIGA, 8)
"""Dense bf16, HBM3, NVLink 4 (900 GB/s in both directions): NVIDIA's H100 data sheet. One 400 Gbit/s NDR InfiniBand
port per GPU: DGX H100's."""


STEP_LAUNCHES, LAYER_LAUNCHES = 75, 36
"""Operations that the local engine calls in a decode step on CUDA, and in each layer of a Qwen3 in addition: those that
are no views. Counted by dispatch (``tests/test_simulator.py``); some are more than one kernel."""


@dataclass(frozen=True)
class Model:
    name: str
    parameters: float
    layers: int
    kv_heads: int
    head_dim: int

    @property
    def kv_bytes(self) -> int:
        """Of a token, in bfloat16."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 2


MODELS = (
    Model("1.7 B", 1.72e9, 28, 8, 128),
    Model("8 B", 8.19e9, 36, 8, 128),
    Model("32 B", 32.8e9, 64, 8, 128),
)
"""The shapes of Qwen3-1.7B, -8B and -32B."""


@dataclass(frozen=True)
class Placement:
    """How a model lies on the GPUs."""

    layout: str
    split: int
    """GPUs that sample together, each with this part of the sampler's weights; over 1, vLLM's tensor parallelism."""
    bytes: float
    """Weights, gradients and optimizer of a GPU."""

    @property
    def engine(self) -> str:
        """What samples: the local engine, unless several GPUs sample together."""
        return "local" if self.split == 1 else "vllm"


def place(hardware: Hardware, model: Model, ranks: int) -> Placement | None:
    """The first layout that fits, without splitting the sampler if possible; None: none fits.

    Per parameter: 4 bytes of weights, 4 of gradients, 8 of AdamW, and 2 of the bfloat16 weights that sample.
    """
    held = {"replicate": 16.0, "optimizer": 8.0 + 8.0 / ranks, "full": 16.0 / ranks}
    for split in (1, 2, 4, 8):
        for layout, per_parameter in held.items():
            used = model.parameters * (per_parameter + 2.0 / split)
            if used <= hardware.memory * hardware.filled and (split == 1 or layout == "full") and split <= ranks:
                return Placement(layout, split, used)
    return None


def costs_on(hardware: Hardware, model: Model, placement: Placement, ranks: int, control: Costs) -> Costs:
    """Costs of a rank on a GPU. A decode step waits for the host first and for the GPU then, though the two overlap.

    Args:
        hardware: the machine.
        model: the model.
        placement: how it lies on the GPUs.
        ranks: number of ranks.
        control: what the host's work was measured to cost; its times are taken as they are.
    """
    read, split = hardware.memory_rate * hardware.memory_share, placement.split
    weights = 2 * model.parameters / split / read
    joined = 2 * model.layers * hardware.latency * (split > 1)
    compute = 2 * model.parameters / (hardware.flops * hardware.decode_share)
    rate = (hardware.link if ranks <= hardware.gpus else hardware.network) * hardware.link_share
    held = model.parameters / (ranks if placement.layout != "replicate" else 1)
    launches = (STEP_LAUNCHES + model.layers * LAYER_LAUNCHES) * hardware.launch_seconds
    return replace(
        control,
        decode_step=weights + joined + (launches if placement.engine == "local" else hardware.step_seconds),
        decode_token=compute,
        decode_context=model.kv_bytes / read,
        train_token=6 * model.parameters / (hardware.flops * hardware.train_share),
        update_step=32 * held / read,  # weights, gradient and both moments are read, all but the gradient written
        gather_byte=control.gather_byte + 1 / rate,
        latency=hardware.latency,
        reduce_byte=1 / rate,
        neighbour=1.0,
    )


def reduced_bytes(model: Model, placement: Placement, passes: int) -> float:
    """Bytes of the reduction, as those of an all-reduce: a gather or a scatter moves half of one.

    replicate: float32 gradients once. optimizer: gradients are scattered and weights gathered once. full: weights are
    gathered in the forward and in the backward pass, and gradients scattered, in each pass.
    """
    whole = 4.0 * model.parameters
    return whole if placement.layout != "full" else 1.5 * whole * passes
