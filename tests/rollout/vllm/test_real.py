"""Against a real vLLM server, of the environment that `make vllm` creates: `make vllm-test`."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from cohort import GRPOConfig, GRPOTrainer
from cohort.config import ModelConfig, VLLMConfig
from cohort.data import DataCursor
from cohort.demo.task import accuracy, problems
from cohort.errors import ConfigError, EngineError, PolicyMismatchError
from cohort.policy import load_policy
from cohort.rollout import RNGKey, Sampling, Watch
from cohort.rollout.vllm.connect import ServerProbe
from cohort.rollout.vllm.own_server import OwnServer
from cohort.rollout.vllm.plugin import check_sizes, describe_server
from cohort.rollout.vllm.transports import transport_of
from tests.conftest import DEMO_MODEL

PYTHON = Path(os.environ.get("COHORT_VLLM_PYTHON", Path(__file__).parents[3] / ".venv-vllm" / "bin" / "python"))
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not PYTHON.exists(), reason="no environment with vLLM: run `make vllm`"),
]

ARGUMENTS = ("--enforce-eager", "--max-model-len", "512", "--skip-tokenizer-init", "--gpu-memory-utilization", "0.1")
SHORT = ("--enforce-eager", "--max-model-len", "256", "--gpu-memory-utilization", "0.1")
"""With a tokenizer, for the demo's model."""
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
    return VLLMConfig(
        start=True, python=str(PYTHON), arguments=values.pop("arguments", ARGUMENTS), update_timeout=60.0, **values
    )


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
        gaps = {"start": probe(server)["vllm/probe_gap_max"]}
        for transport_name in ("files", "group"):
            transport = transport_of(settings(transport=transport_name), torch.device("cpu"))
            transport.check(server)
            for number in range(2):
                perturb(policy, number)
                with pytest.raises(PolicyMismatchError, match="nats from the trainer's"):
                    probe(server)  # the update is large enough to be seen
                update(server, transport, policy, f"{transport_name}-{number}")
                gaps[f"{transport_name} {number}"] = probe(server)["vllm/probe_gap_max"]
            transport.close()
        print(f"\nlargest gaps in nats, {'tied' if tied else 'untied'}: {gaps}")
        assert max(gaps.values()) <= MAX_GAP
        assert server.weights_version() == "group-1"


def grpo(tmp_path, steps=1, **vllm):
    config = GRPOConfig(
        model={"precision": "float32", "device": "cpu"},
        data={"format": "chat", "prompt_column": "question"},
        rollout={"engine": "vllm", "prompts_per_step": 16, "num_generations": 8, "max_completion_length": 96},
        vllm={"update_timeout": 60.0, **vllm},
        optim={"learning_rate": 1e-4, "lr_scheduler_type": "constant"},
        run={"max_steps": steps, "output_dir": str(tmp_path / "run")},
        report={"progress": False},
    )
    return GRPOTrainer(str(DEMO_MODEL), accuracy, config, problems(1000, held_out=False, seed=0))


@pytest.mark.parametrize("transport", ["files", "group"])
def test_20_updates_raise_the_reward(transport, tmp_path):
    """The demo's task and model, which forgets more than half of the carries."""
    started = {"start": True, "python": str(PYTHON), "arguments": SHORT}
    trainer = grpo(tmp_path, steps=20, transport=transport, **started)
    steps = list(trainer.steps())
    rewards = [step["reward/mean"] for step in steps]
    gaps = [step["vllm/probe_gap_max"] for step in steps]
    seconds = sorted(step["seconds/weights"] for step in steps)
    trainer.engine.close()
    print(f"\n{transport}: rewards {rewards}; largest gap {max(gaps):.2g} nats; seconds of an update {seconds[10]:.3f}")
    assert trainer.policy.version == 20
    assert max(gaps) <= MAX_GAP
    assert sum(rewards[-5:]) > sum(rewards[:5])
    assert "Application startup complete" in (tmp_path / "run" / "logs" / "vllm.log").read_text()


def test_a_server_that_is_killed_in_a_rollout_is_replaced_by_the_other(tmp_path):
    servers = [OwnServer(settings(arguments=SHORT), str(DEMO_MODEL), dtype="float32") for _ in range(2)]
    try:
        for own in servers:
            own.wait(300)
        trainer = grpo(tmp_path, url=[own.server.url for own in servers], transport="group")
        engine, policy = trainer.engine, trainer.policy
        prompts = trainer.prompts.fetch(DataCursor(), 16)
        sampling, key = Sampling.of(trainer.args.rollout), RNGKey(0, 1)
        engine.update_weights(0)
        undisturbed = engine.generate(prompts, 8, sampling, key)
        ended = []

        def kill(prompt, sample, completion):
            ended.append(prompt)
            if len(ended) == 10:
                process = int(
                    Path(f"/proc/{servers[0]._process.pid}/task/{servers[0]._process.pid}/children").read_text()
                )
                os.killpg(process, signal.SIGKILL)

        groups = engine.generate(prompts, 8, sampling, key, Watch(on_completion=kill))
        found = engine.metrics()
        assert len(ended) == 128
        assert found["vllm/servers"] == 1
        assert found["vllm/failures"] >= 1
        same = [
            list(a.token_ids) == list(b.token_ids)
            for one, other in zip(groups, undisturbed, strict=True)
            for a, b in zip(one.completions, other.completions, strict=True)
        ]
        gap = max(_gap(policy, group) for group in groups)
        print(f"\nfailures {found['vllm/failures']}; {sum(same)} of 128 completions as undisturbed; gap {gap:.2g} nats")
        assert gap <= MAX_GAP
        assert sum(same) >= 120  # a retry repeats the draw up to rounding
        perturb(policy, 0)
        engine.update_weights(policy.version)
        assert max(_gap(policy, group) for group in engine.generate(prompts[:2], 2, sampling, key)) <= MAX_GAP
        engine.close()
    finally:
        for own in servers:
            own.close()


@torch.no_grad()
def _gap(policy, group):
    """The largest difference between the sampler's log-probs of a group and the trainer's, in nats."""
    ids = [list(completion.token_ids) for completion in group.completions]
    ours = policy.logps([group.prompt.token_ids] * len(ids), ids, 1.0).logps_N.double()
    theirs = torch.tensor([logp for completion in group.completions for logp in completion.sampler_logps]).double()
    return float((ours - theirs).abs().max())


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
    monkeypatch.setattr("cohort.rollout.vllm.own_server.PLUGIN_ARGUMENTS", ())
    policy = policy_of(make_model(tied=False))
    with running(policy.model, tmp_path / "model") as own:
        with pytest.raises(ConfigError, match="--worker-extension-cls"):
            describe_server(own.server)
        assert own.server.is_healthy()
