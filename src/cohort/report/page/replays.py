"""The replays of a run (``RUN/replays/*.json``, docs/replay.md) as tables. The files are data: what is missing or of
another type is left out."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cohort.report.history import RunHistory
from cohort.report.page.sections import number
from cohort.report.words import cause_words, fine_share

MAX_REPLAYS = 20
MAX_ROWS = 40
MAX_TEXT = 300
Format = Callable[[Any], str]
Column = tuple[str, str, Format]
"""Head, key in the file, and how a value is shown."""


def text(value: Any) -> str:
    """Any value as a short text; of a long one, the end."""
    words = "" if value is None else str(value)
    return words if len(words) <= MAX_TEXT else f"...{words[-MAX_TEXT:]}"


def share(value: Any) -> str:
    """A share as a percentage, as the terminal has it."""
    return fine_share(value) if isinstance(value, int | float) and math.isfinite(value) else number(None)


def one_line(value: Any) -> str:
    """A text of the run, with its line breaks shown.

    >>> one_line("\\n6+"), one_line("\\n")
    ('↵6+', '↵')
    """
    return text(value.replace("\n", "↵") if isinstance(value, str) else value)


def words(value: Any) -> str:
    """The name of a cause or change, as the terminal has it."""
    return cause_words(text(value))


GRADIENT: tuple[Column, ...] = (
    ("space", "space", text),
    ("term", "term", text),
    ("norm of the run's", "norm_run", number),
    ("of the replay's", "norm_replay", number),
    ("ratio", "ratio", number),
    ("cosine", "cosine", number),
)
CAUSES: tuple[Column, ...] = (
    ("in the run", "run", words),
    ("in the replay", "replay", words),
    ("tokens", "tokens", number),
    ("of all tokens", "tokens_share", share),
    ("of the run's gradient", "share_run", share),
    ("of the replay's", "share_replay", share),
)
SIGNS: tuple[Column, ...] = (
    ("advantage", "advantage", text),
    ("tokens in the run", "tokens_run", number),
    ("of its gradient", "share_run", share),
    ("tokens in the replay", "tokens_replay", number),
    ("of its gradient", "share_replay", share),
)
COMPLETIONS: tuple[Column, ...] = (
    ("group", "group", text),
    ("row", "row", text),
    ("reward", "reward", number),
    ("tokens", "tokens", number),
    ("advantage in the run", "advantage_run", number),
    ("in the replay", "advantage_replay", number),
    ("of the run's gradient", "share_run", share),
    ("of the replay's", "share_replay", share),
    ("end of the text", "text", one_line),
)
STRONGEST: tuple[Column, ...] = (
    ("group", "group", text),
    ("row", "row", text),
    ("place", "position", text),
    ("text before", "before", one_line),
    ("token", "text", one_line),
    ("change", "change", words),
    ("coefficient in the run", "coefficient_run", number),
    ("in the replay", "coefficient_replay", number),
)
LEFT = {text, words, one_line}
"""How columns are shown that are not numbers."""


def replays_of(history: RunHistory) -> list[dict[str, Any]]:
    """The replays of a run for the template, in the order of their names."""
    try:
        names = sorted(name for name in os.listdir(history.path / "replays") if name.endswith(".json"))  # noqa: PTH208
    except OSError:
        return []
    found = []
    for name in names[:MAX_REPLAYS]:
        result = history.json(f"replays/{name}")
        found.append(
            {"name": name[:-5], "title": "", "sentence": f"replays/{name} cannot be read", "notes": [], "tables": []}
        )
        if result is not None:
            found[-1] |= _replay(result)
    return found


def _replay(result: Mapping[str, Any]) -> dict[str, Any]:
    objective = _mapping(result.get("objective"))
    tables = [
        _table("Gradient", GRADIENT, _gradients(result)),
        _table("Tokens by what they have in place of a gradient", CAUSES, result.get("causes")),
        _table("By the sign of the advantage", SIGNS, result.get("signs")),
        _table("Completions that drive the gradient most", COMPLETIONS, result.get("completions")),
        _table("Tokens that change most", STRONGEST, result.get("strongest")),
    ]
    return {
        "sentence": text(result.get("sentence")),
        "title": f"Step {text(result.get('step'))}: {text(objective.get('run'))} → {text(objective.get('replay'))}",
        "notes": [*map(text, _listed(objective.get("changes"))), *map(text, _listed(result.get("notes")))],
        "tables": [table for table in tables if table["rows"]],
    }


def _gradients(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The gradients in both spaces, whole and by term."""
    found = []
    for space in ("parameters", "logits"):
        whole = _mapping(result.get(space))
        terms = {name: _mapping(one) for name, one in _mapping(whole.get("terms")).items()}
        found += [{**one, "space": space, "term": name} for name, one in ({"whole": whole} | terms).items() if one]
    return found


def _table(title: str, columns: Sequence[Column], rows: Any) -> dict[str, Any]:
    heads = [{"name": name, "number": form not in LEFT} for name, _, form in columns]
    cells = [[form(row.get(key)) for _, key, form in columns] for row in _listed(rows)[:MAX_ROWS] if _mapping(row)]
    return {"title": title, "heads": heads, "rows": cells}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
