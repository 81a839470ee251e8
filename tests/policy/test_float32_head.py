"""The head in float32 under a model in bfloat16: in log-probs, their gradients, the model's own forward pass, sampling."""

import copy

import pytest
import torch
from torch.nn import functional

from cohort.config import LoraConfig, ModelConfig
from cohort.errors import ModelError
from cohort.policy import load_policy
from cohort.policy.anatomy import Anatomy
from cohort.policy.head import is_float32, use_float32_head
from cohort.policy.passes import PlainPasses
from cohort.rollout.local.weights import DecoderWeights
from tests.conftest import tiny_llama

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft asks for it
PROMPT, COMPLETION = (5, 9, 20), (4, 6, 7, 1)


def policy_of(**settings):
    model = tiny_llama()
    return load_policy(model, ModelConfig(device="cpu", **({"precision": "bfloat16"} | settings)), model.config)


def logps_and_gradient(policy):
    with policy.compute():
        found = policy.logps([PROMPT], [COMPLETION], 1.0).logps_N
        found.sum().backward()
    return found.detach(), policy.model.lm_head.weight.grad


@pytest.fixture(scope="module")
def wide():
    return policy_of(float32_head=True)


@pytest.mark.parametrize("plain", [False, True])
def test_log_probs_and_gradients_are_those_of_a_product_in_float32(wide, plain):
    policy = wide
    policy.model.zero_grad()
    if plain:  # a padded pass, for models that have no shared one
        policy = copy.copy(wide)
        policy.__dict__["passes"] = PlainPasses(wide, wide.passes.head)
    logps, gradient = logps_and_gradient(policy)
    caught = []
    handle = wide.model.model.norm.register_forward_hook(lambda *args: caught.append(args[-1]))
    with wide.compute(), torch.no_grad():
        own = wide.model(torch.tensor([[*PROMPT, *COMPLETION]]), use_cache=False).logits
    handle.remove()
    hidden = caught[0].detach().to(torch.bfloat16).float()[0, 2:-1]
    weight = wide.model.lm_head.weight.detach().requires_grad_()
    assert own.dtype == torch.float32
    torch.testing.assert_close(own[0, 2:-1], functional.linear(caught[0].float()[0, 2:-1], weight), rtol=0, atol=1e-5)
    expected = functional.linear(hidden, weight).log_softmax(-1)[range(4), COMPLETION]
    expected.sum().backward()
    # Hidden states of different kernels differ by bfloat16's rounding (2^-9 of their size), logits by that of a few.
    torch.testing.assert_close(logps, expected.detach(), rtol=0, atol=0.05)
    torch.testing.assert_close(gradient, weight.grad, rtol=0.05, atol=0.05)
    assert logps.to(torch.bfloat16).float().ne(logps).any()


def test_equal_hidden_states_have_equal_log_probs_in_every_product(wide):
    # The same bfloat16 hidden states through the trainer's head and the sampler's: no rounding to bfloat16 between them.
    hidden = torch.randn(64, 24, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    weights = DecoderWeights(Anatomy.of(wide.model), torch.bfloat16)
    weights.refresh(0)
    expected = functional.linear(hidden.float(), wide.model.lm_head.weight)
    with wide.compute(), torch.no_grad():
        trained = wide.passes.head.logits(hidden)
        called = wide.model.lm_head(hidden)
    sampled = weights.head(hidden)
    for logits in (trained, called, sampled):
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-5)


def test_copies_have_it_too_and_other_precisions_do_not_need_it(wide):
    assert is_float32(wide.copy_frozen().model.lm_head)
    reference = wide.reference()
    assert reference.model.lm_head.weight.dtype == torch.float32
    assert reference.model.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    assert not is_float32(policy_of(float32_head=True, precision="float32").model.lm_head)
    assert policy_of().passes.head.compute == torch.bfloat16


def test_a_head_with_adapters_is_refused():
    with pytest.raises(ModelError, match="needs a head that is a plain linear layer"):
        policy_of(float32_head=True, lora=LoraConfig(rank=2, target_modules=("q_proj", "lm_head")))


def test_a_head_of_another_class_is_refused():
    class Head(torch.nn.Linear):
        pass

    model = tiny_llama()
    model.set_output_embeddings(Head(24, 37, bias=False))
    with pytest.raises(ModelError, match="got a Head"):
        use_float32_head(model)
