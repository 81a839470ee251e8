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
from types import ModuleType

from . import plan, wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


class Remote:
    """Something in the program's process."""

    def __init__(self, link: Link, number: int) -> None:
        object.__setattr__(self, "_link", link)
        object.__setattr__(self, "_number", number)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # by such names libraries ask for memory addresses, as numpy does
            raise AttributeError(name)
        return self._link.ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._link.ask("setattr", self, name, value)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:  # noqa: D102
        return self._link.ask("call", self, *arguments, **keywords)

    def __instancecheck__(self, thing: Any) -> bool:
        return isinstance(thing, Remote) and self._link.ask("isinstance", thing, self) is True

    def __exit__(self, *_: Any) -> None:
        self._link.ask("exit", self)

    def __str__(self) -> str:
        return str(self._link.ask("str", self))

    __repr__ = __str__

    def __bool__(self) -> bool:
        return self._link.ask("bool", self) is True


def _forward(operation: str, *, only_remote: bool) -> Callable[..., Any]:
    def forward(self: Remote, *arguments: Any) -> Any:
        if only_remote and not all(isinstance(argument, Remote) for argument in arguments):
            return NotImplemented
        return self._link.ask(operation, self, *arguments)

    return forward


for _name in ["len", "getitem", "setitem", "delitem", "iter", "next", "enter", "hash", "neg", "abs"]:
    setattr(Remote, f"__{_name}__", _forward(_name, only_remote=False))
for _name in wire.BINARY:
    setattr(Remote, f"__{_name.strip('_')}__", _forward(_name, only_remote=True))


class Link:
    """Questions to the program."""

    def __init__(self, connection: wire.Wire) -> None:
        self.connection = connection
        self.broken = False
        self.unusable: str | None = None
        """Why the tests cannot be run, whatever the program is."""
        self.exceptions: dict[str, type[Exception]] = {}

    def ask(self, operation: str, *arguments: Any, **keywords: Any) -> Any:
        """What the program's process gives for an operation.

        Raises:
            Exception: what the program raised, or ConnectionError: it is gone.
        """
        answer = self.exchange(
            {
                "operation": operation,
                "arguments": wire.encode(list(arguments), self._number),
                "keywords": wire.encode(keywords, self._number),
                "seconds": signal.getitimer(signal.ITIMER_REAL)[0] * 0.9,
            }
        )
        if "error" in answer:
            kind = self._exception(answer["error"])
            if issubclass(kind, StopIteration) and operation != "next":
                kind = RuntimeError  # else it would end a ``map`` of the tests' early, and ``all`` of nothing is true
            raise kind(*answer["arguments"])
        if answer.get("arguments") is not None:
            for ours, theirs in zip(arguments, wire.decode(answer["arguments"], self.find), strict=True):
                _restore(ours, theirs)
        return wire.decode(answer["value"], self.find)

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
            return True, self._exception(answer["exception"], keep=True)
        return True, wire.decode(answer["value"], self.find)

    def find(self, data: list[Any]) -> Remote:
        """What stands here for an object there."""
        return Remote(self, int(data[1]))

    def _number(self, value: Any) -> list[Any]:
        if isinstance(value, Remote):
            return ["object", value._number]
        self.unusable = f"they hand over a {type(value).__name__}: only plain data can go to the program"
        raise TypeError(self.unusable)

    def _exception(self, names: list[str], *, keep: bool = False) -> type[Exception]:
        """The exception class here for one there: the program's own by name, else the nearest built-in one."""
        for name in names:
            if name in self.exceptions:
                return self.exceptions[name]
            found = getattr(builtins, name, None)
            if isinstance(found, type) and issubclass(found, Exception):
                if not keep:
                    return found
                return self.exceptions.setdefault(names[0], type(names[0], (found,), {}))
        return Exception


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
    broken = _run(lambda names: _look_up(plan.free_names(steps), names, link), names, task["seconds"])
    for step in steps:
        error = broken or _run(step.run, names, task["seconds"])
        if link.unusable is not None:
            say({"unusable": link.unusable})
            return
        if step.counts:
            say({"passed": error is None, "error": error})
            if task["stop"] and error is not None:
                return
        else:
            broken = error


def _run(run: Callable[[dict[str, Any]], None], names: dict[str, Any], seconds: float) -> str | None:
    """Run a step; what went wrong, if anything did."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        run(names)
    except BaseException as error:  # also SystemExit: tests do not end this process
        return f"{type(error).__name__}: {error}"[:300]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return None


def _look_up(wanted: list[tuple[str, bool]], names: dict[str, Any], link: Link) -> None:
    for name, is_module in wanted:
        if is_module:  # the tests' ``math`` is the real one, whatever the program calls so
            names[name] = __import__(name)
        else:
            found, value = link.look_up(name)
            if found:
                names[name] = value
