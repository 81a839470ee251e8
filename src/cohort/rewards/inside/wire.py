"""How tests and a program, in two sandboxes, talk: one JSON document a line, in which values are plain data.

Nothing that is received can carry code: numbers, strings and containers are rebuilt as exactly the built-in types, so
that no ``__eq__`` of the program's ever runs where results are compared. What is not plain data stays where it is and
travels as a number.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter, OrderedDict, defaultdict, deque

TYPE_CHECKING = False  # as ``typing`` has it, which takes longer to import than most programs to run
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MAX_LINE = 64 * 1024 * 1024
CONTAINERS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
VALUES = {"Decimal": "decimal", "Fraction": "fractions"}
"""Numbers of the standard library that travel as text, and the modules they are of."""
TIMES = {"date": "fromisoformat", "datetime": "fromisoformat", "time": "fromisoformat", "timedelta": ""}
"""Those of ``datetime``, and how a text becomes one."""
MAPPINGS: dict[str, Any] = {"Counter": Counter, "OrderedDict": OrderedDict}
TYPES: dict[str, Any] = {
    t.__name__: t for t in (bool, int, float, complex, str, bytes, list, tuple, set, dict, frozenset)
}
TYPES["NoneType"] = type(None)
CHANGES = (list, dict, set, bytearray, deque)
"""What a call may change in place."""
BINARY = ["eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "truediv", "floordiv", "mod", "matmul"]
BINARY += ["and_", "or_", "xor"]
"""Names in ``operator`` of what two of the program's objects may be asked for."""


def encode(value: Any, hold: Callable[[Any], list[Any]]) -> Any:
    """A value as JSON data; ``hold`` gives what stands for one that is not plain.

    Values of a subclass of a number, a text or a tuple, such as members of an ``IntEnum`` and named tuples, travel as
    both: plain data, and what stands for their other attributes. Other containers of a class of the program's own, with
    methods that change them, are not plain.

    >>> encode({"a": (1, {2.5})}, hold=list)
    ['dict', [['a', ['tuple', [1, ['set', [2.5]]]]]]]
    """
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    for plain in (int, float, str, tuple):
        if isinstance(value, plain) and kind is not tuple:
            own = hold(value) if kind.__module__ != "numpy" else []
            same = encode(_plain(plain, value), hold)
            return ["both", [same, own]] if own else same
    if kind in (dict, *MAPPINGS.values()):
        return [kind.__name__, [[encode(key, hold), encode(item, hold)] for key, item in value.items()]]
    if kind is defaultdict:
        makes = next((name for name, made in TYPES.items() if made is value.default_factory), None)
        return ["defaultdict", [makes, encode(dict(value), hold)[1]]]
    if CONTAINERS.get(kind.__name__) is kind:
        return [kind.__name__, [encode(item, hold) for item in value]]
    if kind in (bytes, bytearray):
        return [kind.__name__, value.decode("latin-1")]
    if kind is complex:
        return ["complex", [value.real, value.imag]]
    if kind in (range, slice):
        return [kind.__name__, [encode(part, hold) for part in (value.start, value.stop, value.step)]]
    return _encode_other(value, kind, hold)


def _plain(kind: Any, value: Any) -> Any:
    """Without asking the value's own class, which may lie."""
    if kind is tuple:
        return tuple(tuple.__iter__(value))
    return str.__str__(value) if kind is str else int.__int__(value) if kind is int else float.__float__(value)


def _encode_other(value: Any, kind: type, hold: Callable[[Any], list[Any]]) -> Any:
    if VALUES.get(kind.__name__) == kind.__module__:
        return [kind.__name__, str(value)]
    if kind.__module__ == "datetime" and kind.__name__ in TIMES:
        parts = [value.days, value.seconds, value.microseconds] if kind.__name__ == "timedelta" else value.isoformat()
        return [kind.__name__, parts]
    name = getattr(value, "__name__", "") if kind is type else ""
    if name and TYPES.get(name) is value:
        return ["type", name]
    if kind.__module__ == "numpy":  # arrays, and scalars that are not Python's own
        return ["array", [str(value.dtype), encode(value.tolist(), hold)]]
    return hold(value)


def decode(data: Any, find: Callable[[list[Any]], Any]) -> Any:
    """The value of JSON data; ``find`` gives what a stand-in stands for.

    >>> decode(["tuple", [1, ["deque", [2]]]], find=list)
    (1, deque([2]))
    """
    if not isinstance(data, list):
        return data
    name, body = data
    if name == "dict" or name in MAPPINGS:
        items = {decode(key, find): decode(item, find) for key, item in body}
        return MAPPINGS[name](items) if name in MAPPINGS else items
    if name == "defaultdict":
        return defaultdict(TYPES.get(body[0]), {decode(key, find): decode(item, find) for key, item in body[1]})
    if name in CONTAINERS:
        return CONTAINERS[name](decode(item, find) for item in body)
    if name in ("bytes", "bytearray"):
        return (bytes if name == "bytes" else bytearray)(body, "latin-1")
    if name == "complex":
        return complex(*body)
    if name in ("range", "slice"):
        return (range if name == "range" else slice)(*(decode(part, find) for part in body))
    if name == "both":
        return _both(decode(body[0], find), find(body[1]))
    return _decode_other(name, body, find, data)


def _decode_other(name: str, body: Any, find: Callable[[list[Any]], Any], data: list[Any]) -> Any:
    if name in VALUES:
        return getattr(__import__(VALUES[name]), name)(str(body))
    if name in TIMES:
        kind = getattr(__import__("datetime"), name)
        return getattr(kind, TIMES[name])(body) if TIMES[name] else kind(*body)
    if name == "type":
        return TYPES[body]
    if name == "array":
        numpy: Any = __import__("numpy")
        return numpy.array(decode(body[1], find), dtype=body[0])[()]
    return find(data)


class Far:
    """What stands for something in the other process."""


class Both:
    """A number, text or tuple that is plain data here, where it is compared, and has attributes there."""

    remote: Any

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.remote, name)

    def __str__(self) -> str:
        return str(self.remote)

    def __repr__(self) -> str:
        return repr(self.remote)


BOTH: dict[str, Any] = {kind.__name__: type("Both", (Both, kind), {}) for kind in (int, float, str, tuple)}


def _both(plain: Any, other: Any) -> Any:
    if not isinstance(other, Far):  # it is back where it came from
        return other
    value = BOTH[type(plain).__name__](plain)
    value.remote = other
    return value


class Wire:
    """The two ends of two pipes."""

    def __init__(self, reads: int, writes: int) -> None:
        sys.set_int_max_str_digits(0)
        self._reads = os.fdopen(reads, "rb")
        self._writes = writes

    def send(self, message: Any) -> None:
        """Send a message: anything that JSON can say."""
        data = memoryview(json.dumps(message).encode() + b"\n")
        while data:
            data = data[os.write(self._writes, data) :]

    def receive(self) -> Any:
        """The next message.

        Raises:
            EOFError: the other side is gone.
        """
        line = self._reads.readline(MAX_LINE)
        if not line.endswith(b"\n"):
            raise EOFError("the program is gone, or sent more than a line may hold")
        return json.loads(line)


def too_long(*_: Any) -> None:
    """What an alarm does, on either side."""
    raise TimeoutError("the test's time is over")
