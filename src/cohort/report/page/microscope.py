"""What the microscope shows: groups of completions with every token, packed until the page is full."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
from numpy.typing import NDArray

from cohort.report.history import RunHistory
from cohort.report.page.blocks import NO_CAUSE, clipped, pack
from cohort.report.page.sample import Chosen, choose_completions, choose_steps, rank_groups
from cohort.report.page.tokens import Vocabulary, find_vocabulary

MAX_BLOCKS = 11_000_000
"""Characters of all blocks: the page stays under 20 MB with everything else."""
MAX_GROUP_TOKENS = 48_000
HEAD, TAIL = 16_000, 4_000
"""Tokens at the beginning and the end of a completion that are embedded of one that has more."""
MAX_TABLE = 1 << 31
"""Bytes of a table, uncompressed, that is read."""

QUANTITIES = (
    (
        "advantage",
        "Advantage",
        "diverging",
        "How much better the completion is than its group, as the update weighs it.",
    ),
    ("coefficient", "Coefficient", "diverging", "Weight of the token's score in the gradient, KL term included."),
    ("ratio", "Ratio", "ratio", "Probability under the current policy over that under the old policy."),
    ("kl", "KL to reference", "positive", "k3 estimate of KL(current || reference) at this token, in nats."),
    ("entropy", "Entropy", "positive", "Entropy of the policy's distribution at this token, in nats."),
    ("sampler_logps", "Log-prob: sampler", "negative", "Under the distribution that the token was drawn from."),
    ("old_logps", "Log-prob: old policy", "negative", "Under the policy that sampled, as the trainer computes it."),
    ("logps", "Log-prob: current policy", "negative", "Under the policy of the first update that used the token."),
    ("ref_logps", "Log-prob: reference", "negative", "Under the reference policy of the KL term."),
    ("gap", "Sampler gap", "diverging", "Log-prob of the old policy minus that of the sampler."),
)
"""Key, label, scale and meaning of what a token can be coloured by. ``kl``, ``gap`` and ``coefficient`` follow from the
stored columns in the browser."""
STORED = {
    "advantage": "token_advantages",
    **{name: name for name in ("ratio", "entropy", "sampler_logps", "old_logps", "logps", "ref_logps")},
    **{name: name for name in ("policy_coefficient", "kl_coefficient")},
}
"""Columns with a number for each drawn token, by name in the page."""
LISTS = ("token_ids", "drawn", "no_gradient", "turn_lengths", *STORED.values())
PLAIN = (
    *("group", "row", "source", "prompt", "completion", "finish_reason", "reward", "advantage"),
    *("weights_version", "messages", "environment_reward", "episode_error", "reward_error"),
)
PREFIXED = ("rewards/", "extra/")
UNREADABLE = (OSError, pyarrow.ArrowException, ValueError, TypeError, LookupError, OverflowError)


@dataclass
class Microscope:
    """The embedded sample."""

    groups: list[dict[str, Any]] = field(default_factory=list)
    """``step``, ``group`` and ``why`` of each block."""
    blocks: list[str] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    completions: dict[str, list[Any]] = field(default_factory=dict)
    """Columns for the filters: block, place in it, reward, length, index of finish reason, clipped tokens."""
    finishes: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What the sample is and what could not be read, in words."""

    def data(self) -> dict[str, Any]:
        """What the script of the page needs, besides the blocks."""
        return {name: getattr(self, name) for name in ("groups", "steps", "completions", "finishes")}


def build_microscope(history: RunHistory, begins: Mapping[int, str], space: int = MAX_BLOCKS) -> Microscope:
    """The sample of a run.

    Args:
        history: the run.
        begins: steps at which findings begin, and which.
        space: characters that all blocks may have.
    """
    vocabulary, chosen = find_vocabulary(history), choose_steps(history, begins)
    found: list[tuple[Chosen, list[_Packed], int]] = []
    unreadable: list[str] = []
    left = space
    for place, step in enumerate(chosen):
        try:
            table = read_table(history.rollout_steps[step.number])
            share = left // (len(chosen) - place)
            packed, groups = _fitting(table, step, vocabulary, share, left)
        except UNREADABLE as error:
            reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
            unreadable.append(f"rollouts/{history.rollout_steps[step.number].name} cannot be read: {reason}")
            continue
        left -= sum(len(one.block) for one in packed)
        found.append((step, packed, groups))
    found = sorted(((step, packed, groups) for step, packed, groups in found if packed), key=lambda one: one[0].number)
    notes = _notes(history, found, vocabulary, unreadable)
    return _indexed(found, notes)


@dataclass(frozen=True, slots=True)
class _Packed:
    """A group, packed, and what the filters need of it."""

    group: Chosen
    block: str
    rows: list[tuple[float | None, int, str, int]]
    """Reward, length, finish reason and clipped tokens of each completion."""


def _fitting(
    table: pyarrow.Table, step: Chosen, vocabulary: Vocabulary | None, share: int, left: int
) -> tuple[list[_Packed], int]:
    """The most telling groups of a step that fit into its share of the space; at least one, if that fits what is left.
    Also the number of groups of the step."""
    cheap = {name: _plain_column(table, name) for name in ("group", "reward", "finish_reason")}
    groups = [one if isinstance(one, int) else -1 for one in cheap["group"]]
    ranked = rank_groups(
        groups, [_number(one) for one in cheap["reward"]], [r == "length" for r in cheap["finish_reason"]]
    )
    places: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        places.setdefault(group, []).append(row)
    packed: list[_Packed] = []
    used = 0
    for choice in ranked:
        one = pack_group(table, places[choice.number], step.number, choice, vocabulary)
        used += len(one.block)
        if used > (left if not packed else share):
            break
        packed.append(one)
    return packed, len(ranked)


def read_table(path: Path) -> pyarrow.Table:
    """The columns of a stored step that the page shows; what else the table has is not read.

    Raises:
        OSError, pyarrow.ArrowException, ValueError: the file cannot be read, or is too large.
    """
    with pyarrow.parquet.ParquetFile(path) as file:
        names = [name for name in file.schema_arrow.names if name in (*PLAIN, *LISTS) or name.startswith(PREFIXED)]
        size = sum(file.metadata.row_group(index).total_byte_size for index in range(file.metadata.num_row_groups))
        if size > MAX_TABLE:
            raise ValueError(f"it has {size:,} bytes, uncompressed")
        if len(set(names)) < len(names):
            raise ValueError("two columns have one name")
        return file.read(columns=names[:200]).combine_chunks()


def _plain_column(table: pyarrow.Table, name: str) -> list[Any]:
    return table.column(name).to_pylist() if name in table.column_names else [None] * table.num_rows


def _number(value: Any) -> float | None:
    """A finite number; None for anything else."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def pack_group(
    table: pyarrow.Table, rows: Sequence[int], step: int, group: Chosen, vocabulary: Vocabulary | None
) -> _Packed:
    """Pack some rows of a table as one group."""
    plain = table.select([name for name in table.column_names if name in PLAIN or name.startswith(PREFIXED)])
    lists = _Lists(table)
    rewards = (
        [_number(one) for one in plain.column("reward").take(rows).to_pylist()]
        if "reward" in plain.column_names
        else [None] * len(rows)
    )
    lengths = [min(len(lists.ids(row)), HEAD + TAIL) for row in rows]
    kept = choose_completions(rewards, lengths, MAX_GROUP_TOKENS)
    records = plain.take([rows[one] for one in kept]).to_pylist()
    tokens = _Tokens(lists)
    completions = [
        {**_describe(record), "number": at + 1, **tokens.add(rows[at])}
        for at, record in zip(kept, records, strict=True)
    ]
    header = {
        "step": step,
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
    summary = [(one["reward"], one["drawn"], one["finish"], one.pop("clipped")) for one in completions]
    return _Packed(group, pack(header, tokens.arrays()), summary)


def _describe(record: Mapping[str, Any]) -> dict[str, Any]:
    """A completion without its tokens, in plain values."""
    found: dict[str, Any] = {
        "text": clipped(str(record.get("completion") or "")),
        "finish": str(record.get("finish_reason") or "unknown")[:40],
        "reward": _number(record.get("reward")),
        "advantage": _number(record.get("advantage")),
        "rewards": {key[8:][:80]: _number(one) for key, one in record.items() if key.startswith("rewards/")},
        "details": [[key[6:][:80], clipped(str(one), 400)] for key, one in record.items() if _is_detail(key, one)],
        "error": clipped(str(record.get("episode_error") or record.get("reward_error") or ""), 2_000),
    }
    if (environment := _number(record.get("environment_reward"))) is not None:
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


class _Lists:
    """The columns of lists of a table, row by row. A column of another type counts as absent."""

    def __init__(self, table: pyarrow.Table) -> None:
        self.columns = {name: table.column(name).combine_chunks() for name in table.column_names if name in LISTS}
        self.columns = {name: one for name, one in self.columns.items() if _is_list(one.type)}

    def ids(self, row: int) -> NDArray[np.int32]:
        """The token ids of a completion; empty if they are not known."""
        found = self.numbers("token_ids", row)
        return (
            np.zeros(0, np.int32)
            if found is None
            else np.clip(np.nan_to_num(found, nan=-1), -1, 2**31 - 1).astype(np.int32)
        )

    def numbers(self, name: str, row: int) -> NDArray[Any] | None:
        """The numbers of a row; None if there are none."""
        column = self.columns.get(name)
        if column is None or not column[row].is_valid:
            return None
        values = column[row].values
        if not (
            pyarrow.types.is_integer(values.type)
            or pyarrow.types.is_floating(values.type)
            or pyarrow.types.is_boolean(values.type)
        ):
            return None
        return (
            values.to_numpy(zero_copy_only=False)
            if not values.null_count
            else values.cast(pyarrow.float64()).to_numpy(zero_copy_only=False)
        )

    def texts(self, name: str, row: int) -> list[Any] | None:
        """The texts of a row."""
        column = self.columns.get(name)
        if column is None or not column[row].is_valid:
            return None
        texts: list[Any] = column[row].as_py()
        return texts


def _is_list(kind: Any) -> bool:
    return bool(pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind))


class _Tokens:
    """Collects the token arrays of a group, completion by completion."""

    def __init__(self, lists: _Lists) -> None:
        self._lists = lists
        self._ids: list[NDArray[np.int32]] = []
        self._drawn: list[NDArray[np.bool_]] = []
        self._numbers: dict[str, list[NDArray[np.float32]]] = {name: [] for name in STORED}
        self._causes: list[NDArray[np.uint8]] = []
        self._known: set[str] = set()
        self.causes: list[str] = []
        self._all_drawn, self._caused, self._t, self._n = True, False, 0, 0

    def add(self, row: int) -> dict[str, Any]:
        """Add the tokens of a row; returns where they are."""
        ids = self._lists.ids(row)
        flags = self._lists.numbers("drawn", row)
        drawn = np.ones(len(ids), np.bool_) if flags is None or len(flags) != len(ids) else flags.astype(np.bool_)
        kept_T = np.ones(len(ids), np.bool_)
        if len(ids) > HEAD + TAIL:
            kept_T[HEAD:-TAIL] = False
        kept_N, count = kept_T[drawn], int(drawn.sum())
        self._ids.append(ids[kept_T])
        self._drawn.append(drawn[kept_T])
        self._all_drawn &= bool(drawn.all())
        has = [name for name in STORED if self._add_numbers(name, row, kept_N)]
        clipped_tokens = self._add_causes(row, kept_N)
        t, n = self._t, self._n
        self._t, self._n = t + int(kept_T.sum()), n + int(kept_N.sum())
        turns = self._lists.numbers("turn_lengths", row)
        return {
            "t": [t, self._t],
            "n": [n, self._n],
            "tokens": len(ids),
            "drawn": count,
            "has": has,
            "gap": None if kept_T.all() else [HEAD, len(ids) - HEAD - TAIL],
            "turns": None if turns is None else [int(one) for one in turns[:1000]],
            "clipped": clipped_tokens,
        }

    def _add_numbers(self, name: str, row: int, kept_N: NDArray[np.bool_]) -> bool:
        values = self._lists.numbers(STORED[name], row)
        fits = values is not None and len(values) == len(kept_N)
        with np.errstate(over="ignore"):
            self._numbers[name].append(
                values[kept_N].astype(np.float32)
                if values is not None and fits
                else np.full(int(kept_N.sum()), np.nan, np.float32)
            )
        if fits:
            self._known.add(name)
        return fits

    def _add_causes(self, row: int, kept_N: NDArray[np.bool_]) -> int:
        """Add why tokens have no gradient; returns how many the trust region clipped."""
        texts = self._lists.texts("no_gradient", row)
        codes = np.full(len(kept_N), NO_CAUSE, np.uint8)
        if texts is not None and len(texts) == len(kept_N):
            self._caused = True
            for name in {one for one in texts if one is not None}:
                if name not in self.causes and len(self.causes) < NO_CAUSE:
                    self.causes.append(name)
            numbers = {name: code for code, name in enumerate(self.causes)}
            codes = np.fromiter((numbers.get(one, NO_CAUSE) for one in texts), np.uint8, len(texts))
        self._causes.append(codes[kept_N])
        return sum(str(one).startswith("clipped") for one in texts or () if one is not None)

    def ids(self) -> Iterator[int]:
        """All token ids."""
        return (int(one) for one in np.unique(np.concatenate([np.zeros(0, np.int32), *self._ids])))

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The arrays of the block: those that say something."""
        found: dict[str, NDArray[Any]] = {"ids": np.concatenate([np.zeros(0, np.int32), *self._ids])}
        if not self._all_drawn:
            found["drawn"] = np.concatenate(self._drawn)
        found |= {name: np.concatenate(self._numbers[name]) for name in STORED if name in self._known}
        if self._caused:
            found["no_gradient"] = np.concatenate(self._causes)
        return found


def _indexed(found: Sequence[tuple[Chosen, list[_Packed], int]], notes: list[str]) -> Microscope:
    """The sample with the columns that the filters use."""
    result = Microscope(
        notes=notes, completions={name: [] for name in ("group", "at", "reward", "length", "finish", "clipped")}
    )
    for step, packed, _ in found:
        result.steps.append({"step": step.number, "why": step.why})
        for one in packed:
            block = len(result.blocks)
            result.blocks.append(one.block)
            result.groups.append({"step": step.number, "group": one.group.number, "why": one.group.why})
            for at, (reward, length, finish, clipped_tokens) in enumerate(one.rows):
                if finish not in result.finishes:
                    result.finishes.append(finish)
                row = (block, at, reward, length, result.finishes.index(finish), clipped_tokens)
                for column, value in zip(result.completions.values(), row, strict=True):
                    column.append(value)
    return result


def _notes(
    history: RunHistory,
    found: Sequence[tuple[Chosen, list[_Packed], int]],
    vocabulary: Vocabulary | None,
    unreadable: list[str],
) -> list[str]:
    """What the sample is, in words."""
    stored = len(history.rollout_steps)
    groups, all_groups = sum(len(packed) for _, packed, _ in found), sum(count for _, _, count in found)
    notes = []
    if not stored:
        return ["The run folder has no stored completions (rollouts/)."]
    if len(found) == stored and groups == all_groups:
        notes.append(f"All stored completions are in this page: {groups:,} groups of {stored:,} steps.")
    elif found:
        notes.append(
            f"This page holds a sample: {groups:,} of {all_groups:,} groups in {len(found):,} of {stored:,} stored steps. "
            "Steps: the last, the first, those at which findings begin, those with the extremes of the reward, of the "
            "gradient norm and of update_kl, then steps at even distances. Groups of a step: the largest differences, the "
            "highest and the lowest mean reward, equal rewards, the most truncated completions, then in order, until "
            "the page is full. All completions are in rollouts/."
        )
    if vocabulary is None:
        notes.append(
            "The run folder has no tokenizer.json beside a checkpoint: tokens are shown as ids, beside the text."
        )
    return notes + unreadable
