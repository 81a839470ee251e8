"""What a trainer is given in Python, by name: so that a run can be resumed from its folder alone."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from cohort.calls import partial_layers
from cohort.config import GRPOConfig, Source
from cohort.plugins import file_modules
from cohort.rewards.names import BUILTIN_REWARDS
from cohort.runs.code import bindings


def recorded(
    config: GRPOConfig,
    model: Any = None,
    reward_funcs: Any = None,
    train_dataset: Any = None,
    eval_dataset: Any = None,
    processing_class: Any = None,
    tools: Any = None,
    environment_factory: Any = None,
) -> tuple[GRPOConfig, dict[str, str]]:
    """The settings with the names of what the trainer was given in their place, and what has no name.

    Args:
        config: the settings.
        model, reward_funcs, train_dataset, eval_dataset, processing_class, tools, environment_factory: as
            ``GRPOTrainer`` takes them.
    """
    missing: dict[str, str] = {}
    if isinstance(model, str | os.PathLike):
        config = _with(config, "model", path=os.fspath(model))
    elif model is not None:
        missing["model"] = "an object in memory"
    if processing_class is not None:
        missing["processing_class"] = "an object in memory"
    for name, key, given in (("train_dataset", "train", train_dataset), ("eval_dataset", "eval", eval_dataset)):
        if given is not None:
            named = _named_data(given)
            config = _with(config, "data", **{key: named or ""})
            missing |= {} if named else {name: "rows in memory"}
    if reward_funcs is not None:
        config, unnamed = _with_names(config, "reward", "functions", (), _listed(reward_funcs))
        missing |= {"reward_funcs": ", ".join(unnamed)} if unnamed else {}
    if tools is not None:
        config, unnamed = _with_names(config, "environment", "tools", config.environment.tools, _listed(tools))
        missing |= {"tools": ", ".join(unnamed)} if unnamed else {}
    if environment_factory:
        several = environment_factory if isinstance(environment_factory, Mapping) else {"": environment_factory}
        names = {key: name_of(factory) for key, factory in several.items()}
        if None in names.values():
            missing["environment_factory"] = ", ".join(_shown(one) for one in several.values())
        else:
            config = _with(config, "environment", factory=names.get("", names))
    return config, missing


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
        ast.Import,
        ast.ImportFrom,
        ast.FunctionDef,
        ast.AsyncFunctionDef,
        ast.ClassDef,
        ast.Assign,
        ast.AnnAssign,
    )
    bound = {bound for one in body if one not in guards for bound in bindings(one)}
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


def _with_names(
    config: GRPOConfig, section: str, key: str, before: tuple[str, ...], given: list[Any]
) -> tuple[GRPOConfig, list[str]]:
    """The settings with the names of functions, and the functions without a name."""
    names = [name_of(one) for one in given]
    unnamed = [_shown(one) for one, name in zip(given, names, strict=True) if name is None]
    return (config if unnamed else _with(config, section, **{key: (*before, *names)})), unnamed


def _with(config: GRPOConfig, section: str, **values: Any) -> GRPOConfig:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, list | tuple) else [given]


def _shown(function: Callable[..., Any]) -> str:
    inner = partial_layers(function)[-1]
    name = getattr(inner, "__qualname__", type(inner).__name__)
    return f"{name} of {getattr(inner, '__module__', type(inner).__module__)}"
