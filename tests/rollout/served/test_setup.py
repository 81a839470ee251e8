"""From the settings to training on servers."""

from __future__ import annotations

import re

import pytest
import torch

from cohort import GRPOConfig, GRPOTrainer
from cohort.errors import ConfigError, PolicyMismatchError
from cohort.parallel import World
from cohort.policy import load_model, resolve_device, resolve_precision
from cohort.rollout import setup
from tests.conftest import DEMO_MODEL

from .stand_in import GENERATE, StandIn

ROWS = [{"prompt": f"{number}+1="} for number in range(8)]


SIZES = {"prompts_per_step": 2, "num_generations": 2, "max_completion_length": 4}


def reward(completions, **_):
    return [float(len(text)) for text in completions]


@pytest.fixture
def stand_in(demo_tokenizer):
    precision = resolve_precision("float32", resolve_device("cpu"))
    one = StandIn(load_model(str(DEMO_MODEL), precision, resolve_device("cpu")), tokenizer=demo_tokenizer)
    yield one
    one.die()


def trainer(tmp_path, stand_in, rollout=None, **server):
    config = GRPOConfig(
        model={"path": str(DEMO_MODEL), "precision": "float32"},
        rollout={"engine": "server", **SIZES, **(rollout or {})},
        server={"url": stand_in.url, "folder": str(tmp_path / "weights"), **server},
        optim={"learning_rate": 1e-2},
        run={"output_dir": str(tmp_path / "run"), "max_steps": 2},
        report={"progress": False},
    )
    return GRPOTrainer(None, reward, config, ROWS)


@pytest.mark.parametrize("transport", ["folder", "group"])
def test_training_on_a_server_measures_the_gap_after_every_update(tmp_path, stand_in, transport):
    one = trainer(tmp_path, stand_in, transport=transport)
    steps = list(one.steps())
    assert [step["server/probe_gap_max"] < 1e-4 for step in steps] == [True, True]  # float32
    assert [step["server/servers"] for step in steps] == [1, 1]
    one.engine.update_weights(one.policy.version)
    assert one.engine.turns.probe(one.engine.turns.fleet.live[0])["server/probe_gap_max"] < 1e-4
    one.engine.close()


def test_servers_sleep_during_updates_and_wake_for_weights_and_cache(tmp_path, stand_in, monkeypatch):
    freed = "what the trainer's allocator keeps"
    monkeypatch.setattr("cohort.rollout.served.fleet.release_memory", lambda: stand_in.calls.append((freed, {})))
    one = trainer(tmp_path, stand_in, {"sleep": True})
    list(one.steps())
    paths = [path for path, _ in stand_in.calls]
    sleeps = [n for n, path in enumerate(paths) if path == "/sleep"]
    assert len(sleeps) == 2  # one for each step
    between = [path for path in paths[sleeps[0] : sleeps[1]] if path != GENERATE]
    expected = ["/sleep", freed, "/pause", "/wake_up", "/collective_rpc", "/wake_up"]
    assert between == [*expected, "/update_weight_version", "/reset_prefix_cache", "/resume"]
    one.engine.update_weights(one.policy.version)
    assert stand_in.awake == {"weights", "kv_cache"}
    one.engine.close()


def test_weights_that_arrive_wrong_stop_the_run(tmp_path, stand_in):
    one = trainer(tmp_path, stand_in)
    steps = one.steps()
    next(steps)
    stand_in.load = lambda weights: None  # as servers that report a success
    one.policy.model.lm_head.weight.data.mul_(1.5)
    with pytest.raises(PolicyMismatchError, match="nats from the trainer's on average"):
        list(steps)
    one.engine.close()


def test_what_does_not_fit_is_refused_before_the_model_is_loaded(tmp_path, stand_in, monkeypatch):
    monkeypatch.setattr("cohort.trainer.load_policy", lambda *_, **__: pytest.fail("the model was loaded"))
    stand_in.described["enable_sleep_mode"] = False
    with pytest.raises(ConfigError, match=r"rollout.sleep: .*--enable-sleep-mode"):
        trainer(tmp_path, stand_in, {"sleep": True})
    stand_in.described["skip_tokenizer_init"] = True
    with pytest.raises(ConfigError, match="has no tokenizer to look for stop strings"):
        trainer(tmp_path, stand_in, {"stop": ["="]})
    with pytest.raises(ConfigError, match="returns at most 20 log-probs .* --max-logprobs 34"):
        trainer(tmp_path, stand_in, {"top_p": 0.9})


def test_sleeping_servers_cannot_sample_during_updates():
    with pytest.raises(ConfigError, match=r"rollout.sleep .* rollout.lag"):
        GRPOConfig(rollout={"engine": "server", "lag": 1, "sleep": True})


def test_quantized_policies_are_not_sent(tmp_path):
    config = GRPOConfig(
        model={"path": str(DEMO_MODEL), "quantization": "4bit", "lora": {"rank": 4}},
        rollout={"engine": "server"},
        server={"url": "http://127.0.0.1:1"},
    )
    with pytest.raises(ConfigError, match=r"model.quantization '4bit' cannot be sent without loss"):
        GRPOTrainer(None, reward, config, ROWS)


# Which engine.


def chosen(monkeypatch, device="cuda", why="", ranks=1, **settings):
    monkeypatch.setattr(setup, "resolve_device", lambda _: torch.device(device))
    monkeypatch.setattr(setup, "missing", lambda: why)
    config, said = setup.with_engine(GRPOConfig(**settings), World(size=ranks))
    return config.rollout.engine, said


@pytest.mark.parametrize(
    ("given", "engine", "reason"),
    [
        ({}, "vllm", "it is installed, and the policy is on a GPU"),
        ({"device": "cpu"}, "local", "no GPU"),
        ({"why": "vLLM is not installed"}, "local", "vLLM is not installed"),
        ({"rollout": {"repetition_penalty": 1.1}}, "local", "ServedEngine lacks .* repetition_penalty"),
        ({"vllm": {"tensor_parallel_size": 2}}, "local", "1 ranks are no multiple of it"),
    ],
)
def test_the_engine_is_chosen_and_the_start_says_why(monkeypatch, given, engine, reason):
    found, said = chosen(monkeypatch, **given)
    assert found == engine
    assert re.fullmatch(rf"engine: {engine} \(.*{reason}.*\); rollout.engine is auto", said)


def test_an_engine_that_is_named_is_taken_or_refused(monkeypatch):
    assert chosen(monkeypatch, rollout={"engine": "local"}) == ("local", "")
    assert chosen(monkeypatch, device="cpu", rollout={"engine": "vllm"}) == ("vllm", "")
    with pytest.raises(ConfigError, match=r"'vllm': vLLM is not installed: pip install 'cohort-rl\[vllm\]', or set"):
        chosen(monkeypatch, why="vLLM is not installed", rollout={"engine": "vllm"})
    apart = {"vllm": {"tensor_parallel_size": 2}, "environment": {"tools": ["calculator"]}}
    with pytest.raises(ConfigError, match="turns of environments do not end together"):
        chosen(monkeypatch, ranks=2, rollout={"engine": "vllm"}, **apart)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"url": "http://127.0.0.1:1"}, "vllm.url: set rollout.engine = 'server' and server.url"),
        ({"start": True}, "vllm.start: set rollout.engine = 'vllm'"),
        ({"python": "python"}, r"vllm.python: install vLLM beside Cohort"),
        ({"probe_threshold": 0.1}, "vllm.probe_threshold: set rollout.probe_threshold"),
        ({"sleep": True}, "vllm.sleep: set rollout.sleep"),
        ({"transport": "files"}, "vllm.transport; did you mean server.transport"),
        ({"arguments": {"dtype": "float16"}}, "dtype of vllm.LLM is set by the trainer"),
    ],
)
def test_earlier_names_of_settings_answer_with_the_present_ones(settings, message):
    with pytest.raises(ConfigError, match=message):
        GRPOConfig(vllm=settings)
