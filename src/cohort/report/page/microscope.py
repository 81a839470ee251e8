"""What the microscope shows: groups of completions with every token, packed until the page is full."""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cohort.errors import RunFolderError
from cohort.report.rollouts import StoredStep
from cohort.runs.reader import Run

Record: TypeAlias = dict[str, Any]
"""A completion: a row of a stored step, or what the page has of it."""

# ----------------------------------------
# The texts of tokens, from ``tokenizer.json``. The file is read as data: no tokenizer is made, no code is run.


MAX_TOKENIZER = 1 << 27
"""Bytes of a tokenizer.json that is read."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Token texts by id."""

    pieces: Mapping[int, bytes]
    special: frozenset[int]
    """End tokens, markers of turns and the like, which the decoded text leaves out."""

    def of(self, ids: Iterable[int]) -> dict[str, list[Any]]:
        """What the page needs to spell these ids: the text of each, or its bytes if they are not UTF-8 by
        themselves."""
        known = [one for one in sorted(set(ids)) if one in self.pieces]
        pieces = [self.pieces[one] for one in known]
        spelled = [text if "\ufffd" not in (text := one.decode("utf-8", "replace")) else list(one) for one in pieces]
        return {"ids": known, "pieces": spelled, "special": [one for one in known if one in self.special]}


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
    """The vocabulary of a parsed ``tokenizer.json`` whose tokens are byte-level (GPT-2) or SentencePiece's; those of
    other kinds are shown as the vocabulary has them.

    Raises:
        ValueError, TypeError, LookupError, AttributeError: it has another form.
    """
    entries, added = tokenizer["model"]["vocab"], tokenizer.get("added_tokens") or []
    if isinstance(entries, list):  # Unigram: texts with their scores, in the order of the ids
        entries = {entry[0]: number for number, entry in enumerate(entries)}
    decoder = tokenizer.get("decoder") or {}
    kinds = [part.get("type") for part in (decoder, *(decoder.get("decoders") or []))]
    to_bytes = _from_byte_level if "ByteLevel" in kinds else _from_sentencepiece
    pieces = {int(number): to_bytes(str(text)) for text, number in entries.items()}
    pieces |= {int(token["id"]): _utf8(str(token["content"])) for token in added}
    return Vocabulary(pieces, frozenset(int(token["id"]) for token in added if token.get("special")))


def _byte_alphabet() -> dict[str, int]:
    """The printable characters that stand for bytes in byte-level vocabularies (GPT-2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


BYTES = _byte_alphabet()


def _from_byte_level(text: str) -> bytes:
    return b"".join(bytes([BYTES[letter]]) if letter in BYTES else _utf8(letter) for letter in text)


def _from_sentencepiece(text: str) -> bytes:
    is_byte = len(text) == 6 and text.startswith("<0x") and text.endswith(">")
    return bytes([int(text[3:5], 16)]) if is_byte else _utf8(text.replace("▁", " "))


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "replace")


# ----------------------------------------
# Which steps, groups and completions of a run the page embeds, the most telling first, and why. Steps are chosen by the
# metrics alone: no table is read for it.


MAX_STEPS = 60
CHOICE = (
    "Steps: the last, the first, those at which findings begin, those with the extremes of the reward, of the gradient "
    "norm and of update_kl, then steps at even distances. Groups of a step: the largest differences of rewards, the "
    "highest and the lowest mean reward, equal rewards, the most truncated completions, then in order, until the page "
    "is full."
)
"""How a sample is chosen."""


def choose_steps(history: Run, begins: Mapping[int, str], limit: int = MAX_STEPS) -> dict[int, str]:
    """Steps with stored completions: the last, the first, those at which findings begin (``begins``: which), those with
    the extremes of some metrics, then steps at even distances."""
    stored = history.rollouts.keys()
    reasons = [(max(stored), "last"), (min(stored), "first"), *begins.items()] if stored else []
    for key, words in (("reward/mean", "reward"), ("grad_norm", "gradient norm"), ("update_kl", "update KL")):
        pairs = [(value, step) for step, value in zip(*history.series(key), strict=True) if step in stored]
        if pairs and min(pairs)[0] < max(pairs)[0]:
            reasons.append((max(pairs)[1], f"highest {words}"))
            reasons += [(min(pairs)[1], f"lowest {words}")] * (key == "reward/mean")
    found: dict[int, str] = {}
    for step, why in reasons:
        if step in stored and len(found) < limit:
            found.setdefault(step, why)
    rest = [step for step in stored if step not in found]
    spare = min(limit - len(found), len(rest))
    why = "evenly spaced" if len(rest) > spare else "in order"
    return found | {rest[place * len(rest) // spare]: why for place in range(spare)}


def choose_groups(records: Sequence[Record]) -> dict[int, str]:
    """The groups of a step: the most varied, highest and lowest reward, equal rewards, most truncated, then in order.
    A record has ``group``, ``reward`` (None: not scored) and ``finish_reason``."""
    scored: dict[int, list[float]] = {record["group"]: [] for record in records}
    truncated = dict.fromkeys(scored, 0)
    for record in records:
        truncated[record["group"]] += record["finish_reason"] == "length"
        scored[record["group"]] += [] if record["reward"] is None else [record["reward"]]
    if len(scored) == 1:
        return dict.fromkeys(scored, "the only group")
    mean = {group: math.fsum(some) / len(some) for group, some in scored.items() if some}
    spread = {group: max(scored[group]) - min(scored[group]) for group in mean}
    found: dict[int, str] = {}
    if any(spread.values()):
        found[max(spread, key=lambda group: spread[group])] = "rewards differ most"
    if mean:
        found.setdefault(max(mean, key=lambda group: mean[group]), "highest reward")
        found.setdefault(min(mean, key=lambda group: mean[group]), "lowest reward")
        equal = [group for group in mean if spread[group] == 0 and group not in found]
        found |= dict.fromkeys(equal[:1], "all rewards equal")
        if any(truncated.values()):
            found.setdefault(max(truncated, key=lambda group: truncated[group]), "most truncated")
    return found | {group: "in order" for group in scored if group not in found}


def choose_completions(rewards: Sequence[float | None], lengths: Sequence[int], max_tokens: int) -> list[int]:
    """Completions of a group in order, as many as have ``max_tokens`` together, but at least two: the best and the
    worst in turn, then those without a reward."""
    known = sorted((row for row, one in enumerate(rewards) if one is not None), key=lambda row: -(rewards[row] or 0.0))
    turns = [known[place // 2] if place % 2 == 0 else known[-1 - place // 2] for place in range(len(known))]
    turns += [row for row, one in enumerate(rewards) if one is None]
    sums = np.cumsum([lengths[row] for row in turns])
    return sorted(row for place, row in enumerate(turns) if place < 2 or sums[place] <= max_tokens)


# ----------------------------------------
# One group of completions with every token, as one deflated block of text, numbers and token arrays:
#
#     uint32       length of the header, little-endian as everything here
#     header       JSON: prompt, completions, token texts, and ``arrays`` as [name, kind, count] in order
#     arrays       kind u1: bytes; i4, f4: the numbers' lowest bytes, then their second bytes, ... (it deflates better)
#
# Floats keep 16 significant bits: five digits are shown at most.


MAX_TEXT = 200_000
"""Characters of a text that is embedded."""
MAX_GROUP_TOKENS = 48_000
HEAD, TAIL = 16_000, 4_000
"""Tokens at the beginning and the end of a completion that are embedded of one that has more."""
STORED = {
    "advantage": "token_advantages",
    **{name: name for name in ("ratio", "entropy", "sampler_logps", "full_logps", "old_logps", "logps", "ref_logps")},
    **{name: name for name in ("policy_coefficient", "kl_coefficient")},
}
"""Columns with a number for each drawn token, by name in the page."""
SHOWN = (
    *("group", "row", "source", "prompt", "completion", "finish_reason", "reward", "advantage"),
    *("weights_version", "messages", "environment_reward", "episode_error", "reward_error"),
    *("token_ids", "drawn", "turn_lengths", "no_gradient", *STORED.values()),
)
MAX_PREFIXED = 100
"""Columns of rewards and logged values that are shown."""
NO_CAUSE = 255
Arrays: TypeAlias = dict[str, NDArray[Any]]


def pack(header: Mapping[str, Any], arrays: Arrays) -> str:
    """Base64 of a deflated block.

    Args:
        header: plain values.
        arrays: flat; bool and uint8 become u1, integers i4, floats f4.
    """
    parts, listed = [], []
    for name, array in arrays.items():
        kind = "u1" if array.dtype.itemsize == 1 else "i4" if array.dtype.kind in "iu" else "f4"
        listed.append([name, kind, len(array)])
        if kind == "u1":
            parts.append(array.astype(np.uint8).tobytes())
        else:
            words = array.astype(f"<{kind}").view(np.uint32) & np.uint32(0xFFFFFF00 if kind == "f4" else 0xFFFFFFFF)
            parts.append(words.view(np.uint8).reshape(-1, 4).T.tobytes())
    text = plain_json({**header, "arrays": listed}).encode()
    block = len(text).to_bytes(4, "little") + text + b"".join(parts)
    return base64.b64encode(zlib.compress(block, 6)).decode()


def plain_json(value: Any) -> str:
    """JSON without lone surrogates, which UTF-8 cannot hold, and without NaN, which JSON cannot."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "replace").decode()


def clipped(text: Any, limit: int = MAX_TEXT) -> str:
    """A text of at most ``limit`` characters, whose middle is left out if it is longer; empty for None."""
    whole, half = "" if text is None else str(text), limit // 2
    if len(whole) <= limit:
        return whole
    return f"{whole[:half]}\n[{len(whole) - 2 * half:,} characters left out of this page]\n{whole[-half:]}"


def number(value: Any) -> float | None:
    """A finite number; None for anything else."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def pack_group(
    group: int, records: Sequence[Record], vocabulary: Vocabulary | None
) -> tuple[str, list[tuple[Any, ...]]]:
    """The block of a group, and ``FILTERED`` of the completions in it."""
    lengths = [min(HEAD + TAIL, len(record.get("token_ids") or ())) for record in records]
    kept = choose_completions([number(record.get("reward")) for record in records], lengths, MAX_GROUP_TOKENS)
    causes: list[str] = []
    found = [_tokens(records[at], causes) for at in kept]
    whole = {name: np.concatenate([arrays[name] for _, arrays in found]) for name in found[0][1]}
    ends = np.cumsum([0, *(len(arrays["ids"]) for _, arrays in found)]).tolist()
    completions = [
        {**_describe(records[at]), "number": at + 1, "t": [start, end], **tokens}
        for at, start, end, (tokens, _) in zip(kept, ends[:-1], ends[1:], found, strict=True)
    ]
    if whole["drawn"].all():  # turns without answers between them are not told apart
        completions = [one | {"turns": []} for one in completions]
    first, left_out = records[0], f"{len(kept)} of the group's {len(records)} completions are in this page."
    header = {
        "group": group,
        "row": first.get("row"),
        "source": clipped(first.get("source")),
        "prompt": clipped(first.get("prompt")),
        "completions": completions,
        "causes": causes,
        "vocabulary": vocabulary and vocabulary.of(np.unique(whole["ids"]).tolist()),
        "notes": [left_out] if len(kept) < len(records) else [],
    }
    silent = {"drawn": whole["drawn"].all(), "no_gradient": not causes}  # and numbers that no completion has
    silent |= {name: np.isnan(whole[name]).all() for name in STORED}
    block = pack(header, {name: array for name, array in whole.items() if not silent.get(name)})
    return block, [tuple(one[name] for name in FILTERED) for one in completions]


def _tokens(record: Record, causes: list[str]) -> tuple[dict[str, Any], Arrays]:
    """The tokens of a completion in words and as arrays; causes that are not known yet are added to the list."""
    ids = np.array(record.get("token_ids") or (), np.float64)
    drawn = np.array(record.get("drawn") or np.ones(len(ids)), np.bool_)
    kept_T = np.ones(len(ids), np.bool_)
    kept_T[HEAD : len(ids) - TAIL] = len(ids) <= HEAD + TAIL
    kept_N = kept_T[drawn]
    arrays = {"ids": np.clip(ids[kept_T], -1, 2**31 - 1).astype(np.int32), "drawn": drawn[kept_T]}
    numbers = dict(record)
    if "token_advantages" not in record and record.get("advantage") is not None:  # one for all tokens
        numbers["token_advantages"] = [record["advantage"]] * len(kept_N)
    for name, column in STORED.items():
        values = numbers.get(column)
        values = [math.nan] * len(kept_N) if values is None or len(values) != len(kept_N) else values
        with np.errstate(over="ignore"):
            arrays[name] = np.array(values, np.float64)[kept_N].astype(np.float32)
    given = record.get("no_gradient")
    given = given if given and len(given) == len(kept_N) else [None] * len(kept_N)
    causes += [one for one in dict.fromkeys(given) if one is not None and one not in causes][: NO_CAUSE - len(causes)]
    codes = {one: code for code, one in enumerate(causes)}
    arrays["no_gradient"] = np.array([codes.get(one, NO_CAUSE) for one in given], np.uint8)[kept_N]
    words = {
        "tokens": len(ids),
        "drawn": len(kept_N),
        "gap": None if len(ids) <= HEAD + TAIL else [HEAD, len(ids) - HEAD - TAIL],
        "turns": _turns(record.get("turn_lengths") or (), drawn, np.flatnonzero(kept_T)),
        "clipped": sum(one is not None and one.startswith("clipped") for one in given),
    }
    return words, arrays


def _turns(lengths: Sequence[int], drawn_T: NDArray[np.bool_], kept_K: NDArray[np.int64]) -> list[tuple[int, str]]:
    """Where turns of an episode, and answers that the policy read, begin among the tokens that are embedded."""
    turn_T = np.zeros(len(drawn_T), np.int64)  # 0: given
    turn_T[drawn_T] = 1 + np.searchsorted(np.cumsum(lengths), np.arange(drawn_T.sum()), side="right")
    turn_K, last_K = turn_T[kept_K], np.where(kept_K > 0, turn_T[kept_K - 1], 0)
    found = []
    for at in np.flatnonzero((turn_K != last_K) | (np.diff(kept_K, prepend=-1) > 1)).tolist():
        drawn = f"turn {turn_K[at]}, drawn by the policy" + (", goes on" if turn_K[at] == last_K[at] else "")
        found.append((at, drawn if turn_K[at] else "answer, not drawn by the policy"))
    return found


def _describe(record: Record) -> dict[str, Any]:
    """A completion without its tokens, in plain values."""
    rewards = {key[8:][:80]: number(one) for key, one in record.items() if key.startswith("rewards/")}
    if (environment := number(record.get("environment_reward"))) is not None:
        rewards["environment"] = environment
    extra = [(key[6:86], one) for key, one in record.items() if key.startswith("extra/") and one is not None]
    return {
        "text": clipped(record.get("completion")),
        "finish": clipped(record.get("finish_reason") or "unknown")[:40],
        "reward": number(record.get("reward")),
        "advantage": number(record.get("advantage")),
        "rewards": rewards,
        "details": [[name, clipped(one, 400)] for name, one in extra],
        "error": clipped(record.get("episode_error") or record.get("reward_error"), 2_000),
        "messages": _messages(record.get("messages")),
    }


def _messages(text: Any) -> list[dict[str, Any]] | None:
    """The messages of an episode; None if there are none that can be read."""
    try:
        return [
            {
                "role": clipped(one.get("role"))[:40],
                "content": clipped(content if isinstance(content := one.get("content"), str) else _json(content)),
                "calls": [clipped(_json(call), 4_000) for call in one.get("tool_calls") or []],
            }
            for one in json.loads(text)[:200]
        ]
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None


def _json(value: Any) -> str:
    return "" if value is None else json.dumps(value, ensure_ascii=False)


# ----------------------------------------
# The sample of a run.


MAX_BLOCKS = 11_000_000
"""Characters of all blocks: the page stays under 20 MB with everything else."""
QUANTITIES = tuple(
    dict(zip(("key", "label", "scale", "about"), row, strict=True))
    for row in (
        ("advantage", "Advantage", "diverging",
         "How much better the completion is than its group, as the update weighs it."),
        ("coefficient", "Coefficient", "diverging",
         "Weight of the token's score in the gradient, KL term included."),
        ("ratio", "Ratio", "ratio",
         "Probability under the current policy over that under the policy of objective.ratio_anchor."),
        ("kl", "KL to reference", "positive", "k3 estimate of KL(current || reference) at this token, in nats."),
        ("entropy", "Entropy", "positive", "Entropy of the policy's distribution at this token, in nats."),
        ("sampler_logps", "Log-prob: sampler", "negative", "Under the distribution that the token was drawn from."),
        ("old_logps", "Log-prob: old policy", "negative",
         "Under the policy that sampled, as the trainer computes it."),
        ("logps", "Log-prob: current policy", "negative",
         "Under the policy of the first update that used the token."),
        ("ref_logps", "Log-prob: reference", "negative", "Under the reference policy of the KL term."),
        ("gap", "Sampler gap", "diverging", "Log-prob of the old policy minus that of the sampler."),
    )
)  # fmt: skip
"""What a token can be coloured by. The browser computes ``kl``, ``gap`` and ``coefficient`` from the stored columns."""
CAUSES = {
    "masked": "the completion reached the length limit, and objective.truncated masks such completions",
    "no_advantage": "the advantage is 0",
    "low_entropy": "the token is not among the objective.top_entropy tokens",
    "mismatch": "a mismatch rule dropped it, because sampler and trainer differ",
    "off_policy": "the off-policy mask dropped its completion",
    "clipped_low": "the trust region clipped it at a low ratio",
    "clipped_high": "the trust region clipped it at a high ratio",
    "vanished": "the multiplier of the trust region is 0",
    "held": "",
}
"""Why a token has no policy gradient. ``held`` is the exception: it has one, with a clamped log-ratio."""


Groups: TypeAlias = dict[int, tuple[str, str, list[tuple[Any, ...]]]]
"""Groups of a step: why each was chosen, its block, and ``FILTERED`` of its completions."""
FILTERED = ("number", "reward", "drawn", "finish", "clipped")


@dataclass
class Microscope:
    """The embedded sample."""

    steps: list[dict[str, Any]]
    """``step`` and ``why``."""
    groups: list[dict[str, Any]]
    """``step``, ``group`` and ``why`` of each block."""
    completions: dict[str, list[Any]]
    """For the filters: ``group`` (the block), ``at`` (the place in it), and ``FILTERED``."""
    blocks: list[str]
    notes: list[str]
    """What the sample is and what could not be read, in words."""
    choice: str
    """How the sample was chosen; empty if it is everything."""

    def data(self) -> dict[str, Any]:
        """What the script of the page needs, besides the blocks."""
        return {"steps": self.steps, "groups": self.groups, "completions": self.completions}


def build_microscope(history: Run, begins: Mapping[int, str], space: int = MAX_BLOCKS) -> Microscope:
    """The sample of a run.

    Args:
        history: the run.
        begins: steps at which findings begin, and which.
        space: characters that all blocks may have.
    """
    vocabulary, chosen, stored = find_vocabulary(history), choose_steps(history, begins), history.rollouts
    packed: dict[int, Groups] = {}
    unreadable, left, all_groups = [], space, 0
    for place, step in enumerate(chosen):
        try:
            groups, packed[step] = _packed(stored[step], vocabulary, left // (len(chosen) - place), left)
        except RunFolderError as error:
            unreadable.append(str(error))
            continue
        left -= sum(len(block) for _, block, _ in packed[step].values())
        all_groups += groups
    steps = sorted(step for step, some in packed.items() if some)
    found = [(step, group, *packed[step][group]) for step in steps for group in packed[step]]
    rows = [(block, at, *one) for block, (*_, some) in enumerate(found) for at, one in enumerate(some)]
    names = ("group", "at", *FILTERED)
    whole = len(steps) == len(stored) and len(found) == all_groups
    return Microscope(
        steps=[{"step": step, "why": chosen[step]} for step in steps],
        groups=[{"step": step, "group": group, "why": why} for step, group, why, *_ in found],
        completions={name: [row[place] for row in rows] for place, name in enumerate(names)},
        blocks=[block for _, _, _, block, _ in found],
        notes=[*_notes(len(stored), len(steps), len(found), all_groups, vocabulary), *unreadable],
        choice="" if whole else CHOICE,
    )


def _packed(path: Path, vocabulary: Vocabulary | None, share: int, left: int) -> tuple[int, Groups]:
    """The number of groups of a step, and the most telling ones that fit into its share of the space; at least one, if
    that fits what is left."""
    prefixed = [name for name in StoredStep.read(path, ()).names if name.startswith(("rewards/", "extra/"))]
    step = StoredStep.read(path, {*SHOWN, *prefixed[:MAX_PREFIXED]})
    rows: dict[int, list[int]] = {}
    heads = []
    for row, head in enumerate(zip(*map(step.values, ("group", "reward", "finish_reason")), strict=True)):
        group = -1 if head[0] is None else head[0]
        heads.append({"group": group, "reward": number(head[1]), "finish_reason": head[2]})
        rows.setdefault(group, []).append(row)
    chosen, used = choose_groups(heads), 0
    found: Groups = {}
    for group, why in chosen.items():
        first, count = rows[group][0], len(rows[group])
        together = rows[group][-1] == first + count - 1  # as they are written
        part = step.table.slice(first, count) if together else step.table.take(rows[group])
        block, rows_shown = pack_group(group, part.to_pylist(), vocabulary)
        used += len(block)
        if used > (share if found else left):
            break
        found[group] = why, block, rows_shown
    return len(chosen) if found else 0, found


def _notes(stored: int, steps: int, groups: int, all_groups: int, vocabulary: Vocabulary | None) -> list[str]:
    """What the sample is, in words."""
    if not stored:
        return ["The run folder has no stored completions (rollouts/)."]
    notes = []
    part = f"all {groups:,} groups" if groups == all_groups else f"{groups:,} of the {all_groups:,} groups"
    if steps == stored and groups == all_groups:
        notes.append(f"All stored completions are in this page: {groups:,} groups of {stored:,} steps.")
    elif steps:
        notes.append(
            f"This page holds a sample: {part} of {steps:,} of the {stored:,} stored steps. All are in rollouts/."
        )
    if vocabulary is None:
        notes.append(
            "The run folder has no tokenizer.json beside a checkpoint: tokens are shown as ids, beside the text."
        )
    return notes
