"""Environments in a script for TRL."""

import random

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


class Server:
    """Asks a server for a game, which nothing here seeds."""

    games = iter(range(10**6))

    def reset(self, **row) -> str:
        self.game = next(self.games)
        return f"Game {self.game}: guess."

    def guess(self, number: int) -> str:
        """Guesses.

        Args:
            number: The guess.
        """
        return "no"

    def get_reward(self) -> float:
        return float(self.game % 3)


def test_a_script_whose_environments_draw_on_their_own_runs_as_in_trl(tmp_path, caplog):
    trainer = make(tmp_path / "run", Server, max_steps=1)
    trainer.train()
    assert "showed different things first" in caplog.text
    assert len(rows_of(tmp_path / "run")) == 8
    assert trainer.state.log_history[0]["frac_reward_zero_std"] < 1


class Draws(Server):
    """Draws the game from Python's own generator, as if it were alone."""

    def reset(self, **row) -> str:
        self.game = random.randint(0, 10**6)
        return f"Game {self.game}: guess."


def test_a_script_whose_reset_draws_at_random_shows_a_group_one_game(tmp_path, caplog):
    make(tmp_path / "run", Draws, max_steps=1).train()
    assert "showed different things first" not in caplog.text
    prompts = [row["prompt"] for row in rows_of(tmp_path / "run")]
    assert len(prompts) == 8
    assert prompts[::2] == prompts[1::2]
    assert len(set(prompts)) == 4
