"""Updates and rollouts under each layout against one plain process."""

import numpy as np
import pytest
import torch
from torch import nn

from cohort.parallel import Full, Layout, World, layout_of
from cohort.parallel.full import used_wide
from tests.conftest import tiny_llama
from tests.parallel.launching import Ranks, on_ranks
from tests.parallel.under_layouts import (
    FAILURES,
    LAYOUTS,
    failure_on_one_rank,
    gap,
    half_gradient,
    make_policy,
    on_each_layout,
    out_of_memory_in_the_sum,
    updates,
)

PLAIN = ("updates", {})
CASES = [
    PLAIN,
    ("updates", {"few": True}),
    ("updates", {"tie_word_embeddings": True, "checkpointing": True}),
    ("updates", {"passes": "custom", "budget": 1000}),
    ("updates", {"passes": "custom", "checkpointing": True, "full_kl": True}),
    ("updates", {"passes": "plain", "budget": 60}),
    ("updates", {"lora": True, "full_kl": True}),
    ("updates", {"experts": True, "budget": 1000}),
    ("updates", {"experts": True, "routes": True, "checkpointing": True}),
    ("updates", {"experts": True, "routes": True, "passes": "custom", "checkpointing": True, "full_kl": True}),
    ("updates", {"recurrent": "qwen3_5_text", "checkpointing": True}),
]
"""Settings of ``updates``."""
EXACT = 1e-10
"""In float64, sums in another order differ by about 1e-15."""


def check(found, cases):
    """Compare what ``on_each_layout`` found on a rank with one process without a layout."""
    for index, (function, settings) in enumerate(cases):
        assert function == "updates"
        norms, weights, logps, _ = updates(Layout(), **settings)
        for name in {name for name, number in found if number == index}:
            got = found[name, index]
            assert np.abs(np.subtract(got[0], norms)).max() < EXACT, (name, settings)
            assert gap(got[1], weights) < EXACT, (name, settings)
            assert np.nanmax(np.abs(got[2] - logps)) < EXACT, (name, settings)
            assert np.array_equal(np.isnan(got[2]), np.isnan(logps)), (name, settings)


def test_updates_on_two_ranks_equal_those_of_one_process():
    first, second = on_ranks(2, on_each_layout, ["optimizer", "full"], [PLAIN])
    check(first, [PLAIN])
    for key, (norms, weights, _, numbers) in first.items():
        assert norms == second[key][0]
        assert gap(weights, second[key][1]) == 0
        whole = 2 * sum(weight.size for weight in weights.values())  # AdamW's two moments
        assert numbers + second[key][3] == whole
        assert abs(numbers - whole / 2) < 0.02 * whole


@pytest.mark.ranks
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_layout_and_pass_equals_one_process(size):
    for found in on_ranks(size, on_each_layout, list(LAYOUTS), CASES, timeout=900)[:2]:
        check(found, CASES)


@pytest.mark.ranks
def test_rollouts_are_bit_equal():
    """To one process with as many threads."""
    cases = [("rollout", {}), ("rollout", {"lora": True})]
    (expected,) = on_ranks(1, on_each_layout, ["replicate"], cases)
    for found in on_ranks(2, on_each_layout, list(LAYOUTS), cases):
        for name, index in found:
            assert found[name, index] == expected["replicate", index], name
    lengths = {len(ids) for ids, _ in expected["replicate", 0]}
    assert len(lengths) > 1


@pytest.mark.ranks
def test_a_value_that_is_not_finite_prevents_the_update_on_every_rank():
    weights = updates(Layout(), poison=True)[1]
    for found in on_ranks(2, on_each_layout, list(LAYOUTS), [("updates", {"poison": True})]):
        for norms, changed, *_ in found.values():
            assert norms == ["NonFinite"] * 3
            assert gap(changed, weights) == 0


@pytest.mark.ranks
def test_bfloat16_and_kernels_stay_close_to_one_process():
    """Products in bfloat16 round differently when microbatches are cut in another way: Adam's first steps have the
    size of the learning rate whatever the gradient's, so weights may differ by it, and norms by a few percent."""
    cases = [("updates", {"dtype": "bfloat16", "kernels": kernels}) for kernels in (False, True)]
    adapters = ("updates", {"dtype": "bfloat16", "lora": True})  # weights of two dtypes in a layer
    expected = updates(Layout(), dtype="bfloat16")
    for found in on_ranks(2, on_each_layout, list(LAYOUTS), [*cases, adapters]):
        for (_, case), (norms, weights, *_) in found.items():
            if case == len(cases):
                assert np.isfinite(norms).all()
                continue
            assert np.allclose(norms[0], expected[0][0], rtol=0.05)
            assert gap(weights, expected[1]) < 6.1e-2


HALF_CASES = [
    {},
    {"tie_word_embeddings": True, "checkpointing": True},
    {"passes": "custom"},
    {"lora": True},
    {"experts": True, "kernels": True},
    {"recurrent": "gpt_oss", "kernels": True},
    {"recurrent": "qwen3_5_text", "kernels": True},
    {"recurrent": "falcon_h1"},
]


@pytest.mark.ranks
def test_layers_gathered_in_bfloat16_compute_the_bits_of_one_process():
    """Autocast rounds to bfloat16 what is gathered in it, and two equal gradients add up without rounding."""
    cases = [("half_gradient", settings) for settings in HALF_CASES]
    for found in on_ranks(2, on_each_layout, ["full"], cases):
        for index, settings in enumerate(HALF_CASES):
            logps_N, grads, gathered, narrow = found["full", index]
            expected_N, expected, *_ = half_gradient(Layout(), **settings)
            assert np.array_equal(logps_N, expected_N), settings
            assert grads.keys() == expected.keys()
            assert gap(grads, expected) == 0, settings
            if settings == {}:
                check_gathers(gathered, narrow)


def check_gathers(gathered, narrow):
    """What two ranks gather of the llama with three layers: the root in float32, and each layer's matrices in bfloat16;
    a rank sends half of the numbers."""
    matrices = [weight for weight in tiny_llama().model.layers[0].parameters() if weight.ndim == 2]
    half = sum(weight.numel() for weight in matrices) // 2
    assert {numbers for dtype, numbers in gathered if dtype == torch.bfloat16} == {half}
    assert len({numbers for dtype, numbers in gathered if dtype == torch.float32}) == 1
    assert {dtype for dtype, _ in gathered} == {torch.bfloat16, torch.float32}
    assert len(narrow) == 3 * 7
    assert all("_proj.weight" in name for name in narrow)


def test_what_autocast_does_not_round_is_not_gathered_in_half_precision():
    layer = nn.Module()
    layer.linear, layer.norm, layer.convolution = nn.Linear(64, 64), nn.LayerNorm(64), nn.Conv1d(4, 4, 1)
    wide = [layer.linear.bias, *layer.norm.parameters(), *layer.convolution.parameters()]
    assert used_wide(layer) == set(wide)  # 212 of 4,308 numbers
    layer.table = nn.Embedding(100, 32)  # more than a sixteenth: the layer is gathered as it is
    assert used_wide(layer) is None


@pytest.mark.ranks
@pytest.mark.parametrize("failure", FAILURES)
def test_where_passes_exchange_weights_a_rank_that_fails_ends_the_run(failure):
    with Ranks(2, failure_on_one_rank, "full", failure) as ranks:
        ranks.wait(200)
        (first, second) = (outcome[1] for outcome in ranks.outcomes())
    assert first[0] == second[0] == "RankError"
    first, second = first[1], second[1]
    assert "lost another rank" in first
    assert ("set optim.microbatch_tokens to less than 20" in second) is (failure != "interrupt")


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["replicate", "optimizer"])
def test_a_rank_without_memory_for_the_sum_of_gradients_ends_the_run(name):
    """It cannot repeat the update alone: the others wait for its part of the sum."""
    with Ranks(2, out_of_memory_in_the_sum, name) as ranks:
        ranks.wait(100)
        kinds = [outcome[1][0] for outcome in ranks.outcomes()]
    assert kinds == ["RankError", "StepError"]


@pytest.mark.ranks
def test_elsewhere_all_ranks_repeat_with_fewer_tokens():
    found = on_ranks(2, failure_on_one_rank, "optimizer", "cpu")
    norms, warned = found[0]
    assert all(norm > 0 for norm in norms)
    assert [text for text in warned if "repeating with 10 tokens" in text]
    assert found[0] == found[1]


def test_passes_compute_where_the_model_was_loaded():
    """``parallel.offload`` moves the weights away."""
    policy = make_policy()
    policy.model.to("meta")
    assert policy.device == torch.device("cpu")


def test_one_rank_needs_no_division():
    for name in LAYOUTS:
        assert type(layout_of(name, World())) is Layout
    assert type(layout_of("full", World(), offload=True)) is Full  # there is something to move
