"""The program's side: run it once, then do with its functions and objects what the tests ask for.

The tests send names, arguments and seconds, never what they expect. Whatever the program does to this process, what
leaves it is plain data for the other side to judge: a forged answer is worth what a wrong ``return`` is.
"""

from __future__ import annotations

import json
import operator
import signal
import sys
from types import ModuleType

from . import wire  # this folder is a package of another name where it runs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, *arguments, **keywords: function(*arguments, **keywords),
    "enter": lambda thing: type(thing).__enter__(thing),
    "exit": lambda thing: type(thing).__exit__(thing, None, None, None),
    **{f.__name__: f for f in (isinstance, getattr, setattr, len, iter, next, bool, str, repr, hash, abs)},
    **{name: getattr(operator, name) for name in [*wire.BINARY, "neg", "getitem", "setitem", "delitem"]},
}


class Objects:
    """Those that are not plain data: the other side knows them by number."""

    def __init__(self) -> None:
        self._kept: list[Any] = []

    def hold(self, value: Any) -> list[Any]:
        """Keep one; what stands for it."""
        self._kept.append(value)
        return ["object", len(self._kept) - 1]

    def find(self, data: list[Any]) -> Any:
        """The one that this stands for."""
        return self._kept[data[1]]


def main(source: bytes, reads: int, writes: int) -> None:
    """Run a program, and serve it until the tests are done."""
    link, objects = wire.Wire(reads, writes), Objects()
    module = ModuleType("solution")
    sys.modules["solution"] = module
    signal.signal(signal.SIGALRM, wire.too_long)
    exec(compile(source, "program.py", "exec"), module.__dict__)
    while True:
        try:
            request = link.receive()
        except EOFError:
            return
        try:
            answer = _answer(request, objects, module)
        except BaseException as error:  # SystemExit is no way out either
            answer = {"error": _names(type(error)), "arguments": [str(error)[:1000]]}
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
        return {"value": wire.encode(value, objects.hold)}
    keywords = wire.decode(request["keywords"], objects.find)
    signal.setitimer(signal.ITIMER_REAL, max(request["seconds"], 0.001))
    value = OPERATIONS[operation](*arguments, **keywords)
    answer = {"value": wire.encode(value, objects.hold)}
    signal.setitimer(signal.ITIMER_REAL, 0)
    if operation == "call" and any(isinstance(argument, (list, dict, set, bytearray)) for argument in arguments):
        answer["arguments"] = _changed(request["arguments"], arguments, objects)
    return answer


def _changed(before: Any, arguments: Any, objects: Objects) -> Any:
    """The arguments after the call where it changed them, None where it did not."""
    after = wire.encode(arguments, objects.hold)
    return None if json.dumps(before) == json.dumps(after) else after


def _names(kind: type) -> list[str]:
    return [base.__name__ for base in kind.__mro__]
