"""What the microscope shows: groups of completions, packed until the page is full."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow
import pyarrow.parquet
from numpy.typing import NDArray

from cohort.errors import RunFolderError
from cohort.report.page.blocks import NO_CAUSE, clipped, pack
from cohort.report.rollouts import StoredStep
from cohort.runs.reader import Run

# ----------------------------------------
# The texts of tokens, from ``tokenizer.json``. The file is read as data: no tokenizer is made, no code is run.


MAX_TOKENIZER = 1 << 27
"""Bytes of a tokenizer.json that is read."""
Piece: TypeAlias = str | list[int]
"""The text of a token, or its bytes if they are not UTF-8 by themselves."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Token texts by id."""

    pieces: Mapping[int, bytes]
    special: frozenset[int]
    """End tokens, markers of turns and the like, which the decoded text leaves out."""

    def of(self, ids: Iterable[int]) -> dict[str, list[Any]]:
        """What the page needs to spell these ids."""
        known = [one for one in sorted(set(ids)) if one in self.pieces]
        return {
            "ids": known,
            "pieces": [_piece(self.pieces[one]) for one in known],
            "special": [one for one in known if one in self.special],
        }


def find_vocabulary(history: Run) -> Vocabulary | None:
    """The tokenizer beside the run's newest model; None if no saved model has a ``tokenizer.json`` that can be read."""
    folders = [*reversed(history.checkpoints.values()), history.path / "best", history.path]
    root = history.path.resolve()
    for path in (folder / "tokenizer.json" for folder in folders):
        try:
            if path.resolve().is_relative_to(root) and path.is_file() and path.stat().st_size <= MAX_TOKENIZER:
                return read_vocabulary(json.loads(path.read_bytes()))
        except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
            continue
    return None


def read_vocabulary(tokenizer: Mapping[str, Any]) -> Vocabulary:
    """The vocabulary of a parsed ``tokenizer.json``.

    Raises:
        ValueError, TypeError, LookupError, AttributeError: it has another form.
    """
    model, added = tokenizer["model"], tokenizer.get("added_tokens") or []
    entries = model["vocab"]
    texts = {int(number): str(text) for text, number in entries.items()} if isinstance(entries, dict) else {}
    if isinstance(entries, list):  # Unigram: texts with their scores, in the order of the ids
        texts = {number: str(entry[0]) for number, entry in enumerate(entries)}
    decode = _decoder(tokenizer.get("decoder") or {})
    pieces = {number: decode(text) for number, text in texts.items()}
    pieces |= {int(token["id"]): _utf8(str(token["content"])) for token in added}
    return Vocabulary(pieces, frozenset(int(token["id"]) for token in added if token.get("special")))


def _decoder(decoder: Mapping[str, Any]) -> Callable[[str], bytes]:
    """What makes bytes of a token as the vocabulary has it."""
    parts = [decoder, *(decoder.get("decoders") or [])]
    kinds = {part.get("type") for part in parts}
    if "ByteLevel" in kinds:
        return _from_byte_level
    if "WordPiece" in kinds:
        prefix = next((str(part.get("prefix")) for part in parts if part.get("prefix")), "##")
        return lambda text: _utf8(text.removeprefix(prefix) if text.startswith(prefix) else f" {text}")
    space = "▁" if kinds & {"Metaspace", "Replace", "ByteFallback"} else ""
    suffix = next((str(part.get("suffix")) for part in parts if part.get("type") == "BPEDecoder"), "")

    def decode(text: str) -> bytes:
        if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            return bytes([int(text[3:5], 16)])
        text = text.replace(space, " ") if space else text
        return _utf8(f"{text.removesuffix(suffix)} " if suffix and text.endswith(suffix) else text)

    return decode


def _byte_alphabet() -> dict[str, int]:
    """The printable characters that stand for bytes in byte-level vocabularies (GPT-2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


BYTES = _byte_alphabet()


def _from_byte_level(text: str) -> bytes:
    return b"".join(bytes([BYTES[letter]]) if letter in BYTES else _utf8(letter) for letter in text)


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def _piece(text: bytes) -> Piece:
    try:
        return text.decode()
    except UnicodeDecodeError:
        return list(text)


# ----------------------------------------
# Which steps and groups of a run the page embeds. Steps are chosen by the metrics alone: no table is read for it.


MAX_STEPS = 60


@dataclass(frozen=True, slots=True)
class Chosen:
    """A step or a group, and why it is in the sample."""

    number: int
    why: str


def choose_steps(history: Run, begins: Mapping[int, str], limit: int = MAX_STEPS) -> list[Chosen]:
    """Steps with stored completions, the most telling first: the last, the first, those at which findings begin, those
    with the extremes of some metrics, then steps at even distances.

    Args:
        history: the run.
        begins: steps at which findings begin, and which.
        limit: how many steps.
    """
    stored = list(history.rollouts)
    if not stored:
        return []
    found: dict[int, str] = {stored[-1]: "last", stored[0]: "first"}
    for step, words in begins.items():
        if step in history.rollouts:
            found.setdefault(step, words)
    for key, words in (("reward/mean", "reward"), ("grad_norm", "gradient norm"), ("update_kl", "update KL")):
        pairs = [(v, s) for s, v in zip(*history.series(key), strict=True) if s in history.rollouts]
        if pairs and min(pairs)[0] < max(pairs)[0]:
            found.setdefault(max(pairs)[1], f"highest {words}")
            if key == "reward/mean":
                found.setdefault(min(pairs)[1], f"lowest {words}")
    found = dict(list(found.items())[:limit])
    even = f"every {math.ceil(len(stored) / limit)} steps" if len(stored) > limit else "in order"
    spare = limit - len(found)
    rest = [step for step in stored if step not in found]
    for place in range(min(spare, len(rest))):
        found[rest[place * len(rest) // min(spare, len(rest))]] = "evenly spaced" if len(rest) > spare else even
    return [Chosen(step, why) for step, why in found.items()]


def rank_groups(groups: Sequence[int], rewards: Sequence[float | None], cut: Sequence[bool]) -> list[Chosen]:
    """The groups of a step, the most telling first: the most varied, highest and lowest reward, equal rewards, most
    truncated, then in order.

    Args:
        groups: the group of each completion.
        rewards: the reward of each completion; None: not scored.
        cut: whether the length limit truncated it.
    """
    members: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    scored = {group: [r for row in rows if (r := rewards[row]) is not None] for group, rows in members.items()}
    mean = {group: math.fsum(some) / len(some) for group, some in scored.items() if some}
    spread = {group: max(scored[group]) - min(scored[group]) for group in mean}
    truncated = {group: sum(cut[row] for row in rows) for group, rows in members.items()}
    found: dict[int, str] = {}
    if len(members) > 1 and mean:
        if max(spread.values()) > 0:
            found.setdefault(max(spread, key=lambda group: spread[group]), "rewards differ most")
        found.setdefault(max(mean, key=lambda group: mean[group]), "highest reward")
        found.setdefault(min(mean, key=lambda group: mean[group]), "lowest reward")
        equal = [group for group in mean if spread[group] == 0 and group not in found]
        found |= dict.fromkeys(equal[:1], "all rewards equal")
        if max(truncated.values()):
            found.setdefault(max(truncated, key=lambda group: truncated[group]), "most truncated")
    found |= {group: "in order" if len(members) > 1 else "the only group" for group in members if group not in found}
    return [Chosen(group, why) for group, why in found.items()]


def choose_completions(rewards: Sequence[float | None], lengths: Sequence[int], max_tokens: int) -> list[int]:
    """Completions of a group in order, as many as have ``max_tokens`` together, but at least two: the best and the
    worst in turn, then those without a reward."""
    known = sorted((row for row, one in enumerate(rewards) if one is not None), key=lambda row: -(rewards[row] or 0.0))
    unknown = [row for row, one in enumerate(rewards) if one is None]
    turns = [known[place // 2] if place % 2 == 0 else known[-1 - place // 2] for place in range(len(known))]
    chosen: list[int] = []
    total = 0
    for row in [*turns, *unknown]:
        total += lengths[row]
        if len(chosen) >= 2 and total > max_tokens:
            break
        chosen.append(row)
    return sorted(chosen)


# ----------------------------------------
# One group of completions with every token, packed from the columns of a stored step.


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


MAX_BLOCKS = 11_000_000
"""Characters of all blocks: the page stays under 20 MB with everything else."""

QUANTITIES = (
    (
        "advantage",
        "Advantage",
        "diverging",
        "How much better the completion is than its group, as the update weighs it.",
    ),
    ("coefficient", "Coefficient", "diverging", "Weight of the token's score in the gradient, KL term included."),
    (
        "ratio",
        "Ratio",
        "ratio",
        "Probability under the current policy over that under the policy of objective.ratio_anchor.",
    ),
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


@dataclass
class Microscope:
    """The embedded sample."""

    groups: list[dict[str, Any]] = field(default_factory=list)
    """``step``, ``group`` and ``why`` of each block."""
    blocks: list[str] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    completions: dict[str, list[Any]] = field(default_factory=dict)
    """Columns for the filters: block, place in it, number in the group, reward, length, index of finish reason, clipped
    tokens."""
    finishes: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What the sample is and what could not be read, in words."""
    choice: str = ""
    """How the sample was chosen; empty if it is everything."""

    def data(self) -> dict[str, Any]:
        """What the script of the page needs, besides the blocks."""
        return {name: getattr(self, name) for name in ("groups", "steps", "completions", "finishes")}


def build_microscope(history: Run, begins: Mapping[int, str], space: int = MAX_BLOCKS) -> Microscope:
    """The sample of a run.

    Args:
        history: the run.
        begins: steps at which findings begin, and which.
        space: characters that all blocks may have.
    """
    vocabulary, chosen = find_vocabulary(history), choose_steps(history, begins)
    found: list[tuple[Chosen, list[PackedGroup], int]] = []
    unreadable: list[str] = []
    left = space
    for place, step in enumerate(chosen):
        try:
            path = history.rollouts[step.number]
            stored = StoredStep.read(path, shown_columns(path))
        except RunFolderError as error:
            unreadable.append(str(error))
            continue
        share = left // (len(chosen) - place)
        packed, groups = _fitting(stored, vocabulary, share, left)
        left -= sum(len(one.block) for one in packed)
        found.append((step, packed, groups))
    found = sorted(((step, packed, groups) for step, packed, groups in found if packed), key=lambda one: one[0].number)
    result = _indexed(found, _notes(history, found, vocabulary, unreadable))
    whole = len(found) == len(history.rollouts) and all(len(packed) == count for _, packed, count in found)
    return replace(result, choice="" if whole else CHOICE)


def _fitting(stored: StoredStep, vocabulary: Vocabulary | None, share: int, left: int) -> tuple[list[PackedGroup], int]:
    """The most telling groups of a step that fit into its share of the space; at least one, if that fits what is left.
    Also the number of groups of the step."""
    groups = [-1 if one is None else one for one in stored.values("group")]
    rewards = [number(one) for one in stored.values("reward")]
    ranked = rank_groups(groups, rewards, [reason == "length" for reason in stored.values("finish_reason")])
    places: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        places.setdefault(group, []).append(row)
    columns = {name: stored.arrays(name) for name in ARRAYS if name in stored}
    packed: list[PackedGroup] = []
    used = 0
    for choice in ranked:
        one = pack_group(stored.table, columns, places[choice.number], choice, vocabulary)
        used += len(one.block)
        if used > (share if packed else left):
            break
        packed.append(one)
    return packed, len(ranked)


CHOICE = (
    "Steps: the last, the first, those at which findings begin, those with the extremes of the reward, of the gradient "
    "norm and of update_kl, then steps at even distances. Groups of a step: the largest differences of rewards, the "
    "highest and the lowest mean reward, equal rewards, the most truncated completions, then in order, until the page "
    "is full."
)
"""How a sample is chosen."""


def _indexed(found: Sequence[tuple[Chosen, list[PackedGroup], int]], notes: list[str]) -> Microscope:
    """The sample with the columns that the filters use."""
    result = Microscope(
        notes=notes,
        completions={name: [] for name in ("group", "at", "number", "reward", "length", "finish", "clipped")},
    )
    for step, packed, _ in found:
        result.steps.append({"step": step.number, "why": step.why})
        for one in packed:
            block = len(result.blocks)
            result.blocks.append(one.block)
            result.groups.append({"step": step.number, "group": one.group.number, "why": one.group.why})
            for at, (position, reward, length, finish, clipped_tokens) in enumerate(one.rows):
                if finish not in result.finishes:
                    result.finishes.append(finish)
                row = (block, at, position, reward, length, result.finishes.index(finish), clipped_tokens)
                for column, value in zip(result.completions.values(), row, strict=True):
                    column.append(value)
    return result


def _notes(
    history: Run,
    found: Sequence[tuple[Chosen, list[PackedGroup], int]],
    vocabulary: Vocabulary | None,
    unreadable: list[str],
) -> list[str]:
    """What the sample is, in words."""
    stored = len(history.rollouts)
    groups, all_groups = sum(len(packed) for _, packed, _ in found), sum(count for _, _, count in found)
    notes = []
    if not stored:
        return ["The run folder has no stored completions (rollouts/)."]
    if len(found) == stored and groups == all_groups:
        notes.append(f"All stored completions are in this page: {groups:,} groups of {stored:,} steps.")
    elif found:
        part = f"all {groups:,} groups" if groups == all_groups else f"{groups:,} of the {all_groups:,} groups"
        notes.append(
            f"This page holds a sample: {part} of {len(found):,} of the {stored:,} stored steps. All are in rollouts/."
        )
    if vocabulary is None:
        notes.append(
            "The run folder has no tokenizer.json beside a checkpoint: tokens are shown as ids, beside the text."
        )
    return notes + unreadable
