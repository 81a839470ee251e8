"""Against a real vLLM server, of the environment that `make vllm` creates: `make vllm-test`."""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from cohort.config import ModelConfig, VLLMConfig
from cohort.errors import ConfigError, EngineError, PolicyMismatchError
from cohort.policy import load_policy
from cohort.rollout.own_server import OwnServer
from cohort.rollout.plugin import check_sizes, describe_server
from cohort.rollout.probe import ServerProbe
from cohort.rollout.transports import transport_of

PYTHON = Path(os.environ.get("COHORT_VLLM_PYTHON", Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"))
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not PYTHON.exists(), reason="no environment with vLLM: run `make vllm`"),
]

ARGUMENTS = ("--enforce-eager", "--max-model-len", "512", "--skip-tokenizer-init", "--gpu-memory-utilization", "0.1")
MAX_GAP = 5e-5
"""Nats. float32 products in another order: 1e-6 relative, of logits of up to about 10."""


def make_model(*, tied: bool, seed: int = 0):
    torch.manual_seed(seed)
    shape = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
    }  # vLLM: 32 or more each
    # Weights of 0.1 instead of 0.02: log-probs that differ from those of a uniform distribution.
    kind, config = (Qwen2ForCausalLM, Qwen2Config) if tied else (LlamaForCausalLM, LlamaConfig)
    return kind(config(**shape, **heads, tie_word_embeddings=tied, initializer_range=0.1)).eval()


def policy_of(model):
    return load_policy(model, ModelConfig(precision="float32"), model.config)


def settings(**values):
    return VLLMConfig(start=True, python=str(PYTHON), arguments=ARGUMENTS, update_timeout=60.0, **values)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; the arguments leave the rest of the memory alone
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@contextmanager
def running(model, folder, **values):
    model.save_pretrained(folder)
    own = OwnServer(settings(**values), str(folder), dtype="float32")
    try:
        own.wait(300)
        yield own
    finally:
        own.close()


def perturb(policy, seed):
    """An update of a size that a learning rate of 0.01 makes."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator))
    policy.version += 1


def update(server, transport, policy, version):
    state = policy.model.state_dict()
    if policy.model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    server.post("/pause", mode="wait")
    failed = transport.send([server], state.items(), version)
    assert not failed
    server.post("/update_weight_version", {"new_version": version})
    server.post("/reset_prefix_cache")
    server.post("/resume")


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_log_probs_agree_before_and_after_updates_by_both_transports(tied, tmp_path, record_property):
    policy = policy_of(make_model(tied=tied))
    with running(policy.model, tmp_path / "model") as own:
        server = own.server
        description = describe_server(server)
        assert description.dtype == torch.float32
        check_sizes(server, description.sizes, policy.model.config.to_dict())
        probe = ServerProbe(policy, None, {server: description.dtype})
        gaps = {"start": probe([server])["vllm/probe_gap_max"]}
        for transport_name in ("files", "group"):
            transport = transport_of(settings(transport=transport_name), torch.device("cpu"))
            transport.check([server])
            for number in range(2):
                perturb(policy, number)
                with pytest.raises(PolicyMismatchError, match="nats from the trainer's"):
                    probe([server])  # the update is large enough to be seen
                update(server, transport, policy, f"{transport_name}-{number}")
                gaps[f"{transport_name} {number}"] = probe([server])["vllm/probe_gap_max"]
            transport.close()
        print(f"\nlargest gaps in nats, {'tied' if tied else 'untied'}: {gaps}")
        assert max(gaps.values()) <= MAX_GAP
        assert server.weights_version() == "group-1"


def test_weights_that_do_not_arrive_are_reported(tmp_path):
    policy = policy_of(make_model(tied=False))
    with running(policy.model, tmp_path / "model") as own:
        transport = transport_of(settings(), torch.device("cpu"))
        transport.check([own.server])
        state = {name: one for name, one in policy.model.state_dict().items() if "layers.1.mlp.down_proj" not in name}
        failed = transport.send([own.server], state.items(), "1")
        assert "layers.1.mlp.down_proj.weight" in str(failed[own.server])


def test_a_server_that_cannot_start_shows_the_end_of_its_log(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    own = OwnServer(settings(), str(tmp_path), dtype="float32")
    with pytest.raises(EngineError, match="ended with exit code(.|\n)*config.json"):
        own.wait(120)


def test_a_server_without_the_plugin_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("cohort.rollout.own_server.PLUGIN_ARGUMENTS", ())
    policy = policy_of(make_model(tied=False))
    with running(policy.model, tmp_path / "model") as own:
        with pytest.raises(ConfigError, match="--worker-extension-cls"):
            describe_server(own.server)
        assert own.server.is_healthy()
