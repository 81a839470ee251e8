"""Rows in pieces have the gradients of whole rows, and their activations do not grow with the row."""

import pytest
import torch

from cohort.policy import PackedRows, Policy, pieces
from tests.conftest import tiny_llama
from tests.families.configs import small_model
from tests.policy.plain import DOUBLE, LORA, WINDOW, assert_near, model_of, with_peft

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
        ("granite4", [], True),
        ("qwen3_5", [], False),
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
