"""Sampler and trainer agree on every kind of architecture that people train: attention of all sorts."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from cohort.policy import Policy, Precision
from cohort.rollout import LocalEngine, RNGKey, Sampling
from cohort.types import Prompt
from tests.conftest import family_model, telling
from tests.rollout.test_local_engine import LetterTokenizer

COMMON = {"vocab_size": 37, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1, "initializer_range": 0.2}
ATTENTION = COMMON | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
FAMILIES = {
    "llama": ATTENTION,
    "qwen2": ATTENTION,
    "qwen3": ATTENTION | {"head_dim": 8},
    "mistral": ATTENTION | {"sliding_window": 6},
    "gemma2": ATTENTION | {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8},
    "gemma3_text": ATTENTION | {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8},
    "phi3": ATTENTION,
    "olmo2": ATTENTION,
    "gpt_neox": {k: v for k, v in ATTENTION.items() if k != "num_key_value_heads"},
    "gpt2": COMMON | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "mixtral": ATTENTION | {"num_local_experts": 4},
}
PROMPTS = [(5, 9, 20), (7,), (30, 31, 32, 33, 34, 35, 36, 3, 4, 5, 6), (2, 3)]


@pytest.mark.parametrize("family", telling(FAMILIES, "llama", "mixtral"))  # test_lean and test_generic have others
def test_sampler_and_trainer_agree(family):
    torch.manual_seed(0)
    model = family_model(family, **FAMILIES[family])
    policy = Policy(model, Precision(torch.float32, torch.float32))
    engine = LocalEngine(policy, LetterTokenizer(), (1,))
    prompts = [Prompt(i, i, ids, "", "", {}) for i, ids in enumerate(PROMPTS)]
    groups = engine.generate(prompts, 3, Sampling(16), RNGKey(0, 0))
    pairs = [(g.prompt.token_ids, c) for g in groups for c in g.completions]
    with torch.no_grad():
        logps, *_ = policy.logps([p for p, _ in pairs], [c.token_ids for _, c in pairs], 1.0)
    sampled = torch.tensor([lp for _, c in pairs for lp in c.sampler_logps])
    torch.testing.assert_close(sampled, logps.double(), rtol=0, atol=1e-5)  # float32, sums in another order


def test_recurrent_models_are_sampled_too_and_the_way_is_named():
    torch.manual_seed(0)
    config = AutoConfig.for_model("mamba", **COMMON, hidden_size=32, num_hidden_layers=1, state_size=8)
    policy = Policy(AutoModelForCausalLM.from_config(config), Precision(torch.float32, torch.float32))
    engine = LocalEngine(policy, LetterTokenizer(), (1,))
    assert engine.backend.description.startswith("without a cache: every token computes the whole text again")
    (group,) = engine.generate([Prompt(0, 0, PROMPTS[0], "", "", {})], 4, Sampling(8), RNGKey(0, 0))
    with torch.no_grad():
        logps, *_ = policy.logps([PROMPTS[0]] * 4, [c.token_ids for c in group.completions], 1.0)
    sampled = torch.tensor([lp for c in group.completions for lp in c.sampler_logps])
    torch.testing.assert_close(sampled, logps.double(), rtol=0, atol=1e-5)  # float32, sums in another order
