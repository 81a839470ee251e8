"""Settings that an engine cannot serve are refused, by name, before a model is loaded."""

import pytest

from cohort import GRPOConfig, GRPOTrainer
from cohort.config import RolloutConfig
from cohort.errors import ConfigError
from cohort.rollout import Capabilities, LocalEngine, setup
from cohort.rollout.engine import check_capabilities, required_capabilities
from tests.conftest import each


class Plain:
    """An engine that draws tokens and can do nothing else."""

    capabilities = Capabilities(shared_weights=True)


NEEDS = {
    "plain": ({}, {}),
    "stop": ({"stop": ("a",)}, {}),
    "penalty": ({"repetition_penalty": 1.2}, {"repetition_penalty": "rollout.repetition_penalty is 1.2"}),
    "top-p": ({"top_p": 0.9}, {"support": "rollout.replay_sampling is on"}),
    "minimum": ({"min_completion_length": 3}, {"support": "rollout.replay_sampling is on"}),
    "top-p, not replayed": ({"top_p": 0.9, "replay_sampling": False}, {"full_logps": "rollout.replay_sampling is off"}),
    "regex": (
        {"regex": "a+", "replay_sampling": False},
        {"grammars": "rollout.regex is set", "full_logps": "rollout.replay_sampling is off"},
    ),
    "schema": ({"json_schema": "{}"}, {"grammars": "rollout.json_schema is set", "support": "rollout.replay_sampling"}),
}


@each("name", NEEDS)
def test_each_setting_needs_its_capability(name):
    settings, expected = NEEDS[name]
    config = GRPOConfig(rollout=RolloutConfig(**settings))
    needed = required_capabilities(config)
    assert needed.keys() == expected.keys()
    assert all(needed[name].startswith(words) for name, words in expected.items())
    check_capabilities(LocalEngine, config)
    if expected:
        with pytest.raises(ConfigError, match=rf"Plain lacks .*{next(iter(expected))} .*It has: shared_weights"):
            check_capabilities(Plain, config)
    else:
        check_capabilities(Plain, config)


def test_the_trainer_asks_before_it_reads_a_model(monkeypatch):
    monkeypatch.setattr(setup, "LocalEngine", Plain)
    config = GRPOConfig(rollout=RolloutConfig(regex="a+"))
    with pytest.raises(ConfigError, match="Plain lacks what these settings need: grammars"):
        GRPOTrainer(model="no such model", reward_funcs=len, args=config, train_dataset=[{"prompt": "a"}])
