"""Models whose code comes with them: the permission reaches every reader of their config."""

import json

import pytest

import cohort
from cohort.config import GRPOConfig as Settings
from cohort.errors import ModelError
from cohort.trl import GRPOConfig, GRPOTrainer
from tests.conftest import tiny_llama
from tests.train.harness import ROWS, digits_reward

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft asks for it

CODE = """
from transformers import LlamaConfig, LlamaForCausalLM


class MyConfig(LlamaConfig):
    model_type = "cohort_custom_code"


class MyModel(LlamaForCausalLM):
    config_class = MyConfig
"""
SMALL = {"num_generations": 2, "max_completion_length": 4}


@pytest.fixture(scope="module")
def folder(demo_tokenizer, tmp_path_factory):
    """A model of a type that transformers does not know."""
    path = tmp_path_factory.mktemp("custom")
    tiny_llama(vocab_size=len(demo_tokenizer)).save_pretrained(path)
    demo_tokenizer.save_pretrained(path)
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    config |= {"model_type": "cohort_custom_code", "architectures": ["MyModel"]}
    config["auto_map"] = {"AutoConfig": "code.MyConfig", "AutoModelForCausalLM": "code.MyModel"}
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (path / "code.py").write_text(CODE, encoding="utf-8")
    return str(path)


def test_the_core_loads_it(folder, tmp_path):
    config = Settings(
        model={"trust_remote_code": True, "device": "cpu"},
        rollout={"prompts_per_step": 2, **SMALL},
        run={"output_dir": str(tmp_path / "run")},
    )
    assert type(cohort.GRPOTrainer(folder, digits_reward, config, ROWS).policy.model).__name__ == "MyModel"


@pytest.mark.parametrize(
    ("trust", "adapters"),
    [({"trust_remote_code": True}, True), ({"model_init_kwargs": {"trust_remote_code": True}}, False)],
    ids=["field", "kwargs"],
)
def test_a_trl_script_loads_it(folder, tmp_path, trust, adapters):
    peft_config = None
    if adapters:
        peft_config = pytest.importorskip("peft").LoraConfig(r=2, target_modules=["q_proj"])
    args = GRPOConfig(str(tmp_path / "run"), per_device_train_batch_size=2, max_steps=1, use_cpu=True, **SMALL, **trust)
    trainer = GRPOTrainer(folder, digits_reward, args, ROWS, peft_config=peft_config)
    assert type(trainer.processing_class).__name__ == "TokenizersBackend"
    assert "MyModel" in str(trainer.model)


def test_without_permission_it_is_refused(folder, tmp_path):
    args = GRPOConfig(str(tmp_path / "run"), per_device_train_batch_size=2, max_steps=1, use_cpu=True, **SMALL)
    with pytest.raises(ModelError, match="To run it, set trust_remote_code = true"):
        GRPOTrainer(folder, digits_reward, args, ROWS)
