"""The journal of a run: ``journal/step-N.safetensors`` is the rollout of step N, exactly.

It is on the disk before the step's first update. It goes when the two newest checkpoints hold the step (or the only
one does), and when the run ends. A run that goes on reads it instead of sampling again: its updates are bit for bit
those of the run that stopped.

The file is a tree of objects as JSON, in bytes, and the numbers of all arrays end to end: one tensor per dtype. Its
header has the digest of both. Nothing in it is code: loading makes objects of the classes in ``CLASSES`` and of plain
types, and of nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import date, datetime, time, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import save

from cohort.rewards.runner import Scores
from cohort.runs.reading import damage_named
from cohort.types import Completion, Episode, FinishReason, Group, Prompt, Segment, Support, Turn

CLASSES: dict[str, Any] = {
    one.__name__: one for one in (Prompt, Support, Segment, Turn, Episode, Completion, Group, Scores)
}
"""The dataclasses that a file may hold."""
MEMBERS = {name: tuple(member.name for member in fields(one)) for name, one in CLASSES.items()}
TIMEZONES = (type(None), timezone)
"""Time zones that the ISO format holds completely."""
DTYPES = {np.dtype(f"{sign}int{bits}"): f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
DTYPES |= {np.dtype(name): name for name in ("bool", "float16", "float32", "float64")}
"""The dtypes of arrays that are stored, with their names."""
TAG = "$"
"""Key of the JSON objects that stand for something else than a dict."""
TREE, DIGEST = "tree", "cohort_sha256"
"""Name of the tree's tensor, and key of the digest: a power failure can leave holes in a file."""
EXACT = "is_exact"
"""Fact of a loaded rollout: whether every value of its objects is there, and none is an ``Unstorable``."""


@dataclass(frozen=True, slots=True)
class StoredRollout:
    """A rollout as a file holds it."""

    groups: Sequence[Group]
    scores: Scores | None = None
    """None: every completion is drawn, and none is scored."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What else is needed to go on with it."""


@dataclass(frozen=True, slots=True)
class Unstorable:
    """Stands for an object of a class that no file can hold, such as one that a user's environment keeps in its state.
    ``str`` gives what it gave for the object."""

    text: str

    def __str__(self) -> str:
        return self.text


def encode_rollout(rollout: StoredRollout) -> bytes:
    """The contents of a rollout's file.

    ``load_rollout`` returns an equal one: every array bit for bit, NaN and lone surrogates included. Values of columns,
    states and logged extras may be of Python's plain types, containers of them, dates, decimals, and NumPy or torch
    arrays of numbers. Any other object becomes an ``Unstorable``.
    """
    arrays = _Writer()
    tree = {"groups": arrays.encode(list(rollout.groups)), "scores": arrays.encode(rollout.scores)}
    tree["facts"] = arrays.encode({**rollout.facts, EXACT: arrays.is_exact})
    text = json.dumps(tree, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode()
    numbers = {name: np.concatenate(parts) for name, parts in arrays.parts.items()}
    numbers[TREE] = np.frombuffer(text, np.uint8)
    content: bytes = save(numbers, {DIGEST: digest(numbers)})
    return content


def load_rollout(path: Path) -> StoredRollout:
    """Read a rollout.

    Raises:
        RunFolderError: the file is damaged, or holds something else.
    """
    with damage_named(path):
        with safe_open(path, "numpy") as file:
            header = file.metadata() or {}
            numbers = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
        if header.get(DIGEST) != digest(numbers):
            raise ValueError("it is not what was written: its SHA-256 differs")
        decode = _Reader(numbers).decode
        values = {name: decode(value) for name, value in json.loads(numbers[TREE].tobytes()).items()}
        groups, scores, facts = values["groups"], values["scores"], values["facts"]
        if not (isinstance(groups, list) and all(isinstance(group, Group) for group in groups)):
            raise TypeError("expected a list of groups")
        if not (isinstance(scores, Scores | None) and isinstance(facts, dict)):
            raise TypeError("expected scores and a table of facts")
        return StoredRollout(groups, scores, facts)


def digest(numbers: Mapping[str, np.ndarray]) -> str:
    """The SHA-256 of a file's numbers, those of the tree included."""
    found = hashlib.sha256()
    for name in sorted(numbers):
        found.update(f"{name} {len(numbers[name])}".encode())
        found.update(np.ascontiguousarray(numbers[name]).view(np.uint8).data)
    return found.hexdigest()


CODECS: dict[str, tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "FinishReason": (FinishReason, lambda value: value.value, FinishReason),
    "text": (str, lambda value: [ord(character) for character in value], lambda codes: "".join(map(chr, codes))),
    "float": (float, lambda value: str(float(value)), float),
    "tuple": (tuple, list, tuple),
    "set": (set, list, set),
    "frozenset": (frozenset, list, frozenset),
    "bytes": (bytes, lambda value: base64.b64encode(value).decode(), base64.b64decode),
    "complex": (complex, lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    "dict": (Mapping, lambda value: [list(pair) for pair in value.items()], dict),
    "datetime": (datetime, datetime.isoformat, datetime.fromisoformat),
    "date": (date, date.isoformat, date.fromisoformat),
    "time": (time, time.isoformat, time.fromisoformat),
    "Decimal": (Decimal, str, Decimal),
    "Unstorable": ((), str, Unstorable),
}
"""By tag: the class of a value that JSON lacks, what JSON holds of it, and what makes the value from that. Of several
classes the first counts; of dates and decimals, a subclass becomes an ``Unstorable``."""


class _Writer:
    """Turns objects into JSON, and collects the numbers of arrays by dtype."""

    def __init__(self) -> None:
        self.parts: dict[str, list[np.ndarray]] = {}
        self.is_exact = True
        """Whether no value became an ``Unstorable``."""
        self._sizes: dict[str, int] = {}

    def encode(self, value: Any) -> Any:
        """The JSON of a value."""
        kind = type(value)
        if value is None or kind is int or kind is bool or (kind is str and value.isascii()):
            return value
        if isinstance(value, np.ndarray | np.generic | torch.Tensor):
            return self._array(value)
        if CLASSES.get(name := kind.__name__) is kind:
            return {TAG: name, "of": {member: self.encode(getattr(value, member)) for member in MEMBERS[name]}}
        if isinstance(value, list):
            return [self.encode(one) for one in value]
        if isinstance(value, Mapping) and all(isinstance(key, str) and key.isascii() and key != TAG for key in value):
            return {str.__str__(key): self.encode(one) for key, one in value.items()}
        if isinstance(value, float) and math.isfinite(value):
            return float(value)
        if isinstance(value, int):
            return int(value)
        if isinstance(value, str) and not isinstance(value, FinishReason) and _is_text(value):
            return str.__str__(value)
        for tag, (base, content, _) in CODECS.items():
            if isinstance(value, base):
                is_other = issubclass(base, date | time | Decimal) and (
                    kind is not base or type(getattr(value, "tzinfo", None)) not in TIMEZONES
                )
                return self._unstorable(value) if is_other else {TAG: tag, "of": self.encode(content(value))}
        return self._unstorable(value)

    def _unstorable(self, value: Any) -> Any:
        self.is_exact = False
        try:
            text = str(value)
        except Exception:  # of a class of the user
            text = f"an object of {type(value).__name__}"
        return {TAG: "Unstorable", "of": self.encode(text)}

    def _array(self, value: Any) -> Any:
        """The place of an array: dtype, shape, and index of its first number among those of its dtype."""
        kind = "array" if isinstance(value, np.ndarray) else "tensor" if isinstance(value, torch.Tensor) else "scalar"
        if kind == "tensor" and value.dtype in (torch.bfloat16, torch.complex64, torch.complex128):
            return self._unstorable(value)
        numbers = np.asarray(value.detach().cpu() if kind == "tensor" else value)
        if (name := DTYPES.get(numbers.dtype.newbyteorder("="))) is None:
            return self._unstorable(value)
        start = self._sizes.get(name, 0)
        self.parts.setdefault(name, []).append(numbers.reshape(-1))
        self._sizes[name] = start + numbers.size
        return {TAG: kind, "of": [name, list(numbers.shape), start]}


class _Reader:
    """Turns JSON back into objects."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._arrays = arrays

    def decode(self, value: Any) -> Any:
        """The value of some JSON."""
        if isinstance(value, list):
            return [self.decode(one) for one in value]
        if not isinstance(value, dict):
            return value
        if TAG not in value:
            return {key: self.decode(one) for key, one in value.items()}
        kind, of = value[TAG], value["of"]
        if kind in CLASSES:
            return CLASSES[kind](**{name: self.decode(one) for name, one in of.items()})
        if kind in ("array", "scalar", "tensor"):
            name, shape, start = of
            numbers = self._arrays[name][start : start + math.prod(shape)].reshape(shape).copy()
            return torch.from_numpy(numbers) if kind == "tensor" else numbers[()] if kind == "scalar" else numbers
        return CODECS[kind][2](self.decode(of))


def _is_text(text: str) -> bool:
    """Whether JSON can hold a text: it would join a high and a low surrogate that stand alone to one character."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)
