"""Rows in pieces have the gradients of whole rows; a token of a long row takes no more than its hidden states."""

import pytest
import torch

from cohort.policy import PackedRows, Policy, attention, pieces
from cohort.train.memory import peak_bytes
from tests.conftest import tiny_llama
from tests.families.configs import small_model
from tests.policy.plain import DOUBLE, LORA, MIXED, SINGLE, WINDOW, assert_near, model_of, with_peft

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

PROMPTS = [(5, 9, 20), (7,), tuple(range(20, 36))]
LENGTHS = (150, 12, 64)
MODELS = {
    "llama": lambda: tiny_llama(num_hidden_layers=3, tie_word_embeddings=False, max_position_embeddings=4096),
    "gemma2": lambda: model_of("gemma2", WINDOW | {"head_dim": 8, "query_pre_attn_scalar": 8}),
    "lora": lambda: with_peft(LORA),
    "granite4": lambda: small_model("granitemoehybrid"),
    "qwen3_5": lambda: small_model("qwen3_5_text"),
}


def rows_of(*, given=False):
    ids = [[(7 * n + t * t) % 20 for t in range(length)] for n, length in enumerate(LENGTHS)]
    drawn = [[not given or not 40 < t < 110 for t in range(length)] for length in LENGTHS]
    drawn = [[*row[:-1], True] for row in drawn]
    return PackedRows.of([2, 1, 0], ids, drawn=drawn)


def trained(policy, rows, most):
    """Log-probs and gradients as in an update."""
    policy.model.zero_grad()
    with policy.training(), policy.compute(), policy.gradients_in_place():
        prefixes = policy.passes.read(PROMPTS)
        logps_N = policy.states(prefixes, rows, 0.8, most_tokens=most).logps().logps_N
        (logps_N * torch.linspace(-1, 2, len(logps_N))).sum().backward()
        prefixes.backward()
    return logps_N.detach(), {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("name", "sizes", "given"),
    [
        ("llama", [1, 1, 1], False),
        ("llama", [2, 1], True),
        ("llama", [3], True),
        ("gemma2", [1, 1], True),
        ("lora", [1, 1], False),
        ("granite4", [1, 1], True),
        ("qwen3_5", [1, 1], False),
    ],
)
def test_pieces_change_no_gradient(monkeypatch, name, sizes, given):
    """Whatever the stages, with tokens that were given, with states, and with a prompt of one token."""
    monkeypatch.setattr(pieces, "stage_sizes", lambda *_: sizes)
    policy = Policy(MODELS[name]().double(), DOUBLE)
    assert policy.passes.shared
    whole, expected = trained(policy, rows_of(given=given), None)
    got, grads = trained(policy, rows_of(given=given), 64)
    torch.testing.assert_close(got, whole, rtol=0, atol=1e-12)
    assert_near(grads, expected, 1e-12)


def test_blocks_of_a_prefix_change_no_gradient(monkeypatch):
    """Some layers see a window: whole blocks lie before it."""
    policy = Policy(MODELS["gemma2"]().double(), DOUBLE)
    whole, expected = trained(policy, rows_of(), None)
    monkeypatch.setattr(attention, "BLOCK", 16)
    got, grads = trained(policy, rows_of(), 64)
    torch.testing.assert_close(got, whole, rtol=0, atol=1e-12)
    assert_near(grads, expected, 1e-12)


@pytest.mark.parametrize("precision", [SINGLE, MIXED], ids=str)
def test_pieces_in_the_precisions_of_runs(precision):
    """In bfloat16, a copy of a weight that is made without a graph must not be used with one."""
    policy = Policy(MODELS["llama"](), precision)
    whole, expected = trained(policy, rows_of(), None)
    got, grads = trained(policy, rows_of(), 64)
    tolerance = 1e-5 if precision == SINGLE else 3e-2  # rounding of either precision
    torch.testing.assert_close(got, whole, rtol=0, atol=10 * tolerance)
    assert_near(grads, expected, tolerance)


@pytest.mark.parametrize("precision", [DOUBLE, SINGLE], ids=str)
def test_a_token_takes_no_more_than_its_hidden_states(monkeypatch, precision):
    """Beyond the first pieces; four more numbers a token are ids and log-probs. float32 has native kernels, which copy
    keys block by block."""
    monkeypatch.setattr(attention, "BLOCK", 64)
    layers, hidden = 3, 64
    sizes = {"hidden_size": hidden, "intermediate_size": 256, "num_hidden_layers": layers, "num_key_value_heads": 1}
    policy = Policy(tiny_llama(**sizes, max_position_embeddings=4096).to(precision.master), precision)
    assert pieces.stage_sizes(layers, hidden, hidden // 4) == [2, 1]
    few, many = (peak_bytes(policy, 8, length, most_tokens=64) for length in (256, 512))
    assert (many - few) / 256 < 1.1 * layers * hidden * precision.master.itemsize


def test_rows_without_gradients_and_with_others_about_them():
    """Log-probs of the old policy or the reference; where gradients are not added in place, rows stay whole."""
    policy = Policy(MODELS["llama"]().double(), DOUBLE)
    whole, expected = trained(policy, rows_of(), None)
    with torch.no_grad():
        prefixes = policy.passes.read(PROMPTS)
        found = policy.states(prefixes, rows_of(), 0.8, most_tokens=64).logps().logps_N
    torch.testing.assert_close(found, whole, rtol=0, atol=1e-12)
    prefixes = policy.passes.read(PROMPTS, attached=True)
    with policy.gradients_in_place():
        logps_N = policy.states(prefixes, rows_of(), 0.8, most_tokens=64).logps().logps_N
    weight = policy.model.model.layers[0].self_attn.k_proj.weight
    (grad,) = torch.autograd.grad((logps_N * torch.linspace(-1, 2, len(logps_N))).sum(), weight)
    torch.testing.assert_close(grad, expected["model.layers.0.self_attn.k_proj.weight"], rtol=0, atol=1e-11)
