"""How tests and a program, in two sandboxes, talk: one JSON document a line, in which values are plain data.

Nothing that is received can carry code: numbers, strings and containers are rebuilt as exactly the built-in types, so
that no ``__eq__`` of the program's ever runs where results are compared. What is not plain data stays where it is and
travels as a number.
"""

from __future__ import annotations

import json
import os
import sys
from collections import deque

TYPE_CHECKING = False  # as ``typing`` has it, which takes longer to import than most programs to run
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MAX_LINE = 64 * 1024 * 1024
CONTAINERS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
VALUES = {"Decimal": "decimal", "Fraction": "fractions"}
"""Numbers of the standard library that travel as text, and the modules they are of."""
BINARY = ["eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "truediv", "floordiv", "mod", "matmul"]
BINARY += ["and_", "or_", "xor"]
"""Names in ``operator`` of what two of the program's objects may be asked for."""


def encode(value: Any, hold: Callable[[Any], list[Any]]) -> Any:
    """A value as JSON data; ``hold`` gives what stands for one that is not plain.

    Subclasses travel as the type they extend: a named tuple arrives as a tuple, a Counter as a dict.

    >>> encode({"a": (1, {2.5})}, hold=list)
    ['dict', [['a', ['tuple', [1, ['set', [2.5]]]]]]]
    """
    if value is None or isinstance(value, bool):
        return value
    for plain in (int, float, str):
        if isinstance(value, plain):
            return plain(value) if type(value) is not plain else value
    if isinstance(value, dict):
        return ["dict", [[encode(key, hold), encode(item, hold)] for key, item in value.items()]]
    for name, kind in CONTAINERS.items():
        if isinstance(value, kind):
            return [name, [encode(item, hold) for item in value]]
    if isinstance(value, (bytes, bytearray)):
        return [type(value).__name__, value.decode("latin-1")]
    if isinstance(value, complex):
        return ["complex", [value.real, value.imag]]
    if isinstance(value, range):
        return ["range", [value.start, value.stop, value.step]]
    kind = type(value)
    if VALUES.get(kind.__name__) == kind.__module__:
        return [kind.__name__, str(value)]
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
    if name == "dict":
        return {decode(key, find): decode(item, find) for key, item in body}
    if name in CONTAINERS:
        return CONTAINERS[name](decode(item, find) for item in body)
    if name in ("bytes", "bytearray"):
        return (bytes if name == "bytes" else bytearray)(body, "latin-1")
    if name == "complex":
        return complex(*body)
    if name == "range":
        return range(*body)
    if name in VALUES:
        return getattr(__import__(VALUES[name]), name)(str(body))
    if name == "array":
        numpy: Any = __import__("numpy")
        return numpy.array(decode(body[1], find), dtype=body[0])[()]
    return find(data)


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
