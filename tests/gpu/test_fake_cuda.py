"""Sampling and updates on CUDA tensors without data (``make fake-cuda``): mixed devices, dtypes and hidden waits."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM

from cohort import GRPOConfig
from cohort.config import LoraConfig
from cohort.parallel import Layout, World
from cohort.parallel.sharded import Sharded
from cohort.policy import Policy, Precision
from cohort.policy.adapters import add_adapters
from cohort.rollout import LocalEngine, RNGKey, Sampling
from cohort.rollout.local.cached import LeanBody
from cohort.train import assign_advantages, find_budget, lay_out, policy_logps, update
from cohort.train.update import UpdateResult
from cohort.types import Prompt
from tests.families.configs import small_config, small_model
from tests.gpu.fake import driver, fake_cuda
from tests.policy.plain import COMPLETIONS, PROMPTS, TEMPERATURE
from tests.rollout.test_local_engine import LetterTokenizer
from tests.train.updates import all_sequences, context_for, rollout

pytestmark = [
    pytest.mark.fake_cuda,
    pytest.mark.skipif(torch.version.cuda is None, reason="needs torch's CUDA build: make fake-cuda"),
    pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor"),
]

WIDE = {"hidden_size": 64, "head_dim": 16}
LEAN = ["llama", "qwen3", "mistral", "gemma2", "gemma3_text"]
HALF, SINGLE = Precision(torch.float32, torch.bfloat16), Precision(torch.float32, torch.float32)


backward = pytest.mark.skipif(driver() is None, reason="needs tests/gpu/no_driver.c preloaded: make fake-cuda")


def made(family, precision=HALF, **changes):
    config = small_config(family, **({} if family == "gpt2" else WIDE) | changes)
    with torch.device("cuda"):
        return Policy(AutoModelForCausalLM.from_config(config), precision)


@pytest.mark.parametrize("family", [*LEAN, "gpt2"])
@pytest.mark.parametrize("precision", [HALF, SINGLE], ids=["bfloat16", "float32"])
def test_forward_passes(family, precision):
    with fake_cuda() as machine, torch.no_grad():
        policy = made(family, precision)
        assert policy.passes.shared
        machine.reads.clear(), machine.calls.clear()
        logps = policy.logps(PROMPTS, COMPLETIONS, TEMPERATURE)
    assert logps.logps_N.device.type == "cuda"
    assert logps.logps_N.shape == (sum(map(len, COMPLETIONS)),)
    assert not machine.reads  # nothing waits for the GPU
    if precision == HALF and family != "gemma2":  # which has soft caps
        layers = policy.model.config.num_hidden_layers
        calls = machine.calls["_flash_attention_forward"]
        # Prompts: one a layer; lean layers need none in the last. Completions: one with a window, two without.
        assert calls in range(2 * layers - 1, 3 * layers + 1)


@pytest.mark.parametrize("family", [*LEAN, "gpt2"])
def test_sampling_reads_the_device_once_a_step(family):
    prompts = [Prompt(0, 0, (5, 9, 20), "", "", {}), Prompt(1, 1, (5,), "", "", {})]
    with fake_cuda() as machine:
        engine = LocalEngine(made(family), LetterTokenizer(), (1,))
        assert isinstance(engine.backend.body, LeanBody) is (family in LEAN)
        machine.reads.clear()
        machine.number = 2.0  # the token that is drawn
        groups = engine.generate(prompts, 3, Sampling(12), RNGKey(0, 0))
    assert all(len(completion.token_ids) == 12 for group in groups for completion in group.completions)
    assert machine.reads.pop("rollout/local/runner.py draw") == 12
    assert family not in LEAN or not machine.reads  # the generic path also reads masks when rows begin or end


UPDATES = {
    "": {},
    "a reference": {"beta": 0.1},
    "a reference, KL over the vocabulary": {"beta": 0.1, "kl": {"estimator": "full"}},
    "an entropy bonus": {"entropy": {"coefficient": 0.01}},
}


def updated(policy, budget=12, objective=(), updates=2):
    """Make updates as a step does, with a step of the fused optimizer each; returns the context."""
    groups, scores = rollout()
    settings = GRPOConfig(objective=dict(objective)).resolved_objective
    context = context_for(policy, settings, budget, reference=policy.reference() if settings.beta else None)
    assert context.optimizer.rules[0].defaults["fused"]
    batch = assign_advantages(lay_out(groups, policy.device, 1.0), scores, settings, 8)
    batch = replace(batch, old_logps_N=policy_logps(context, policy, batch, all_sequences(batch)))
    if settings.beta:
        batch = replace(batch, ref_logps_N=policy_logps(context, context.reference, batch, all_sequences(batch)))
    for _ in range(updates):
        result = update(context, batch, all_sequences(batch), 0.01 if settings.entropy else 0.0)
        assert isinstance(result, UpdateResult)
        assert result.logps_N.device.type == "cuda"
    return context


@backward
@pytest.mark.parametrize("objective", UPDATES)
@pytest.mark.parametrize("family", [*LEAN, "gpt2"])
def test_an_update(family, objective):
    """Several prompts a pack, microbatches of some of them, and a step of the fused optimizer, twice."""
    with fake_cuda() as machine:
        policy = made(family)
        updated(policy, objective=UPDATES[objective])
        assert machine.calls["_fused_adamw_"] >= 3  # with the one that allocates the states
        assert family == "gemma2" or machine.calls["_flash_attention_backward"]  # which has soft caps


@backward
def test_what_waits_for_the_gpu_does_not_grow_with_the_layers():
    """An update reads whether its numbers are finite and how long its parts are."""
    counts = []
    for layers in (2, 4):
        with fake_cuda() as machine:
            policy = made("qwen3", num_hidden_layers=layers)
            _ = policy.passes
            machine.reads.clear()
            updated(policy, 10_000, updates=1)
            counts.append(machine.reads.total())
    assert counts[0] == counts[1]


@backward
@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_completions_in_pieces(family, monkeypatch):
    monkeypatch.setattr("cohort.train.memory.FEWEST_TOKENS", 3)
    with fake_cuda() as machine:
        updated(made(family), 3)
        assert machine.calls["_fused_adamw_"]


@backward
def test_adapters():
    with fake_cuda():
        with torch.device("cuda"), mock.patch.object(torch.nn.Module, "to", lambda module, *_, **__: module):
            # Made where they belong: fake tensors cannot be moved in place.
            policy = Policy(add_adapters(made("qwen3").model, LoraConfig(rank=4), HALF), HALF)
        assert {p.dtype for p in policy.model.parameters() if p.requires_grad} == {torch.float32}
        context = updated(policy, objective={"beta": 0.1})
        assert context.reference.model is policy.model


@backward
def test_the_budget():
    with fake_cuda():
        budget = find_budget(made("qwen3"), None, 20, 40)
    assert budget.predicted_bytes > 0
    assert budget.free > 70 * 2**30


@pytest.mark.parametrize("layout", [Layout, Sharded])
def test_layouts(layout):
    """Of two ranks, whose exchange is made up. FSDP2 needs a device: tests/gpu/test_layouts.py."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with fake_cuda() as machine:
            policy = made("qwen3")
            layout = layout(World(0, 2))
            parameters = list(layout.trained(policy.model).values())
            for weight in policy.model.parameters():
                weight.grad = torch.zeros_like(weight)
            machine.reads.clear()
            layout.sum_gradients(parameters)
            assert layout.clip_gradients(parameters, 1.0).device.type == "cuda"
            layout.stepped()
            assert not machine.reads
    finally:
        torch.distributed.destroy_process_group()


@backward
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_mixtures(family):
    """Grouped products get bfloat16, or the rules refuse them."""
    with fake_cuda() as machine:
        with torch.device("cuda"):
            model = small_model(family)
        updated(Policy(model, HALF))
        assert machine.calls["_grouped_mm"]
