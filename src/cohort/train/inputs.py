"""What a trainer is given, checked: settings, model, rows."""

from __future__ import annotations

import os
from typing import Any

from cohort.config import GRPOConfig, ModelConfig, Schedule
from cohort.data import Data, check_held_out, load_data, load_sets
from cohort.environments import Acting
from cohort.environments.setup import reward_runner
from cohort.errors import ConfigError, DataError, ModelError
from cohort.objective import Objective
from cohort.parallel import World
from cohort.policy import folder_of_revision
from cohort.presets.parts import GroupMean
from cohort.rewards import RewardRunner


def checked_settings(args: GRPOConfig | None) -> GRPOConfig:
    """The settings, or the defaults. Raises ``ConfigError`` for anything else."""
    if not isinstance(args, GRPOConfig | None):
        raise ConfigError(f"args must be a cohort.GRPOConfig, got {type(args).__name__}")
    return GRPOConfig() if args is None else args


def chosen_model(given: Any, config: ModelConfig) -> Any:
    """The model that the trainer is given, or ``model.path``: an object, a folder or a hub id; the folder of its
    snapshot if ``model.revision`` is set."""
    model = config.path if given is None else os.fspath(given) if isinstance(given, os.PathLike) else given
    if not config.revision:
        return model
    if not isinstance(model, str):
        raise ConfigError("model.revision chooses a revision of a hub id, and the model is an object in memory")
    return folder_of_revision(model, config.revision, allow_pickled_weights=config.allow_pickled_weights)


def model_name(model: Any) -> str:
    """The folder or hub id of a model's tokenizer."""
    if isinstance(model, str):
        return model
    if name := getattr(getattr(model, "config", None), "_name_or_path", ""):
        return str(name)
    raise ModelError("a model built in memory has no tokenizer: pass processing_class")


def load_rows(train_dataset: Any, eval_dataset: Any, config: GRPOConfig) -> tuple[Data, dict[str, Data]]:
    """Training data, and evaluation data by name, with all checks that need no tokenizer."""
    data = load_data(train_dataset, config.data)
    if data is None:
        raise DataError("no training data: pass train_dataset, or set data.train")
    Schedule.of(config, data.epoch_length())  # too few rows are known now
    sets = load_sets(eval_dataset, config.data)
    check_held_out(data, sets)
    return data, sets


def checked_rewards(
    given: Any, config: GRPOConfig, objective: Objective, acting: Acting | None, world: World
) -> RewardRunner:
    """The reward functions: those given, those of the settings, or the environment's reward. Raises ``ConfigError`` if
    the objective cannot use them."""
    if acting is not None and acting.gives_rewards and objective.credit == "process":
        raise ConfigError(
            "objective.credit 'process' is biased where the number of turns depends on the policy, as with rewards "
            "of an environment: set objective.credit 'turns' (baseline 'leave_one_out', scale 'none') or 'outcome'"
        )
    functions = config.reward.functions if given is None else given
    listed = [functions] if callable(functions) or isinstance(functions, str) else list(functions)
    return reward_runner(acting, listed, config, not_negative=part_without_negative_rewards(objective), world=world)


def part_without_negative_rewards(objective: Objective) -> str | None:
    """The part of an objective that does not accept negative rewards, with the reason; None: there is none."""
    if isinstance(objective.scale, GroupMean):
        return "scale 'group_mean' (a negative mean inverts every sign)"
    return "unlikeliness (it would soften a penalty for the likelier completions)" if objective.unlikeliness else None
