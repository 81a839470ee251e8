"""A user's settings of an objective: words, numbers and tables laid over those of a preset."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from cohort.errors import ConfigError, did_you_mean
from cohort.presets.base import Part, kinds, require
from cohort.presets.parts import KL
from cohort.presets.trust_regions import FIPO, PPOClip

SHORTHANDS = ("beta", "epsilon", "epsilon_high")
"""Settings that stand for numbers inside a part."""
K3_LEGACY = KL(direction="forward").model_dump(exclude={"beta", "top_k", "target", "horizon"})
"""What ``kl = "k3_legacy"`` stands for: k3 as a loss without a ratio, DeepSeekMath's."""
KL_ESTIMATORS = (
    ": a KL is named by its gradient's direction and correction; k3 as a loss is kl = 'k3_legacy', k2 as a loss is "
    "{ direction = 'reverse', correction = 'none' }, k1 in the reward is { place = 'reward' }"
)


def merged(objective: BaseModel, current: Mapping[str, object], given: Mapping[str, object]) -> dict[str, object]:
    """The given settings of an objective, each completed by the numbers of the part that it changes.

    Args:
        objective: its type knows which parts a setting may hold.
        current: its parts.
        given: words, numbers, tables and parts; shorthands too.
    """
    given = _with_epsilon(current, _with_beta(_with_whole_kl(given)))
    for name in given:
        require(name in current, f"unknown objective setting {name!r}{did_you_mean(name, (*current, *SHORTHANDS))}")
    fields = type(objective).model_fields
    return {
        name: _completed(name, value, kinds(fields[name].annotation), current[name]) for name, value in given.items()
    }


def _with_whole_kl(given: Mapping[str, object]) -> Mapping[str, object]:
    """Replace the words for a whole KL by their numbers: "none" and "k3_legacy"."""
    kl = given.get("kl")
    if kl in ("none", None) and "kl" in given:
        return {**given, "kl": KL()}
    table = {"rule": kl} if isinstance(kl, str) else kl
    if isinstance(table, Mapping) and table.get("rule") == "k3_legacy":
        return {**given, "kl": {**K3_LEGACY, **table, "rule": "kl"}}
    return given


def _with_beta(given: Mapping[str, object]) -> Mapping[str, object]:
    """Move ``beta`` into the KL."""
    if "beta" not in given:
        return given
    rest = {name: value for name, value in given.items() if name != "beta"}
    table = _table(rest.get("kl", {}))
    if not isinstance(table, Mapping):
        return rest  # refused where the KL is read
    if table.get("beta", 0) not in (0, given["beta"]):
        raise ConfigError("the KL's weight is given twice: as beta and as kl.beta")
    return {**rest, "kl": {**table, "beta": given["beta"]}}


def _with_epsilon(current: Mapping[str, object], given: Mapping[str, object]) -> Mapping[str, object]:
    """Move ``epsilon`` and ``epsilon_high`` into the bounds of the PPO clip."""
    numbers = {key: _number(key, given[key]) for key in ("epsilon", "epsilon_high") if given.get(key) is not None}
    rest = {name: value for name, value in given.items() if name not in ("epsilon", "epsilon_high")}
    if not numbers:
        return rest
    require(min(numbers.values()) > 0, "epsilon and epsilon_high must be greater than 0")
    epsilon = numbers.get("epsilon")
    require(
        epsilon is None or epsilon < 1,
        f"epsilon ({epsilon}) is the distance of the ratio's lower bound from 1, as 0.2; for no lower bound set "
        "trust_region.low to 0",
    )
    clip = current["trust_region"]
    table = _table(rest["trust_region"]) if "trust_region" in rest else {}
    rule = table.get("rule", getattr(clip, "rule", None)) if isinstance(table, Mapping) else table
    kind = {"ppo_clip": PPOClip, "fipo": FIPO}.get(str(rule))
    if kind is None or not isinstance(table, Mapping):
        what = "no trust region" if rule in (None, "none") else f"trust_region {rule!r}"
        raise ConfigError(
            f"epsilon and epsilon_high are the bounds of the PPO clip, and this objective has {what}: set its own "
            "numbers (trust_region = {...}), or trust_region = 'ppo_clip'"
        )
    before = clip if isinstance(clip, PPOClip) and clip.rule == rule else kind()
    if "epsilon_high" not in numbers and abs(before.low + before.high - 2) > 1e-12:
        raise ConfigError(
            f"the clip range [{before.low:g}, {before.high:g}] of this objective is asymmetric: set epsilon_high as "
            "well, or set trust_region.low alone"
        )
    bounds = {"high": 1 + numbers.get("epsilon_high", numbers.get("epsilon", 0.0))}
    if epsilon is not None:
        bounds["low"] = 1 - epsilon
    if twice := [name for name in bounds if name in table]:
        raise ConfigError(
            f"the clip's bound is given twice: as trust_region.{twice[0]} and as an epsilon (epsilon sets the upper "
            "bound too, unless epsilon_high does)"
        )
    return {**rest, "trust_region": {**table, **bounds, "rule": rule}}


def _number(name: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or math.isnan(value):
        raise ConfigError(f"{name}: expected a number, got {value!r}")
    return value


def _table(value: Any) -> Any:
    """A part or a rule's name as a table; other values as they are."""
    if isinstance(value, Part):
        return {"rule": value.rule, **value.numbers()}
    return {"rule": value} if isinstance(value, str) else value


def _completed(name: str, value: Any, rules: Mapping[str, type[Part]], current: object) -> object:
    """A setting as the objective's type reads it: a part's table with its rule and all numbers that do not change."""
    if name == "mismatch":
        items = () if value in (None, "none") else (value,) if isinstance(value, str | Mapping | Part) else value
        if not isinstance(items, Sequence):
            return value  # refused by its type
        return tuple(_completed(f"mismatch[{index}]", item, rules, None) for index, item in enumerate(items))
    if not rules or isinstance(value, Part):
        return value
    if "custom" in rules:
        value = _user_rule(name, value)
    table = {"rule": "none"} if value is None else _table(value)
    optional = name != "kl" and not name.startswith("mismatch")
    words = ["none", *rules] if optional else [*rules]
    if not isinstance(table, Mapping):
        raise ConfigError(f"{name}: expected one of {', '.join(words)}, or a table with its numbers, got {value!r}")
    present = current.rule if isinstance(current, Part) else next(iter(rules)) if len(rules) == 1 else None
    rule, numbers = table.get("rule", present), {key: item for key, item in table.items() if key != "rule"}
    if rule is None:
        raise ConfigError(f"{name} is a table without its rule: expected rule = one of {', '.join(words)}")
    if not isinstance(rule, str):
        raise ConfigError(f"{name}: expected rule = one of {', '.join(words)}, got {rule!r}")
    if rule == "none" and optional:
        require(not numbers, f"{name} is 'none' and has no {next(iter(numbers), None)}")
        return None
    if rule not in rules and len(rules) == 1:
        listed = ", ".join(key for key in next(iter(rules.values())).model_fields if key != "rule")
        hint = KL_ESTIMATORS if name == "kl" and str(rule).startswith(("k1", "k2", "k3", "low_var")) else ""
        raise ConfigError(f"{name}: expected a table of its numbers ({listed}), got {value!r}{hint}")
    if rule not in rules:
        raise ConfigError(f"{name}: expected one of {', '.join(words)}, got {rule!r}{did_you_mean(rule, rules)}")
    if isinstance(current, KL):
        numbers = dict(_with_implied(numbers, current))
    unchanged = current.numbers() if isinstance(current, Part) and current.rule == rule else {}
    return {**unchanged, **numbers, "rule": rule}


def _user_rule(name: str, value: Any) -> Any:
    """The table of a user's rule named by a string with a colon; other values as they are."""
    if callable(value) or (isinstance(value, str) and value.endswith(".py")):
        raise ConfigError(f"{name}: a user's rule is named 'module:function' or 'file.py:function', got {value!r}")
    if isinstance(value, Mapping) and ":" in str(value.get("rule", "")):
        raise ConfigError(f"{name}: a user's rule has no numbers here, got {dict(value)!r}")
    return {"rule": "custom", "function": value} if isinstance(value, str) and ":" in value else value


def _with_implied(numbers: Mapping[str, object], current: KL) -> Mapping[str, object]:
    """Numbers of a KL with those that they leave only one choice for, unless given."""
    if numbers.get("place", "loss") != "loss":
        scope = {"scope": "sequence"} if numbers["place"] == "reward" else {}
        return {**scope, "correction": "none", "anchor": "old", **numbers}
    if numbers.get("scope") == "sequence" and current.correction in ("token_ratio", "prefix_product"):
        return {"correction": "sequence_weight", **numbers}
    if numbers.get("estimator") == "full" and current.correction in ("token_ratio", "sequence_weight"):
        return {"correction": "none", "anchor": "old", **numbers}
    return numbers


def nested(settings: Mapping[str, Any] | Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Dotted names as tables: ``{"kl.beta": 0.1}`` is ``{"kl": {"beta": 0.1}}``. Pairs may repeat a name: the later of
    two values counts, and tables and words of one part are merged.

    >>> nested({"kl.beta": 0.1, "kl.scope": "token", "scale": "none"})
    {'kl': {'beta': 0.1, 'scope': 'token'}, 'scale': 'none'}
    """
    tables: dict[str, Any] = {}
    for name, value in settings.items() if isinstance(settings, Mapping) else settings:
        part, _, key = name.partition(".")
        given, before = {key: value} if key else value, tables.get(part)
        if part not in tables or (not isinstance(given, Mapping | str) and not isinstance(before, Mapping)):
            tables[part] = given
            continue
        both = _table(before), _table(given)
        if not all(isinstance(item, Mapping) for item in both):
            by = f"by its parts ({name})" if key else f"as {given!r}"
            raise ConfigError(f"{part} is given both as {before!r} and {by}")
        tables[part] = {**both[0], **both[1]}
    return tables


def with_flags(part: str, before: Any, given: Any, objective: BaseModel) -> Any:
    """A part's setting from a file with command-line flags laid over it. Numbers that the file gives for another rule
    are dropped.

    Args:
        part: its name.
        before: the setting in the file; None: not set there.
        given: the setting on the command line.
        objective: the preset, whose rule a table without a rule is about.
    """
    old, new = _table(before), _table(given)
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        return given
    if new.get("rule") == "k3_legacy":  # fixes everything but the weight
        return {**{key: value for key, value in old.items() if key in ("beta", "target", "horizon")}, **new}
    rule = old.get("rule", getattr(getattr(objective, part, None), "rule", None))
    return given if "rule" in new and new["rule"] != rule else {**old, **new}
