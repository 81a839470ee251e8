"""The memory of a run on a GPU: what loading, the optimizer's state, the plan, a rollout, an update and a second rollout
allocate is recorded with tensors of real sizes, and replayed through a model of CUDA's allocator."""

import contextlib
import dataclasses
from concurrent.futures import CancelledError
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from cohort.config import OptimConfig
from cohort.config.schema import LoraConfig
from cohort.objective import PRESETS
from cohort.parallel import Layout
from cohort.policy import Policy, Precision, add_adapters, enable_checkpointing
from cohort.policy.choose import find_head
from cohort.policy.device import forced_kind
from cohort.policy.lean import LeanLayers
from cohort.policy.passes import SharedPasses
from cohort.rewards.runner import Scores
from cohort.rollout import LocalEngine, RNGKey, Sampling, Watch
from cohort.rollout.local.cached import CachedBackend, LeanBody
from cohort.rollout.local.runner import BackendRunner
from cohort.rollout.local.scheduler import Draw
from cohort.train import Optimizer, StepContext, UpdateResult, assign_advantages, find_budget, lay_out, part_of, update
from cohort.types import Completion, FinishReason, Group, Prompt
from tests.train.caching_allocator import GIBI, CachingAllocator
from tests.train.sizes import Recorded

PRECISION = Precision(torch.float32, torch.bfloat16)
CONTEXT = 0.6 * GIBI
"""What the driver and the libraries take of a GPU."""
SMALL = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "max_position_embeddings": 40_960}
QWEN3 = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "6 layers": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 6, "num_attention_heads": 16},
    "8B": {"hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32},
}
DRAWN, END = 2, 1


@dataclasses.dataclass
class Case:
    """A run: the model, the bytes of the GPU that torch can have, and the sizes of a step."""

    model: str
    card: float
    completion: int
    lora: bool = False
    prompt: int = 256
    prompts: int = 4
    group: int = 32

    @property
    def capacity(self):
        return int(self.card * GIBI - CONTEXT)


CASES = {
    "6 layers": Case("6 layers", 24.0, 2048, group=64),  # the 1.7B's, on a GPU that is as tight for them
    "0.6B": Case("0.6B", 23.5, 1024),
    "0.6B pieces": Case("0.6B", 23.5, 8192),
    "1.7B": Case("1.7B", 79.1, 2048, group=64),
    "8B": Case("8B", 23.5, 1024, lora=True),
}


def made(case, recorded):
    """The policy. Frozen matrices are in bfloat16 from the start, as they are loaded."""
    config = AutoConfig.for_model("qwen3", **QWEN3[case.model], **SMALL, tie_word_embeddings=case.model != "8B")
    with torch.device("meta"), contextlib.ExitStack() as stack:
        model = AutoModelForCausalLM.from_config(config)
        if case.lora:
            stack.enter_context(mock.patch("cohort.policy.adapters._can_be_narrow", return_value=False))
            model = add_adapters(model, LoraConfig(rank=16), PRECISION)
            enable_checkpointing(model)
    known = {}
    for module in model.modules():
        for name, weight in list(module._parameters.items()):
            if weight is not None and id(weight) not in known:
                narrow = case.lora and not weight.requires_grad and weight.ndim == 2
                like = weight.detach().to(torch.bfloat16 if narrow else torch.float32)
                known[id(weight)] = nn.Parameter(recorded.sized(like), requires_grad=weight.requires_grad)
            module._parameters[name] = known.get(id(weight))
        for name, values in list(module._buffers.items()):
            module._buffers[name] = torch.zeros(values.shape, dtype=values.dtype)
    policy = Policy(model, PRECISION)
    policy.passes = SharedPasses(policy, find_head(policy), LeanLayers(policy))  # a trial of them has no numbers
    return policy


def rollout(engine, case):
    """Sample; returns how many rows there was room for. Rows jump from their second token to nearly the longest length,
    where the shortest make room, and end there; those are not read again."""
    steps, token, draw, rows = [], DRAWN, BackendRunner.draw, 0

    def on_step():
        nonlocal token, rows
        steps.append(1)
        active = engine._scheduler.active if engine._scheduler else []
        if len(steps) == 3:
            cache, length = engine.backend.cache, case.completion - 4
            for trajectory in active:
                trajectory.tokens[:] = [DRAWN] * (length + 1)
                trajectory.logps[:] = [-1.0] * (length + 1)
            cache._row_length = [length] * len(cache._row_length)
            cache._step = None
        if len(steps) == 5:
            token, rows = END, len(active)

    def drawn(runner, trajectories):
        count = len(draw(runner, trajectories).tokens)
        return Draw([token] * count, [-1.0] * count, [-1.0] * count, [True] * count)

    prompts = [Prompt(p, p, tuple(range(5, 5 + case.prompt)), "", "", {}) for p in range(case.prompts)]
    watch = Watch(on_step=on_step, cancelled=lambda: len(steps) == 6)
    with mock.patch.object(BackendRunner, "draw", drawn), contextlib.suppress(CancelledError):
        engine.generate(prompts, case.group, Sampling(case.completion), RNGKey(0, 0), watch)
    engine.reset()
    return rows


def batch_of(case, tokens):
    """Completions of the longest length, of so many tokens at least: a pass of the budget is full."""
    length = case.completion
    count = max(2, -(-tokens // length))
    texts = [[5 + (row + 7 * t) % 1000 for t in range(length)] for row in range(count)]
    completions = [Completion.of_tokens(text, [-1.0] * length, FinishReason.EOS) for text in texts]
    group = Group(Prompt(0, 0, tuple(range(5, 5 + case.prompt)), "", "", {}), tuple(completions))
    rewards = torch.arange(count).double()
    scores = Scores(rewards, rewards[:, None], ("r",))
    return assign_advantages(
        lay_out([group], torch.device("cpu")), scores, PRESETS["dapo"], max_completion_length=length
    )


class OneNorm(Layout):
    """The gradient's norm is a number."""

    def clip_gradients(self, parameters, max_norm):
        super().clip_gradients(parameters, max_norm)
        return torch.tensor(1.0)


class Peak:
    """The peak inside the block, as the allocator's counters have it."""

    def __init__(self, recorded):
        self._recorded = recorded

    def __enter__(self):
        self._before = self._recorded.peak = self._recorded.now

    def __exit__(self, *_):
        self.peak = self._recorded.peak - self._before


def record(case):
    """What a run allocates: the record, the bytes of all parameters, the number of those that are trained, the budget of
    the update, and the rows of both rollouts."""
    recorded = Recorded()

    def free(device):
        return case.capacity - recorded.now

    with contextlib.ExitStack() as stack:
        for place in ("rollout.local.backend", "train.memory", "train.optim"):
            stack.enter_context(mock.patch(f"cohort.{place}.free_bytes", free))
        stack.enter_context(mock.patch("cohort.train.memory.LiveBytes", partial(Peak, recorded)))
        stack.enter_context(mock.patch("cohort.rollout.local.engine.choose_backend", backend_of))
        stack.enter_context(forced_kind("cuda"))
        stack.enter_context(recorded)
        recorded.mark("load")
        policy = made(case, recorded)
        recorded.mark("state")
        optimizer = Optimizer(policy.model, OptimConfig(), 10)
        optimizer.allocate_state()
        recorded.mark("plan")
        budget = find_budget(policy, None, case.prompt, case.completion)
        engine = LocalEngine(policy, mock.Mock(), (END,))
        recorded.mark("rollout")
        rows = [rollout(engine, case)]
        recorded.mark("update")
        batch = batch_of(case, budget.tokens)
        context = StepContext(policy, optimizer, PRESETS["dapo"], Sampling(8), budget, layout=OneNorm())
        assert isinstance(update(context, batch, part_of(batch, range(batch.num_sequences))), UpdateResult)
        optimizer.zero_grad()
        recorded.mark("second rollout")
        rows.append(rollout(engine, case))
        recorded.mark("end")
    weights = {id(one): one for one in policy.model.parameters()}.values()
    trained = sum(one.numel() for one in weights if one.requires_grad)
    return recorded, sum(one.nbytes for one in weights), trained, budget, rows


def backend_of(policy, *, native_kernels):
    backend = CachedBackend(LeanBody(policy))
    backend.dtype = PRECISION.compute
    return backend


def replayed(recorded, case, **settings):
    """An allocator after all of it, and the bytes in use at each mark."""
    allocator, used = CachingAllocator(case.capacity, **settings), {}
    for name, size in recorded.log:
        if isinstance(name, str):
            used[name] = allocator.allocated
        elif size is None:
            allocator.free(name)
        else:
            allocator.allocate(name, size)
    return allocator, used


@pytest.mark.parametrize(
    "name",
    ["6 layers", *(pytest.param(name, marks=pytest.mark.slow) for name in ("0.6B", "0.6B pieces", "1.7B", "8B"))],
)
def test_a_run_fits_and_its_second_rollout_gets_its_memory_at_once(name):
    case = CASES[name]
    recorded, parameters, trained, budget, rows = record(case)
    allocator, used = replayed(recorded, case, expandable=True)  # or out of memory
    assert allocator.retries == 0
    # Small tensors are rounded to 512 bytes and segments to 20 MiB, and the sampler's tables are kept.
    near = pytest.approx
    assert used["state"] == near(parameters, rel=1e-3)
    assert used["plan"] == near(parameters + 8 * trained, rel=1e-3)
    assert used["rollout"] == near(used["plan"], rel=1e-3)
    # A copy in bfloat16 for the sampler: of float32 matrices. Gradients are freed after the update.
    copy = 2 * trained
    for mark in ("update", "second rollout", "end"):
        assert used[mark] == near(used["plan"] + copy, rel=6e-3)
    # The plan counts half precision copies, gradients and activations of an update on top of what is in use.
    assert 0.5 * budget.predicted_bytes < recorded.peaks["update"] - used["update"] < budget.predicted_bytes
    # Half of what is free is for keys and values, and they are all there at once.
    row = case.completion * 2 * 2 * 8 * 128 * QWEN3[case.model]["num_hidden_layers"]
    for count, before in zip(rows, (used["rollout"], used["second rollout"]), strict=True):
        fit = (case.capacity - before) / 2 / row
        assert count == case.prompts * case.group or 0.9 * fit - 1 < count <= fit
    assert allocator.peak_reserved < 1.1 * allocator.peak_allocated
    classic, _ = replayed(recorded, dataclasses.replace(case, card=1000.0))
    assert allocator.peak_reserved < classic.peak_reserved  # with blocks of past sizes that hold nothing else
