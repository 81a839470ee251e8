"""The program's side: run it once, then do with its functions and objects what the tests ask for.

The tests send names, arguments and seconds, never what they expect. Whatever the program does to this process, what
leaves it is plain data for the other side to judge: a forged answer is worth what a wrong ``return`` is.
"""

from __future__ import annotations

import json
import operator
import signal
import sys
from collections import deque
from types import ModuleType

from . import wire  # this folder is a package of another name where it runs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def _plain(thing: Any) -> Any:
    """What an object of the program's own holds as the container that it extends; None: it extends none."""
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
    """Those that are not plain data: the other side knows them by number."""

    def __init__(self) -> None:
        self._kept: list[Any] = []
        self._numbers: dict[int, int] = {}

    def hold(self, value: Any) -> list[Any]:
        """Keep one; what stands for it, always the same."""
        number = self._numbers.setdefault(id(value), len(self._kept))
        if number == len(self._kept):
            self._kept.append(value)
        return ["object", number]

    def find(self, data: list[Any]) -> Any:
        """The one that this stands for."""
        return self._kept[data[1]]


def main(source: bytes, reads: int, writes: int) -> None:
    """Run a program, and serve it until the tests are done."""
    link, objects = wire.Wire(reads, writes), Objects()
    module = ModuleType("solution")
    sys.modules["solution"] = module
    signal.signal(signal.SIGALRM, wire.too_long)
    exec(compile(source, "program.py", "exec", dont_inherit=True), module.__dict__)
    while True:
        try:
            request = link.receive()
        except EOFError:
            return
        try:
            answer = _answer(request, objects, module)
        except BaseException as error:  # SystemExit is no way out either
            answer = _error(error, objects)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        link.send(answer)


def _answer(request: dict[str, Any], objects: Objects, module: ModuleType) -> dict[str, Any]:
    operation, arguments = request["operation"], wire.decode(request["arguments"], objects.find)
    if operation == "name":
        if not hasattr(module, arguments[0]):
            return {"missing": True}
        value = getattr(module, arguments[0])
        if isinstance(value, type) and issubclass(value, Exception):
            return {"exception": _names(value)}
        # a type is asked for things as the program's other functions are, built-in or not
        return {"value": objects.hold(value) if isinstance(value, type) else wire.encode(value, objects.hold)}
    keywords = wire.decode(request["keywords"], objects.find)
    signal.setitimer(signal.ITIMER_REAL, max(request["seconds"], 0.001))
    value = OPERATIONS[operation](*arguments, **keywords)
    answer = {"value": wire.encode(value, objects.hold)}
    signal.setitimer(signal.ITIMER_REAL, 0)
    handed = [*arguments, *keywords.values()]
    if operation == "call" and any(isinstance(argument, wire.CHANGES) for argument in handed):
        after = wire.encode(handed, objects.hold)
        before = [*request["arguments"][1], *(item for _, item in request["keywords"][1])]
        answer["changed"] = None if json.dumps(before) == json.dumps(after[1]) else after
    return answer


def _error(error: BaseException, objects: Objects) -> dict[str, Any]:
    """What the other side makes an exception of."""
    answer = {"error": _names(type(error)), "text": "", "arguments": ["list", []], "attributes": ["dict", []]}
    try:
        answer["text"] = str(error)[:1000]
        answer["arguments"] = wire.encode([a[:1000] if type(a) is str else a for a in error.args], objects.hold)
        answer["attributes"] = wire.encode(dict(vars(error)), objects.hold)
        json.dumps(answer)
    except Exception:  # as deep as it likes
        answer |= {"arguments": ["list", []], "attributes": ["dict", []]}
    return answer


def _names(kind: type) -> list[list[str]]:
    return [[str(base.__module__), base.__name__] for base in kind.__mro__]
