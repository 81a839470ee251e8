"""One group of completions with every token, packed from the columns of a stored step."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow
import pyarrow.parquet
from numpy.typing import NDArray

from cohort.report.page.blocks import NO_CAUSE, clipped, pack
from cohort.report.page.sample import Chosen, choose_completions
from cohort.report.page.tokens import Vocabulary

MAX_GROUP_TOKENS = 48_000
HEAD, TAIL = 16_000, 4_000
"""Tokens at the beginning and the end of a completion that are embedded of one that has more."""
STORED = {
    "advantage": "token_advantages",
    **{name: name for name in ("ratio", "entropy", "sampler_logps", "full_logps", "old_logps", "logps", "ref_logps")},
    **{name: name for name in ("policy_coefficient", "kl_coefficient")},
}
"""Columns with a number for each drawn token, by name in the page."""
ARRAYS = ("token_ids", "drawn", "turn_lengths", *STORED.values())
_Arrays: TypeAlias = Mapping[str, Sequence[NDArray[Any] | None]]
"""The columns of lists of a step by name, an array for each row."""
PLAIN = (
    *("group", "row", "source", "prompt", "completion", "finish_reason", "reward", "advantage"),
    *("weights_version", "messages", "environment_reward", "episode_error", "reward_error"),
)
PREFIXED = ("rewards/", "extra/")
MAX_PREFIXED = 100
"""Columns of rewards and logged values that are shown."""


@dataclass(frozen=True, slots=True)
class PackedGroup:
    """A group, packed, and what the filters need of it."""

    group: Chosen
    block: str
    rows: list[tuple[int, float | None, int, str, int]]
    """Number in the group from 1, reward, length, finish reason and clipped tokens of each completion."""


def shown_columns(path: Path) -> list[str]:
    """The columns of a file that the page shows; none if it cannot be read, which the reader then says."""
    try:
        names = pyarrow.parquet.read_schema(path).names
    except (OSError, ValueError, pyarrow.ArrowException):
        return []
    prefixed = [name for name in names if name.startswith(PREFIXED)][:MAX_PREFIXED]
    return [name for name in names if name in (*PLAIN, *ARRAYS, "no_gradient")] + prefixed


def number(value: Any) -> float | None:
    """A finite number; None for anything else."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def pack_group(
    table: pyarrow.Table, columns: _Arrays, rows: Sequence[int], group: Chosen, vocabulary: Vocabulary | None
) -> PackedGroup:
    """Pack some rows of a stored step as one group."""
    names = [name for name in table.column_names if name in (*PLAIN, "no_gradient") or name.startswith(PREFIXED)]
    together = rows[-1] - rows[0] == len(rows) - 1  # as they are written
    part = table.select(names)
    records = (part.slice(rows[0], len(rows)) if together else part.take(rows)).to_pylist()
    lengths = [min(HEAD + TAIL, len(_list(columns, "token_ids", row, ()))) for row in rows]
    kept = choose_completions([number(one.get("reward")) for one in records], lengths, MAX_GROUP_TOKENS)
    tokens = _Tokens(columns)
    completions = [{**_describe(records[at]), "number": at + 1, **tokens.add(rows[at], records[at])} for at in kept]
    header = {
        "group": group.number,
        "row": records[0].get("row"),
        "source": str(records[0].get("source") or ""),
        "prompt": clipped(str(records[0].get("prompt") or "")),
        "completions": completions,
        "causes": tokens.causes,
        "vocabulary": vocabulary and vocabulary.of(tokens.ids()),
        "notes": [f"{len(kept)} of the group's {len(rows)} completions are in this page."]
        if len(kept) < len(rows)
        else [],
    }
    summary = [(one["number"], one["reward"], one["drawn"], one["finish"], one.pop("clipped")) for one in completions]
    return PackedGroup(group, pack(header, tokens.arrays()), summary)


def _describe(record: Mapping[str, Any]) -> dict[str, Any]:
    """A completion without its tokens, in plain values."""
    found: dict[str, Any] = {
        "text": clipped(str(record.get("completion") or "")),
        "finish": str(record.get("finish_reason") or "unknown")[:40],
        "reward": number(record.get("reward")),
        "advantage": number(record.get("advantage")),
        "rewards": {key[8:][:80]: number(one) for key, one in record.items() if key.startswith("rewards/")},
        "details": [[key[6:86], clipped(str(one), 400)] for key, one in record.items() if _is_detail(key, one)],
        "error": clipped(str(record.get("episode_error") or record.get("reward_error") or ""), 2_000),
    }
    if (environment := number(record.get("environment_reward"))) is not None:
        found["rewards"]["environment"] = environment
    if (messages := _messages(record.get("messages"))) is not None:
        found["messages"] = messages
    return found


def _is_detail(key: str, value: Any) -> bool:
    return key.startswith("extra/") and value is not None


def _messages(text: Any) -> list[dict[str, Any]] | None:
    """The messages of an episode; None if there are none that can be read."""
    try:
        return [
            {
                "role": str(one.get("role") or "")[:40],
                "content": clipped(
                    one["content"] if isinstance(one.get("content"), str) else _json(one.get("content"))
                ),
                "calls": [clipped(_json(call), 4_000) for call in one.get("tool_calls") or []],
            }
            for one in json.loads(text)[:200]
        ]
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None


def _json(value: Any) -> str:
    return "" if value is None else json.dumps(value, ensure_ascii=False)


def _list(columns: _Arrays, name: str, row: int, default: Any = None) -> Any:
    """An entry of a column of lists; the default if the table lacks the column or the entry is null."""
    found = columns[name][row] if name in columns else None
    return default if found is None else found


class _Tokens:
    """Collects the token arrays of a group, completion by completion."""

    def __init__(self, columns: _Arrays) -> None:
        self._columns = columns
        self._ids: list[NDArray[np.int32]] = []
        self._drawn: list[NDArray[np.bool_]] = []
        known = {name for name, column in STORED.items() if column in columns} | {"advantage"}
        self._numbers: dict[str, list[NDArray[np.float32]]] = {name: [] for name in STORED if name in known}
        self._causes: list[NDArray[np.uint8]] = []
        self.causes: list[str] = []
        self._t, self._n = 0, 0

    def add(self, row: int, record: Mapping[str, Any]) -> dict[str, Any]:
        """Add the tokens of a row; returns where they are."""
        ids = np.asarray(_list(self._columns, "token_ids", row, ()))
        drawn = np.asarray(_list(self._columns, "drawn", row, ()), np.bool_)
        drawn = drawn if len(drawn) == len(ids) else np.ones(len(ids), np.bool_)
        kept_T = np.ones(len(ids), np.bool_)
        if len(ids) > HEAD + TAIL:
            kept_T[HEAD:-TAIL] = False
        kept_N = kept_T[drawn]
        self._ids.append(np.clip(np.nan_to_num(ids[kept_T], nan=-1), -1, 2**31 - 1).astype(np.int32))
        self._drawn.append(drawn[kept_T])
        t, n = self._t, self._n
        self._t, self._n = t + len(self._ids[-1]), n + int(kept_N.sum())
        self._add_numbers(row, kept_N, number(record.get("advantage")))
        return {
            "t": [t, self._t],
            "n": [n, self._n],
            "tokens": len(ids),
            "drawn": len(kept_N),
            "gap": None if len(ids) <= HEAD + TAIL else [HEAD, len(ids) - HEAD - TAIL],
            "turns": [int(one) for one in _list(self._columns, "turn_lengths", row, ())[:1000]] or None,
            "clipped": self._add_causes(record.get("no_gradient"), kept_N),
        }

    def _add_numbers(self, row: int, kept_N: NDArray[np.bool_], advantage: float | None) -> None:
        """Add the numbers of all columns; NaN where a column has none for this completion."""
        for name, parts in self._numbers.items():
            values = _list(self._columns, STORED[name], row)
            if name == "advantage" and STORED[name] not in self._columns:  # one for all tokens of the completion
                values = np.full(len(kept_N), np.nan if advantage is None else advantage)
            if values is None or len(values) != len(kept_N):
                values = np.full(len(kept_N), np.nan)
            with np.errstate(over="ignore"):
                parts.append(values[kept_N].astype(np.float32))

    def _add_causes(self, causes: Sequence[str | None] | None, kept_N: NDArray[np.bool_]) -> int:
        """Add why tokens have no gradient; returns how many the trust region clipped."""
        codes = np.full(len(kept_N), NO_CAUSE, np.uint8)
        if causes is not None and len(causes) == len(kept_N):
            for name in {one for one in causes if one is not None}:
                if name not in self.causes and len(self.causes) < NO_CAUSE:
                    self.causes.append(name)
            numbers = {name: code for code, name in enumerate(self.causes)}
            codes = np.fromiter((numbers.get(one or "", NO_CAUSE) for one in causes), np.uint8, len(causes))
        self._causes.append(codes[kept_N])
        return sum(one is not None and one.startswith("clipped") for one in causes or ())

    def ids(self) -> Iterator[int]:
        """All token ids."""
        return (int(one) for one in np.unique(np.concatenate(self._ids)))

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The arrays of the block: those that say something."""
        drawn = np.concatenate(self._drawn)
        found: dict[str, NDArray[Any]] = {"ids": np.concatenate(self._ids)} | ({} if drawn.all() else {"drawn": drawn})
        numbers = {name: np.concatenate(parts) for name, parts in self._numbers.items()}
        found |= {name: values for name, values in numbers.items() if not np.isnan(values).all()}
        return found | ({"no_gradient": np.concatenate(self._causes)} if self.causes else {})
