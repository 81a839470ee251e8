"""Whole runs whose completions are drawn by stand-ins of vLLM."""

import contextlib
import threading
import time

import pytest
import torch

from cohort.environments import Step
from cohort.errors import ConfigError, EngineError, PolicyMismatchError
from cohort.rollout import ServedEngine
from tests.conftest import each, tiny_llama
from tests.environments.templates import FAMILIES
from tests.environments.test_training import model as conversing
from tests.environments.test_training import trainer as episode_trainer
from tests.rollout.served.stand_in import StandIn
from tests.train.harness import checkpoints_of, make_trainer, metrics_of, rows_of, same_parameters, untimed_metrics_of

STEPS = 2
EVAL_ROWS = [{"prompt": "3+4", "answer": "7"}, {"prompt": "5+1", "answer": "6"}]


@contextlib.contextmanager
def serving():
    """A function that starts stand-ins."""
    made = []

    def serve(tokenizer, count=1, model=None):
        stand_ins = [
            StandIn(model or tiny_llama(len(tokenizer), initializer_range=0.1), tokenizer) for _ in range(count)
        ]
        made.extend(stand_ins)
        return stand_ins

    yield serve
    for one in made:
        one.die()


@pytest.fixture
def serve():
    with serving() as serve:
        yield serve


@pytest.fixture(scope="module")
def straight(demo_tokenizer, tmp_path_factory):
    """A run of ``STEPS`` steps that nothing disturbs."""
    with serving() as serve:
        (stand_in,) = serve(demo_tokenizer)
        trainer = served(demo_tokenizer, tmp_path_factory.mktemp("served") / "straight", stand_in)
        trainer.train()
    return trainer


def served(tokenizer, folder, *stand_ins, **settings):
    url = tuple(one.url for one in stand_ins)
    sizes = {"max_steps": STEPS, "prompts_per_step": 2, "max_completion_length": 6}
    return make_trainer(tokenizer, folder, engine="server", url=url, **sizes | settings)


def test_a_run_trains_the_policy_that_the_servers_sample_from(demo_tokenizer, tmp_path, serve):
    (stand_in,) = serve(demo_tokenizer)
    trainer = served(demo_tokenizer, tmp_path / "run", stand_in, eval_rows=EVAL_ROWS, eval_steps=1)
    assert isinstance(trainer.engine, ServedEngine)
    assert f"sampler: servers at {stand_in.url}; at most 256 completions at a time on each" in trainer.describe()
    trainer.train()
    lines = [line for line in metrics_of(tmp_path / "run") if line["step"]]
    assert len(lines) == STEPS
    for line in lines:
        # Every step, after every update: the same weights on both sides, up to float32's rounding.
        assert 0 < line["sampler/gap"] < 1e-5
        assert line["sampler/version_lag_max"] == 0
        assert line["server/servers"] == 1
        assert line["server/failures"] == 0
        assert line["server/probe_gap"] < 1e-5
        assert line["seconds/weights"] > 0
    # Once before the first evaluation, and after each update for the evaluation: never twice.
    labels = [body["new_version"] for path, body in stand_in.calls if path == "/update_weight_version"]
    assert [label.rpartition("-")[2] for label in labels] == [str(n) for n in range(STEPS + 1)]
    assert {row["weights_version"] for row in rows_of(tmp_path / "run", STEPS)} == {STEPS - 1}
    moved = [
        bool((a != b).any())
        for a, b in zip(tiny_llama(len(demo_tokenizer)).parameters(), trainer.policy.model.parameters(), strict=True)
    ]
    assert all(moved)
    for name, weight in trainer.policy.model.state_dict().items():
        assert torch.equal(weight, stand_in.model.state_dict()[name])


def test_servers_draw_ahead_of_the_training(demo_tokenizer, tmp_path, serve):
    """With a lag of 1, with the weights of the step before, exactly."""
    served(demo_tokenizer, tmp_path / "run", *serve(demo_tokenizer, 2), lag=1, max_steps=3).train()
    lines = metrics_of(tmp_path / "run")
    assert [line["rollout/lag"] for line in lines] == [line["sampler/version_lag_max"] for line in lines] == [0, 1, 1]
    assert lines[0]["sampler/gap"] < 1e-5 < 1e-3 < lines[1]["sampler/gap"]
    assert [{row["weights_version"] for row in rows_of(tmp_path / "run", step)} for step in (1, 2, 3)] == [
        {0},
        {0},
        {1},
    ]


def test_the_death_of_a_server_changes_nothing(demo_tokenizer, tmp_path, serve, straight):
    first, second = serve(demo_tokenizer, 2)

    def dies(number, body, answer):
        if number == 7:  # in the second step; the trial takes one or two
            threading.Thread(target=first.die).start()
            time.sleep(0.3)
        return answer

    first.fault = dies
    other = served(demo_tokenizer, tmp_path / "other", first, second, max_batch_size=3)
    other.train()
    assert [line["server/servers"] for line in metrics_of(tmp_path / "other")][-1] == 1
    assert same_parameters(straight, other)

    def without_servers(folder):
        return [{k: v for k, v in line.items() if not k.startswith("server/")} for line in untimed_metrics_of(folder)]

    assert without_servers(straight.folder.path) == without_servers(tmp_path / "other")


def test_a_run_without_servers_stops_and_is_resumed(demo_tokenizer, tmp_path, serve, straight, monkeypatch):
    monkeypatch.setattr("cohort.rollout.served.fleet.BACKOFF_SECONDS", 0.01)
    (stand_in,) = serve(demo_tokenizer)
    broken = served(demo_tokenizer, tmp_path / "broken", stand_in)
    steps = broken.steps()
    next(steps)
    stand_in.die()
    with pytest.raises(EngineError, match=r"(?s)no server has taken the weights.*a checkpoint of step 1 is kept"):
        next(steps)
    assert checkpoints_of(tmp_path / "broken") == ["step-1"]
    (stand_in,) = serve(demo_tokenizer)
    resumed = served(demo_tokenizer, tmp_path / "broken", stand_in)
    resumed.train(resume=True)
    assert same_parameters(straight, resumed)


@pytest.mark.parametrize(
    ("threshold", "message"),
    [
        (None, "does not compute the policy: its log-probabilities of a fixed text"),
        (100.0, "nats from the trainer's.*the vLLM server does not compute what"),
    ],
    ids=["probe", "first rollout"],
)
def test_a_server_that_computes_something_else_stops_the_run(demo_tokenizer, tmp_path, serve, threshold, message):
    (stand_in,) = serve(demo_tokenizer)
    stand_in.load = lambda weights: None
    trainer = served(demo_tokenizer, tmp_path / "run", stand_in, probe_threshold=threshold)
    before = [parameter.clone() for parameter in trainer.policy.model.parameters()]
    with pytest.raises(PolicyMismatchError, match=message):
        trainer.train()
    assert all(torch.equal(one, other) for one, other in zip(before, trainer.policy.model.parameters(), strict=True))


def test_mismatch_rules_see_the_servers_log_probs(demo_tokenizer, tmp_path, serve):
    (stand_in,) = serve(demo_tokenizer)

    def shifted(number, body, answer):
        for one in answer["choices"][0]["logprobs"]["content"]:
            one["logprob"] -= 0.05 * (one["logprob"] < 0)
        return answer

    stand_in.fault = shifted
    rules = [{"rule": "weight", "mode": "mask", "level": "token", "low": 0.99, "high": 1.01}]
    (metrics,) = served(
        demo_tokenizer, tmp_path / "run", stand_in, max_steps=1, mismatch=rules, probe_threshold=1.0
    ).steps()
    assert metrics["sampler/gap"] == pytest.approx(0.05, abs=1e-5)
    assert metrics["sampler/mean_ratio"] == pytest.approx(1.0513, abs=1e-4)
    assert metrics["tokens/mismatch_share"] == 1


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft asks for it
def test_adapters_are_merged_into_what_is_sent(demo_tokenizer, tmp_path, serve):
    pytest.importorskip("peft")
    (stand_in,) = serve(demo_tokenizer)
    trainer = served(demo_tokenizer, tmp_path / "run", stand_in, lora={"rank": 4}, max_steps=2)
    trainer.train()
    assert all(0 < line["sampler/gap"] < 1e-5 for line in metrics_of(tmp_path / "run") if line["step"])


class Count:
    """Three turns; rewards long texts."""

    def reset(self, answer, **row):
        self.turns = 0
        return f" Count to {answer}."

    def step(self, text):
        self.turns += 1
        return Step("Go on.", float(len(text)), done=self.turns == 3)


def test_episodes(tmp_path, serve):
    family = FAMILIES["qwen2_5"]
    first, second = serve(family.tokenizer, 2, conversing())
    for stand_in in (first, second):
        stand_in.described["max_model_len"] = 1024
    settings = {
        "engine": "server",
        "url": (first.url, second.url),
        "stop": tuple("aeiou0123456789"),
        "precision": "float32",
    }
    run = episode_trainer(tmp_path / "run", environment_factory=Count, family=family, **settings)
    run.train()
    lines = [line for line in metrics_of(tmp_path / "run") if line["step"]]
    assert len(lines) == 2
    for line in lines:
        assert line["sampler/gap"] < 1e-5
        assert line["episodes/turns"] > 1
    for stand_in in (first, second):
        assert stand_in.requests()


REFUSED = {
    "no address": ({"url": ()}, "set server.url"),
    "public": ({"url": "http://8.8.8.8:8000"}, "public address"),
    "top-p, not replayed": ({"top_p": 0.9, "replay_sampling": False}, "ServedEngine lacks .* full_logps"),
    "temperature": ({"temperature": 0.005}, "rollout.temperature is 0.005: vLLM would raise it to 0.01"),
    "high temperature": ({"temperature": 2.5}, "rollout.temperature is 2.5: vLLM refuses more than 2"),
    "penalty": ({"repetition_penalty": 1.1}, "ServedEngine lacks .* repetition_penalty"),
}


@each("name", REFUSED)
def test_settings_are_refused_before_anything_is_read(demo_tokenizer, name):
    settings, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        make_trainer(
            demo_tokenizer, None, rows="no such file", **{"engine": "server", "url": "http://127.0.0.1:9"} | settings
        )


def test_servers_are_checked_before_the_model_is_loaded(demo_tokenizer, serve, monkeypatch):
    (stand_in,) = serve(demo_tokenizer, model=tiny_llama(11))

    def loaded(*_, **__):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("cohort.trainer.load_policy", loaded)
    with pytest.raises(ConfigError, match="serves a model with 11 tokens"):
        served(demo_tokenizer, None, stand_in)
