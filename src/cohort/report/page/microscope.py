"""What the microscope shows: groups of completions with every token, packed until the page is full."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow
import pyarrow.parquet
from numpy.typing import NDArray

from cohort.errors import RunFolderError
from cohort.report.history import RunHistory
from cohort.report.page.blocks import NO_CAUSE, clipped, pack
from cohort.report.page.sample import Chosen, choose_completions, choose_steps, rank_groups
from cohort.report.page.tokens import Vocabulary, find_vocabulary
from cohort.report.rollouts import StoredStep

MAX_BLOCKS = 11_000_000
"""Characters of all blocks: the page stays under 20 MB with everything else."""
MAX_GROUP_TOKENS = 48_000
HEAD, TAIL = 16_000, 4_000
"""Tokens at the beginning and the end of a completion that are embedded of one that has more."""

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
            stored = StoredStep.read(history.rollout_steps[step.number], _columns(history.rollout_steps[step.number]))
        except RunFolderError as error:
            unreadable.append(str(error))
            continue
        share = left // (len(chosen) - place)
        packed, groups = _fitting(stored, vocabulary, share, left)
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


def _fitting(stored: StoredStep, vocabulary: Vocabulary | None, share: int, left: int) -> tuple[list[_Packed], int]:
    """The most telling groups of a step that fit into its share of the space; at least one, if that fits what is left.
    Also the number of groups of the step."""
    groups = [-1 if one is None else one for one in stored.values("group")]
    rewards = [_number(one) for one in stored.values("reward")]
    ranked = rank_groups(groups, rewards, [reason == "length" for reason in stored.values("finish_reason")])
    places: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        places.setdefault(group, []).append(row)
    columns = {name: stored.arrays(name) for name in ARRAYS if name in stored}
    packed: list[_Packed] = []
    used = 0
    for choice in ranked:
        one = _pack_group(stored, columns, places[choice.number], choice, vocabulary)
        used += len(one.block)
        if used > (share if packed else left):
            break
        packed.append(one)
    return packed, len(ranked)


def _columns(path: Path) -> list[str]:
    """The columns of a file that the page shows; none if it cannot be read, which the reader then says."""
    try:
        names = pyarrow.parquet.read_schema(path).names
    except (OSError, ValueError, pyarrow.ArrowException):
        return []
    prefixed = [name for name in names if name.startswith(PREFIXED)][:MAX_PREFIXED]
    return [name for name in names if name in (*PLAIN, *ARRAYS, "no_gradient")] + prefixed


def _number(value: Any) -> float | None:
    """A finite number; None for anything else."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _pack_group(
    stored: StoredStep, columns: _Arrays, rows: Sequence[int], group: Chosen, vocabulary: Vocabulary | None
) -> _Packed:
    """Pack some rows of a stored step as one group."""
    names = [name for name in stored.table.column_names if name in PLAIN or name.startswith(PREFIXED)]
    rewards = [_number(stored.values("reward")[row]) for row in rows]
    lengths = [min(HEAD + TAIL, _length(columns, row)) for row in rows]
    kept = choose_completions(rewards, lengths, MAX_GROUP_TOKENS)
    chosen = [rows[one] for one in kept]
    records = stored.table.select(names).take(chosen).to_pylist()
    causes = stored.table.column("no_gradient").take(chosen).to_pylist() if "no_gradient" in stored else None
    tokens = _Tokens(columns)
    completions = [
        {**_describe(record), "number": at + 1, **tokens.add(row, record, causes[place] if causes else None)}
        for place, (at, row, record) in enumerate(zip(kept, chosen, records, strict=True))
    ]
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
        "details": [[key[6:86], clipped(str(one), 400)] for key, one in record.items() if _is_detail(key, one)],
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


def _ids(columns: _Arrays, row: int) -> NDArray[np.int32]:
    """The token ids of a completion; -1 where there is none."""
    ids = columns["token_ids"][row] if "token_ids" in columns else None
    if ids is None:
        return np.zeros(0, np.int32)
    found: NDArray[np.int32] = np.clip(np.nan_to_num(ids, nan=-1), -1, 2**31 - 1).astype(np.int32)
    return found


def _length(columns: _Arrays, row: int) -> int:
    ids = columns["token_ids"][row] if "token_ids" in columns else None
    return 0 if ids is None else len(ids)


class _Tokens:
    """Collects the token arrays of a group, completion by completion."""

    def __init__(self, columns: _Arrays) -> None:
        self._columns = columns
        self._ids: list[NDArray[np.int32]] = []
        self._drawn: list[NDArray[np.bool_]] = []
        self._numbers: dict[str, list[NDArray[np.float32]]] = {name: [] for name in STORED}
        self._causes: list[NDArray[np.uint8]] = []
        self._known: set[str] = set()
        self.causes: list[str] = []
        self._all_drawn, self._caused, self._t, self._n = True, False, 0, 0

    def add(self, row: int, record: Mapping[str, Any], causes: Sequence[str | None] | None) -> dict[str, Any]:
        """Add the tokens of a row, and why they have no gradient; returns where they are."""
        advantage = _number(record.get("advantage"))
        ids = _ids(self._columns, row)
        flags = self._columns["drawn"][row] if "drawn" in self._columns else None
        drawn = np.ones(len(ids), np.bool_) if flags is None or len(flags) != len(ids) else flags.astype(np.bool_)
        kept_T = np.ones(len(ids), np.bool_)
        if len(ids) > HEAD + TAIL:
            kept_T[HEAD:-TAIL] = False
        kept_N = kept_T[drawn]
        self._ids.append(ids[kept_T])
        self._drawn.append(drawn[kept_T])
        self._all_drawn &= bool(drawn.all())
        t, n = self._t, self._n
        self._t, self._n = t + int(kept_T.sum()), n + int(kept_N.sum())
        turns = self._columns["turn_lengths"][row] if "turn_lengths" in self._columns else None
        return {
            "t": [t, self._t],
            "n": [n, self._n],
            "tokens": len(ids),
            "drawn": len(kept_N),
            "has": [name for name in STORED if self._add_numbers(name, row, kept_N, advantage)],
            "gap": None if kept_T.all() else [HEAD, len(ids) - HEAD - TAIL],
            "turns": None if turns is None else turns[:1000].tolist(),
            "clipped": self._add_causes(causes, kept_N),
        }

    def _add_numbers(self, name: str, row: int, kept_N: NDArray[np.bool_], advantage: float | None) -> bool:
        values = self._columns[STORED[name]][row] if STORED[name] in self._columns else None
        if name == "advantage" and STORED[name] not in self._columns and advantage is not None:
            values = np.full(len(kept_N), advantage)  # one for all tokens of the completion
        if values is None or len(values) != len(kept_N):
            self._numbers[name].append(np.full(int(kept_N.sum()), np.nan, np.float32))
            return False
        with np.errstate(over="ignore"):
            self._numbers[name].append(values[kept_N].astype(np.float32))
        self._known.add(name)
        return True

    def _add_causes(self, causes: Sequence[str | None] | None, kept_N: NDArray[np.bool_]) -> int:
        """Add why tokens have no gradient; returns how many the trust region clipped."""
        codes = np.full(len(kept_N), NO_CAUSE, np.uint8)
        if causes is not None and len(causes) == len(kept_N):
            self._caused = True
            for name in {one for one in causes if one is not None}:
                if name not in self.causes and len(self.causes) < NO_CAUSE:
                    self.causes.append(name)
            numbers = {name: code for code, name in enumerate(self.causes)}
            codes = np.fromiter((numbers.get(one or "", NO_CAUSE) for one in causes), np.uint8, len(causes))
        self._causes.append(codes[kept_N])
        return sum(one is not None and one.startswith("clipped") for one in causes or ())

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
            f"This page holds a sample: {groups:,} of {all_groups:,} groups in {len(found):,} of {stored:,} stored "
            "steps. Steps: the last, the first, those at which findings begin, those with the extremes of the reward, "
            "of the gradient norm and of update_kl, then steps at even distances. Groups of a step: the largest "
            "differences of rewards, the highest and the lowest mean reward, equal rewards, the most truncated "
            "completions, then in order, until the page is full. All completions are in rollouts/."
        )
    if vocabulary is None:
        notes.append(
            "The run folder has no tokenizer.json beside a checkpoint: tokens are shown as ids, beside the text."
        )
    return notes + unreadable
