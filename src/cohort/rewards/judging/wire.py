"""The protocol between tests and program, which run in two sandboxes: one JSON document per line, holding plain data.

Received data cannot carry code. Numbers, strings and containers are rebuilt as exactly the built-in types, so that no
``__eq__`` of the program runs where results are compared. Other objects stay in their process and travel as a number.
"""

from __future__ import annotations

import json
import os
import sys
from collections import deque

TYPE_CHECKING = False  # importing ``typing`` takes longer than most programs run
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MAX_LINE = 64 * 1024 * 1024
TYPES: dict[str, Any] = {
    t.__name__: t for t in (bool, int, float, complex, str, bytes, list, tuple, set, dict, frozenset, type(None))
}
PLAIN: dict[type, Callable[..., Any]] = {int: int.__int__, float: float.__float__, str: str.__str__}
PLAIN[tuple] = lambda value: tuple(tuple.__iter__(value))
"""Conversions to a built-in type that call no method of the value's class."""
MUTABLE = (list, dict, set, bytearray, deque)
"""Types that a call may change in place."""
BINARY = ["eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "truediv", "floordiv", "mod", "matmul"]
BINARY += ["and_", "or_", "xor"]
"""Operations on two objects of the program, by their names in ``operator``."""


CODECS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}
"""Name of a type to two functions: value to JSON data, and type and JSON data to value. ``code`` codes the items."""


def _add(names: str, encode: Callable[..., Any], decode: Callable[..., Any]) -> None:
    CODECS.update(dict.fromkeys(names.split(), (encode, decode)))


def _pairs(value: Any, code: Callable[[Any], Any]) -> Any:
    return [[code(key), code(item)] for key, item in value.items()]


def _dict(body: Any, code: Callable[[Any], Any]) -> dict[Any, Any]:
    return {code(key): code(item) for key, item in body}


def _factory(value: Any) -> str | None:
    return next((name for name, made in TYPES.items() if made is value.default_factory), None)


_LISTS = "list tuple set frozenset collections.deque"
_add(_LISTS, lambda v, code: [code(item) for item in v], lambda t, body, code: t(code(item) for item in body))
_add("dict collections.Counter collections.OrderedDict", _pairs, lambda t, body, code: t(_dict(body, code)))
_add(
    "collections.defaultdict",
    lambda v, code: [_factory(v), _pairs(v, code)],
    lambda t, body, code: t(TYPES.get(body[0]), _dict(body[1], code)),
)
_add("bytes bytearray", lambda v, _: v.decode("latin-1"), lambda t, body, _: t(body, "latin-1"))
_add("complex", lambda v, _: [v.real, v.imag], lambda t, body, _: t(*body))
_add("range slice", lambda v, code: [*map(code, (v.start, v.stop, v.step))], lambda t, b, code: t(*map(code, b)))
_add("decimal.Decimal fractions.Fraction", lambda v, _: str(v), lambda t, body, _: t(str(body)))
_DATES = "datetime.date datetime.datetime datetime.time"
_add(_DATES, lambda v, _: v.isoformat(), lambda t, body, _: t.fromisoformat(body))
_add("datetime.timedelta", lambda v, _: [v.days, v.seconds, v.microseconds], lambda t, body, _: t(*body))


def encode(value: Any, refer: Callable[[Any], list[Any]]) -> Any:
    """Encode a value as JSON data.

    Values of a subclass of a number, string or tuple, such as members of an ``IntEnum`` and named tuples, are encoded
    twice: as plain data, and as an object for their other attributes. Containers of a subclass with methods that change
    them are objects.

    Args:
        value: any value.
        refer: returns the JSON data that stands for an object that is not plain data.

    >>> encode({"a": (1, {2.5})}, refer=list)
    ['dict', [['a', ['tuple', [1, ['set', [2.5]]]]]]]
    """
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    for plain, convert in PLAIN.items():
        if isinstance(value, plain) and kind is not tuple:
            reference = refer(value) if kind.__module__ != "numpy" else []
            data = encode(convert(value), refer)
            return ["both", [data, reference]] if reference else data
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    if name in CODECS and _type(name) is kind:
        return [name, CODECS[name][0](value, lambda item: encode(item, refer))]
    type_name = getattr(value, "__name__", "") if kind is type else ""
    if type_name and TYPES.get(type_name) is value:
        return ["type", type_name]
    if kind.__module__ == "numpy":  # arrays, and scalars that are not also Python numbers
        return ["array", [str(value.dtype), encode(value.tolist(), refer)]]
    return refer(value)


def _type(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(__import__(module or "builtins"), attribute)


def decode(data: Any, find: Callable[..., Any]) -> Any:
    """Decode JSON data. ``find`` returns the object for what ``refer`` returned; it also gets the plain data, if any.

    >>> decode(["tuple", [1, ["collections.deque", [2]]]], find=list)
    (1, deque([2]))
    """
    if not isinstance(data, list):
        return data
    name, body = data
    if name in CODECS:
        return CODECS[name][1](_type(name), body, lambda item: decode(item, find))
    if name == "both":
        return find(body[1], decode(body[0], find))
    if name == "type":
        return TYPES[body]
    if name == "array":
        numpy: Any = __import__("numpy")
        return numpy.array(decode(body[1], find), dtype=body[0])[()]
    return find(data)


def restore(ours: Any, theirs: Any) -> None:
    """Change a container of the tests as the program has changed its copy. Nested containers keep their identity."""
    if type(ours) is not type(theirs):
        return
    if isinstance(ours, list) and len(ours) == len(theirs):
        for index, (old, new) in enumerate(zip(ours, theirs, strict=True)):
            if isinstance(old, (list, dict, set)) and type(old) is type(new):
                restore(old, new)
            else:
                ours[index] = new
    elif isinstance(ours, MUTABLE):
        ours.clear()
        (ours.update if isinstance(ours, (dict, set)) else ours.extend)(theirs)


class Wire:
    """A connection to the other process over two pipes."""

    def __init__(self, reads: int, writes: int) -> None:
        sys.set_int_max_str_digits(0)
        self._reads = os.fdopen(reads, "rb")
        self._writes = writes

    def send(self, message: Any) -> None:
        """Send JSON data."""
        data = memoryview(json.dumps(message).encode() + b"\n")
        while data:
            data = data[os.write(self._writes, data) :]

    def receive(self) -> Any:
        """Receive the next message.

        Raises:
            EOFError: the other process is gone.
        """
        line = self._reads.readline(MAX_LINE)
        if not line.endswith(b"\n"):
            raise EOFError("the program is gone, or sent more than a line may hold")
        return json.loads(line)


def raise_timeout(*_: Any) -> None:
    """The handler of SIGALRM in both processes."""
    raise TimeoutError("the test's time is over")
