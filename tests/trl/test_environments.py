"""Environments in a script for TRL."""

import random

import pytest

from cohort import GRPOConfig as Settings
from cohort.errors import ConfigError
from cohort.rewards import environment_reward
from cohort.trl import GRPOConfig, GRPOTrainer
from cohort.trl.given import with_environment_rewards
from tests.environments.test_training import FAMILY, Count, model
from tests.train.harness import rows_of
from tests.trl.test_trainer import SETTINGS


class Own(Count):
    """Chooses the number itself, the same for the completions of a group."""

    def reset(self, seed):
        return super().reset(seed % 7)


def make(folder, environment, reward_funcs=None, **settings):
    options = {"processing_class": FAMILY.tokenizer, "environment_factory": environment}
    args = GRPOConfig(str(folder), **SETTINGS | {"max_completion_length": 64, "max_steps": 2} | settings)
    return GRPOTrainer(model(FAMILY, 32), reward_funcs, args=args, **options)


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


def even_length(completions, **_):
    return [float(len(text) % 2) for text in completions]


class Other(Own):
    """Gives rewards of its own."""

    def get_reward(self):
        return 3.0


class Plain:
    """Gives none."""

    def reset(self):
        return None

    def act(self, x: int) -> int:
        """Act.

        Args:
            x: a number.
        """
        return x


def test_the_environments_reward_is_one_more_reward(tmp_path):
    """As in TRL: named after the class, weight 1, beside the given functions with their weights."""
    trainer = make(tmp_path / "run", Other, reward_funcs=even_length, reward_weights=[0.5])
    assert (trainer.reward_func_names, trainer.reward_weights.tolist()) == (["even_length", "Other"], [0.5, 1.0])
    trainer.train()
    (row, *_) = rows_of(tmp_path / "run")
    assert row["rewards/Other"] == 3.0
    assert row["reward"] == 0.5 * row["rewards/even_length"] + 3.0
    assert trainer.state.log_history[-1]["rewards/Other/mean"] == 3.0
    resumed = make(tmp_path / "run", Other, reward_funcs=even_length, reward_weights=[0.5], max_steps=4)
    assert resumed.train(resume_from_checkpoint=True).global_step == 4


@pytest.mark.parametrize(
    ("factory", "names", "row", "reward"),
    [
        (Own, ["Own"], {}, 1.0),  # named after the class, without functions too
        ({"a": Own, "b": Own}, ["Own"], {"environment": "b"}, 1.0),  # once for a class
        ({"a": Own, "b": Other}, ["Own", "Other"], {"environment": "b"}, None),  # each of its own rows only
        ({"a": Own, "b": Plain}, ["Own"], {"environment": "b"}, None),
    ],
)
def test_which_environments_give_which_reward(factory, names, row, reward):
    listed, config = with_environment_rewards(None, factory, Settings())
    assert ([one.__name__ for one in listed], config.reward.weights) == (names, None)
    assert listed[0]("", 1.0, **row) == reward


@pytest.mark.parametrize(
    ("given", "weights", "message"),
    [(None, None, "No reward source provided"), (even_length, [1.0, 1.0], "has 2 numbers for 1 reward")],
)
def test_rewards_that_do_not_fit(given, weights, message):
    with pytest.raises(ConfigError, match=message):
        with_environment_rewards(given, None, Settings(weights=weights))


def test_environment_reward_in_the_functions_is_not_counted_twice():
    listed, _ = with_environment_rewards([environment_reward], Own, Settings())
    assert listed == [environment_reward]
