"""With the real vLLM: in this process, where it is installed beside Cohort, and by a server of COHORT_VLLM_PYTHON or of
the environment that `make vllm` creates. `make vllm-test` runs both."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from cohort import GRPOConfig, GRPOTrainer
from cohort.config import ModelConfig, ServerConfig, VLLMConfig
from cohort.data import DataCursor
from cohort.demo.task import accuracy, problems
from cohort.errors import EngineError, PolicyMismatchError
from cohort.policy import load_policy, load_tokenizer, named_weights
from cohort.rollout import RNGKey, Sampling, ServedEngine, Watch
from cohort.rollout.served.colocated import NAME, Colocated, missing
from cohort.rollout.served.connect import Probe
from cohort.rollout.served.vllm import PLUGIN, PLUGIN_ARGUMENTS, VLLMServer
from cohort.rollout.served.weights import sender_of
from cohort.types import Prompt
from tests.conftest import DEMO_MODEL
from tests.parallel.launching import on_ranks

OTHER = Path(os.environ.get("COHORT_VLLM_PYTHON", Path(__file__).parents[3] / ".venv-vllm" / "bin" / "python"))
"""The interpreter of the servers."""
pytestmark = pytest.mark.vllm
here = pytest.mark.skipif(bool(missing()), reason="vLLM is not installed beside Cohort")
there = pytest.mark.skipif(not OTHER.exists(), reason="no environment with vLLM: run `make vllm`")

MAX_GAP = 5e-5
"""Nats. float32 products in another order: 1e-6 relative, of logits of up to about 10."""
STEPS = 20


def make_model(*, tied: bool):
    torch.manual_seed(0)
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


@pytest.fixture(autouse=True)
def little_memory(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def perturb(policy, seed):
    """An update of a size that a learning rate of 0.01 makes."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator))
    policy.version += 1


@contextlib.contextmanager
def running(model, *arguments):
    """A server of a model's folder, its address and its process."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    command = [OTHER, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", port, "--enforce-eager"]
    command += ["--dtype", "float32", "--max-model-len", 256, "--enable-scale-out", "--generation-config", "vllm"]
    command += ["--logprobs-mode", "processed_logprobs", *PLUGIN_ARGUMENTS, *arguments]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    switches = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "PYTHONPATH": str(PLUGIN)}
    process = subprocess.Popen(list(map(str, command)), env=kept | switches, start_new_session=True)
    server = VLLMServer(f"http://127.0.0.1:{port}")
    try:
        until = time.monotonic() + 300
        while time.monotonic() < until and process.poll() is None:
            with contextlib.suppress(EngineError):
                server.describe()
                break
            time.sleep(0.3)
        yield server, process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@there
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_log_probs_agree_before_and_after_updates_by_both_ways(tied, tmp_path):
    policy = policy_of(make_model(tied=tied))
    policy.model.save_pretrained(tmp_path / "model")
    with running(tmp_path / "model", "--skip-tokenizer-init") as (server, _):
        found, probe, gaps = server.describe(), Probe(policy), {}
        server.check(512)
        gaps["start"] = probe(server, server.url, found)["server/probe_gap_max"]
        for way in ("folder", "group"):
            sender = sender_of(ServerConfig(transport=way, update_timeout=60.0), torch.device("cpu"))
            sender.check(server, found)
            for number in range(2):
                perturb(policy, number)
                with pytest.raises(PolicyMismatchError, match="nats from the trainer's"):
                    probe(server, server.url, found)  # the update is large enough to be seen
                assert sender.send([server], named_weights(policy), f"{way}-{number}") == {}
                gaps[f"{way} {number}"] = probe(server, server.url, found)["server/probe_gap_max"]
            sender.close()
        print(f"\nlargest gaps in nats, {'tied' if tied else 'untied'}: {gaps}")
        assert max(gaps.values()) <= MAX_GAP
        assert server.describe().weights == "group-1"


@there
def test_weights_that_do_not_arrive_are_reported(tmp_path):
    policy = policy_of(make_model(tied=False))
    policy.model.save_pretrained(tmp_path / "model")
    with running(tmp_path / "model", "--skip-tokenizer-init") as (server, _):
        sender = sender_of(ServerConfig(update_timeout=60.0), torch.device("cpu"))
        sender.check(server, server.describe())
        some = ((name, one) for name, one in named_weights(policy) if "layers.1.mlp.down_proj" not in name)
        failed = sender.send([server], some, "1")
        assert "layers.1.mlp.down_proj.weight" in str(failed[server])


def grpo(folder, steps=1, model=None, **settings):
    sections = {
        "model": {"precision": "float32", "device": "cpu", **(model or {})},
        "data": {"format": "chat", "prompt_column": "question"},
        "rollout": {"prompts_per_step": 16, "num_generations": 8, "max_completion_length": 96},
        "optim": {"learning_rate": 1e-4, "lr_scheduler_type": "constant"},
        "run": {"max_steps": steps, "output_dir": str(folder)},
        "report": {"progress": False},
    }
    for name, values in settings.items():
        sections[name] = sections.get(name, {}) | values
    return GRPOTrainer(str(DEMO_MODEL), accuracy, GRPOConfig(**sections), problems(1000, held_out=False, seed=0))


def learnt(trainer):
    """Train; return the rewards, and check what vLLM computes at each step."""
    try:
        steps = list(trainer.steps())
    finally:
        trainer.engine.close()
    gaps = [step["server/probe_gap_max"] for step in steps if "server/probe_gap_max" in step]
    print(f"\nlargest gap {max(gaps):.2g} nats; seconds of weights {steps[-1]['seconds/weights']:.3f}")
    assert max(gaps) <= MAX_GAP
    assert max(step["sampler/gap"] for step in steps) < 1e-5
    return [step["reward/mean"] for step in steps]


@there
@pytest.mark.parametrize("way", ["folder", "group"])
def test_updates_by_a_server_raise_the_reward(way, tmp_path):
    """The demo's task and model, which forgets more than half of the carries."""
    with running(DEMO_MODEL) as (server, _):
        rollout = {"engine": "server", "max_completion_length": 90}
        trainer = grpo(tmp_path / "run", STEPS, rollout=rollout, server={"url": server.url, "transport": way})
        rewards = learnt(trainer)
    assert sum(rewards[-5:]) > sum(rewards[:5])


@there
def test_adapters_by_a_server(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    with running(DEMO_MODEL, "--enable-lora", "--max-lora-rank", "8") as (server, _):
        model = {"lora": {"rank": 8}}
        trainer = grpo(tmp_path / "run", 3, model, rollout={"engine": "server"}, server={"url": server.url})
        assert "the adapter is loaded beside the base weights" in trainer.describe()
        assert len(learnt(trainer)) == 3


@there
def test_a_server_that_is_killed_in_a_rollout_is_replaced_by_the_other(tmp_path):
    with running(DEMO_MODEL) as (first, process), running(DEMO_MODEL) as (second, _):
        urls = {"url": [first.url, second.url], "transport": "group", "update_timeout": 60.0}
        trainer = grpo(tmp_path / "run", rollout={"engine": "server"}, server=urls)
        engine, policy = trainer.engine, trainer.policy
        prompts = trainer.prompts.fetch(DataCursor(), 16)
        sampling, key = Sampling.of(trainer.args.rollout), RNGKey(0, 1)
        engine.update_weights(0)
        undisturbed = engine.generate(prompts, 8, sampling, key)
        ended = []

        def kill(prompt, sample, completion):
            ended.append(prompt)
            if len(ended) == 10:
                os.killpg(process.pid, signal.SIGKILL)

        groups = engine.generate(prompts, 8, sampling, key, Watch(on_completion=kill))
        found = engine.metrics()
        assert len(ended) == 128
        assert found["server/servers"] == 1
        assert found["server/failures"] >= 1
        same = [
            list(a.token_ids) == list(b.token_ids)
            for one, other in zip(groups, undisturbed, strict=True)
            for a, b in zip(one.completions, other.completions, strict=True)
        ]
        assert max(_gap(policy, group) for group in groups) <= MAX_GAP
        assert sum(same) >= 120  # a retry repeats the draw up to rounding
        perturb(policy, 0)
        engine.update_weights(policy.version)
        assert max(_gap(policy, group) for group in engine.generate(prompts[:2], 2, sampling, key)) <= MAX_GAP
        engine.close()


@torch.no_grad()
def _gap(policy, group):
    """The largest difference between the sampler's log-probs of a group and the trainer's, in nats."""
    ids = [list(completion.token_ids) for completion in group.completions]
    ours = policy.logps([group.prompt.token_ids] * len(ids), ids, 1.0).logps_N.double()
    theirs = torch.tensor([logp for completion in group.completions for logp in completion.sampler_logps]).double()
    return float((ours - theirs).abs().max())


# In this process. vLLM starts once in a process in these tests, so each has its own.


def alone(function, *arguments):
    """Call a function in a process of its own."""
    (found,) = on_ranks(1, function, *arguments)
    return found


def gaps_in_process(tied, folder):
    policy = policy_of(make_model(tied=tied))
    probe = Probe(policy)
    turns = Colocated(policy, None, VLLMConfig(), context=256, probe=lambda one: probe(one, NAME, one.found))
    engine, gaps = ServedEngine(policy, None, (), turns), []
    for number in range(3):
        engine.update_weights(policy.version)
        gaps.append(engine.metrics()["server/probe_gap_max"])
        perturb(policy, number)
    engine.close()
    return gaps


@here
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_log_probs_agree_in_this_process(tied, tmp_path):
    gaps = alone(gaps_in_process, tied, tmp_path)
    print(f"\nlargest gaps in nats, {'tied' if tied else 'untied'}: {gaps}")
    assert max(gaps) <= MAX_GAP


def rewards_in_process(folder, steps, model, settings):
    trainer = grpo(folder, steps, model, **{"rollout": {"engine": "vllm"}} | settings)
    return learnt(trainer)


@here
def test_updates_in_this_process_raise_the_reward(tmp_path):
    rewards = alone(rewards_in_process, tmp_path / "run", STEPS, {}, {})
    assert sum(rewards[-5:]) > sum(rewards[:5])


@here
@pytest.mark.parametrize(
    "settings",
    [
        {"rollout": {"engine": "vllm", "top_k": 5, "top_p": 0.9}},
        {"rollout": {"engine": "vllm", "min_p": 0.05, "min_completion_length": 8}},
        {"rollout": {"engine": "vllm", "regex": "[^?]*"}},
        {"rollout": {"engine": "vllm", "lag": 1}},
    ],
    ids=["top-k and top-p", "min-p", "regex", "lag"],
)
def test_settings_in_this_process(settings, tmp_path):
    if settings["rollout"].get("lag"):
        trainer_gap = alone(lagging, tmp_path / "run", settings)
        assert trainer_gap[0] < 1e-5 < trainer_gap[1]
    else:
        assert len(alone(rewards_in_process, tmp_path / "run", 3, {}, settings)) == 3


def lagging(folder, settings):
    trainer = grpo(folder, 3, **settings)
    steps = list(trainer.steps())
    trainer.engine.close()
    return [step["sampler/gap"] for step in steps]


@here
@pytest.mark.parametrize("quantization", ["none", "4bit"])
def test_adapters_in_this_process(quantization, tmp_path):
    if quantization != "none":
        pytest.importorskip("bitsandbytes")
    settings = {"optim": {"learning_rate": 2e-3}}
    model = {"lora": {"rank": 4}, "quantization": quantization}
    assert len(alone(rewards_in_process, tmp_path / "run", 3, model, settings)) == 3


def stopped_and_resumed(folder):
    """The weights of a run, and of one that was stopped after a step and resumed."""
    found = []
    for name, stops in (("straight", 0), ("stopped", 1)):
        trainer = grpo(folder / name, 3, rollout={"engine": "vllm"})
        steps = trainer.steps()
        for _ in range(stops or 3):
            next(steps)
        steps.close()
        if stops:
            trainer.engine.close()
            trainer = grpo(folder / name, 3, rollout={"engine": "vllm"})
            trainer.train(resume=True)
        found.append({key: value.clone() for key, value in trainer.policy.model.state_dict().items()})
        trainer.engine.close()
    return [float((one - other).abs().max()) for one, other in zip(*(each.values() for each in found), strict=True)]


@here
def test_a_run_that_was_stopped_goes_on(tmp_path):
    # vLLM draws the same tokens up to rounding: the batch of a prompt's prefill may differ. Here it does not.
    assert max(alone(stopped_and_resumed, tmp_path)) < 1e-6


def drawn_in_process(folder):
    policy, tokenizer = policy_of(make_model(tied=False)), load_tokenizer(str(DEMO_MODEL))
    turns = Colocated(policy, None, VLLMConfig(), context=256)
    engine = ServedEngine(policy, tokenizer, (), turns)
    engine.update_weights(0)
    prompt = Prompt(0, 0, (5, 9, 20), "", "", {})
    (group,) = engine.generate([prompt], 2000, Sampling(1, 1.3, top_k=6), RNGKey(0, 3))
    with torch.no_grad():
        best = (policy.model(torch.tensor([[5, 9, 20]])).logits[0, -1] / 1.3).topk(6)
    engine.close()
    exact = dict(zip(best.indices.tolist(), best.values.softmax(-1).tolist(), strict=True))
    return exact, Counter(int(c.token_ids[0]) for c in group.completions)


@here
def test_draws_follow_the_truncated_distribution(tmp_path):
    exact, counts = alone(drawn_in_process, tmp_path)
    assert counts.keys() <= exact.keys()
    statistic = sum((counts[token] - 2000 * p) ** 2 / (2000 * p) for token, p in exact.items())
    assert statistic < 20.5  # five degrees of freedom: exceeded once in 1,000 seeds


@here
@pytest.mark.parametrize("parallel", [1, 2], ids=["each its own", "tensor parallel"])
def test_two_ranks(parallel, tmp_path):
    settings = {"vllm": {"tensor_parallel_size": parallel}}
    left = [Path(f"/dev/shm/-tp:0-[0-1]-cpushm_{rank}") for rank in range(2)]  # as vLLM leaves them
    for path in left:
        path.touch()
    one, other = on_ranks(2, rewards_in_process, tmp_path / "two", 3, {}, settings)
    alone_ = alone(rewards_in_process, tmp_path / "one", 3, {}, {})
    assert set(Path("/dev/shm").glob("*cpushm*")) == set(left)
    for path in left:
        path.unlink()
    assert one == other
    assert one == pytest.approx(alone_, abs=0.1)  # the same draws, but for those that rounding decides
