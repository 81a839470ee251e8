"""Lean layers: with and without native kernels, in few shapes, and with gradients added in place."""

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cohort.policy import Policy, Precision, enable_checkpointing
from cohort.policy.head import LIKE_SHAPES
from cohort.policy.lean import LeanLayers
from cohort.policy.narrow import add_gradients
from tests.conftest import tiny_llama
from tests.policy.plain import (
    COMPLETIONS,
    DOUBLE,
    MIXED,
    PROMPTS,
    SINGLE,
    TEMPERATURE,
    WEIGHTS,
    assert_near,
    gradients,
    policy_of,
    shares,
    weighted,
)
from tests.rollout.test_lean import FAMILIES as LEAN

pytestmark = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning", "ignore:Model has .tie_word_embeddings=True."
)


def test_native_kernels_switched_off():
    policy = Policy(tiny_llama(), SINGLE)
    policy.native_kernels = False
    assert policy.why_no_kernels() == "switched off"
    assert policy.passes.description.endswith("no native kernels: switched off")
    assert policy.passes.native is policy.passes.head.native is policy.passes.body.fused.native is False
    assert policy.copy_frozen().native_kernels is policy.reference().native_kernels is False


@pytest.mark.parametrize("family", ["lfm2", "qwen3_5", "granite4"])
def test_recurrent_layers_are_lean_in_each_precision(family):
    for precision, native in itertools.product([SINGLE, MIXED], [True, False]):
        policy = policy_of(*LEAN[family], precision)
        policy.native_kernels = native
        assert type(policy.passes.body) is LeanLayers, policy.passes.description


# Shapes


class ProductSizes(TorchDispatchMode):
    """The sizes of factors of matrix products."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}:
            self.seen |= {size for part in args[-2:] for size in part.shape}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("family", "precision"), [("llama", SINGLE), ("arcee", MIXED)])
def test_products_have_few_shapes(family, precision):
    """Forward and backward, for any number of tokens: oneDNN keeps code for each shape until the process ends."""
    settings = LEAN["llama"][1]
    policy = policy_of(family, settings, precision)
    assert shares(policy)
    seen = []
    for count in (3, 29, 61):
        with ProductSizes() as sizes:
            completions = [(3,) * length for length in (count, 7)]
            policy.logps([(5,) * count, (6, 7)], completions, 1.0).logps_N.sum().backward()
        seen.append(sizes.seen)
    widths = {size for p in policy.model.parameters() for size in p.shape}
    assert {size for sizes in seen for size in sizes} - widths <= {LIKE_SHAPES, 2 * LIKE_SHAPES}


# Gradients in place


def in_place(policy, prompts=PROMPTS, completions=COMPLETIONS, weights=WEIGHTS):
    """Gradients of two passes: each parameter has the sum of both."""
    policy.model.zero_grad()
    with policy.training(), policy.gradients_in_place():
        for _ in range(2):
            logps_N = policy.logps(prompts, completions, TEMPERATURE).logps_N
            (logps_N * weights.to(policy.precision.master)).sum().backward()
    assert not policy.adds_gradients
    trained = {name: p for name, p in policy.model.named_parameters() if p.requires_grad}
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in trained.items()}


@pytest.mark.parametrize(
    ("name", "checkpointing"),
    [("llama", False), ("llama", True), ("qwen2 window, tied", True), ("gemma2", False), ("gemma3", True)],
)
def test_gradients_in_place_are_those_of_autograd(name, checkpointing):
    policy = policy_of(*LEAN[name])
    if checkpointing:
        enable_checkpointing(policy.model)
    expected = gradients(policy, 2 * weighted(policy))
    assert_near(in_place(policy), expected, 1e-10)


def test_the_passes_may_be_chosen_in_the_block():
    """Their trial has a block of its own, whose end is not the end of this one: the first update of a process is
    rounded as all later ones."""
    found = []
    for chosen_before in (True, False):
        torch.manual_seed(3)
        policy = Policy(tiny_llama(tie_word_embeddings=True), Precision(torch.float32, torch.float32))
        if chosen_before:
            assert policy.passes.shared
        found.append(in_place(policy))
    for name, expected in found[0].items():
        assert torch.equal(found[1][name], expected), name


def test_the_padding_token_is_not_trained():
    model = tiny_llama(pad_token_id=5)
    assert model.model.embed_tokens.padding_idx == 5
    policy = Policy(model.double(), DOUBLE)
    prompts, completions, weights = [(5, 9, 5)], [(5, 8, 5)], torch.tensor([1.0, -2.0, 0.5])
    expected = gradients(policy, 2 * (policy.logps(prompts, completions, TEMPERATURE).logps_N * weights).sum())
    got = in_place(policy, prompts, completions, weights)
    assert_near(got, expected, 1e-12)
    assert got["model.embed_tokens.weight"][5].abs().sum() == 0
    assert got["model.embed_tokens.weight"][9].abs().sum() > 0


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_hooks_on_a_weight_still_get_its_gradient(name):
    policy = Policy(tiny_llama(tie_word_embeddings=False).double(), DOUBLE)
    expected = in_place(policy)
    weight = dict(policy.model.named_parameters())[name]
    weight.register_hook(lambda grad: 3 * grad)
    got = in_place(policy)
    torch.testing.assert_close(got[name], 3 * expected[name], rtol=1e-12, atol=1e-14)


def test_no_other_tensor_is_as_large_as_the_head(monkeypatch):
    """Gradients are allocated once, and added to in slices."""
    monkeypatch.setattr("cohort.policy.narrow.PRODUCT", 24 * 64)
    monkeypatch.setattr("cohort.policy.head.CHUNK_LOGITS", 64 * 64)
    policy = Policy(tiny_llama(vocab_size=4096, tie_word_embeddings=False), SINGLE)

    class Large(TorchDispatchMode):
        made = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.shape == (4096, 24):
                given = [a.untyped_storage()._cdata for a in args if isinstance(a, torch.Tensor)]
                Large.made += out.untyped_storage()._cdata not in given
            return out

    assert policy.passes.shared
    with Large():
        in_place(policy, [(5, 9, 20)], [(4, 6, 1)], torch.ones(3))
    assert Large.made == 2  # .grad of the embedding and of the head


# In the dtype of the total at once, in others in slices, with the rounding of float32 sums of 5 products.
@pytest.mark.parametrize(
    ("rows", "dtype", "atol"), [(7, torch.float32, 2e-6), (1000, torch.float32, 2e-6), (9, torch.float64, 1e-14)]
)
def test_adding_a_product(rows, dtype, atol, monkeypatch):
    monkeypatch.setattr("cohort.policy.narrow.PRODUCT", 16 * 100)
    left, right = torch.randn(rows, 5, dtype=dtype), torch.randn(5, 16, dtype=dtype)
    total = torch.randn(rows, 16, dtype=torch.float64)
    expected = total + left.double() @ right.double()
    add_gradients([total], left.T, right)
    torch.testing.assert_close(total, expected, rtol=0, atol=atol)
