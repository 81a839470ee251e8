"""What the benchmarks count, by hand."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def floor():
    before = set(sys.modules)
    sys.path.insert(0, str(FOLDER))
    try:
        spec = importlib.util.spec_from_file_location("floor_benchmark", FOLDER / "floor.py")
        module = sys.modules["floor_benchmark"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(FOLDER))
        for name in {"floor_benchmark", "common", "step", "rollout"} - before:
            sys.modules.pop(name, None)


def test_arithmetic_by_hand(floor):
    shape = floor.MODELS["tiny"]
    shape = floor.replace(shape, num_hidden_layers=3, num_attention_heads=2, head_dim=4)
    found = floor.Arithmetic(floor.Job(floor.Workload(2, 9, False), shape, prompts=1), mean_length=3.0)
    assert (found.prompt_tokens, found.drawn_tokens) == (2, 8 * 3)
    assert found.linear(10) == 2 * 10 * 26
    assert found.linear(10, head=True) == 2 * 10 * 24
    # A prompt's tokens see 1 and 2 tokens; those of each of 8 completions 3, 4 and 5.
    assert found.attention == 7 * 2 * 4 * (2 * 3) * (3 + 8 * 12)
    assert found.decode(10, 5) == 2 * 10 * 26 + 2 * 5 * 24


def test_floors_add_up_the_products_of_all_layers_at_their_rates(floor, monkeypatch):
    layers = [torch.zeros(4, 6), torch.zeros(4, 6), torch.zeros(2, 6)]
    weights = floor.Weights(layers, torch.zeros(10, 6))
    rates = {(4, 6): [1.0, 2.0, 4.0], (2, 6): [1.0, 1.0, 1.0], (10, 6): [2.0, 2.0, 2.0]}
    monkeypatch.setattr(floor, "product_rates", lambda weight, *_: rates[tuple(weight.shape)])

    class Fixed(floor.Arithmetic):
        attention = 40.0
        drawn_tokens, prompt_tokens = 3, 1

    arithmetic = Fixed(floor.CASES["A"], 3.0)
    found = floor.floors(weights, arithmetic, 64)
    of_layers = 2 * 4 * 2 * 24 * (1 + 1 / 2 + 1 / 4) + 3 * 2 * 4 * 12
    assert found["products"] == of_layers + 3 * 2 * 3 * 60 / 2 + 40 / 4
    assert found["products_at_best"] == (3 * 2 * 4 * 60 + 3 * 2 * 3 * 60 + 40) / 4
    assert found["decode_products"] == (2 * 4 * 60 + 2 * 3 * 60) / 4


@pytest.mark.parametrize("end", [None, 4096])
def test_a_prompt_has_as_many_tokens_as_numbers(floor, end):
    tokenizer = sys.modules["common"].make_tokenizer(5000, end)
    numbers = [0, 10, 1045, 2003, 4096, 409, 4999]
    assert tokenizer(" ".join(map(str, numbers)))["input_ids"] == numbers
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, end)


def test_all_weights_are_read(floor):
    first, second, head = (torch.arange(n).view(torch.float32).view(n, 2) for n in (2, 3, 5))
    weights = floor.Weights([first, second], head)
    assert weights.read() == 1 + 3 + 10
    assert weights.num_bytes == 10 * 8


def test_rates_are_positive(floor):
    assert all(rate > 0 for rate in floor.product_rates(torch.zeros(8, 8), 16, least=0.0))


def test_witness_sees_steps_that_move_one_weight_up_and_one_down(floor):
    model = torch.nn.Linear(2, 1, bias=False)
    model.weight.data = torch.tensor([[1.0, 1.5]])
    witness = sys.modules["common"].Witness(model)
    assert witness.look()["changed"] == 0
    with torch.no_grad():  # by one bit each: neither the sum nor the sum of the bits changes
        model.weight += 2.0**-23 * torch.tensor([[1.0, -1.0]])
    assert witness.look()["changed"] == 1
