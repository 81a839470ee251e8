"""Rewards for the format of a completion."""

from __future__ import annotations

import json
import re as _re
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import regex as _regex
from pydantic import AfterValidator

from cohort.errors import RewardError
from cohort.rewards.builtin import import_extra
from cohort.rewards.messages import turn_text

_FENCED = _re.compile(
    r"^```json[^\S\n]*\n((?:(?!^```json).)*?)^```[^\S\n]*$", _re.DOTALL | _re.MULTILINE | _re.IGNORECASE
)

MATCH_SECONDS = 5.0
"""Time limit for matching one completion. Most take microseconds; a pattern like ``(a+)+b`` may never end."""


def _compiled(pattern: str) -> str:
    try:
        _pattern(pattern)
    except _regex.error as error:
        raise ValueError(f"not a regular expression: {error}") from None
    return pattern


@lru_cache(maxsize=64)
def _pattern(pattern: str) -> Any:
    return _regex.compile(pattern)


def regex(
    completion: Any, prefill: str = "", *, pattern: Annotated[str, AfterValidator(_compiled)], full: bool = False
) -> float:
    r"""1 if a pattern is found in the assistant turn, 0 otherwise.

    The prefill from the prompt is part of the turn. Patterns use Python's syntax, with inline flags: ``(?i)`` ignores
    case, ``(?s)`` lets dots match line breaks, ``(?m)`` matches line by line. A completion that takes more than 5
    seconds to match fails with TimeoutError and is unscored.

    Args:
        pattern: the regular expression.
        full: the whole turn must match.

    >>> regex("It is 42.", pattern=r"\d+"), regex("It is 42.", pattern=r"\d+", full=True)
    (1.0, 0.0)
    """
    compiled = _pattern(pattern)
    match = compiled.fullmatch if full else compiled.search
    return float(match(turn_text(completion, prefill), timeout=MATCH_SECONDS) is not None)


def think_format(completion: Any, prefill: str = "", *, start: str = "<think>", end: str = "</think>") -> float:
    """1 if the assistant turn is ``<think>``, reasoning, ``</think>`` and an answer; 0 otherwise.

    The turn must begin with the first tag, contain each tag once, and have text after the second. The prefill from the
    prompt is part of the turn: if the chat template ends in ``<think>``, completions need not begin with it. The
    reasoning may be empty.

    Args:
        start, end: the two tags.

    >>> think_format("<think>6*7</think>42"), think_format("6*7</think>42")
    (1.0, 0.0)
    >>> think_format("6*7</think>42", prefill="<think>")
    1.0
    """
    turn = turn_text(completion, prefill).strip()
    before, _, answer = turn.partition(end)
    once = turn.count(start) == 1 and turn.count(end) == 1
    return float(once and before.startswith(start) and bool(answer.strip()))


Schema = dict[str, Any] | bool | str


def _checked(schema: Schema) -> Schema:
    _validator(schema if isinstance(schema, str) else json.dumps(schema))
    return schema


@lru_cache(maxsize=64)
def _validator(schema: str) -> Any:
    """The validator of a schema, given as JSON text or as the path of a .json file."""
    jsonschema, referencing = (import_extra(name, "json_schema") for name in ("jsonschema", "referencing"))
    try:
        content = json.loads(Path(schema).read_text(encoding="utf-8") if schema.endswith(".json") else schema)
        kind = jsonschema.validators.validator_for(content)
        kind.check_schema(content)
    except (OSError, ValueError, jsonschema.SchemaError) as error:
        reason = getattr(error, "message", None) or error
        raise ValueError(f"expected a JSON schema, its text or the path of a .json file: {reason}") from None
    return kind(content, registry=referencing.Registry())  # fetches no $ref


def json_schema(
    completion: Any, prefill: str = "", *, schema: Annotated[Schema, AfterValidator(_checked)], fenced: bool = False
) -> float:
    """1 if the assistant turn is JSON that a schema accepts, 0 otherwise.

    The prefill from the prompt is part of the turn. JSON follows RFC 8259: no NaN, no Infinity, no text after it. A
    ``$ref`` to another document is not fetched and raises an error.

    Args:
        schema: a JSON schema as a table, as JSON text, or the path of a .json file.
        fenced: read the last fenced json block instead of the whole turn.

    >>> schema = {"type": "object", "required": ["age"], "properties": {"age": {"type": "integer"}}}
    >>> [json_schema(text, schema=schema) for text in ('{"age": 7}', '{"age": "seven"}', "seven")]
    [1.0, 0.0, 0.0]
    """
    text = turn_text(completion, prefill)
    validator = _validator(schema if isinstance(schema, str) else json.dumps(schema))
    if fenced:
        blocks = _FENCED.findall(text)
        if not blocks:
            return 0.0
        text = blocks[-1]
    try:
        value = json.loads(text, parse_constant=_refused)
        return float(validator.is_valid(value))
    except (ValueError, RecursionError):  # not JSON, or nested too deeply for Python
        return 0.0
    except import_extra("referencing", "json_schema").exceptions.Unresolvable as error:
        raise RewardError(f"json_schema: the schema contains a reference that cannot be resolved: {error}") from None


def _refused(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")
