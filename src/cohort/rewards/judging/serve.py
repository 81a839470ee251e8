"""Run a program once, then call its functions and use its objects as the tests ask.

The tests send names, arguments and seconds, never what they expect. Whatever the program does to this process, only
plain data leaves it, and the tests judge that data: a forged answer is worth no more than a wrong ``return``.
"""

from __future__ import annotations

import json
import operator
import signal
import sys
from collections import deque
from types import ModuleType

from . import wire  # relative, because the package has another name inside the sandbox

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def _plain(thing: Any) -> Any:
    """The content of an object that extends a container, as that container; None for other objects."""
    if isinstance(thing, dict):
        return dict(dict.items(thing))
    kinds: tuple[Any, ...] = (list, set, frozenset, deque)
    return next((kind(kind.__iter__(thing)) for kind in kinds if isinstance(thing, kind)), None)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, *arguments, **keywords: function(*arguments, **keywords),
    "enter": lambda thing: type(thing).__enter__(thing),
    "exit": lambda thing: type(thing).__exit__(thing, None, None, None),
    "plain": _plain,
    **{f.__name__: f for f in (isinstance, issubclass, getattr, setattr, delattr, len, iter, next)},
    **{f.__name__: f for f in (bool, str, repr, hash, abs, int, float)},
    **{name: getattr(operator, name) for name in [*wire.BINARY, "neg", "getitem", "setitem", "delitem"]},
}


class Objects:
    """Objects that are not plain data. The tests know them by number."""

    def __init__(self) -> None:
        self._kept: list[Any] = []
        self._numbers: dict[int, int] = {}

    def refer(self, value: Any) -> list[Any]:
        """Keep an object, and return the JSON data that stands for it: always the same."""
        number = self._numbers.setdefault(id(value), len(self._kept))
        if number == len(self._kept):
            self._kept.append(value)
        return ["object", number]

    def find(self, data: list[Any], _plain: Any = None) -> Any:
        """The object that JSON data stands for."""
        return self._kept[data[1]]


def main(source: bytes, reads: int, writes: int) -> None:
    """Run the program, then answer requests until the tests are gone."""
    link, objects = wire.Wire(reads, writes), Objects()
    module = ModuleType("solution")
    sys.modules["solution"] = module
    signal.signal(signal.SIGALRM, wire.raise_timeout)
    exec(compile(source, "program.py", "exec", dont_inherit=True), module.__dict__)
    while True:
        try:
            request = link.receive()
        except EOFError:
            return
        try:
            answer = _answer(request, objects, module)
        except BaseException as error:  # SystemExit included
            answer = _error(error, objects)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        link.send(answer)


def _answer(request: dict[str, Any], objects: Objects, module: ModuleType) -> dict[str, Any]:
    operation = request["operation"]
    if operation == "name":
        if not hasattr(module, request["name"]):
            return {"missing": True}
        value = getattr(module, request["name"])
        if _is_exception(value):
            return {"exception": _class_names(value)}
        # types are objects like the program's functions, even built-in types
        return {"value": objects.refer(value) if isinstance(value, type) else wire.encode(value, objects.refer)}
    arguments, keywords = (wire.decode(request[key], objects.find) for key in ("arguments", "keywords"))
    signal.setitimer(signal.ITIMER_REAL, max(request["seconds"], 0.001))
    value = OPERATIONS[operation](*arguments, **keywords)
    if operation == "getattr" and _is_exception(value):  # ``except Stack.Empty``
        return {"exception": _class_names(value)}
    answer = {"value": wire.encode(value, objects.refer)}
    signal.setitimer(signal.ITIMER_REAL, 0)
    passed = [*arguments, *keywords.values()]
    if operation == "call" and any(isinstance(argument, wire.MUTABLE) for argument in passed):
        after = wire.encode(passed, objects.refer)
        before = [*request["arguments"][1], *(item for _, item in request["keywords"][1])]
        answer["changed"] = None if json.dumps(before) == json.dumps(after[1]) else after
    return answer


def _is_exception(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Exception)


def _error(error: BaseException, objects: Objects) -> dict[str, Any]:
    """An exception as JSON data, from which the tests' side makes one of its own."""
    empty: dict[str, Any] = {"arguments": ["list", []], "attributes": ["dict", []]}
    answer = {"error": _class_names(type(error)), "text": "", **empty}
    try:
        answer["text"] = str(error)[:1000]
        answer["arguments"] = wire.encode([a[:1000] if type(a) is str else a for a in error.args], objects.refer)
        answer["attributes"] = wire.encode(dict(vars(error)), objects.refer)
        json.dumps(answer)
    except Exception:  # nested too deeply, for example
        answer |= empty
    return answer


def _class_names(kind: type) -> list[list[str]]:
    return [[str(base.__module__), base.__name__] for base in kind.__mro__]
