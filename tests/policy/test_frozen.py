"""Frozen weights under adapters: in the compute dtype from the file on, with the results of float32 ones."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from cohort.config import ModelConfig
from cohort.policy import Policy, Precision, adapters, load, load_policy, merged
from cohort.policy.load import matrices, read_config
from cohort.rollout import LocalEngine, RNGKey, Sampling
from cohort.runs.models import save_model
from tests.conftest import telling
from tests.families.configs import small_model
from tests.rollout.test_local_engine import LetterTokenizer, prompts

MIXED = Precision(torch.float32, torch.bfloat16)
PROMPTS, COMPLETIONS = [(3, 4, 5, 6, 7), (8, 9, 10)], [(11, 12, 13, 14), (5, 6)]
# Of peft, about layers of GPT-2 and about experts.
pytestmark = [
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning"),
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning"),
]
ATTENTION = {"rank": 4, "target_modules": ["q_proj", "v_proj"]}
ALL = {"rank": 4}
MODELS = {
    "llama": ALL,
    "qwen3": ALL,
    "gemma3_text": ALL,
    "gpt2": ALL,
    "qwen3_moe": ALL,
    "qwen3_moe, attention": ATTENTION,
    "gpt_oss, attention": ATTENTION,
    "lfm2": ALL,
    "qwen3_5_text": ALL,
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Folders of small models, written once."""
    made = {}

    def folder(name, dtype=torch.bfloat16):
        family = name.partition(",")[0]
        if (family, dtype) not in made:
            made[family, dtype] = tmp_path_factory.mktemp(family)
            small_model(family).to(dtype).save_pretrained(made[family, dtype])
        return str(made[family, dtype])

    return folder


def loaded(folder, lora, **settings):
    config = ModelConfig(path=folder, precision="bfloat16", device="cpu", lora=lora, **settings)
    return load_policy(folder, config, read_config(folder), seed=3)


def as_before(monkeypatch, folder, lora, **settings):
    """The policy with everything but the matrices of linear layers in float32, read in float32."""
    with monkeypatch.context() as patches:
        patches.setattr(load, "_as_stored", lambda *_: {})
        patches.setattr(adapters, "keep_in_compute_dtype", linears_alone)
        return loaded(folder, lora, **settings)


def linears_alone(model, precision):
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for module in model.modules():
        if type(module) is nn.Linear and not module.weight.requires_grad and id(module.weight) not in tables:
            module.weight.data = module.weight.data.to(precision.compute)


def trained(policy):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in policy.model.parameters():
            if weight.requires_grad:
                weight.add_(0.05 * torch.randn(weight.shape, generator=generator))
    return policy


def results(policy):
    """Log-probs, gradients and draws."""
    with policy.gradients_in_place():
        logps = policy.logps(PROMPTS, COMPLETIONS, 1.0).logps_N
        logps.sum().backward()
    found = {name: weight.grad for name, weight in policy.model.named_parameters() if weight.grad is not None}
    assert any(bool(gradient.any()) for gradient in found.values())
    groups = LocalEngine(policy, LetterTokenizer(), (1,)).generate(
        prompts((5, 9, 20), (7,)), 2, Sampling(max_completion_length=8), RNGKey(5, 0)
    )
    drawn = [completion for group in groups for completion in group.completions]
    return found | {
        "logps": logps.detach(),
        "drawn": [list(one.token_ids) for one in drawn],
        "logps of draws": [list(one.sampler_logps) for one in drawn],
    }


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        same = torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
        assert same, name


def without_dtypes(policy):
    """The initial weights and buffers, in float64, in which nothing is rounded."""
    return {name: tensor.detach().double() for name, tensor in policy.model.named_parameters()} | dict(
        policy.model.named_buffers()
    )


@pytest.mark.parametrize("name", telling(list(MODELS), "llama", "gemma3_text", "gpt2", "qwen3_moe, attention", "lfm2"))
def test_narrow_weights_give_the_results_of_wide_ones_bit_for_bit(monkeypatch, folder_of, name):
    folder, lora = folder_of(name), MODELS[name]
    before, now = as_before(monkeypatch, folder, lora), loaded(folder, lora)
    assert_equal(without_dtypes(now), without_dtypes(before))
    assert now.model.config.to_dict() == before.model.config.to_dict()
    assert_equal(results(trained(now)), results(trained(before)))
    assert now.passes.description == before.passes.description


def test_matrices_are_in_the_compute_dtype_and_the_rest_is_in_float32(folder_of):
    policy = loaded(folder_of("qwen3_moe"), ATTENTION)
    frozen = matrices(policy.model)
    for name, weight in policy.model.named_parameters():
        narrow = name in frozen and not weight.requires_grad
        assert weight.dtype == (torch.bfloat16 if narrow else torch.float32), name
    experts = [name for name in frozen if "experts" in name]
    assert len(experts) == 4
    assert all(frozen[name].ndim == 3 for name in experts)
    table = policy.model.get_input_embeddings()
    assert table.weight.dtype == torch.bfloat16
    assert table(torch.tensor([3])).dtype == torch.float32


def test_an_embedding_that_scales_in_its_own_dtype_and_adapted_experts_stay_in_float32(folder_of):
    assert loaded(folder_of("gemma3_text"), ALL).model.get_input_embeddings().weight.dtype == torch.float32
    adapted = matrices(loaded(folder_of("qwen3_moe"), ALL).model)
    assert {weight.dtype for name, weight in adapted.items() if "gate_up_proj" in name} == {torch.float32}


def test_a_table_with_other_values_stays_as_it_is(folder_of):
    """What a float32 file has is not rounded, and no other table than it is read."""
    policy = loaded(folder_of("llama", torch.float32), ALL)
    table = policy.model.get_input_embeddings().weight
    assert table.dtype == torch.float32
    assert torch.equal(table, small_model("llama").get_input_embeddings().weight)


class Largest(TorchDispatchMode):
    """The largest float32 tensor that operations return."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, tuple | list) else [out]:
            if isinstance(one, torch.Tensor) and one.dtype == torch.float32 and one.device.type != "meta":
                self.size = max(self.size, one.untyped_storage().nbytes() // 4)
        return out


@pytest.mark.parametrize("name", ["llama", "qwen3_moe, attention", "lfm2"])
def test_no_float32_tensor_of_a_matrix_is_made(monkeypatch, folder_of, name):
    folder, lora = folder_of(name), MODELS[name] | {"rank": 1}
    # The check of adapters runs the model, whose activations and layers are as small as a matrix here.
    monkeypatch.setattr("cohort.policy.policy.check_targets", lambda *_: None)
    with Largest() as now:
        policy = loaded(folder, lora)
    with Largest() as before:
        as_before(monkeypatch, folder, lora)
    smallest = min(weight.numel() for weight in matrices(policy.model).values() if not weight.requires_grad)
    assert now.size < smallest <= before.size


def test_the_saved_merged_model_is_byte_for_byte_the_same(monkeypatch, tmp_path, folder_of, demo_tokenizer):
    for name in ("llama", "gpt2", "qwen3_moe, attention"):
        folder, lora = folder_of(name), MODELS[name]
        before, now = as_before(monkeypatch, folder, lora), loaded(folder, lora)
        for kind, policy in (("before", before), ("now", now)):
            save_model(trained(policy), demo_tokenizer, tmp_path / name / kind, merge=True)
            save_model(policy, demo_tokenizer, tmp_path / name / kind / "adapter")
        for file in ("model.safetensors", "config.json", "adapter/adapter_model.safetensors"):
            assert (tmp_path / name / "now" / file).read_bytes() == (tmp_path / name / "before" / file).read_bytes()
        assert {weight.dtype for weight in merged(now.model).parameters()} == {torch.float32}


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_modules_that_are_trained_in_full_lose_nothing(monkeypatch, tmp_path, folder_of, demo_tokenizer, target):
    """They, the reference's copy of them, and saved ones that another run goes on from."""
    lora, folder = ATTENTION | {"modules_to_save": [target]}, folder_of("llama")
    before, now = trained(as_before(monkeypatch, folder, lora)), trained(loaded(folder, lora))
    assert_equal(logps(now.reference()), logps(before.reference()))
    assert_equal(results(now), results(before))
    save_model(now, demo_tokenizer, tmp_path / "adapter")
    going_on = {"adapter": str(tmp_path / "adapter")}
    before, now = as_before(monkeypatch, folder, going_on), loaded(folder, going_on)
    assert_equal(without_dtypes(now), without_dtypes(before))
    assert_equal(results(now), results(before))


def logps(policy):
    with torch.no_grad():
        return {"logps": policy.logps(PROMPTS, COMPLETIONS, 1.0).logps_N}


@pytest.mark.parametrize("settings", [{"float32_head": True}, {"gradient_checkpointing": True}])
def test_a_tied_table_under_other_settings(monkeypatch, folder_of, settings):
    before = trained(as_before(monkeypatch, folder_of("lfm2"), ALL, **settings))
    now = trained(loaded(folder_of("lfm2"), ALL, **settings))
    head, table = now.model.get_output_embeddings(), now.model.get_input_embeddings()
    assert head.weight is table.weight
    assert table.weight.dtype == torch.bfloat16
    assert_equal(results(now), results(before))


@pytest.mark.parametrize("variant", ["dora", "rslora"])
def test_new_adapters_are_not_rounded(monkeypatch, folder_of, variant):
    lora = {"rank": 4, "variant": variant}
    before, now = as_before(monkeypatch, folder_of("llama"), lora), loaded(folder_of("llama"), lora)
    assert_equal(without_dtypes(now), without_dtypes(before))
    assert_equal(results(trained(now)), results(trained(before)))


def test_copies_are_the_same(folder_of):
    policy = trained(loaded(folder_of("lfm2"), ALL))
    expected = logps(policy)
    for copied in (policy.snapshot(), policy.copy_frozen(), Policy(copy.deepcopy(policy.model), MIXED)):
        assert_equal(logps(copied), expected)


def test_a_frozen_reference_has_narrow_experts_and_the_same_log_probs():
    policy = Policy(small_model("qwen3_moe"), MIXED)
    reference = policy.reference()
    assert reference.model.model.layers[0].mlp.experts.down_proj.dtype == torch.bfloat16
    assert reference.model.get_input_embeddings().weight.dtype == torch.float32
    assert_equal(logps(reference), logps(policy))
