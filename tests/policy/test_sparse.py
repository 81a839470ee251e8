"""Sparse attention: layers that choose the keys of each token, at lengths where they leave some out."""

import pytest

from cohort.policy import Policy
from tests.families.configs import small_model
from tests.policy.plain import SINGLE, assert_plain

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.parametrize("model_type", ["minimax_m3_vl_text", "deepseek_v32", "glm_moe_dsa"])
def test_sparse_layers(model_type):
    """Texts of up to 22 tokens; each token sees at most 4 of them, or 2 blocks of 8, which is more than a trial has. In
    float32 because of the experts."""
    model = small_model(model_type)
    config = model.config
    seen = getattr(config, "index_topk", None) or config.index_topk_blocks * config.index_block_size
    assert seen <= 16
    policy = Policy(model, SINGLE)
    assert_plain(policy, 1e-4, 1e-4)
    reasons = {"minimax_m3_vl_text": "takes block_indices, which packed attention does not know"}
    assert reasons.get(model_type, "its layers choose the keys of each token") in policy.passes.description
