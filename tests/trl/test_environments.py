"""Environments in a script for TRL."""

import pytest

from cohort.errors import ConfigError
from cohort.trl import GRPOConfig, GRPOTrainer
from tests.environments.test_training import FAMILY, Count, model
from tests.train.harness import rows_of
from tests.trl.test_trainer import SETTINGS


class Own(Count):
    """Chooses the number itself, the same for the completions of a group."""

    def reset(self, seed):
        return super().reset(seed % 7)


def make(folder, environment, **settings):
    options = {"processing_class": FAMILY.tokenizer, "environment_factory": environment}
    args = GRPOConfig(str(folder), **SETTINGS | {"max_completion_length": 64, "max_steps": 2} | settings)
    return GRPOTrainer(model(FAMILY, 32), args=args, **options)


def test_an_environment_gives_the_prompts(tmp_path):
    """Without rows, as in TRL: each prompt of a generation is a row, and prompts differ by their seed."""
    trainer = make(tmp_path / "run", Own)
    assert (len(trainer.train_dataset), trainer.train().global_step) == (4, 2)
    prompts = [row["prompt"] for row in rows_of(tmp_path / "run")]
    assert all("Count to" in prompt for prompt in prompts)
    assert len(set(prompts)) > 1


@pytest.mark.parametrize(
    ("environment", "settings", "message"),
    [({"one": Own}, {}, "a column 'environment'"), (Own, {"max_steps": -1}, "set max_steps")],
)
def test_an_environment_that_cannot_give_them(tmp_path, environment, settings, message):
    with pytest.raises(ConfigError, match=f"train_dataset is None.*{message}"):
        make(tmp_path / "run", environment, **settings)
