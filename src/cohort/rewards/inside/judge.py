"""The tests' side: run a row's tests against a program that is in another sandbox.

The names that the tests use and do not define stand for the program's functions and classes: calls go over the wire,
plain data comes back, and every comparison is made here. An object that is no plain data is a ``Remote``: its
attributes, methods and items can be asked for, and it can be compared with other such objects, but never with plain
data: what a program's ``__eq__`` says of an expected value it has never seen is worth nothing.

One JSON line a message on the standard output: first how many tests there are, before the program is asked anything;
then whether each has passed. What the tests print goes to the standard error.
"""

from __future__ import annotations

import builtins
import json
import os
import signal
import sys
from collections import deque
from types import ModuleType

from . import plan, wire
from .names import free_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any


class Remote(wire.Far):
    """Something in the program's process.

    Args:
        link: to that process.
        number: which of its objects.
        known: how sure it is that the tests, not the program, have chosen to ask this thing: 3 for what has a name with
            a capital in the tests, 2 for other names and objects made by calling the former, 1 for their attributes, 0
            for all that the program has come up with.
    """

    def __init__(self, link: Link, number: int, known: int = 0) -> None:
        vars(self).update(_link=link, _number=number, _known=known)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__name__":  # by such names libraries ask for memory addresses, as numpy
            raise AttributeError(name)
        return self._result("getattr", name, known=1 if self._known > 1 else 0)

    def __setattr__(self, name: str, value: Any) -> None:
        self._link.ask("setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        self._link.ask("delattr", self, name)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:  # noqa: D102
        return self._result("call", *arguments, known=2 if self._known > 2 else 0, **keywords)

    def _result(self, operation: str, *arguments: Any, known: int, **keywords: Any) -> Any:
        value = self._link.ask(operation, self, *arguments, **keywords)
        if isinstance(value, Remote):
            vars(value)["_known"] = max(known, value._known)
        return value

    def __instancecheck__(self, thing: Any) -> bool:
        thing = thing.remote if isinstance(thing, wire.Both) else thing
        return isinstance(thing, Remote) and self._link.ask("isinstance", thing, self) is True

    def __subclasscheck__(self, thing: Any) -> bool:
        return isinstance(thing, Remote) and self._link.ask("issubclass", thing, self) is True

    def __exit__(self, *_: Any) -> None:
        self._link.ask("exit", self)

    def __str__(self) -> str:
        return str(self._link.ask("str", self))

    def __repr__(self) -> str:
        return str(self._link.ask("repr", self))

    def __bool__(self) -> bool:
        return self._link.ask("bool", self) is True

    def __hash__(self) -> int:
        return int(self._link.ask("hash", self))

    def __eq__(self, other: object) -> Any:
        """Of plain data with what this extends, a list perhaps, the comparison is made here."""
        if isinstance(other, Remote):
            return self._link.ask("eq", self, other)
        if not isinstance(other, (list, dict, set, frozenset)):
            return NotImplemented
        plain = self._link.ask("plain", self)
        return NotImplemented if plain is None else plain == other

    def __ne__(self, other: object) -> Any:
        if isinstance(other, Remote):
            return self._link.ask("ne", self, other)
        same = self == other
        return same if same is NotImplemented else not same


def _forward(operation: str, *, only_remote: bool) -> Callable[..., Any]:
    def forward(self: Remote, *arguments: Any) -> Any:
        if only_remote and not all(isinstance(argument, Remote) for argument in arguments):
            return NotImplemented
        return self._link.ask(operation, self, *arguments)

    return forward


for _name in ["len", "getitem", "setitem", "delitem", "iter", "next", "enter", "neg", "abs", "int", "float"]:
    setattr(Remote, f"__{_name}__", _forward(_name, only_remote=False))
for _name in wire.BINARY[2:]:
    setattr(Remote, f"__{_name.strip('_')}__", _forward(_name, only_remote=True))


class Link:
    """Questions to the program."""

    def __init__(self, connection: wire.Wire) -> None:
        self.connection = connection
        self.broken = False
        self.unusable: str | None = None
        """Why the tests cannot be run, whatever the program is."""
        self.raised: BaseException | None = None
        """The last exception that was the program's."""
        self._blame = False
        self._remotes: dict[int, Remote] = {}
        self._exceptions: dict[str, type[Exception]] = {}

    def ask(self, operation: str, *arguments: Any, **keywords: Any) -> Any:
        """What the program's process gives for an operation.

        Raises:
            Exception: what the program raised, or ConnectionError: it is gone.
        """
        self._blame = isinstance(arguments[0], Remote) and arguments[0]._known > 0
        answer = self.exchange(
            {
                "operation": operation,
                "arguments": wire.encode(list(arguments), self._hold),
                "keywords": wire.encode(keywords, self._hold),
                "seconds": signal.getitimer(signal.ITIMER_REAL)[0] * 0.9,
            }
        )
        if "error" in answer:
            self.raised = self._error(answer, operation)
            raise self.raised
        if answer.get("changed") is not None:
            for ours, theirs in zip([*arguments, *keywords.values()], self._decode(answer["changed"]), strict=True):
                _restore(ours, theirs)
        return self._decode(answer["value"])

    def _decode(self, data: Any) -> Any:
        try:
            return wire.decode(data, self.find)
        except TimeoutError:
            raise
        except Exception as error:  # forged; or an array, and there is no numpy
            raise ConnectionError(f"the program's answer cannot be read: {error}") from None

    def _error(self, answer: dict[str, Any], operation: str) -> Exception:
        """What the program has raised, as an exception of this process."""
        kind = self._exception(answer["error"])
        if issubclass(kind, StopIteration) and operation != "next":
            kind = RuntimeError  # else it would end a loop of the tests' early, and ``all`` of nothing is true
        arguments = self._decode(answer["arguments"])
        try:
            error = kind(*arguments)
        except Exception:  # it takes others
            error = kind.__new__(kind)
            error.args = tuple(arguments) or (answer["text"],)
        for name, value in self._decode(answer["attributes"]).items():
            if isinstance(name, str) and not name.startswith("__"):
                setattr(error, name, value)
        vars(error)["_text"] = answer["text"]
        return error

    def exchange(self, request: dict[str, Any]) -> dict[str, Any]:
        """A message there and one back."""
        if self.broken:
            raise ConnectionError("the program is gone, or has not answered in time")
        self.broken = True  # until it has answered: an alarm may end the wait
        try:
            self.connection.send(request)
            answer = self.connection.receive()
        except (EOFError, OSError, ValueError) as error:
            if isinstance(error, TimeoutError):
                raise
            raise ConnectionError(f"the program is gone: {error}") from None
        self.broken = False
        if not isinstance(answer, dict):
            raise ValueError("the program's answer is none")
        return answer

    def look_up(self, name: str) -> tuple[bool, Any]:
        """Whether the program has such a name, and what it stands for."""
        answer = self.exchange({"operation": "name", "arguments": ["list", [name]]})
        if "error" in answer or answer.get("missing"):
            return False, None
        if "exception" in answer:
            return True, self._exception(answer["exception"])
        value = self._decode(answer["value"])
        if isinstance(value, Remote):
            vars(value)["_known"] = 3 if name[:1].isupper() else 2
        return True, value

    def find(self, data: list[Any]) -> Remote:
        """What stands here for an object there: always the same."""
        kind, number = data
        if kind != "object":
            raise ValueError(f"unknown kind of data {kind!r}")
        return self._remotes.setdefault(number, Remote(self, int(number)))

    def _hold(self, value: Any) -> list[Any]:
        if isinstance(value, wire.Both):
            value = value.remote
        if isinstance(value, Remote):
            return ["object", value._number]
        if isinstance(value, (int, float, str, tuple)):
            return []  # the tests' own: plain data alone
        kind = value if isinstance(value, type) else type(value)
        why = f"they hand over a {type(value).__name__}: only plain data can go to the program"
        # where the program has led the tests to do so, it is its fault
        if self._blame and not issubclass(kind, BaseException):
            self.unusable = why
        raise TypeError(why)

    def _exception(self, names: list[list[str]]) -> type[Exception]:
        """The exception class here for one there: the standard library's, or one made here on top of such."""
        made: list[str] = []
        found: type[Exception] = Exception
        for module, name in names:
            known = _standard(module, name)
            if known is not None:
                found = known
                break
            made.append(name)
        for name in reversed(made):
            if name not in self._exceptions:
                self._exceptions[name] = type(name, (found,), {"__str__": _text_of(found)})
            found = self._exceptions[name]
        return found


def _standard(module: str, name: str) -> type[Exception] | None:
    """One of the built-in exceptions, or of a module that the tests have imported; but none that skips a test."""
    top = module.partition(".")[0]
    if module == "builtins" or (top in sys.stdlib_module_names and top != "unittest"):
        found = getattr(sys.modules.get(module), name, None)
        if isinstance(found, type) and issubclass(found, Exception):
            return found
    return None


def _text_of(base: type[Exception]) -> Callable[[Exception], str]:
    return lambda error: vars(error).get("_text") or base.__str__(error)


def _loops(names: dict[str, Any]) -> None:
    """In the tests, a StopIteration of a function that is mapped does not end the loop: ``all`` of nothing is true."""

    def mapped(function: Any, *iterables: Any) -> Iterator[Any]:
        return (function(*items) for items in zip(*iterables, strict=False))

    def filtered(function: Any, iterable: Any) -> Iterator[Any]:
        return (item for item in iterable if (item if function is None else function(item)))

    names["__builtins__"] = vars(builtins) | {"map": mapped, "filter": filtered}


def _restore(ours: Any, theirs: Any) -> None:
    """Make a container of the tests' what the program has made of its copy."""
    if type(ours) is not type(theirs):
        return
    if isinstance(ours, list) and len(ours) == len(theirs):
        for index, (old, new) in enumerate(zip(ours, theirs, strict=True)):
            if isinstance(old, (list, dict, set)) and type(old) is type(new):
                _restore(old, new)
            else:
                ours[index] = new
    elif isinstance(ours, (list, bytearray)):
        ours[:] = theirs
    elif isinstance(ours, deque):
        ours.clear()
        ours.extend(theirs)
    elif isinstance(ours, (dict, set)):
        ours.clear()
        ours.update(theirs)


class _Solution(ModuleType):
    """What ``from solution import name`` finds."""

    def __init__(self, link: Link) -> None:
        super().__init__("solution")
        self._link = link

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found, value = self._link.look_up(name)
        if not found:
            raise AttributeError(f"the program has no {name}")
        return value


def main(source: bytes, reads: int, writes: int) -> None:
    """Run the tests of a task, which is JSON."""
    results = os.dup(1)
    os.dup2(2, 1)

    def say(message: dict[str, Any]) -> None:
        os.write(results, json.dumps(message).encode() + b"\n")

    task = json.loads(source)
    steps = plan.plan(task)
    say({"tests": sum(step.counts for step in steps)})
    link = Link(wire.Wire(reads, writes))
    signal.signal(signal.SIGALRM, wire.too_long)
    sys.modules["solution"] = _Solution(link)
    sys.modules["tests"] = module = ModuleType("tests")
    names = module.__dict__
    _loops(names)
    broken = _run(lambda names: _look_up(free_names(task), names, link), names, task["seconds"], link)
    for step in steps:
        error = broken or _run(step.run, names, task["seconds"], link)
        if link.unusable is not None:
            say({"unusable": link.unusable})
            return
        if step.counts:
            say({"passed": error is None, "error": error})
            if task["stop"] and error is not None:
                return
        else:
            broken = error


def _run(run: Callable[[dict[str, Any]], None], names: dict[str, Any], seconds: float, link: Link) -> str | None:
    """Run a step; what went wrong, if anything did."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        run(names)
    except BaseException as error:  # also SystemExit: tests do not end this process
        said = f"{type(error).__name__}: {error}"[:300]
        missing = isinstance(error, ImportError) and (error.name or "").partition(".")[0] != "solution"
        if (missing or isinstance(error, plan.UnclearError)) and error is not link.raised:
            link.unusable = said
        return said
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return None


def _look_up(wanted: list[tuple[str, bool]], names: dict[str, Any], link: Link) -> None:
    program = names["__program__"] = {}
    for name, is_module in wanted:
        if is_module:  # the tests' ``math`` is the real one, whatever the program calls so
            names[name] = __import__(name)
        else:
            found, value = link.look_up(name)
            if found:
                program[name] = names[name] = value
