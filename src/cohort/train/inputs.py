"""What a trainer is given: checked, named for its folder, and compared when a run is resumed."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cohort.calls import partial_layers
from cohort.config import GRPOConfig, ModelConfig, Schedule, Source, with_absolute_names
from cohort.data import Data, PromptLoader, check_held_out, load_data, load_sets
from cohort.environments import Acting
from cohort.environments.setup import reward_runner
from cohort.errors import ConfigError, DataError, ModelError
from cohort.objective import Objective
from cohort.parallel import World
from cohort.plugins import file_modules
from cohort.policy import Policy, folder_of_revision
from cohort.presets.parts import GroupMean
from cohort.presets.trust_regions import Custom
from cohort.rewards import RewardRunner
from cohort.rewards.model import RewardModel
from cohort.rewards.names import BUILTIN_REWARDS
from cohort.runs.changes import entries, machine, versions
from cohort.runs.code import code_hash, named_code_hash, values_hash


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
    refusing = None  # the part of the objective that does not accept negative rewards, with the reason
    if isinstance(objective.scale, GroupMean):
        refusing = "scale 'group_mean' (a negative mean inverts every sign)"
    elif objective.unlikeliness:
        refusing = "unlikeliness (it would soften a penalty for the likelier completions)"
    functions = config.reward.functions if given is None else given
    listed = [functions] if callable(functions) or isinstance(functions, str) else list(functions)
    return reward_runner(acting, listed, config, not_negative=refusing, world=world)


# ----------------------------------------
# What a trainer is given in Python, by name: so that a run can be resumed from its folder alone.


class Given(NamedTuple):
    """What a trainer is given beside its settings, as ``GRPOTrainer`` takes it."""

    model: Any = None
    reward_funcs: Any = None
    train_dataset: Any = None
    eval_dataset: Any = None
    processing_class: Any = None
    tools: Any = None
    environment_factory: Any = None


def recorded(config: GRPOConfig, given: Given) -> tuple[GRPOConfig, dict[str, str]]:
    """The settings with the names of what the trainer was given in their place, absolute ones of files, and what has no
    name."""
    missing: dict[str, str] = {}
    if isinstance(given.model, str | os.PathLike):
        config = _with(config, "model", path=os.fspath(given.model))
    elif given.model is not None:
        missing["model"] = "an object in memory"
    if given.processing_class is not None:
        missing["processing_class"] = "an object in memory"
    for name, key in (("train_dataset", "train"), ("eval_dataset", "eval")):
        if (rows := getattr(given, name)) is not None:
            named = _named_data(rows)
            config = _with(config, "data", **{key: named or ""})
            missing |= {} if named else {name: "rows in memory"}
    for name, section, key in (("reward_funcs", "reward", "functions"), ("tools", "environment", "tools")):
        before = config.environment.tools if name == "tools" else ()  # given tools are added to those of the settings
        if (some := getattr(given, name)) is not None:
            listed = list(some) if isinstance(some, list | tuple) else [some]
            names = [name_of(one) for one in listed]
            if unnamed := [_shown(one) for one, found in zip(listed, names, strict=True) if found is None]:
                missing[name] = ", ".join(unnamed)
            else:
                config = _with(config, section, **{key: (*before, *names)})
    if factory := given.environment_factory:
        several = factory if isinstance(factory, Mapping) else {"": factory}
        factories = {key: name_of(one) for key, one in several.items()}
        if None in factories.values():
            missing["environment_factory"] = ", ".join(_shown(one) for one in several.values())
        else:
            config = _with(config, "environment", factory=factories.get("", factories))
    return with_absolute_names(config), missing


def name_of(function: Any) -> str | None:
    """The name under which the settings find a function or class: built in, "file.py:name" or "module:name", with what
    ``functools.partial`` binds in parentheses. None: it has none."""
    if isinstance(function, str):
        return function
    layers = partial_layers(function)
    inner = layers[-1]
    bound: dict[str, Any] = {}
    for layer in reversed(layers):
        if isinstance(layer, partial):
            if layer.args:
                return None
            bound |= layer.keywords
    if (name := _plain_name(inner)) is None or not all(map(_is_literal, bound.values())):
        return None
    return name + (f"({', '.join(f'{key}={value!r}' for key, value in bound.items())})" if bound else "")


def _plain_name(function: Any) -> str | None:
    function = getattr(function, "recorded_as", function)  # of a wrapper that the trainer of TRL's scripts made
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    found = sys.modules.get(str(module))
    file = getattr(found, "__file__", None) or ""
    if getattr(found, name, None) is not function or (module == "__main__" and not _is_importable(file, name)):
        return None
    row = BUILTIN_REWARDS.get(name)
    if row is not None and module == f"cohort.rewards.{row.module}":
        return name
    if module in file_modules():
        return f"{file_modules()[module][0]}:{name}"
    if "." not in str(module) and file.endswith(".py") and "site-packages" not in Path(file).parts:
        return f"{Path(file).resolve()}:{name}"
    return f"{module}:{name}"


def _is_importable(script: str, name: str) -> bool:
    """Whether importing a script only defines things, this name among them: it trains under ``if __name__ ==
    "__main__"``."""
    try:
        body = ast.parse(Path(script).read_text(encoding="utf-8")).body
    except (OSError, UnicodeDecodeError, SyntaxError):
        return False
    guards = [one for one in body if isinstance(one, ast.If) and "__name__" in ast.unparse(one.test)]
    texts = [one for one in body if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant)]
    defines = (
        ast.Import | ast.ImportFrom | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign
    )
    bound = {getattr(one, "name", None) for one in body}
    return name in bound and bool(guards) and all(isinstance(one, defines) or one in (*guards, *texts) for one in body)


def _is_literal(value: Any) -> bool:
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError, RecursionError):
        return False


def _named_data(given: Any) -> Any:
    """Data as the settings name it; None for rows."""
    if type(given) is dict:
        sets = {name: _named_data(one) for name, one in given.items()}
        return None if None in sets.values() else sets
    listed = given if isinstance(given, list | tuple) else [given]
    if not listed or not all(isinstance(one, str | os.PathLike | Source) for one in listed):
        return None
    if any(isinstance(one, Source) and not isinstance(one.path, str) for one in listed):
        return None
    if isinstance(given, str | os.PathLike):
        return os.fspath(given)
    return tuple(one if isinstance(one, Source) else Source(path=os.fspath(one)) for one in listed)


def _with(config: GRPOConfig, section: str, **values: Any) -> GRPOConfig:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})


def _shown(function: Callable[..., Any]) -> str:
    inner = partial_layers(function)[-1]
    name = getattr(inner, "__qualname__", type(inner).__name__)
    return f"{name} of {getattr(inner, '__module__', type(inner).__module__)}"


# ----------------------------------------
# The facts about a run that are not settings, which its checkpoints store and a resumed run compares.


NOT_COMPUTED = {"architectures", "transformers_version", "dtype", "torch_dtype", "use_cache", "id2label", "label2id"}
"""Entries of a model's config that its numbers do not depend on, or that saving changes."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def data_facts(
    prompts: PromptLoader, rewards: RewardRunner, acting: Acting | None, config: GRPOConfig
) -> dict[str, str]:
    """What can be known without a model: prompts, columns, names, code, versions."""
    builtin, code = _builtin_names(rewards), list(_code(rewards, acting, config))
    packages = {row.package for row in BUILTIN_REWARDS.values() if row.package and row.name in builtin}
    facts = {
        "prompts": prompts.fingerprint,
        "columns": entries(prompts.prompts.contents),
        "rewards": ", ".join(rewards.names),
        "code": entries({name: file for name, file, _ in code}),
        "values": entries({name: values for name, _, values in code if values}),
        "versions": versions([*sorted(packages), *(["peft"] if config.model.lora.wanted else [])]),
    }
    return facts | ({"tools": ", ".join(acting.names)} if acting else {})


def model_facts(policy: Policy, model_config: Any, end_token_ids: tuple[int, ...], world: World) -> dict[str, str]:
    """What the model computes beside the weights of a checkpoint: its config, frozen weights, precision and machine."""
    config = {key: value for key, value in model_config.to_dict().items() if key not in NOT_COMPUTED and key[0] != "_"}
    model = {"config": _hash(config), "end tokens": " ".join(map(str, end_token_ids))}
    frozen = {name: weight for name, weight in policy.model.named_parameters() if not weight.requires_grad}
    if frozen:
        model["frozen weights"] = fingerprint(frozen)
    return {
        "model": entries(model),
        "precision": str(policy.precision),
        "threads": str(torch.get_num_threads()),
        "ranks": str(world.size),
        "machine": machine(policy.device) + ("" if policy.why_no_kernels() else ", native kernels"),
    }


def fingerprint(weights: Mapping[str, Tensor]) -> str:
    """A hash of a model's weights, from the sum of each tensor's bits as integers: it tells one model from another."""
    sums = []
    for name, weight in weights.items():
        bits = weight.detach().contiguous().flatten().view(_INTEGERS[weight.element_size()])
        sums.append((name, list(weight.shape), int(bits.sum(dtype=torch.int64))))
    return _hash(sums)


def _code(rewards: RewardRunner, acting: Acting | None, config: GRPOConfig) -> Iterator[tuple[str, str, str]]:
    """Each piece of the user's code: what it is, the hash of its file, and that of the values and the weights that
    belong to it."""
    for name, function in zip(rewards.names, rewards.functions, strict=True):
        model = partial_layers(function.call)[-1]
        weights = fingerprint(model.model.state_dict()) if isinstance(model, RewardModel) else ""
        yield f"reward {name}", code_hash(function.call), values_hash(function.call) + weights
    if acting:
        for name, tool in acting.toolbox.items():
            yield f"tool {name}", code_hash(tool.function), values_hash(tool.function)
        for shape in acting.shapes.values():
            yield f"environment {shape.name}", code_hash(shape.factory), values_hash(shape.factory)
    objective, environment = config.resolved_objective, config.environment
    named: dict[str, Any] = {"history": environment.history, "parser": environment.parser}
    named |= {"baseline": objective.baseline, "filter": config.data.filter}
    if isinstance(objective.trust_region, Custom):
        named["trust region"] = objective.trust_region.function
    for name, spec in named.items():
        if isinstance(spec, str) and ":" in spec:
            yield name, named_code_hash(spec), ""


def _builtin_names(rewards: RewardRunner) -> set[str]:
    inner = (partial_layers(function.call)[-1] for function in rewards.functions)
    return {one.__name__ for one in inner if getattr(one, "__module__", "").startswith("cohort.rewards.")}


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:12]
