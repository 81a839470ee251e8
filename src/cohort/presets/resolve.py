"""From what a user writes (a preset's name, words, numbers, tables) to an ``Objective``."""

from __future__ import annotations

import dataclasses
import difflib
import math
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from cohort.errors import ConfigError
from cohort.presets.bounds import literal_words, type_options
from cohort.presets.objective import ABOUT, Objective
from cohort.presets.parts import FIPO, KL, PPOClip
from cohort.presets.table import PRESETS, TABLE

SHORTHANDS = ("beta", "epsilon", "epsilon_high")
"""Settings that stand for numbers inside a part."""
K3_LEGACY = {
    "direction": "forward",
    "scope": "token",
    "place": "loss",
    "correction": "none",
    "anchor": "old",
    "estimator": "sampled",
}
"""What ``kl = "k3_legacy"`` is short for: k3 as a loss without a ratio, DeepSeekMath's."""
KL_ESTIMATORS = (
    ": a KL is named by the gradient it gives, direction and correction; k3 as a loss is kl = 'k3_legacy', k2 as a "
    "loss is { direction = 'reverse', correction = 'none' }, k1 in the reward is { place = 'reward' }"
)


def preset(name: str) -> Objective:
    """A row of the table by ``name`` (its newest version) or ``name@version``.

    Raises:
        ConfigError: there is no such preset; the nearest names are given.
    """
    plain, _, version = name.partition("@")
    if plain not in PRESETS:
        close = difflib.get_close_matches(plain.lower().replace("-", "_"), PRESETS, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}?" if close else "'cohort objective' lists all"
        raise ConfigError(f"unknown preset {plain!r}; {hint}")
    if not version:
        return PRESETS[plain]
    versions = {str(row.version): row for row in TABLE if row.name == plain}
    if version not in versions:
        raise ConfigError(f"preset {plain} has version {', '.join(versions)}, not {version!r}")
    return versions[version]


def setting_names() -> tuple[str, ...]:
    """The settings of an objective, shorthands included."""
    return (*(f.name for f in dataclasses.fields(Objective) if f.name not in ABOUT), *SHORTHANDS)


def optional_parts() -> frozenset[str]:
    """Parts whose absence, "none", is one of their values."""
    found = {"kl"}
    for name, hint in typing.get_type_hints(Objective).items():
        options = type_options(hint)
        holds_none = type(None) in options and any(hasattr(option, "rule") for option in options)
        if holds_none or "none" in literal_words(hint) or typing.get_origin(hint) is tuple:
            found.add(name)
    return frozenset(found)


def with_flags(part: str, before: Any, given: Any, objective: Objective) -> Any:
    """A part's setting from a file with command-line flags laid over it. What the file says of another rule is not
    taken along.

    Args:
        part: its name.
        before: what the file says; None: nothing.
        given: what the flags say.
        objective: the preset, whose rule a table without one is about.
    """
    if before is None or isinstance(given, list) or not isinstance(given, str | Mapping):
        return given
    if not isinstance(before, str | Mapping):
        return given
    new, old = ({"rule": item} if isinstance(item, str) else dict(item) for item in (given, before))
    if new.get("rule") == "k3_legacy":  # fixes everything but the weight
        return {**{key: value for key, value in old.items() if key in ("beta", "target", "horizon")}, **new}
    own_rule = old.get("rule", getattr(getattr(objective, part, None), "rule", None))
    return given if "rule" in new and new["rule"] != own_rule else {**old, **new}


def replaced(objective: Objective, settings: Mapping[str, Any]) -> Objective:
    """``objective`` with some settings changed. See ``Objective.replace``."""
    hints = typing.get_type_hints(Objective)
    kl = settings.get("kl")
    if kl == "none":
        settings = {**settings, "kl": KL()}
    if kl == "k3_legacy" or (isinstance(kl, Mapping) and kl.get("rule") == "k3_legacy"):
        numbers = {key: value for key, value in kl.items() if key != "rule"} if isinstance(kl, Mapping) else {}
        settings = {**settings, "kl": {**K3_LEGACY, **numbers}}
    settings = _with_epsilon(objective, _with_beta(settings))
    changes: dict[str, Any] = {}
    for name, value in settings.items():
        if name not in hints or name in ABOUT:
            raise ConfigError(f"unknown objective setting {name!r}{_nearest(name, setting_names())}")
        changes[name] = _value(name, value, hints[name], getattr(objective, name))
    return dataclasses.replace(objective, **changes)


def nested(settings: Mapping[str, Any] | Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Dotted names as tables: ``{"kl.beta": 0.1}`` is ``{"kl": {"beta": 0.1}}``. Given as pairs, names may repeat: of
    two values the later one counts, and tables and words of one part are put together.

    >>> nested({"kl.beta": 0.1, "kl.scope": "token", "scale": "none"})
    {'kl': {'beta': 0.1, 'scope': 'token'}, 'scale': 'none'}
    """
    tables: dict[str, Any] = {}
    for name, value in settings.items() if isinstance(settings, Mapping) else settings:
        part, _, key = name.partition(".")
        given = {key: value} if key else value
        before = tables.get(part)
        if not isinstance(given, Mapping | str) and not isinstance(before, Mapping):
            tables[part] = given
            continue
        both: list[Any] = [
            {"rule": item} if isinstance(item, str) else item for item in (before, given) if part in tables
        ]
        if not all(isinstance(item, Mapping) for item in both):
            by = f"by its parts ({name})" if key else f"as {given!r}"
            raise ConfigError(f"{part} is given both as {before!r} and {by}")
        tables[part] = {**both[0], **both[1]} if both else given
    return tables


def _with_beta(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """``beta`` as part of the KL."""
    if "beta" not in settings:
        return settings
    rest = {name: value for name, value in settings.items() if name != "beta"}
    beta, kl = _value("beta", settings["beta"], float, None), settings.get("kl")
    if isinstance(kl, KL):
        kl = {f.name: getattr(kl, f.name) for f in dataclasses.fields(kl)}
    table = {"rule": kl} if isinstance(kl, str) else (kl or {})
    if not isinstance(table, Mapping):
        return rest  # refused where the KL is read
    if table.get("beta", 0) not in (0, beta):
        raise ConfigError("the KL's weight is given twice: as beta and as kl.beta")
    return {**rest, "kl": {**table, "beta": beta}}


def _with_epsilon(objective: Objective, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """``epsilon`` and ``epsilon_high`` as bounds of the PPO clip."""
    epsilon, epsilon_high = settings.get("epsilon"), settings.get("epsilon_high")
    rest = {name: value for name, value in settings.items() if name not in ("epsilon", "epsilon_high")}
    given = {"epsilon": epsilon, "epsilon_high": epsilon_high}
    numbers = {name: _value(name, value, float, None) for name, value in given.items() if value is not None}
    if not numbers:
        return rest
    if min(numbers.values()) <= 0:
        raise ConfigError("epsilon and epsilon_high must be greater than 0")
    if numbers.get("epsilon", 0.0) >= 1:
        raise ConfigError(
            f"epsilon ({epsilon:g}) is how far below 1 the ratio may fall, as 0.2; for no lower bound set "
            "trust_region.low to 0"
        )
    part = rest.get("trust_region", objective.trust_region)
    rule = part.get("rule", getattr(objective.trust_region, "rule", None)) if isinstance(part, Mapping) else part
    rule = getattr(rule, "rule", rule)
    if rule not in (PPOClip.rule, FIPO.rule):
        what = "no trust region" if rule in (None, "none") else f"trust_region {rule!r}"
        raise ConfigError(
            f"epsilon and epsilon_high are the bounds of the PPO clip, and this objective has {what}: set its own "
            "numbers (trust_region = {...}), or trust_region = 'ppo_clip'"
        )
    current = objective.trust_region
    if getattr(current, "rule", None) != rule:
        current = PPOClip() if rule == PPOClip.rule else FIPO()
    if epsilon_high is None and isinstance(current, PPOClip | FIPO) and abs(current.low + current.high - 2) > 1e-12:
        raise ConfigError(
            f"this objective's clip is [{current.low:g}, {current.high:g}], not as far above 1 as below: beside "
            "epsilon set epsilon_high, or set trust_region.low alone"
        )
    bounds = {"high": 1 + numbers.get("epsilon_high", numbers.get("epsilon", 0.0))}
    if epsilon is not None:
        bounds["low"] = 1 - numbers["epsilon"]
    if isinstance(part, PPOClip | FIPO):
        # As a table with all its numbers, so that they are checked together with the new bounds.
        part = {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}
    table = dict(part) if isinstance(part, Mapping) else {}
    if twice := [name for name in bounds if name in table and "trust_region" in rest]:
        raise ConfigError(
            f"the clip's bound is given twice: as trust_region.{twice[0]} and as an epsilon (epsilon sets the upper "
            "bound too, unless epsilon_high does)"
        )
    return {**rest, "trust_region": {**table, **bounds, "rule": rule}}


def _value(name: str, value: Any, hint: Any, current: Any) -> Any:
    """One setting as its type wants it."""
    options = type_options(hint)
    parts: dict[str, Any] = {option.rule: option for option in options if hasattr(option, "rule")}
    if typing.get_origin(hint) is tuple:
        return _tuple_of_parts(name, value, typing.get_args(hint)[0])
    if parts:
        return _part(name, value, parts, current, optional=type(None) in options)
    if value == "none" and type(None) in options:
        return None
    return _plain(name, value, hint, options)


def _tuple_of_parts(name: str, value: Any, hint: Any) -> tuple[Any, ...]:
    if value is None or value == "none":
        return ()
    if isinstance(value, str | Mapping) or dataclasses.is_dataclass(value):
        value = (value,)
    if not isinstance(value, Sequence):
        raise ConfigError(f"{name}: expected a list of tables, got {value!r}")
    return tuple(_value(f"{name}[{index}]", item, hint, None) for index, item in enumerate(value))


def _part(name: str, value: Any, parts: Mapping[str, Any], current: Any, *, optional: bool) -> Any:
    """A part from itself, a word, or a table of its numbers."""
    if optional and (value is None or value == "none"):
        return None
    if type(value) in parts.values():
        return value
    if isinstance(value, str) and ":" in value and "custom" in parts:
        value = {"rule": "custom", "function": value}
    if "custom" in parts and (callable(value) or (isinstance(value, str) and value.endswith(".py"))):
        raise ConfigError(f"{name}: a rule of your own is named 'module:function' or 'file.py:function', got {value!r}")
    if isinstance(value, Mapping) and ":" in str(value.get("rule", "")) and "custom" in parts:
        raise ConfigError(f"{name}: a rule of your own has no numbers here, got {dict(value)!r}")
    table = {"rule": value} if isinstance(value, str) else value
    if isinstance(table, Mapping) and optional and table.get("rule") == "none":
        return _absent(name, table)
    if not isinstance(table, Mapping):
        raise ConfigError(
            f"{name}: expected one of {_listed(parts, optional)}, or a table with its numbers, got {value!r}"
        )
    rule = table.get("rule", current.rule if current is not None else (next(iter(parts)) if len(parts) == 1 else None))
    if rule is None:
        raise ConfigError(f"{name} is a table without its rule: expected rule = one of {_listed(parts, optional)}")
    if rule not in parts and len(parts) == 1:
        listed = ", ".join(field.name for field in dataclasses.fields(next(iter(parts.values()))))
        hint = KL_ESTIMATORS if name == "kl" and str(rule).startswith(("k1", "k2", "k3", "low_var")) else ""
        raise ConfigError(f"{name}: expected a table of its numbers ({listed}), got {value!r}{hint}")
    if rule not in parts:
        raise ConfigError(
            f"{name}: expected one of {_listed(parts, optional)}, got {rule!r}{_nearest(str(rule), parts)}"
        )
    chosen = parts[rule]
    hints = typing.get_type_hints(chosen)
    fields = [field.name for field in dataclasses.fields(chosen)]
    numbers: Mapping[str, Any] = {key: item for key, item in table.items() if key != "rule"}
    if chosen is KL and isinstance(current, KL):
        numbers = _with_what_follows(numbers, current)
    for key in numbers:
        if key not in fields:
            has = f"; {rule} has {', '.join(fields) or 'no numbers'}"
            raise ConfigError(f"unknown setting {name}.{key}{_nearest(key, fields) or has}")
    checked = {key: _value(f"{name}.{key}", item, hints[key], None) for key, item in numbers.items()}
    if current is not None and current.rule == rule:
        return dataclasses.replace(current, **checked)
    return chosen(**checked)


def _absent(name: str, table: Mapping[str, Any]) -> None:
    if numbers := [key for key in table if key != "rule"]:
        raise ConfigError(f"{name} is 'none' and has no {numbers[0]}")


def _with_what_follows(numbers: Mapping[str, Any], current: KL) -> Mapping[str, Any]:
    """A KL that is moved or widened, with the settings that have only one meaning then, unless they are given."""
    place = numbers.get("place", current.place)
    if place != "loss" and "place" in numbers:
        scope = {"scope": "sequence"} if place == "reward" else {}
        return {**scope, "correction": "none", "anchor": "old", **numbers}
    if numbers.get("scope") == "sequence" and current.correction in ("token_ratio", "prefix_product"):
        return {"correction": "sequence_weight", **numbers}
    if numbers.get("estimator") == "full" and current.correction in ("token_ratio", "sequence_weight"):
        return {"correction": "none", "anchor": "old", **numbers}
    return numbers


def _plain(name: str, value: Any, hint: Any, options: Sequence[Any]) -> Any:
    """A word, a number or a truth value."""
    words = literal_words(hint)
    if isinstance(value, str) and value in words and str in {type(word) for word in words}:
        return value
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
    if float in options and is_number:
        return float(value)
    if int in options and isinstance(value, int) and not isinstance(value, bool):
        return value
    if int in words and isinstance(value, int) and value in words:
        return value
    if bool in options and isinstance(value, bool):
        return value
    if str in options and isinstance(value, str):
        return value
    if value is None and type(None) in options:
        return None
    kinds = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    expected = [repr(word) for word in words] + [kinds[option] for option in options if option in kinds]
    nearest = _nearest(value, words) if isinstance(value, str) else ""
    raise ConfigError(f"{name}: expected {' or '.join(expected) or hint}, got {value!r}{nearest}")


def _listed(parts: Mapping[str, Any], optional: bool) -> str:
    return ", ".join([*(["none"] if optional else []), *parts])


def _nearest(word: str, words: Any) -> str:
    close = difflib.get_close_matches(word, [str(item) for item in words], n=1)
    return f"; did you mean {close[0]}?" if close else ""
