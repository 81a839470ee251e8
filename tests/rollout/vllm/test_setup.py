"""From the settings to training on servers."""

from __future__ import annotations

import pytest

from cohort import GRPOConfig, GRPOTrainer
from cohort.errors import ConfigError, PolicyMismatchError
from cohort.parallel import World
from cohort.policy import load_model, resolve_device, resolve_precision
from cohort.rollout import EngineSetup
from tests.conftest import DEMO_MODEL

from .stand_in_weights import GENERATE, WeightStandIn

ROWS = [{"prompt": f"{number}+1="} for number in range(8)]


def reward(completions, **_):
    return [float(len(text)) for text in completions]


@pytest.fixture
def stand_in(demo_tokenizer):
    precision = resolve_precision("float32", resolve_device("cpu"))
    one = WeightStandIn(load_model(str(DEMO_MODEL), precision, resolve_device("cpu")), tokenizer=demo_tokenizer)
    yield one
    one.die()


def trainer(tmp_path, stand_in, **vllm):
    config = GRPOConfig(
        model={"path": str(DEMO_MODEL), "precision": "float32"},
        rollout={"engine": "vllm", "prompts_per_step": 2, "num_generations": 2, "max_completion_length": 4},
        vllm={"url": stand_in.url, "folder": str(tmp_path / "weights"), **vllm},
        optim={"learning_rate": 1e-2},
        run={"output_dir": str(tmp_path / "run"), "max_steps": 2},
        report={"progress": False},
    )
    return GRPOTrainer(None, reward, config, ROWS)


@pytest.mark.parametrize("transport", ["files", "group"])
def test_training_on_a_server_measures_the_gap_after_every_update(tmp_path, stand_in, transport):
    one = trainer(tmp_path, stand_in, transport=transport)
    steps = list(one.steps())
    assert [step["vllm/probe_gap_max"] < 1e-4 for step in steps] == [True, True]  # float32
    assert [step["vllm/servers"] for step in steps] == [1, 1]
    one.engine.update_weights(one.policy.version)
    assert one.engine.probe(one.engine.fleet.live[0])["vllm/probe_gap_max"] < 1e-4
    one.engine.close()


def test_servers_sleep_during_updates_and_wake_for_weights_and_cache(tmp_path, stand_in, monkeypatch):
    freed = "what the trainer's allocator keeps"
    monkeypatch.setattr("cohort.rollout.vllm.engine.release_memory", lambda: stand_in.calls.append((freed, {})))
    one = trainer(tmp_path, stand_in, sleep=True)
    list(one.steps())
    paths = [path for path, _ in stand_in.calls]
    sleeps = [n for n, path in enumerate(paths) if path == "/sleep"]
    assert len(sleeps) == 2  # one for each step
    between = [path for path in paths[sleeps[0] : sleeps[1]] if path != GENERATE]
    expected = ["/sleep", "/pause", freed, "/wake_up", "/collective_rpc", "/wake_up"]
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


@pytest.mark.parametrize(
    ("change", "vllm", "message"),
    [
        ({"can_sleep": False}, {"sleep": True}, r"vllm.sleep: .*--enable-sleep-mode"),
        ({"sizes": {"hidden_size": 77}}, {}, r"serves another model \(hidden_size 77, the policy 128\)"),
        ({}, {"sleep": True, "start": True, "url": (), "transport": "group"}, r"NCCL connects no two processes"),
        ({}, {"start": True, "python": "python"}, r"vllm.start starts a server and vllm.url names running ones"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_model_is_loaded(
    tmp_path, stand_in, change, vllm, message, monkeypatch
):
    monkeypatch.setattr("cohort.trainer.load_policy", lambda *_, **__: pytest.fail("the model was loaded"))
    stand_in.description |= change
    with pytest.raises(ConfigError, match=message):
        trainer(tmp_path, stand_in, **vllm)


def test_stop_strings_need_a_tokenizer_in_the_server(tmp_path, stand_in):
    stand_in.description["has_tokenizer"] = False
    config = GRPOConfig(
        model={"path": str(DEMO_MODEL)},
        rollout={"engine": "vllm", "stop": ["="], "max_completion_length": 4},
        vllm={"url": stand_in.url},
    )
    with pytest.raises(ConfigError, match="has no tokenizer to look for stop strings"):
        GRPOTrainer(None, reward, config, ROWS)


def test_sleeping_servers_cannot_sample_during_updates():
    with pytest.raises(ConfigError, match=r"vllm.sleep .* rollout.lag"):
        GRPOConfig(rollout={"engine": "vllm", "lag": 1}, vllm={"url": "http://127.0.0.1:1", "sleep": True})


def test_a_server_of_its_own_is_for_one_rank():
    config = GRPOConfig(model={"path": "model"}, rollout={"engine": "vllm"}, vllm={"start": True, "python": "python"})
    with pytest.raises(ConfigError, match="vllm.start is for one process, and there are 2"):
        EngineSetup(config, World(rank=1, size=2))


def test_quantized_policies_are_refused(tmp_path, stand_in):
    config = GRPOConfig(
        model={"path": str(DEMO_MODEL), "quantization": "4bit", "lora": {"rank": 4}},
        rollout={"engine": "vllm"},
        vllm={"url": stand_in.url},
    )
    with pytest.raises(ConfigError, match=r"model.quantization '4bit' cannot be merged without loss"):
        GRPOTrainer(None, reward, config, ROWS)
