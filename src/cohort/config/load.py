"""Settings from TOML files and from ``--section.key value`` overrides, and as TOML files."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from cohort.config.grpo import GRPOConfig
from cohort.config.names import absolute, changed, with_texts
from cohort.config.schema import (
    explain_errors,
    explanations,
    foreign_names,
    marks_of,
    read_text,
    setting_paths,
    subsection,
    suggestion,
)
from cohort.config.secrets import hide_secrets
from cohort.errors import ConfigError, did_you_mean
from cohort.presets import nested, optional_parts, preset, with_flags
from cohort.presets import setting_names as objective_parts


def file_and_overrides(arguments: Sequence[str]) -> tuple[str | None, tuple[str, ...]]:
    """The arguments of ``cohort train``: a file of settings, which may be left out, and ``--section.key value`` pairs.

    >>> file_and_overrides(["my.toml", "--run.seed", "1"]), file_and_overrides(["--run.seed=1"])
    (('my.toml', ('--run.seed', '1')), (None, ('--run.seed=1',)))

    Raises:
        ConfigError: there is none.
    """
    if not arguments:
        raise ConfigError(
            "no settings: give a TOML file ('cohort config > my.toml' writes one) or --section.key value, at least "
            "--model.path, --data.train and --reward.functions"
        )
    is_file = not arguments[0].startswith("--")
    return (arguments[0], tuple(arguments[1:])) if is_file else (None, tuple(arguments))


def load_config(path: str | Path | None, overrides: Sequence[str] = (), *, of_run: bool = False) -> GRPOConfig:
    """The settings of a TOML file, with command-line overrides.

    Names of files become absolute: in the file, names belong to its folder or, if it has no such file, to the working
    directory; those of overrides belong to the working directory.

    Args:
        path: a TOML file with one table per section. None: the defaults.
        overrides: ``["--rollout.num_generations", "4", "--run.seed=1"]``. A value is read by its setting's type;
            ``none`` unsets an optional setting.
        of_run: the file is in a run folder, where names are absolute; others stay what they are.

    Raises:
        ConfigError: the file does not exist or is not TOML, a key is unknown (the error names the nearest one), or a
            value has the wrong type or range.
    """
    if path is None:
        return apply_overrides({}, overrides)
    path = Path(path)
    try:
        text = read_text(path)
    except ValueError as error:
        missing = isinstance(error.__context__, FileNotFoundError)
        raise ConfigError(f"no config file {path}" if missing else str(error)) from None
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # not TOMLDecodeError alone: an integer may have too many digits
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    with explain_errors(GRPOConfig, source=str(path)):
        _check_sections(table)
    table = table if of_run else with_texts(table, marks_of(GRPOConfig), absolute(path.parent, Path()))
    try:
        return apply_overrides(table, overrides)
    except ConfigError as error:
        lines = str(error).splitlines()
    mistakes_of_file: list[str] = []
    try:
        GRPOConfig(**table)
    except ConfigError as error:
        mistakes_of_file = str(error).splitlines()
    raise ConfigError("\n".join(f"{path if line in mistakes_of_file else 'command line'}: {line}" for line in lines))


def apply_overrides(table: Mapping[str, Any], overrides: Sequence[str]) -> GRPOConfig:
    """Settings from nested tables and ``--section.key value`` pairs, which take precedence. Names of files in the pairs
    become absolute.

    Raises:
        ConfigError: a key is unknown, or a value has the wrong type or range.
    """
    merged, marks, here = dict(table), marks_of(GRPOConfig), absolute(Path())
    parts: list[tuple[str, Any]] = []
    mistakes: list[str] = []
    lists: dict[str, str] = {}
    for name, text in _pairs(overrides):
        try:
            path, rest, field = _find(name)
        except ConfigError as error:
            mistakes.append(str(error))
            continue
        setting = ".".join(path)
        named = partial(changed, path=setting, mark=marks[setting], change=here)
        if path[0] == "objective" and path[1] in objective_parts():
            value = named(parse_value(text))
            absent = value == "none" and path[1] not in optional_parts()
            parts.append((".".join([*path[1:], *rest]), None if absent else value))
        elif rest:
            merged = with_value(merged, [*path, *rest], named(parse_value(text)))
        else:
            try:
                value = _read(text, field)
            except ValidationError as error:
                mistakes += explanations(error, GRPOConfig, name)
                continue
            merged = with_value(merged, path, named(value))
            if isinstance(value, tuple) and lists.setdefault(name, text) != text:
                both = ", ".join(json.dumps(one) for one in (lists[name], text))
                mistakes.append(f"--{name} is given twice, which would drop the first: give the list, as '[{both}]'")
    if parts:
        merged["objective"] = _with_parts(merged.get("objective", {}), nested(parts))
    try:
        config = GRPOConfig(**merged)
    except ConfigError as error:
        mistakes += str(error).splitlines()
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return config


def with_absolute_names(config: GRPOConfig) -> GRPOConfig:
    """The settings with absolute names of files; relative ones belong to the working directory."""
    table = config.model_dump(exclude_none=True)
    named = with_texts(table, marks_of(GRPOConfig), absolute(Path()))
    return config if named == table else GRPOConfig(**named)


def setting_names(overrides: Sequence[str]) -> tuple[str, ...]:
    """The settings that ``--section.key value`` pairs change. A part of a setting stands for the whole.

    >>> setting_names(["--run.seed=1", "--objective.trust_region.high", "1.4"])
    ('run.seed', 'objective.trust_region')
    """
    return tuple(dict.fromkeys(".".join(_find(name)[0]) for name, _ in _pairs(overrides)))


def with_values(config: GRPOConfig, values: Mapping[str, Any]) -> GRPOConfig:
    """The settings with other values of some, by their dotted paths.

    Raises:
        ConfigError: they do not go together.
    """
    table: dict[str, Any] = config.model_dump(exclude_none=True)
    for path, value in values.items():
        table = with_value(table, path.split("."), value)
    return GRPOConfig(**table)


def parse_settings(assignments: Sequence[str], also: Collection[str] = ()) -> dict[str, Any]:
    """Parts of an objective from ``["trust_region.high=1.4", "scale=none"]``.

    ``also`` are names beside the parts that are taken.

    Raises:
        ConfigError: an item is not NAME=VALUE, or NAME is not a part of an objective.

    >>> parse_settings(["trust_region.high=1.4", "scale=none"])
    {'trust_region': {'high': 1.4}, 'scale': 'none'}
    """
    settings: list[tuple[str, Any]] = []
    for assignment in assignments:
        name, given, text = assignment.partition("=")
        name = name.strip().removeprefix("objective.")
        if not given or not name:
            raise ConfigError(f"expected PART=VALUE, as in trust_region.high=1.4, got {assignment!r}")
        part = name.partition(".")[0]
        if part in foreign_names():
            raise ConfigError(f"unknown part {part!r}: {foreign_names()[part].replace('objective.', '')}")
        if part not in {*objective_parts(), *also} and part in (paths := setting_paths(GRPOConfig)):
            raise ConfigError(f"{part} is not a part of an objective but a setting of a run: {paths[part]}")
        settings.append((name, parse_value(text.strip())))
    return nested(settings)


def parse_value(text: str) -> Any:
    """A word, a number, true or false, a list or a table from its text.

    >>> parse_value("1e-6"), parse_value(".5"), parse_value("True"), parse_value("cap"), parse_value("{ low = 1 }")
    (1e-06, 0.5, True, 'cap', {'low': 1})
    """
    try:
        return tomllib.loads(f"value = {text.lower() if text in ('True', 'False') else text}")["value"]
    except tomllib.TOMLDecodeError:
        pass
    try:
        return float(text)
    except ValueError:
        return text


def with_value(table: Any, path: Sequence[str], value: Any) -> Any:
    """A copy of ``table`` with a nested key set. Parents that are not tables are replaced.

    >>> with_value({"a": {"b": 1}, "c": 2}, ["a", "d"], 3)
    {'a': {'b': 1, 'd': 3}, 'c': 2}
    """
    if not path:
        return value
    before = table if isinstance(table, Mapping) else {}
    return {**before, path[0]: with_value(before.get(path[0]), path[1:], value)}


def _read(text: str, field: FieldInfo) -> Any:
    """A setting's value from its text. Pydantic converts it to the setting's type.

    A list may be TOML or text with commas.
    """
    adapter = TypeAdapter[Any](field.rebuild_annotation())
    form = None if text.lower() == "none" else parse_value(text) if text.startswith(("[", "{")) else text
    for value in (form, text):
        try:
            return adapter.validate_python(value)
        except ValidationError as error:
            kind = error.errors()[0]["type"]
            if value is not None and not kind.endswith("_type"):
                raise
    return adapter.validate_python(_split(text) if kind == "tuple_type" else text)


def _split(text: str) -> list[str]:
    """The parts of a list: commas inside parentheses do not separate, as in "f(a=1, b=(2, 3)),g"."""
    shielded = re.sub(r"\((?:[^()]|\([^()]*\))*\)", lambda found: found[0].replace(",", "\0"), text)
    return [part.replace("\0", ",") for part in shielded.split(",")] if text else []


def _pairs(overrides: Sequence[str]) -> Iterator[tuple[str, str]]:
    rest = iter(overrides)
    for flag in rest:
        name, has_value, text = flag.removeprefix("--").partition("=")
        if not flag.startswith("--") or not name:
            raise ConfigError(f"expected --section.key value, got {flag!r}")
        value = text if has_value else next(rest, None)
        if value is None:
            raise ConfigError(f"--{name} needs a value")
        if any("\ud800" <= character <= "\udfff" for character in name + value):
            raise ConfigError(f"--{name!r:.80} {value!r:.80} is not UTF-8 text")
        yield name, value


def _find(name: str) -> tuple[list[str], list[str], FieldInfo]:
    """The path of the setting that a dotted name begins with, the keys after it, and the setting's declaration.

    Raises:
        ConfigError: there is no such setting, it is a section, or its value is not a table and has no keys.
    """
    keys, schema = name.split("."), GRPOConfig
    for depth, key in enumerate(keys, 1):
        if (field := schema.model_fields.get(key)) is None:
            break
        if inner := subsection(field.annotation):
            schema = inner  # type: ignore[assignment]
            continue
        path, rest, form = keys[:depth], keys[depth:], str(field.annotation)
        if rest and (keys[0] != "objective" or key not in objective_parts()):
            if "dict[" not in form:
                break
            rest = rest if "Any]" in form else [".".join(rest)]  # a table of strings is flat
        return path, rest, field
    else:
        settings = ", ".join(f"--{name}.{key}" for key in [*schema.model_fields][:3])
        raise ConfigError(f"--{name} is a section: set one of its settings, such as {settings}")
    raise ConfigError(f"unknown setting --{name}{suggestion(name, GRPOConfig, prefix='--')}")


def _with_parts(objective: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """A file's objective with the parts that flags name."""
    try:
        base = preset(str(objective.get("preset", "default")))
    except ConfigError:
        base = preset("default")  # GRPOConfig refuses the name
    return {**objective, **{key: with_flags(key, objective.get(key), value, base) for key, value in flags.items()}}


def _check_sections(table: Mapping[str, Any]) -> None:
    sections, mistakes = tuple(GRPOConfig.model_fields), []
    for name, value in table.items():
        if name in sections:
            if not isinstance(value, Mapping):
                mistakes.append(f"{name} is a section: expected a table [{name}], got {name} = {value!r}")
        elif isinstance(value, Mapping):
            hint = did_you_mean(name, sections, form="[{}]") or f"; sections are {', '.join(sections)}"
            mistakes.append(f"unknown section [{name}]{hint}")
        else:
            mistakes.append(f"setting {name} is outside a section{suggestion(name, GRPOConfig)}")
    if mistakes:
        raise ConfigError("\n".join(mistakes))


def to_toml(config: GRPOConfig) -> str:
    """The settings as a TOML file that reads back as the same settings, apart from secrets, which are ``***``. Unset
    ones are omitted: TOML has no null.

    Raises:
        ConfigError: a setting is not UTF-8 text.
    """
    text = tomli_w.dumps(hide_secrets(config.model_dump(exclude_none=True)))
    with explain_errors(GRPOConfig):
        text.encode()
    return text


def annotated_toml() -> str:
    """Every setting with its default and its documentation, as a TOML file to start from."""
    return "\n".join(_annotated("", GRPOConfig))


def _annotated(name: str, section: type[BaseModel]) -> list[str]:
    lines = [f"[{name}]  # {' '.join((section.__doc__ or '').split())}"] if name else []
    tables: list[str] = []
    for key, field in section.model_fields.items():
        if table := subsection(field.annotation):
            tables += _annotated(f"{name}.{key}".lstrip("."), table)
            continue
        lines += [f"# {line.strip()}" for line in (field.description or "").splitlines()]
        lines += [_assignment(key, field.default), ""]
    return lines + tables


def _assignment(key: str, value: Any) -> str:
    if value is None:
        return f"# {key} ="
    return f"{key} = {{}}" if value == {} else tomli_w.dumps({key: value}).strip()
