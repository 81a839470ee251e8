"""Rollouts and other values in files: without loss, as safetensors and JSON.

NAME.json           the tree of objects; an array is a place in NAME.safetensors
NAME.safetensors    the numbers of all arrays, end to end: one tensor for each dtype

Nothing in them is code. Loading makes objects of the classes in ``CLASSES`` and of plain types, and of nothing else.
"""

from __future__ import annotations

import base64
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
from safetensors.numpy import load_file, save_file

from cohort.rewards.runner import Scores
from cohort.runs.reading import damage_named, read_object
from cohort.types import Completion, Episode, FinishReason, Group, Prompt, Segment, Support, Turn

CLASSES: dict[str, Any] = {
    one.__name__: one for one in (Prompt, Support, Segment, Turn, Episode, Completion, Group, Scores)
}
"""The dataclasses that a file may hold."""
TIMEZONES = (type(None), timezone)
"""Time zones that the ISO format holds completely."""
DTYPES = frozenset(
    [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)] + ["bool", "float16", "float32", "float64"]
)
"""The dtypes of arrays that are stored."""
TAG = "$"
"""Key of the JSON objects that stand for something else than a dict."""


@dataclass(frozen=True, slots=True)
class StoredRollout:
    """A rollout, complete or in progress, as files hold it."""

    groups: Sequence[Group]
    scores: Scores | None = None
    """None: not scored yet."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What else is needed to go on with it."""


@dataclass(frozen=True, slots=True)
class Unstorable:
    """Stands for an object of a class that no file can hold, such as one that a user's environment keeps in its state.
    ``str`` gives what it gave for the object."""

    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Encoded:
    """Values as their two files hold them."""

    text: str
    arrays: Mapping[str, np.ndarray]


def encode_rollout(rollout: StoredRollout) -> Encoded:
    """A rollout in the form of its files.

    ``load_rollout`` returns an equal one: every array bit for bit, NaN and lone surrogates included. Values of columns,
    states and logged extras may be of Python's plain types, containers of them, dates, decimals, and NumPy or torch
    arrays of numbers. Any other object becomes an ``Unstorable``.
    """
    return encode_values({"groups": list(rollout.groups), "scores": rollout.scores, "facts": rollout.facts})


def encode_values(values: Mapping[str, Any]) -> Encoded:
    """As ``encode_rollout``, for any values by name."""
    arrays = _Writer()
    tree = {name: arrays.encode(value) for name, value in values.items()}
    text = json.dumps(tree, allow_nan=False, separators=(",", ":"))
    return Encoded(text + "\n", {name: np.concatenate(parts) for name, parts in arrays.parts.items()})


def write_encoded(path: Path, encoded: Encoded) -> None:
    """Write ``path.json`` and ``path.safetensors``."""
    save_file(dict(encoded.arrays), _file(path, "safetensors"))
    _file(path, "json").write_text(encoded.text, encoding="ascii")


def load_rollout(path: Path) -> StoredRollout:
    """Read a rollout.

    Raises:
        RunFolderError: the files hold something else.
    """
    values = load_values(path)
    with damage_named(_file(path, "json")):
        groups, scores, facts = values["groups"], values["scores"], values["facts"]
        if not (isinstance(groups, list) and all(isinstance(group, Group) for group in groups)):
            raise TypeError("expected a list of groups")
        if not (isinstance(scores, Scores | None) and isinstance(facts, dict)):
            raise TypeError("expected scores and a table of facts")
        return StoredRollout(groups, scores, facts)


def load_values(path: Path) -> dict[str, Any]:
    """Read values.

    Raises:
        RunFolderError: the files hold something else.
    """
    with damage_named(_file(path, "json")):
        tree = read_object(_file(path, "json"))
        decode = _Reader(load_file(_file(path, "safetensors"))).decode
        return {name: decode(value) for name, value in tree.items()}


def _file(path: Path, kind: str) -> Path:
    return path.with_name(f"{path.name}.{kind}")


MAKERS: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "dict": dict,
    "bytes": base64.b64decode,
    "float": float,
    "complex": lambda parts: complex(*parts),
    "text": lambda codes: "".join(map(chr, codes)),
    "date": date.fromisoformat,
    "time": time.fromisoformat,
    "datetime": datetime.fromisoformat,
    "Decimal": Decimal,
    "FinishReason": FinishReason,
    "Unstorable": Unstorable,
}
"""What makes the object of a tag from its decoded content."""


class _Writer:
    """Turns objects into JSON, and collects the numbers of arrays by dtype."""

    def __init__(self) -> None:
        self.parts: dict[str, list[np.ndarray]] = {}
        self._sizes: dict[str, int] = {}

    def encode(self, value: Any) -> Any:
        """The JSON of a value."""
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, np.ndarray | np.generic | torch.Tensor):
            return self._array(value)
        if CLASSES.get(type(value).__name__) is type(value):
            members = {one.name: self.encode(getattr(value, one.name)) for one in fields(CLASSES[type(value).__name__])}
            return {TAG: type(value).__name__, "of": members}
        if isinstance(value, FinishReason):
            return {TAG: "FinishReason", "of": value.value}
        if isinstance(value, str):
            return _encoded_text(str.__str__(value))
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {TAG: "float", "of": str(float(value))}
        return self._container(value)

    def _container(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            pairs = [[self.encode(key), self.encode(one)] for key, one in value.items()]
            if all(isinstance(key, str) and key != TAG for key, _ in pairs):
                return dict(pairs)
            return {TAG: "dict", "of": pairs}
        if isinstance(value, list):
            return [self.encode(one) for one in value]
        if isinstance(value, tuple | set | frozenset):
            kind = next(kind for kind in (tuple, set, frozenset) if isinstance(value, kind))
            return {TAG: kind.__name__, "of": [self.encode(one) for one in value]}
        if isinstance(value, bytes):
            return {TAG: "bytes", "of": base64.b64encode(value).decode()}
        if isinstance(value, complex):
            return {TAG: "complex", "of": [self.encode(value.real), self.encode(value.imag)]}
        if type(value) in (date, time, datetime, Decimal) and type(getattr(value, "tzinfo", None)) in TIMEZONES:
            return {TAG: type(value).__name__, "of": str(value) if type(value) is Decimal else value.isoformat()}
        return {TAG: "Unstorable", "of": _encoded_text(str(value))}

    def _array(self, value: Any) -> Any:
        """The place of an array: dtype, shape, and index of its first number among those of its dtype."""
        kind = "tensor" if isinstance(value, torch.Tensor) else "array" if isinstance(value, np.ndarray) else "scalar"
        if kind == "tensor" and value.dtype in (torch.bfloat16, torch.complex64, torch.complex128):
            return {TAG: "Unstorable", "of": str(value)}
        numbers = np.asarray(value.detach().cpu() if kind == "tensor" else value)
        if numbers.dtype.name not in DTYPES:
            return {TAG: "Unstorable", "of": _encoded_text(str(value))}
        name, start = numbers.dtype.name, self._sizes.get(numbers.dtype.name, 0)
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
        return MAKERS[kind](self.decode(of))


def _encoded_text(text: str) -> Any:
    """JSON text would join a high and a low surrogate that stand alone to one character."""
    if text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text):
        return text
    return {TAG: "text", "of": [ord(character) for character in text]}
