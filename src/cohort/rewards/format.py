"""Rewards for the form of a completion."""

from __future__ import annotations

import json
import re as _re
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import regex as _regex
from pydantic import AfterValidator

from cohort.errors import RewardError
from cohort.rewards.builtin import import_extra, turn_text

_FENCED = _re.compile(
    r"^```json[^\S\n]*\n((?:(?!^```json).)*?)^```[^\S\n]*$", _re.DOTALL | _re.MULTILINE | _re.IGNORECASE
)

MATCH_SECONDS = 5.0
"""What matching one completion may take. Most take microseconds; a pattern like ``(a+)+b`` can take for ever."""


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
    r"""1 when a pattern is found in the assistant's turn, 0 otherwise.

    What the prompt holds of the turn is part of it. Patterns are Python's, flags within them: ``(?i)`` for no case,
    ``(?s)`` for dots that match line breaks, ``(?m)`` for lines. A completion that takes more than 5 seconds to match
    is unscored: it fails with TimeoutError.

    Args:
        pattern: the regular expression.
        full: the turn as a whole must match it.

    >>> regex("It is 42.", pattern=r"\d+"), regex("It is 42.", pattern=r"\d+", full=True)
    (1.0, 0.0)
    """
    compiled = _pattern(pattern)
    match = compiled.fullmatch if full else compiled.search
    return float(match(turn_text(completion, prefill), timeout=MATCH_SECONDS) is not None)


def think_format(completion: Any, prefill: str = "", *, start: str = "<think>", end: str = "</think>") -> float:
    """1 when the assistant's turn is ``<think>``, reasoning, ``</think>`` and an answer; 0 otherwise.

    It begins with the one tag, holds each tag once, and has text after the second. What the prompt holds of the turn
    counts: where the chat template ends in ``<think>``, completions need not begin with it. The reasoning may be empty.

    Args:
        start, end: the tags.

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
    """Of a schema: its JSON text, or the path of a .json file."""
    jsonschema, referencing = (import_extra(name, "json_schema") for name in ("jsonschema", "referencing"))
    try:
        content = json.loads(Path(schema).read_text(encoding="utf-8") if schema.endswith(".json") else schema)
        kind = jsonschema.validators.validator_for(content)
        kind.check_schema(content)
    except (OSError, ValueError, jsonschema.SchemaError) as error:
        reason = getattr(error, "message", None) or error
        raise ValueError(f"not a JSON schema, its text or a .json file with one: {reason}") from None
    return kind(content, registry=referencing.Registry())  # what a $ref names elsewhere is not fetched


def json_schema(
    completion: Any, prefill: str = "", *, schema: Annotated[Schema, AfterValidator(_checked)], fenced: bool = False
) -> float:
    """1 when the assistant's turn is JSON that a schema accepts, 0 otherwise.

    What the prompt holds of the turn is part of it. JSON as RFC 8259 has it: no NaN, no Infinity, nothing after it. A
    ``$ref`` to another document is not fetched: it is an error.

    Args:
        schema: a JSON schema as a table, as JSON text, or the path of a .json file.
        fenced: False: the whole turn is the JSON. True: the last block in a fence for json is.

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
    except (ValueError, RecursionError):  # not JSON, or deeper than Python reads
        return 0.0
    except import_extra("referencing", "json_schema").exceptions.Unresolvable as error:
        raise RewardError(f"json_schema: the schema refers to what is not in it: {error}") from None


def _refused(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")
