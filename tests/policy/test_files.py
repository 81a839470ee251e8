"""Model folders that are incomplete, broken, or from a stranger."""

import json
import shutil

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from transformers import LlavaConfig

from cohort.config import LoraConfig, ModelConfig
from cohort.errors import ConfigError, ModelError, RewardError
from cohort.policy import Precision, load_tokenizer, read_config
from cohort.policy.adapters import add_adapters
from cohort.policy.files import check_attention
from cohort.policy.load import load_model
from cohort.rewards.model import RewardModel
from cohort.train.inputs import chosen_model
from tests.conftest import DEMO_MODEL, tiny_llama

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft asks for it
SINGLE = Precision(torch.float32, torch.float32)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    tiny_llama().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "llama")  # transformers would guess an architecture from this name


def load(folder, **settings):
    return load_model(str(folder), SINGLE, torch.device("cpu"), **settings)


def change_tensors(file, change):
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def test_a_model_that_lacks_a_tensor_is_refused(folder):
    load(folder)
    names = ["model.norm.weight", "lm_head.weight", "model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"]
    change_tensors(folder / "model.safetensors", lambda tensors: [tensors.pop(name) for name in names])
    with pytest.raises(ModelError, match=r"lacks lm_head\.weight, model\.embed_tokens\.weight, .* and 1 more, which"):
        load(folder)


def test_a_model_with_a_tensor_of_another_shape_is_refused(folder):
    change_tensors(folder / "model.safetensors", lambda tensors: tensors.update({"lm_head.weight": torch.zeros(37, 5)}))
    with pytest.raises(
        ModelError, match=r"lm_head\.weight has the shape \[37, 5\] in the file, .* asks for \[37, 24\]"
    ):
        load(folder)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", "[" * 100_000, '{"model_type": "llama", "hidden_size": "wide"}', '{"model_type": "llama", "hidden_size": -4}',
     '{"model_type": 3}', '{"model_type": "llama", "dtype": "no"}', '{"model_type": "llama", "rope_parameters": 4}',
     '{"model_type": "llama", "num_attention_heads": 0}'],
)  # fmt: skip
def test_a_broken_configuration_is_a_clean_error(folder, text):
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelError):
        load(folder)


def test_a_model_without_a_configuration_is_not_guessed(folder):
    (folder / "config.json").unlink()
    for read in (load, lambda folder: read_config(str(folder))):
        with pytest.raises(ModelError, match=r"holds no config\.json"):
            read(folder)


@pytest.mark.parametrize("content", [b"", b"\0" * 100, b"\xff" * 100, b"\x08\0\0\0\0\0\0\0{}      "])
def test_broken_weights_are_a_clean_error(folder, content):
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError):
        load(folder)


def test_pickled_weights_need_the_flag(folder, tmp_path):
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="holds no weights"):
        load(folder)
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin.* set model\.allow_pickled_weights = true"):
        load(folder)
    assert torch.equal(
        load(folder, allow_pickled_weights=True).state_dict()["lm_head.weight"], weights["lm_head.weight"]
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_labels": 1}))
    shutil.copy(DEMO_MODEL / "tokenizer.json", folder)
    with pytest.raises(RewardError, match="cannot load the reward model"):
        RewardModel(str(folder), object())


class Evil:
    def __reduce__(self):
        return exec, ("raise SystemExit('the pickle ran')",)


def test_a_harmful_pickle_does_not_run_even_with_the_flag(folder):
    (folder / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Evil()}, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="cannot load a causal language model"):
        load(folder, allow_pickled_weights=True)


def test_remote_code_and_attention_from_the_hub_need_the_flag(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "evil.py").write_text("raise SystemExit('remote code ran')")
    (folder / "config.json").write_text(
        json.dumps(
            config | {"model_type": "evil", "auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}}
        )
    )
    for read in (load, lambda folder: read_config(str(folder))):
        with pytest.raises(ModelError, match="trust_remote_code"):
            read(folder)
    (folder / "tokenizer_config.json").write_text(
        '{"auto_map": {"AutoTokenizer": ["evil.T", null]}, "tokenizer_class": "T"}'
    )
    with pytest.raises(ModelError, match="trust_remote_code"):
        load_tokenizer(str(folder))
    (folder / "config.json").write_text(json.dumps(config | {"attn_implementation": "stranger/kernel"}))
    with pytest.raises(ModelError, match=r"names attention code on the hub, stranger/kernel.*trust_remote_code"):
        load(folder)
    shutil.copy(DEMO_MODEL / "tokenizer.json", folder)
    with pytest.raises(RewardError, match=r"names attention code on the hub, stranger/kernel.*pass it to RewardModel"):
        RewardModel(str(folder), object())
    parts = LlavaConfig()
    check_attention("model", parts)
    parts.vision_config._attn_implementation = "stranger/kernel"
    with pytest.raises(ModelError, match="names attention code"):
        check_attention("model", parts)


def test_adapters_from_strangers(folder, tmp_path):
    adapter = tmp_path / "adapter"
    add_adapters(tiny_llama(), LoraConfig(rank=2), SINGLE).save_pretrained(adapter)
    saved = adapter / "adapter_config.json"
    config = json.loads(saved.read_text()) | {"base_model_name_or_path": str(folder)}
    saved.write_text(json.dumps(config))
    load(adapter)
    change_tensors(adapter / "adapter_model.safetensors", lambda tensors: tensors.pop(sorted(tensors)[0]))
    with pytest.raises(ModelError, match="lacks base_model.model.*lora_A.weight"):
        load(adapter)
    for change, message in (
        ({"peft_type": "PROMPT_TUNING"}, "expected a low-rank adapter .* got 'PROMPT_TUNING'"),
        ({"megatron_config": {}, "megatron_core": "evil"}, "lacks"),
        ({"megatron_config": {"a": 1}, "megatron_core": "evil"}, "megatron_config"),
        ({"base_model_name_or_path": str(adapter)}, "is an adapter itself"),
        ({"base_model_name_or_path": 3}, "does not say which model"),
    ):
        saved.write_text(json.dumps(config | change))
        with pytest.raises(ModelError, match=message):
            load(adapter)
    saved.write_text(json.dumps(config))
    torch.save(load_file(adapter / "adapter_model.safetensors"), adapter / "adapter_model.bin")
    (adapter / "adapter_model.safetensors").unlink()
    for read in (load, lambda path: add_adapters(tiny_llama(), LoraConfig(adapter=str(path)), SINGLE)):
        with pytest.raises(ModelError, match=r"adapter_model\.bin.*allow_pickled_weights"):
            read(adapter)
    saved.write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        load(adapter)


def test_a_revision_of_a_hub_model_is_the_folder_of_its_snapshot(tmp_path, monkeypatch):
    # A cache of the hub in which only the revision is: nothing is downloaded.
    cached = tmp_path / "models--someone--tiny"
    folder = cached / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (cached / "refs").mkdir()
    (cached / "refs" / "v1.0").write_text(folder.name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    settings = ModelConfig(path="someone/tiny", revision="v1.0")
    assert chosen_model(None, settings) == str(folder)
    assert chosen_model("someone/tiny", settings) == str(folder)
    assert chosen_model(None, ModelConfig(path="someone/tiny")) == "someone/tiny"
    with pytest.raises(ModelError, match="cannot load revision 'v2.0' of 'someone/tiny'"):
        chosen_model(None, ModelConfig(path="someone/tiny", revision="v2.0"))
    with pytest.raises(ModelError, match="is a folder: unset it"):
        chosen_model(tmp_path, settings)
    with pytest.raises(ConfigError, match="an object in memory"):
        chosen_model(object(), settings)


def test_the_hub_is_asked_once_where_it_cannot_be_reached(monkeypatch):
    asked = []

    def unreachable(*arguments):
        asked.append(arguments)
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", unreachable)
    with pytest.raises(ModelError, match="so it was taken for a hub id.: the hub cannot be reached, and its cache"):
        load_tokenizer("nobody/has-this-model")
    assert asked == [("nobody/has-this-model", "config.json")]
