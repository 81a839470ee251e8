"""Two rewards for extraction: the share of fields that are exactly right, and whether a text is JSON of the schema."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cohort.rewards import resolve_reward

json_schema = resolve_reward(f"json_schema(schema={str(Path(__file__).with_name('schema.json'))!r})")


def fields(
    completion: str,
    answer: Mapping[str, Any],
    log_extra: Callable[[str, Any], None],
    log_metric: Callable[[str, float], None],
    prefill: str = "",
) -> float:
    """The share of the fields of ``answer`` that a completion has with exactly this value; 0 if it is not one JSON
    object with these keys. The names of the wrong fields are stored as ``extra/wrong``, and the share of each field
    that is right is logged as ``custom/FIELD``.
    """
    found = parsed(prefill + completion)
    if found is None or found.keys() != answer.keys():
        right = dict.fromkeys(answer, False)
    else:  # compared as JSON: 1, 1.0, true and "1" are four values
        right = {
            name: json.dumps(found[name], sort_keys=True) == json.dumps(answer[name], sort_keys=True) for name in answer
        }
    for name, is_right in right.items():
        log_metric(name, is_right)
    log_extra("wrong", ", ".join(name for name, is_right in right.items() if not is_right))
    return sum(right.values()) / len(right)


def valid(completion: str, prefill: str = "") -> float:
    """1 if a completion is JSON that schema.json accepts, else 0."""
    return float(json_schema(completion=completion, prefill=prefill))


def parsed(text: str) -> dict[str, Any] | None:
    """The object that a text is, without anything around it; None for other texts, and for a key that comes twice."""
    try:
        value = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these pairs.

    Raises:
        ValueError: a key comes twice. JSON readers differ in which of the two they take.
    """
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("a key comes twice")
    return dict(pairs)
