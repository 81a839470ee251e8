"""longrope (Phi-3, Phi-4): beyond a length the rotary factors of a whole pass are others."""

import pytest
import torch

from cohort.errors import DataError, ModelError
from cohort.policy import Policy, Precision, context_length
from cohort.rollout import LocalEngine, RNGKey, Sampling
from tests.families.configs import ATTENTION
from tests.policy.plain import DOUBLE, assert_plain, model_of
from tests.rollout.test_local_engine import LetterTokenizer, prompts

LENGTH = 24
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
SETTINGS = ATTENTION | {
    "original_max_position_embeddings": LENGTH,
    "rope_parameters": LONGROPE | {"original_max_position_embeddings": LENGTH},
}


def test_texts_up_to_its_length_are_exact_and_longer_ones_are_refused():
    """Beside a long text, all texts of a pass would have the long factors: off by up to 1.6 nats."""
    policy = Policy(model_of("phi3", SETTINGS).double(), DOUBLE)
    assert "texts of at most 24 tokens because of its longrope" in policy.passes.description
    short, fits, long = ((5, 9, 20), (4, 6)), ((5, 9, 20), tuple(range(3, 24))), ((5, 9, 20), tuple(range(3, 25)))
    assert_plain(policy, prompts=[short[0], fits[0]], completions=[short[1], fits[1]])
    with pytest.raises(ModelError, match="have 25 tokens, and beyond 24 the model's longrope"):
        policy.logps([short[0], long[0]], [short[1], long[1]], 1.0)


def test_the_context_ends_where_its_factors_change():
    policy = Policy(model_of("phi3", SETTINGS), Precision(torch.float32, torch.float32))
    assert context_length(policy.model.config) == LENGTH
    engine = LocalEngine(policy, LetterTokenizer(), (1,))
    (group,) = engine.generate(prompts((5, 9, 20)), 4, Sampling(21), RNGKey(0, 0))
    ids = [completion.token_ids for completion in group.completions]
    logps_N = policy.logps([(5, 9, 20)] * 4, ids, 1.0).logps_N.detach()
    sampled_N = torch.tensor([logp for completion in group.completions for logp in completion.sampler_logps])
    torch.testing.assert_close(sampled_N, logps_N.double(), rtol=0, atol=1e-5)  # float32
    with pytest.raises(DataError, match="the model's context holds 24"):
        engine.generate(prompts((5, 9, 20)), 4, Sampling(22), RNGKey(0, 0))
