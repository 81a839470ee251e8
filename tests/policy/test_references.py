"""References: what the policy was when they were made, whatever is trained, and no change of the policy."""

import types

import pytest
import torch
from peft import IA3Config, LoHaConfig, LoraConfig, PeftModel, get_peft_model

from cohort.config import ModelConfig
from cohort.errors import ModelError
from cohort.policy import Policy, Precision, adapter_weights, load_policy
from tests.conftest import tiny_llama

SINGLE = Precision(torch.float32, torch.float32)
PROMPTS, COMPLETIONS = [(5, 9, 20), (7, 3)], [(4, 6, 11), (8, 8)]
PLAIN = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore:.*is_gradient_checkpointing.*:FutureWarning")


def logps(policy):
    with torch.no_grad():
        return policy.logps(PROMPTS, COMPLETIONS, 1.0).logps_N


def wrapped(config=None, name="default", **settings):
    torch.manual_seed(1)
    return get_peft_model(tiny_llama(), config or LoraConfig(**{**PLAIN, **settings}), adapter_name=name)


def given(model):
    return load_policy(model, ModelConfig(device="cpu", precision="float32"), model.config)


def train(policy):
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))


KINDS = {
    "zero": {},
    "pissa": {"init_lora_weights": "pissa"},
    "olora": {"init_lora_weights": "olora"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "random": {"init_lora_weights": False},
    "dora": {"use_dora": True},
    "all biases": {"bias": "all"},
    "biases of the layers": {"bias": "lora_only"},
    "a module in full": {"modules_to_save": ["lm_head"]},
    "rows of the embedding": {"trainable_token_indices": [4, 6, 8]},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "another name": {"name": "policy"},
    "named reference": {"name": "reference", "init_lora_weights": False},
    "IA3": {"config": IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])},
    "LoHa": {"config": LoHaConfig(r=2, target_modules=["q_proj"], init_weights=False)},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_reference_stays_what_the_policy_was_and_leaves_it_alone(kind):
    settings = dict(KINDS[kind])
    if settings.get("bias"):
        settings["config"] = LoraConfig(**PLAIN, **settings)
        model = get_peft_model(tiny_llama(attention_bias=True), settings["config"])
    else:
        model = wrapped(**settings)
    policy = given(model)
    before = logps(policy)
    reference = policy.reference()
    assert torch.equal(logps(policy), before)
    torch.testing.assert_close(logps(reference), before, rtol=0, atol=2e-6)
    weights = {name: one.clone() for name, one in adapter_weights(policy.model).items()}
    train(policy)
    assert any(not torch.equal(one, weights[name]) for name, one in adapter_weights(policy.model).items())
    assert (logps(policy) - before).abs().max() > 1e-3
    torch.testing.assert_close(logps(reference), before, rtol=0, atol=2e-6)
    # The base's weights are there once; a reference without weights of its own is the model without its adapter.
    frozen = {id(one) for name, one in policy.model.named_parameters() if not one.requires_grad}
    assert frozen <= {id(one) for one in reference.model.parameters()}
    assert (reference.model is policy.model) == (kind in {"zero", "dora", "embedding", "another name"})


def test_a_reference_that_is_the_policy_itself_is_refused():
    """As after ``model.forward = wrapper(model.forward)``, which a copy of the model keeps."""
    model = tiny_llama()
    forward = model.forward
    model.forward = lambda *args, **named: forward(*args, **named)
    with pytest.raises(ModelError, match="a reference that stays as it is"):
        Policy(model, SINGLE).reference()
    model.forward = types.MethodType(type(model).forward, model)  # of which a copy is the copy's
    Policy(model, SINGLE).reference()


def test_a_hook_that_asks_for_gradients_of_the_embedding_is_no_trained_weight():
    model = wrapped()
    model.enable_input_require_grads()
    given(model).reference()


def test_what_trains_of_a_given_model_is_what_is_saved_or_it_is_refused():
    frozen = wrapped()
    frozen.requires_grad_(False)
    with pytest.raises(ModelError, match=r"no weight of the given model requires a gradient.*is_trainable=True"):
        given(frozen)
    beside = wrapped()
    beside.get_base_model().model.norm.weight.requires_grad_()
    with pytest.raises(ModelError, match=r"1 weights .* not part of its active adapter 'default'.*modules_to_save"):
        given(beside)
    both = wrapped()
    both.add_adapter("other", LoraConfig(**PLAIN))
    assert set(adapter_weights(given(both).model)) == set(adapter_weights(given(wrapped()).model))
    both.base_model.set_adapter(["default", "other"])
    with pytest.raises(ModelError, match=r"2 active adapters \(default, other\)"):
        given(both)


def test_an_adapter_that_transformers_loaded_is_refused(tmp_path):
    tiny_llama().save_pretrained(tmp_path / "base")
    wrapped().save_pretrained(tmp_path / "adapter")
    model = tiny_llama()
    model.load_adapter(str(tmp_path / "adapter"))
    with pytest.raises(ModelError, match="AutoPeftModelForCausalLM"):
        given(model)


def test_an_adapter_read_without_gradients_is_refused(tmp_path):
    wrapped().save_pretrained(tmp_path / "adapter")
    model = PeftModel.from_pretrained(tiny_llama(), str(tmp_path / "adapter"))
    with pytest.raises(ModelError, match="is_trainable=True"):
        given(model)
    given(PeftModel.from_pretrained(tiny_llama(), str(tmp_path / "adapter"), is_trainable=True))
