"""What a run saves, exported and loaded, is what it trained; a run goes on from the adapter of another."""

import json
import logging

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from cohort.cli.main import main
from cohort.errors import ModelError
from cohort.policy import Precision, adapter_weights, load_model
from tests.conftest import telling, tiny_llama
from tests.train.harness import make_trainer, metrics_of

SINGLE = Precision(torch.float32, torch.float32)
IDS = torch.arange(5, 25)[None]
LORA = {"rank": 4, "target_modules": ["q_proj", "v_proj"]}
pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore:.*is_gradient_checkpointing.*:FutureWarning", "ignore::DeprecationWarning"
)


@pytest.fixture
def base(tmp_path, demo_tokenizer):
    tiny_llama(vocab_size=len(demo_tokenizer)).save_pretrained(tmp_path / "base")
    demo_tokenizer.save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


@torch.no_grad()
def logits(model):
    return model.eval()(IDS).logits


def trained(tokenizer, folder, model, **settings):
    trainer = make_trainer(tokenizer, folder, model, learning_rate=0.05, **{"max_steps": 2} | settings)
    trainer.train()
    return trainer


def saved(folder, step=2):
    return load_model(str(folder / f"checkpoints/step-{step}"), SINGLE, torch.device("cpu"))


def told(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


INITS = [(init, name) for init in (True, "pissa", "olora", "orthogonal") for name in ("default", "policy")]


@pytest.mark.parametrize(("init", "name"), telling(INITS, (True, "default"), ("pissa", "policy"), ("olora", "default")))
def test_a_given_adapter_is_saved_as_it_was_trained(tmp_path, demo_tokenizer, base, caplog, init, name):
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=init)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config, adapter_name=name)
    trainer = trained(demo_tokenizer, tmp_path / "run", model, beta=0.1, save_steps=1)
    torch.testing.assert_close(logits(saved(tmp_path / "run")), logits(trainer.policy.model), rtol=0, atol=1e-5)
    theirs = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "run/checkpoints/step-2")
    torch.testing.assert_close(logits(theirs), logits(trainer.policy.model), rtol=0, atol=1e-5)
    assert told(caplog) == []


def test_a_base_that_was_changed_in_memory_is_told(tmp_path, demo_tokenizer, base, caplog):
    model = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"]))
    trained(demo_tokenizer, tmp_path / "run", model, save_steps=1)
    (message,) = told(caplog)
    assert "step-1, loaded again, has logits that are off by" in message
    assert "base_model_name_or_path" in message


def test_an_adapter_on_a_model_that_is_nowhere_is_told(tmp_path, demo_tokenizer, caplog):
    model = get_peft_model(tiny_llama(vocab_size=len(demo_tokenizer)), LoraConfig(r=4, target_modules=["q_proj"]))
    trained(demo_tokenizer, tmp_path / "run", model)
    (message,) = told(caplog)
    assert "cannot be loaded by itself" in message


def test_a_hook_that_changes_results_is_told_and_another_is_not(tmp_path, demo_tokenizer, caplog):
    for factor in (1.0, 2.0):
        model = tiny_llama(vocab_size=len(demo_tokenizer))
        model.model.embed_tokens.register_forward_hook(lambda module, given, out, factor=factor: out * factor)
        trained(demo_tokenizer, tmp_path / str(factor), model)
        assert len(told(caplog)) == (factor == 2.0)


def test_a_run_goes_on_from_the_adapter_of_another(tmp_path, demo_tokenizer, base, caplog):
    """Its checkpoints hold what both runs have trained, and its reference is what it started from."""
    lora = {"lora": LORA, "beta": 0.1}
    before = logits(trained(demo_tokenizer, tmp_path / "one", base, **lora).policy.model)
    checkpoint = str(tmp_path / "one/checkpoints/step-2")
    for number, more in enumerate([{}, {"lora": LORA}]):
        folder = tmp_path / f"two{number}"
        further = trained(demo_tokenizer, folder, checkpoint, beta=0.1, save_steps=1, **more)
        assert further.policy.model.peft_config["default"].r == 4
        torch.testing.assert_close(logits(further.reference.model), before, rtol=0, atol=1e-6)
        assert (logits(further.policy.model) - before).abs().max() > 1e-3
        torch.testing.assert_close(logits(saved(folder)), logits(further.policy.model), rtol=0, atol=1e-5)
        named = json.loads((folder / "checkpoints/step-2/adapter_config.json").read_text())["base_model_name_or_path"]
        assert named == base
    assert told(caplog) == []
    longer = trained(demo_tokenizer, tmp_path / "long", checkpoint, beta=0.1, save_steps=1, max_steps=1)
    weights = {name: one.clone() for name, one in adapter_weights(longer.reference.model).items()}
    resumed = make_trainer(
        demo_tokenizer, tmp_path / "long", checkpoint, learning_rate=0.05, beta=0.1, save_steps=1, max_steps=2
    )
    resumed.train(resume=True)
    assert all(torch.equal(one, weights[name]) for name, one in adapter_weights(resumed.reference.model).items())
    assert metrics_of(tmp_path / "long")[-1]["kl/k3"] == metrics_of(tmp_path / "two0")[-1]["kl/k3"]


def test_another_adapter_than_that_of_the_model_is_refused(tmp_path, demo_tokenizer, base):
    trained(demo_tokenizer, tmp_path / "one", base, lora=LORA, max_steps=1)
    checkpoint = str(tmp_path / "one/checkpoints/step-1")
    for name, value, word in [
        ("rank", 8, "its rank is 4; model.lora.rank is 8"),
        ("variant", "dora", "its variant is 'lora'"),
        ("target_modules", ["k_proj"], "its target_modules is"),
        ("modules_to_save", ["lm_head"], "its modules_to_save is"),
        ("adapter", base, "its adapter is"),
    ]:
        lora = {name: value} if name in {"rank", "adapter"} else {"rank": 4, name: value}
        with pytest.raises(ModelError, match=word):
            make_trainer(demo_tokenizer, None, checkpoint, lora=lora)


def test_an_exported_run_from_an_adapter_is_what_it_trained(tmp_path, demo_tokenizer, base, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trained(demo_tokenizer, tmp_path / "one", base, lora=LORA, max_steps=1)
    further = trained(demo_tokenizer, tmp_path / "two", str(tmp_path / "one/checkpoints/step-1"))
    main(["export", "two", "out"])
    exported = AutoModelForCausalLM.from_pretrained("out")
    torch.testing.assert_close(logits(exported), logits(further.policy.model), rtol=0, atol=1e-5)


def test_the_comparison_draws_no_random_numbers_of_the_run(tmp_path, demo_tokenizer, base):
    """The generators after a run whose first save is compared are those after one that compares nothing."""
    found = []
    for check in (True, False):
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=4, target_modules=["q_proj"]))
        trained(demo_tokenizer, tmp_path / str(check), model, save_steps=1, check_saved=check)
        found.append(torch.get_rng_state())
    assert torch.equal(*found)
