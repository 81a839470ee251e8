"""Prompts once per group through transformers' modules: memory, and weights in the compute dtype."""

import pytest
import torch

from cohort.config import ModelConfig
from cohort.errors import ConfigError
from cohort.policy import Policy, Precision, load_policy
from cohort.rollout import LocalEngine
from cohort.rollout.local import backend as backends
from cohort.rollout.local.backend import plan
from cohort.rollout.local.cached import CachedBackend, CastWeights, ModuleBody
from cohort.rollout.local.capacity import Capacity
from tests.families.configs import small_model
from tests.rollout.test_local_engine import LetterTokenizer

FLOAT32, MIXED = Precision(torch.float32, torch.float32), Precision(torch.float32, torch.bfloat16)


def test_states_count_against_the_memory():
    """A delta rule of 4 x 8 x 8 numbers and tails of 3 x (16 + 16 + 32), one attention layer of 2 x 2 x 8, float32."""
    backend = LocalEngine(Policy(small_model("qwen3_next"), FLOAT32), LetterTokenizer(), (1,)).backend
    assert isinstance(backend.body, ModuleBody)
    assert backend.token_bytes == 4 * 32
    assert backend.row_bytes == 4 * (256 + 192)
    sizes = {"max_rows": 100, "token_bytes": 1, "token_multiple": 1, "device": torch.device("cpu")}
    capacity = plan([10] * 4, 16, 10, 6, max_tokens=200, **sizes, row_bytes=20)
    assert (capacity.rows, capacity.prompts) == (4, 2)  # 4 (6 + 20) + 2 (10 + 20) = 164; a fifth row adds 2 prompts
    assert plan([10] * 4, 16, 10, 6, max_tokens=200, **sizes).rows == 16


def test_states_without_keys_and_values_count_against_the_free_memory(monkeypatch):
    """Of a model like Mamba 2. 36 rows and 18 prompts, twice the groups of 4 that fit them, take 54,000 of the 56,000
    bytes; a row more would add 2 prompts."""
    monkeypatch.setattr(backends, "free_bytes", lambda _: 112_000)
    sizes = {"max_rows": 100, "token_bytes": 0, "token_multiple": 1, "device": torch.device("cpu"), "row_bytes": 1000}
    for max_tokens in (None, 10_000):
        capacity = plan([10] * 20, 80, 10, 6, max_tokens=max_tokens, **sizes)
        assert (capacity.rows, capacity.prompts) == (36, 18)
    with pytest.raises(ConfigError, match="states of 2000000 bytes, and 50% of the free memory holds 56000"):
        plan([10] * 20, 80, 10, 6, max_tokens=None, **sizes | {"row_bytes": 1_000_000})


def test_weights_are_cast_once_and_given_back():
    """The bits are those of autocast, which casts them in each step."""
    policy = Policy(small_model("lfm2_moe"), MIXED)
    before = {name: (weight.data_ptr(), weight.dtype) for name, weight in policy.model.named_parameters()}
    backend = CachedBackend(ModuleBody(policy))
    backend.begin(Capacity(2, 1, 4, 8))
    prefilled = backend.prefill([0], [[5, 9, 20, 3]])
    backend.add_rows([0, 1], [0, 0])
    stepped = backend.step([0, 1], torch.tensor([4, 7]))
    weights = CastWeights(policy)
    with weights.used():
        linears = [(n, m.weight.dtype) for n, m in policy.model.named_modules() if isinstance(m, torch.nn.Linear)]
    # The head is tied to the embedding.
    assert {(name == "lm_head", dtype) for name, dtype in linears} == {(True, torch.float32), (False, torch.bfloat16)}
    backend.end()
    assert before == {name: (weight.data_ptr(), weight.dtype) for name, weight in policy.model.named_parameters()}
    backend.begin(Capacity(2, 1, 4, 8))
    backend.body._weights = None
    assert torch.equal(backend.prefill([0], [[5, 9, 20, 3]]), prefilled)
    backend.add_rows([0, 1], [0, 0])
    assert torch.equal(backend.step([0, 1], torch.tensor([4, 7])), stepped)


def test_casts_leave_weights_alone_that_a_snapshot_shares():
    """Training saves a checkpoint, or samples to evaluate, while a snapshot samples in another thread."""
    policy = Policy(small_model("lfm2_moe"), MIXED)
    policy.model.model.layers[0].requires_grad_(False)
    before = {name: weight.clone() for name, weight in policy.model.state_dict().items()}
    snapshot = policy.snapshot()
    frozen = next(m for m in snapshot.model.model.layers[0].modules() if type(m) is torch.nn.Linear)
    assert any(frozen.weight is weight for weight in policy.model.parameters())
    first, second = CastWeights(policy).used(), CastWeights(snapshot).used()
    first.__enter__()
    with second:
        assert frozen.weight.dtype == torch.bfloat16
        first.__exit__(None, None, None)
        during = policy.model.state_dict()
        assert {name: weight.dtype for name, weight in during.items()} == {n: w.dtype for n, w in before.items()}
        assert all(torch.equal(during[name], weight) for name, weight in before.items())
    assert frozen.weight.dtype == torch.float32
    assert frozen.weight.requires_grad is False
    assert any(frozen.weight is weight for weight in policy.model.parameters())


def test_a_float32_head_stays_in_float32():
    model = small_model("lfm2_moe")
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())  # untied
    policy = load_policy(model, ModelConfig(precision="bfloat16", float32_head=True), model.config)
    assert isinstance(LocalEngine(policy, LetterTokenizer(), (1,)).backend.body, ModuleBody)


def test_weights_are_given_back_after_an_error():
    policy = Policy(small_model("lfm2_moe"), MIXED)
    with pytest.raises(KeyError), CastWeights(policy).used():
        raise KeyError
    assert {weight.dtype for weight in policy.model.parameters()} == {torch.float32}
