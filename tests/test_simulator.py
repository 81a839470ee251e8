"""The model of a step in ``benchmarks/simulator.py``, by hand."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3Config, Qwen3ForCausalLM

from cohort.policy import Policy, Precision
from cohort.rollout import LocalEngine, RNGKey, Sampling
from cohort.rollout.local.cached import LeanBody
from cohort.types import Prompt
from tests.cuda_on_cpu import cuda_on_cpu
from tests.rollout.test_local_engine import LetterTokenizer

FILE = Path(__file__).parents[1] / "benchmarks" / "simulator.py"
SPEC = importlib.util.spec_from_file_location("simulator", FILE)
simulator = sys.modules["simulator"] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(simulator)
Costs, Load, Placement, simulate = simulator.Costs, simulator.Load, simulator.Placement, simulator.simulate
H100, MODELS, even_load, random_load = simulator.H100, simulator.MODELS, simulator.even_load, simulator.random_load

COSTS = Costs(
    decode_step=0.5,
    decode_token=0.01,
    decode_context=0.001,
    train_token=0.1,
    update_step=2.0,
    control_step=1.0,
    control_token=0.2,
    gather_bytes=10.0,
    gather_byte=0.01,
    latency=0.25,
    reduce_byte=0.001,
    neighbour=2.0,
)


def test_one_rank_by_hand():
    load = Load(prompt=4, lengths=((2, 6),))
    step = simulate(COSTS, load, 1, 1000.0)
    context = 2 * (4 + 1) + 6 * (4 + 3)
    assert step.sampling == pytest.approx(0.5 * 6 + 0.01 * 8 + 0.001 * context)
    assert (step.exchange, step.reduction) == (0, 0)
    assert step.control == pytest.approx(1 + 0.2 * 8)
    assert step.update == pytest.approx(2 + 0.1 * (4 + 8))  # the prompt counts once
    assert step.bound == "update"
    assert step.seconds == pytest.approx(step.sampling + step.control + step.update)


def test_two_ranks_by_hand():
    load = Load(prompt=4, lengths=((2, 6), (1, 1), (3, 3)))
    step = simulate(COSTS, load, 2, 1000.0)
    # Sampling deals out prompts 0 and 2, and 1; the update's shares are 12, and 6 + 10.
    context = 2 * 5 + 6 * 7 + 2 * 3 * 5.5
    assert step.sampling == pytest.approx(2 * (0.5 * 6 + 0.01 * 14 + 0.001 * context))
    assert step.update == pytest.approx(2 * (2 + 0.1 * 16))
    assert step.exchange == pytest.approx(0.25 + 16 * 10 * 0.01)
    assert step.reduction == pytest.approx(0.25 + 1.0)
    assert simulate(COSTS, load, 4, 1000.0).reduction == pytest.approx(0.25 * 3 + 1.5)  # a ring


def test_costs_are_recovered_from_two_steps():
    few, many = even_load(4, 8, 64, 128), even_load(12, 8, 64, 128)
    true = Costs(0.01, 2e-5, 0.0, 3e-5, 0.2, 0.05, 1e-6)
    seconds = []
    for load in (few, many):
        step = simulate(true, load, 1, 0.0)
        seconds.append({"generate": step.sampling, "update": step.update, "other": step.control})
    found = simulator.fitted(*seconds, few, many)
    for name in ("decode_step", "decode_token", "train_token", "update_step", "control_step", "control_token"):
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=1e-6)


def test_layouts_are_chosen_by_memory():
    small, middle, large = MODELS
    assert simulator.place(H100, small, 8) == Placement("replicate", 1, small.parameters * 18)
    assert simulator.place(H100, middle, 8) == Placement("full", 1, middle.parameters * 4)
    assert (
        simulator.place(H100, large, 8) is None
    )  # 16/8 bytes of state and 2/8 of the sampler per parameter are 73.8 GB
    assert simulator.place(H100, large, 64) == Placement("full", 2, large.parameters * 1.25)


def test_lengths_are_random_with_the_mean_and_the_limit():
    load = random_load(2000, 8, 512, 2048, 8192)
    lengths = [length for group in load.lengths for length in group]
    assert sum(lengths) / len(lengths) == pytest.approx(2048, rel=0.02)  # the limit cuts 2% of the mass
    assert max(lengths) == 8192
    assert simulator.update_shares(random_load(16, 8, 64, 64, 128), 2)[1] < 1.05


def test_a_decode_step_on_a_gpu_by_hand():
    small, _, large = MODELS
    read = 3350e9 * 0.7  # bytes per second
    costs = simulator.costs_on(H100, small, Placement("replicate", 1, 0.0), 8, COSTS)
    assert costs.decode_step == pytest.approx(2 * 1.72e9 / read + (75 + 28 * 36) * 8e-6)  # 1,083 operations: 8.7 ms
    split = simulator.costs_on(H100, large, Placement("full", 2, 0.0), 64, COSTS)  # vLLM: its step, and 2 * 64 sums
    assert split.decode_step == pytest.approx(32.8e9 / read + 128 * 30e-6 + 3e-3)


SMALL = {
    "vocab_size": 37,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SMALL |= {"head_dim": 8, "tie_word_embeddings": True}


class Operations(TorchDispatchMode):
    """Counts the operations that are no views."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def test_the_operations_of_a_decode_step_are_counted():
    """The simulator's constants are what the sampler calls on CUDA. If it calls fewer, lower them, and the predictions in
    docs/benchmarks.md with them."""
    of_layers = {}
    for layers in (2, 6):
        model = Qwen3ForCausalLM(Qwen3Config(**SMALL | {"num_hidden_layers": layers}))
        with cuda_on_cpu():
            engine = LocalEngine(Policy(model, Precision(torch.float32, torch.bfloat16)), LetterTokenizer(), ())
            assert isinstance(engine.backend.body, LeanBody)
            counts = []
            for length in (20, 36):  # prompts and the first steps are the same in all
                with Operations() as operations:
                    engine.generate([Prompt(0, 0, (5, 6, 7), "", "", {})], 8, Sampling(length), RNGKey(0, 0))
                counts.append(operations.count)
        of_layers[layers] = (counts[1] - counts[0]) / 16
    per_layer = (of_layers[6] - of_layers[2]) / 4
    assert per_layer == simulator.LAYER_LAUNCHES
    # Now and then a step has one more, as when rows are looked at again.
    assert of_layers[2] - 2 * per_layer == pytest.approx(simulator.STEP_LAUNCHES, abs=1)
