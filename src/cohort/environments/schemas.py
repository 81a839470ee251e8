"""JSON schemas of arguments: what is wrong with a value, and the value that a text means.

The keywords that ``get_json_schema`` writes, and that most servers of tools use, are checked: ``type``, ``enum``,
``const``, ``nullable``, ``anyOf``, ``oneOf``, ``properties``, ``required``, ``additionalProperties``, ``items``,
``prefixItems``. Others are not checked.
"""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

_TYPES: dict[str, tuple[str, type | tuple[type, ...]]] = {
    "string": ("a string", str),
    "integer": ("an integer", int),
    "number": ("a number", (int, float)),
    "boolean": ("true or false", bool),
    "null": ("null", type(None)),
    "array": ("a list", (list, tuple)),
    "object": ("an object", dict),
}
"""What errors call a type, and its Python types."""
MAX_LITERAL = 10_000
"""Maximum length of Python literals, whose parser is slow."""


def problem_with(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """What is wrong with the arguments of a call, in one line. Empty: nothing.

    >>> schema = {"properties": {"n": {"type": "integer"}}, "required": ["n"]}
    >>> problem_with({"n": 3}, schema), problem_with({"n": "3"}, schema)
    ('', "the argument 'n' must be an integer, got '3'")
    """
    closed = {**schema, "additionalProperties": schema.get("additionalProperties") or False}
    return "; ".join(_problems_of_object(arguments, closed, "")[:4])


def _problems(value: Any, schema: Any, what: str) -> list[str]:
    """What is wrong with a value. A schema that is no table accepts everything."""
    if not isinstance(schema, Mapping) or (value is None and schema.get("nullable")):
        return []
    several = [choices for choices in (schema.get("anyOf"), schema.get("oneOf")) if choices]
    fits_none = any(all(_problems(value, choice, what) for choice in choices) for choices in several)
    if fits_none or not _has_type(value, schema):
        return [f"{what} must be {_expected(schema)}, got {_shown(value)}"]
    allowed = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(allowed, list | tuple) and not any(value == one and type(value) is type(one) for one in allowed):
        return [f"{what} must be one of {_shown(list(allowed))}, got {_shown(value)}"]
    if isinstance(value, Mapping):
        return _problems_of_object(value, schema, what)
    if isinstance(value, list | tuple):
        firsts = schema.get("prefixItems") or ()
        schemas = [*firsts, *[schema.get("items")] * (len(value) - len(firsts))][: len(value)]
        return [text for i, item in enumerate(value) for text in _problems(item, schemas[i], f"{what}, item {i},")]
    return []


def _problems_of_object(value: Mapping[str, Any], schema: Mapping[str, Any], what: str) -> list[str]:
    """What is wrong with an object; with the arguments themselves, if ``what`` is empty."""
    properties, rest = schema.get("properties") or {}, schema.get("additionalProperties")
    missing = [key for key in schema.get("required") or () if key not in value]
    found = [f"{what} lacks the key {key!r}" if what else f"the argument {key!r} is missing" for key in missing]
    for key, item in value.items():
        if key not in properties and rest is False:
            found.append(f"{what} has the unknown key {key[:64]!r}" if what else f"unknown argument {key[:64]!r}")
        inner = f"{what}, key {key[:64]!r}," if what else f"the argument {key!r}"
        found += _problems(item, properties.get(key, rest), inner)
    return found


def _own_types(schema: Mapping[str, Any]) -> list[str]:
    given = schema.get("type")
    return [given] if isinstance(given, str) else list(given or ())


def _types(schema: Any) -> list[str]:
    """The types that a schema accepts; none: all, or those of its ``enum``."""
    if not isinstance(schema, Mapping):
        return []
    types = _own_types(schema)
    for choice in (*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())):
        types += _types(choice)
    return [*types, "null"] if types and schema.get("nullable") else types


def _has_type(value: Any, schema: Mapping[str, Any]) -> bool:
    known = [name for name in _own_types(schema) if name in _TYPES]
    return not known or any(
        isinstance(value, _TYPES[name][1]) and (name == "boolean" or not isinstance(value, bool)) for name in known
    )


def _expected(schema: Mapping[str, Any]) -> str:
    return " or ".join(dict.fromkeys(_TYPES.get(name, (name,))[0] for name in _types(schema))) or "another value"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def value_of(text: str, schema: Any) -> Any:
    """The value that a text means, for formats of calls that write every value as text.

    The text is read as JSON, or else as a Python literal, which templates write where they print a value. A result that
    has one of the schema's types is returned, unless it is a string; otherwise the text as it is.

    >>> integer, text = {"type": "integer"}, {"type": "string"}
    >>> value_of("3", integer), value_of("3", text), value_of("three", integer), value_of("True", {"type": "boolean"})
    (3, '3', 'three', True)
    """
    accepted = _types(schema)
    types = [name for name in accepted if name != "string"] or (["string"] if accepted else list(_TYPES))
    for parse in (partial(json.loads, parse_constant=no_constant), _literal):
        try:
            value = parse(text.strip())
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
        is_json = value is None or isinstance(value, bool | int | float | list | dict)
        if is_json and _has_type(value, {"type": types}):
            return value
    return text


def _literal(text: str) -> Any:
    if len(text) > MAX_LITERAL:
        raise ValueError("too long")
    with warnings.catch_warnings(action="ignore"):  # of escapes that Python does not know
        return ast.literal_eval(text)


def no_constant(name: str) -> Any:
    """For ``parse_constant``: refuses NaN and infinities."""
    raise ValueError(f"{name} is not a JSON value")
