"""Adapters: what they start as, what is trained, the reference without a second model, saving alone and merged."""

import json
import sys

import pytest
import torch

from cohort import GRPOConfig, GRPOTrainer
from cohort.config import LoraConfig, ModelConfig
from cohort.errors import ModelError
from cohort.policy import Policy, Precision, add_adapters, has_adapters, load_model, load_policy, merged, named_weights
from tests.conftest import telling, tiny_llama
from tests.families.configs import small_model

SINGLE = Precision(torch.float32, torch.float32)
MIXED = Precision(torch.float32, torch.bfloat16)
PROMPTS, COMPLETIONS = [(5, 9, 20), (7, 3)], [(4, 6, 11), (8, 8)]
# Of tests that call peft themselves.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")


def adapted(precision=SINGLE, model=None, **settings):
    settings = {"rank": 4} | settings
    return Policy(add_adapters(model or tiny_llama(), LoraConfig(**settings), precision), precision)


def trained(policy, size=0.2):
    """Adapters as they are after some training: B is no longer 0."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.requires_grad:
                parameter.add_(size * torch.randn(parameter.shape, generator=generator))
    return policy


def logps(policy):
    with torch.no_grad():
        return policy.logps(PROMPTS, COMPLETIONS, 1.0).logps_N


VARIANTS = [{}, {"variant": "rslora", "alpha": 3.0}, {"variant": "dora"}, {"target_modules": ["q_proj", "v_proj"]}]


@pytest.mark.parametrize("settings", VARIANTS)
def test_a_new_adapter_changes_nothing_and_alone_is_trained(settings):
    policy = adapted(**settings)
    # DoRA normalises columns and multiplies by their norm: float32 rounding.
    torch.testing.assert_close(logps(policy), logps(Policy(tiny_llama(), SINGLE)), rtol=0, atol=2e-6)
    names = [name for name, parameter in policy.model.named_parameters() if parameter.requires_grad]
    assert names
    assert all("lora_" in name for name in names)
    value = policy.logps(PROMPTS, COMPLETIONS, 1.0).logps_N.sum()
    value.backward()
    with_gradient = {name for name, parameter in policy.model.named_parameters() if parameter.grad is not None}
    assert with_gradient == set(names)


def test_scales_are_the_papers():
    """alpha / rank; rsLoRA: alpha / sqrt(rank)."""
    for variant, scale in (("lora", 8 / 4), ("rslora", 8 / 2)):
        module = adapted(variant=variant, alpha=8.0).model.base_model.model.model.layers[0].self_attn.q_proj
        assert module.scaling["default"] == scale
    assert adapted().model.peft_config["default"].lora_alpha == 8  # twice the rank


def test_a_tied_matrix_stays_as_it_is():
    policy = adapted(MIXED, tiny_llama(tie_word_embeddings=True))
    assert policy.model.get_base_model().get_input_embeddings().weight.dtype == torch.float32


def test_a_frozen_reference_is_half_as_large_and_the_same():
    policy = Policy(tiny_llama(), MIXED)
    reference = policy.reference()
    assert reference.model is not policy.model
    assert reference.model.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    assert policy.model.model.layers[0].mlp.up_proj.weight.dtype == torch.float32
    assert torch.equal(logps(reference), logps(policy))
    assert policy.reference(moves=True).model.model.layers[0].mlp.up_proj.weight.dtype == torch.float32


@pytest.mark.parametrize("settings", VARIANTS)
def test_merging_is_a_copy_with_the_same_log_probs(settings):
    policy = trained(adapted(**settings))
    before = logps(policy)
    whole = merged(policy.model)
    assert not has_adapters(whole)
    torch.testing.assert_close(logps(Policy(whole, SINGLE)), before, rtol=0, atol=1e-5)  # float32 sums, another order
    assert torch.equal(logps(policy), before)


def reward(completions, **_):
    return [sum(character.isdigit() for character in text) / (len(text) + 1) for text in completions]


@pytest.fixture
def base(tmp_path, demo_tokenizer):
    path = tmp_path / "base"
    tiny_llama(vocab_size=len(demo_tokenizer)).save_pretrained(path)
    demo_tokenizer.save_pretrained(path)
    return str(path)


def settings(base, folder, lora, **run):
    return GRPOConfig(
        model={"path": base, "precision": "float32", "lora": lora},
        rollout={"prompts_per_step": 2, "num_generations": 4, "max_completion_length": 6},
        optim={"learning_rate": 0.01},
        objective={"beta": 0.1},
        run={"output_dir": str(folder), "max_steps": 2, "save_steps": 1} | run,
        report={"progress": False},
    )


ROWS = [{"prompt": f"{number}+1"} for number in range(8)]


def run(config, *, resume=False):
    trainer = GRPOTrainer(args=config, reward_funcs=reward, train_dataset=ROWS)
    trainer.train(resume=resume)
    return trainer


@pytest.mark.parametrize("variant", telling(["lora", "rslora", "dora"], "lora"))
def test_a_run_saves_adapters_alone_and_merged_and_goes_on_from_them(tmp_path, base, variant):
    trainer = run(settings(base, tmp_path / "run", {"rank": 4, "variant": variant, "save_merged": True}))
    checkpoint, whole = tmp_path / "run/checkpoints/step-2", tmp_path / "run/merged"
    assert (checkpoint / "adapter_model.safetensors").exists()
    assert not (checkpoint / "model.safetensors").exists()
    assert json.loads((checkpoint / "adapter_config.json").read_text())["base_model_name_or_path"] == base
    ours = logps(trainer.policy)
    for folder in (checkpoint, whole):  # either loads as a model, for `cohort generate` and for a new run
        loaded = Policy(load_model(str(folder), SINGLE, torch.device("cpu")), SINGLE)
        torch.testing.assert_close(logps(loaded), ours, rtol=0, atol=1e-5)
    from peft import AutoPeftModelForCausalLM

    theirs = Policy(AutoPeftModelForCausalLM.from_pretrained(checkpoint), SINGLE)
    torch.testing.assert_close(logps(theirs), ours, rtol=0, atol=1e-6)
    # A new run that trains on: the reference is the adapter as it was loaded.
    further = run(settings(base, tmp_path / "further", {"adapter": str(checkpoint)}))
    torch.testing.assert_close(logps(further.reference), ours, rtol=0, atol=1e-6)
    assert further.last_metrics["kl/k3"] > 0


@pytest.mark.parametrize(
    "lora",
    [
        pytest.param({"rank": 4}, marks=pytest.mark.slow),
        {"rank": 2, "variant": "dora", "modules_to_save": ["lm_head"]},
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, base, lora):
    whole = run(settings(base, tmp_path / "whole", lora, max_steps=3))
    run(settings(base, tmp_path / "run", lora, max_steps=2))
    resumed = run(settings(base, tmp_path / "run", lora, max_steps=3), resume=True)
    assert torch.equal(logps(resumed.policy), logps(whole.policy))
    assert resumed.last_metrics["kl/k3"] == whole.last_metrics["kl/k3"]


def test_adapters_on_four_bits_train_as_on_the_values_that_these_stand_for():
    """QLoRA: log-probs and the adapters' gradients are those of a model that holds the dequantized matrices, also after
    passes without gradients, and on a processor for which bitsandbytes packs its weights then."""
    from bitsandbytes.functional import dequantize_4bit

    config = {"path": "cohort:demo", "device": "cpu", "precision": "float32", "native_kernels": False}
    policies = [
        load_policy("cohort:demo", ModelConfig(**config, quantization=bits, lora={"rank": 4}), None)
        for bits in ("4bit", "none")
    ]
    layers = [dict(policy.model.named_modules()) for policy in policies]
    quantized = [name for name, module in layers[0].items() if name.endswith("proj.base_layer")]
    assert len(quantized) == 21  # seven matrices of each of the three layers; the head stays as it is
    for name in quantized:
        weight = layers[0][name].weight
        layers[1][name].weight.data = dequantize_4bit(weight.data, weight.quant_state)
        layers[0][name].support_avx512bf16_for_cpu = True
    found = []
    for policy in policies:
        logps(trained(policy))
        values = policy.logps(PROMPTS, COMPLETIONS, 1.0).logps_N
        values.sum().backward()
        grads = {name: one.grad for name, one in policy.model.named_parameters() if one.requires_grad}
        found.append((values.detach(), grads))
    # float32, and sums in another order: bitsandbytes' own product on one side.
    torch.testing.assert_close(*(values for values, _ in found), rtol=1e-4, atol=1e-4)
    for name, grad in found[0][1].items():
        torch.testing.assert_close(grad, found[1][1][name], rtol=1e-3, atol=1e-3 * float(grad.abs().max()))


def test_the_base_of_four_bits_is_named_by_the_values_that_it_stands_for():
    """As vLLM gets it beside the adapter, also after a pass."""
    from bitsandbytes.functional import dequantize_4bit

    config = {"path": "cohort:demo", "device": "cpu", "precision": "float32", "native_kernels": False}
    policy = load_policy("cohort:demo", ModelConfig(**config, quantization="4bit", lora={"rank": 4}), None)
    logps(policy)
    sent = dict(named_weights(policy, base=True))
    plain = dict(named_weights(load_policy("cohort:demo", ModelConfig(**config), None)))
    assert sent.keys() == plain.keys()
    assert all(sent[name].shape == weight.shape for name, weight in plain.items())
    modules = dict(policy.model.get_base_model().named_modules())
    own = modules["model.layers.1.mlp.up_proj"].base_layer.weight
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(sent[name], dequantize_4bit(own.data, own.quant_state))
    assert 0 < float((sent[name] - plain[name]).abs().max()) < 0.2 * float(plain[name].abs().max())


def test_adapters_that_cannot_be(tmp_path, monkeypatch, base):
    with pytest.raises(ModelError, match=r"model\.lora does not fit LlamaForCausalLM.*no_such"):
        adapted(target_modules=["no_such"])
    with pytest.raises(ModelError, match=r"no adapter_config\.json"):
        adapted(rank=0, adapter=str(tmp_path))
    with pytest.raises(ModelError, match="'8bit' needs CUDA"):
        load_model(base, SINGLE, torch.device("cpu"), quantization="8bit")
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ModelError, match=r"cohort-rl\[lora\]"):
        adapted()


def test_adapters_that_the_model_bypasses_are_refused():
    """Gemma 3n clamps a layer's weight in training mode and multiplies by it, past the adapter."""
    model = small_model("gemma3n_text")
    assert load_policy(model, ModelConfig(precision="float32", lora=LoraConfig(rank=2)), model.config).passes.shared
    model = small_model("gemma3n_text")
    with pytest.raises(ModelError, match="uses the weights of correction_coefs past their adapters"):
        load_policy(model, ModelConfig(precision="float32", dropout=True, lora=LoraConfig(rank=2)), model.config)


def test_adapters_that_a_model_cannot_run_with_are_refused():
    """Its routers are linear layers that return several tensors."""
    model = small_model("phimoe")
    with pytest.raises(ModelError, match="PhimoeForCausalLM cannot run with adapters on these layers"):
        load_policy(model, ModelConfig(precision="float32", lora=LoraConfig(rank=2)), model.config)
