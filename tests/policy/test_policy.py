"""Statistics of policies, dropout, references and loading."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from cohort.errors import ModelError
from cohort.policy import (
    Policy,
    Precision,
    end_token_ids,
    load,
    load_model,
    load_tokenizer,
    resolve_device,
    resolve_precision,
)
from tests.conftest import tiny_llama
from tests.policy.plain import SINGLE, plain_logps, plain_rows

PROMPTS = [(5, 9, 20), (7,), (30, 31, 32, 33, 34, 35, 36), (2, 3)]
COMPLETIONS = [(4, 6, 1), (8, 8, 8, 8, 8, 1), (1,), (12, 13)]


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_statistics_are_those_of_the_plain_forward_pass(float64_policy, temperature):
    with torch.no_grad():
        logps, entropy, collision = float64_policy.logps(PROMPTS, COMPLETIONS, temperature)
        expected = plain_logps(float64_policy, PROMPTS, COMPLETIONS, temperature)
        rows = [plain_rows(float64_policy, p, c) for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    torch.testing.assert_close(logps, expected, rtol=0, atol=1e-12)
    log_probs = torch.log_softmax(torch.cat(rows) / temperature, -1)
    torch.testing.assert_close(entropy, -(log_probs.exp() * log_probs).sum(-1), rtol=0, atol=1e-12)
    torch.testing.assert_close(collision, log_probs.exp().square().sum(-1), rtol=1e-12, atol=0)


def test_log_probs_are_float32_whatever_the_model_computes_in():
    policy = Policy(tiny_llama(), Precision(torch.float32, torch.bfloat16))
    logps, entropy, _ = policy.logps(PROMPTS, COMPLETIONS, 1.0)
    assert logps.dtype == entropy.dtype == torch.float32
    exact, *_ = Policy(tiny_llama(), SINGLE).logps(PROMPTS, COMPLETIONS, 1.0)
    gap = (logps - exact).abs()
    assert 0 < gap.max() < 0.3  # bfloat16 keeps 8 bits: it differs, but is the same function
    logps.sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in policy.model.parameters())


def test_dropout_is_off_everywhere_by_default():
    config = GPT2Config(vocab_size=37, n_embd=24, n_layer=2, n_head=2, n_positions=64)
    assert config.attn_pdrop == config.resid_pdrop == config.embd_pdrop == 0.1
    policy = Policy(GPT2LMHeadModel(config), SINGLE)
    policy.model.train()
    first, second = (policy.logps(PROMPTS, COMPLETIONS, 1.0)[0] for _ in range(2))
    assert first.tolist() == second.tolist()


def test_moving_the_reference_mixes_weights(float32_policy):
    reference = float32_policy.copy_frozen()
    old = [p.clone() for p in reference.model.parameters()]
    with torch.no_grad():
        for parameter in float32_policy.model.parameters():
            parameter.add_(1.0)
    reference.move_toward(float32_policy, 0.25)
    for before, after in zip(old, reference.model.parameters(), strict=True):
        torch.testing.assert_close(after, before + 0.25)


def test_end_tokens_of_all_holders_are_joined():
    model = tiny_llama()
    model.generation_config.eos_token_id = [1, 7]
    model.config.eos_token_id = 3

    class Tokenizer:
        eos_token_id = 9

    assert end_token_ids(model, Tokenizer()) == (1, 3, 7, 9)


@pytest.mark.parametrize(
    ("vendor", "amx", "pairs", "wide", "narrow"),
    [
        ("GenuineIntel", True, True, torch.bfloat16, torch.bfloat16),
        ("GenuineIntel", False, True, torch.float32, torch.float32),
        ("AuthenticAMD", False, True, torch.bfloat16, torch.float32),
        ("AuthenticAMD", False, False, torch.float32, torch.float32),
    ],
)
def test_precision_auto_is_the_faster_one(monkeypatch, tmp_path, vendor, amx, pairs, wide, narrow):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: pairs)
    (tmp_path / "cpuinfo").write_text(f"vendor_id : {vendor}\n")
    monkeypatch.setattr(load, "CPU_INFO", tmp_path / "cpuinfo")
    found = [resolve_precision("auto", torch.device("cpu"), hidden_size=size) for size in (256, 255)]
    assert found == [Precision(torch.float32, wide), Precision(torch.float32, narrow)]


def test_precisions_by_name():
    assert resolve_precision("float64", torch.device("cpu")) == Precision(torch.float64, torch.float64)
    assert str(resolve_precision("bfloat16", torch.device("cpu"))) == "bfloat16 over float32 weights"


def test_a_misspelt_folder_is_answered_before_any_network(tmp_path, monkeypatch):
    """A name whose first part is a folder here is no hub id: asking the hub took half a minute of retries."""
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("asked the network"))
    with pytest.raises(ModelError, match=r"\Ano model folder runs/mien; did you mean runs/mine\?\Z"):
        load_tokenizer("runs/mien")


def test_models_that_cannot_be_loaded(tmp_path):
    with pytest.raises(ModelError, match="no model given"):
        load_tokenizer("")
    with pytest.raises(ModelError, match="no model folder ./nowhere"):
        load_tokenizer("./nowhere")
    tiny_llama().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="holds no tokenizer"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot load a causal language model"):
        load_model(str(tmp_path), SINGLE, torch.device("cpu"))
    with pytest.raises(ModelError, match="cannot be used here"):
        resolve_device("cuda:99")
