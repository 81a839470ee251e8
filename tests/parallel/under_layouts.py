"""Updates and rollouts of a tiny policy under each layout, for tests: what every rank runs."""

from __future__ import annotations

import contextlib
import math
import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from cohort.config import OptimConfig
from cohort.config.schema import LoraConfig
from cohort.objective import PRESETS
from cohort.parallel import Full, Layout, Sharded, World
from cohort.policy import Policy, Precision, add_adapters, enable_checkpointing
from cohort.policy.choose import find_head
from cohort.policy.custom_attention import CustomAttention
from cohort.policy.passes import PlainPasses, SharedPasses
from cohort.policy.rows import PackedRows
from cohort.rollout import LocalEngine, RNGKey, Sampling
from cohort.runs.models import whole
from cohort.train import Optimizer, StepContext, TokenBudget, part_of, update
from cohort.types import Prompt
from tests.conftest import tiny_llama
from tests.families.configs import small_model
from tests.policy.test_router import mixture
from tests.train.updates import batch_for

LAYOUTS = {"replicate": Layout, "optimizer": Sharded, "full": Full}
UPDATES = 3


def make_policy(
    dtype="float64",
    *,
    lora=False,
    checkpointing=False,
    passes="",
    kernels=False,
    experts=False,
    recurrent="",
    **changes: Any,
):
    """A small policy. ``passes``: "custom" or "plain" instead of the lean ones; ``experts``: a mixture of experts;
    ``recurrent``: a type of models with recurrent layers."""
    compute = getattr(torch, dtype)
    precision = Precision(torch.promote_types(compute, torch.float32), compute)
    model = (
        small_model(recurrent) if recurrent else mixture() if experts else tiny_llama(num_hidden_layers=3, **changes)
    )
    model = model.to(precision.master)
    if lora:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*is_gradient_checkpointing.*")  # peft asks for it
            model = add_adapters(model, LoraConfig(rank=2), precision)
        generator = torch.Generator().manual_seed(3)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(0, 0.1, generator=generator)
    if checkpointing:
        enable_checkpointing(model)
    policy = Policy(model, precision)
    policy.native_kernels = kernels
    if passes == "custom":
        policy.passes = SharedPasses(policy, find_head(policy), CustomAttention(policy))
    elif passes == "plain":
        policy.passes = PlainPasses(policy, find_head(policy))
    return policy


def updates(
    layout, *, optimizer="adamw", budget=20, few=False, poison=False, full_kl=False, routes=False, **settings: Any
):
    """Three updates with clipping: their norms or kinds, the weights, the last log-probs of every token, and how many
    numbers of the optimizer's state this rank has.

    Args:
        layout: holds the policy.
        optimizer: by name.
        budget: tokens of a pass.
        few: only two prompts, so that ranks have nothing to do.
        poison: a NaN among the old log-probs, which prevents every update.
        full_kl: a KL over the vocabulary, for which the reference runs beside the policy.
        routes: tokens are routed by recorded experts.
        settings: of ``make_policy``.
    """
    policy = make_policy(**settings)
    objective = PRESETS["default"].replace(beta=0.04)
    batch = batch_for(policy, objective)
    if routes:
        policy.replay_routes()
        batch = with_routes(batch, policy.routing)
    if poison:
        batch.old_logps_N[0] = math.nan
    reference = None
    if full_kl:
        objective = objective.replace(kl={"estimator": "full"})
        reference = policy.reference()
    described = policy.passes.description
    for each in (policy, reference):
        if each is not None and (each is policy or each.model is not policy.model):
            layout.shard(each.model, each.precision.compute)
    config = OptimConfig(learning_rate=1e-2, max_grad_norm=0.5, weight_decay=0.1, optimizer=optimizer)
    rule = Optimizer(policy.model, config, UPDATES, layout)
    context = StepContext(policy, rule, objective, Sampling(8), TokenBudget(budget), reference, layout)
    minibatch = part_of(batch, range(6 if few else batch.num_sequences))
    results = [context.within_memory(update, batch, minibatch, 0.01) for _ in range(UPDATES)]
    assert policy.passes.description == described
    norms = [getattr(result, "grad_norm", type(result).__name__) for result in results]
    logps = None if poison else results[-1].logps_N.numpy()
    return norms, whole_weights(policy, layout), logps, state_numbers(rule)


def with_routes(batch, routing):
    """A batch whose tokens were routed at random."""
    generator = torch.Generator().manual_seed(4)

    def some(count):
        scores = torch.rand(count, routing.layers, routing.experts, generator=generator)
        return scores.topk(routing.each).indices.to(torch.int8)

    prompts = {prompt: some(len(prompt) - 1) for prompt in batch.prompt_ids}
    return replace(batch, routes_T=some(len(batch.ids_T)), prompt_routes=prompts)


def rollout(layout, **settings: Any):
    """Tokens and log-probs of completions that every rank samples."""
    policy = make_policy("float32", kernels=True, **settings)
    _ = policy.passes
    layout.shard(policy.model)
    tokenizer = SimpleNamespace(
        all_special_ids=[], decode=lambda ids, **_: "", batch_decode=lambda ids, **_: [""] * len(ids)
    )
    prompts = [Prompt(i, i, tuple(2 + (i * j) % 30 for j in range(1 + 3 * i)), "", "", {}) for i in range(5)]
    with layout.whole(policy.model):
        engine = LocalEngine(policy, tokenizer, (1,))
        groups = engine.generate(prompts, 3, Sampling(20), RNGKey(3, 0))
    drawn = [completion for group in groups for completion in group.completions]
    return [(list(one.token_ids), list(one.sampler_logps)) for one in drawn]


def whole_weights(policy, layout):
    with layout.whole(policy.model):  # copies: FSDP2 cannot free memory that numpy has seen
        return {name: p.detach().clone().to(torch.float64).numpy() for name, p in policy.model.named_parameters()}


def state_numbers(optimizer):
    """The numbers in memory that the optimizer keeps."""
    local = [
        getattr(value, "_local_tensor", value)
        for rule in optimizer.rules
        for state in rule.state.values()
        for value in state.values()
    ]
    return sum(value.numel() for value in local if torch.is_tensor(value) and value.ndim)


def on_each_layout(names, cases):
    """What each layout gives for each case; a case is a function's name and its arguments."""
    warnings.filterwarnings("error", ".*returned a view tensor.*")
    world = World.of_environment()
    found = {
        (name, index): globals()[function](LAYOUTS[name](world), **settings)
        for name in names
        for index, (function, settings) in enumerate(cases)
    }
    world.close()
    return found


FAILURES = {
    "cuda": torch.OutOfMemoryError("out of memory"),
    "cpu": RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
    "interrupt": KeyboardInterrupt(),
}


def failure_on_one_rank(name, failure):
    """Updates of which rank 1 fails in its third pass."""
    world = World.of_environment()
    states, passes = Policy.states, []

    def fails(*arguments: Any, **settings: Any):
        passes.append(1)
        if world.rank == 1 and len(passes) == 3:
            raise FAILURES[failure]
        return states(*arguments, **settings)

    Policy.states = fails
    with warnings.catch_warnings(record=True) as warned:
        norms = updates(LAYOUTS[name](world))[0]
    return norms, [str(each.message) for each in warned]


def out_of_memory_in_the_sum(name):
    """Updates of which rank 1 fails while gradients are added up."""
    world = World.of_environment()
    layout = LAYOUTS[name](world)

    def fails(parameters):
        raise FAILURES["cuda"]

    if world.rank == 1:
        layout.sum_gradients = fails
    return updates(layout)[0]


def gap(one, other):
    """The largest difference between weights."""
    assert one.keys() == other.keys()
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


@contextlib.contextmanager
def gathers():
    """The dtypes of what FSDP2 gathers in the block, with the numbers of each rank."""
    found, gather = [], torch.distributed.all_gather_single

    def recorded(output, given, **arguments: Any):
        found.append((given.dtype, given.numel()))
        return gather(output, given, **arguments)

    torch.distributed.all_gather_single = recorded
    try:
        yield found
    finally:
        torch.distributed.all_gather_single = gather


def half_gradient(layout, **settings: Any):
    """Log-probs and gradients in bfloat16 of a pass that every rank makes alike, so that the sum over R ranks is R
    times the gradient of one; what was gathered; and the weights that are bfloat16 in ``whole``."""
    policy = make_policy("bfloat16", **settings)
    _ = policy.passes
    layout.shard(policy.model, policy.precision.compute)
    parameters = layout.trained(policy.model)
    with gathers() as gathered:
        prefixes = policy.passes.read([(3, 4, 5, 6), (7, 8)])
        with policy.compute():
            rows = PackedRows.of([0, 1, 0], [(7, 8, 9), (2, 3), (5,)])
            logps_N = policy.states(prefixes, rows, 1.0).logps().logps_N
            logps_N.sum().backward()
            prefixes.backward()
    layout.sum_gradients(list(parameters.values()))
    grads = {name: whole(p.grad).double().numpy() / layout.world.size for name, p in parameters.items()}
    with layout.whole(policy.model):
        narrow = sorted(name for name, p in policy.model.named_parameters() if p.dtype == torch.bfloat16)
    return logps_N.detach().double().numpy(), grads, gathered, narrow
