"""Run the Python tests of a row against a program in another sandbox.

Names that the tests use and do not define stand for the program's functions and classes. Calls go over the wire, plain
data comes back, and every comparison is made here. An object that is not plain data is a ``Remote``. The tests can use
its attributes, methods and items, and compare it with other such objects, but not with plain data: the program's
``__eq__`` must not decide whether a result equals an expected value.

The standard output has one JSON document per line: first the number of tests, before the program is asked anything;
then the error of each test, or null if it passed. What the tests print goes to the standard error.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import json
import os
import signal
import sys
from types import ModuleType

from . import guard, plan, wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any


class Remote:  # noqa: PLW1641 - __hash__ is set below
    """A stand-in for an object in the program's process.

    Args:
        link: the connection to that process.
        number: the number of the object there.

    ``_known`` says how certain it is that the tests, not the program, chose to use this object. 3: a name in the tests
    that starts with a capital letter; 2: another name, or an object made by calling the former; 1: an attribute of one
    of these; 0: anything that the program has returned.
    """

    def __init__(self, link: Link, number: int) -> None:
        vars(self).update(_link=link, _number=number, _known=0)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__name__":  # libraries such as numpy look for memory addresses there
            raise AttributeError(name)
        return self._result("getattr", name, known=1 if self._known > 1 else 0)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:  # noqa: D102
        return self._result("call", *arguments, known=2 if self._known > 2 else 0, **keywords)

    def _result(self, operation: str, *arguments: Any, known: int, **keywords: Any) -> Any:
        value = self._link.ask(operation, self, *arguments, **keywords)
        if isinstance(value, Remote):
            vars(value)["_known"] = max(known, value._known)
        return value

    def __instancecheck__(self, thing: Any) -> bool:
        thing = thing.remote if isinstance(thing, Both) else thing
        return isinstance(thing, Remote) and self._link.ask("isinstance", thing, self) is True

    def __subclasscheck__(self, thing: Any) -> bool:
        return isinstance(thing, Remote) and self._link.ask("issubclass", thing, self) is True

    def __exit__(self, *_: Any) -> None:
        self._link.ask("exit", self)

    def __eq__(self, other: object) -> Any:
        """Compare. If the object extends a container such as a list, its content is compared with plain data here."""
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


def _forward(operation: str, convert: Any = None, *, only_remote: bool = False) -> Callable[..., Any]:
    def forward(self: Remote, *arguments: Any) -> Any:
        if only_remote and not all(isinstance(argument, Remote) for argument in arguments):
            return NotImplemented
        answer = self._link.ask(operation, self, *arguments)
        return convert(answer) if convert else answer

    return forward


for _name in "len getitem setitem delitem setattr delattr iter next enter neg abs int float".split():  # noqa: SIM905
    setattr(Remote, f"__{_name}__", _forward(_name))
for _name, _convert in {"str": str, "repr": str, "hash": int, "bool": lambda answer: answer is True}.items():
    setattr(Remote, f"__{_name}__", _forward(_name, _convert))
for _name in wire.BINARY[2:]:
    setattr(Remote, f"__{_name.strip('_')}__", _forward(_name, only_remote=True))


class Both:
    """A number, string or tuple that is compared here as plain data, and has its other attributes there."""

    remote: Any

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.remote, name)

    def __str__(self) -> str:
        return str(self.remote)

    def __repr__(self) -> str:
        return repr(self.remote)


def is_remote(value: Any) -> bool:
    """Whether a value stands for one in the program."""
    return isinstance(value, (Remote, Both))


_BOTH: dict[type, Any] = {kind: type("Both", (Both, kind), {}) for kind in (int, float, str, tuple)}


_of_program: dict[type[Exception], type[Exception]] = {}


def _raised_by_program(kind: type[Exception]) -> type[Exception]:
    """The class of those exceptions of a standard class that the program raised, and the tests did not.

    It is what a program's ``Err = Exception`` is for the tests: ``except Err`` catches what the program raises, and not
    the AssertionError of the tests.
    """
    if kind not in _of_program:
        bases = [_raised_by_program(base) for base in kind.__bases__ if issubclass(base, Exception)]
        attributes = {"__module__": kind.__module__, "_standard": kind}
        _of_program[kind] = type(kind.__name__, (*bases, kind), attributes)
    return _of_program[kind]


class Link:
    """Requests to the program."""

    def __init__(self, connection: wire.Wire) -> None:
        self.connection = connection
        self.broken = False
        self.unusable: str | None = None
        """Why the tests cannot be run with any program."""
        self.asked = False
        """Whether the tests have asked the program for anything, so that it may have led them elsewhere."""
        self._blame = False
        self._remotes: dict[int, Remote] = {}
        self._exceptions: dict[str, type[Exception]] = {}
        self._named: tuple[type[Exception], ...] = ()  # the exception classes that the tests have by name

    def ask(self, operation: str, *arguments: Any, **keywords: Any) -> Any:
        """The result of an operation in the program's process.

        Raises:
            Exception: the program raised it.
            ConnectionError: the program is gone, or its answer cannot be read.
        """
        self.asked = True
        self._blame = isinstance(arguments[0], Remote) and arguments[0]._known > 0
        answer = self.exchange(
            {
                "operation": operation,
                "arguments": wire.encode(list(arguments), self._refer),
                "keywords": wire.encode(keywords, self._refer),
                "seconds": signal.getitimer(signal.ITIMER_REAL)[0] * 0.9,
            }
        )
        if "error" in answer:
            raise self._error(answer, operation)
        if "exception" in answer:
            return self._name(answer["exception"])
        if answer.get("changed") is not None:
            for ours, theirs in zip([*arguments, *keywords.values()], self._decode(answer["changed"]), strict=True):
                wire.restore(ours, theirs)
        return self._decode(answer["value"])

    def _decode(self, data: Any) -> Any:
        try:
            return wire.decode(data, self.find)
        except TimeoutError:
            raise
        except Exception as error:  # a forged answer, or an array without numpy
            raise ConnectionError(f"the program's answer cannot be read: {error}") from None

    def _error(self, answer: dict[str, Any], operation: str) -> Exception:
        """An exception of the program, as one of this process."""
        kind = self._exception(answer["error"])
        if issubclass(kind, StopIteration) and operation != "next":
            # StopIteration would end a loop of the tests early, and ``all`` of nothing is true
            kind = _raised_by_program(RuntimeError)
        if not issubclass(kind, self._named):
            kind = vars(kind).get("_standard", kind)
        arguments = self._decode(answer["arguments"])
        try:
            error = kind(*arguments)
        except Exception:  # the class expects other arguments
            error = kind.__new__(kind)
            error.args = tuple(arguments) or (answer["text"],)
        for name, value in self._decode(answer["attributes"]).items():
            if isinstance(name, str) and not name.startswith("__"):
                setattr(error, name, value)
        vars(error)["_text"] = answer["text"]
        return error

    def exchange(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a message and receive the answer."""
        if self.broken:
            raise ConnectionError("the program is gone, or has not answered in time")
        self.broken = True  # until the answer has arrived: an alarm may interrupt the wait
        try:
            self.connection.send(request)
            answer = self.connection.receive()
        except (EOFError, OSError, ValueError) as error:
            if isinstance(error, TimeoutError):
                raise
            raise ConnectionError(f"the program is gone: {error}") from None
        self.broken = False
        if not isinstance(answer, dict):
            raise ValueError("the program's answer is not a JSON object")
        return answer

    def look_up(self, name: str) -> Any:
        """The value of a name in the program.

        Raises:
            AttributeError: the program does not define it.
        """
        asked = {"operation": "name", "name": name}
        answer: dict[str, Any] = {"missing": True} if name.startswith("__") else self.exchange(asked)
        if "error" in answer or answer.get("missing"):
            raise AttributeError(f"the program does not define {name}")
        if "exception" in answer:
            return self._name(answer["exception"])
        value = self._decode(answer["value"])
        if isinstance(value, Remote):
            vars(value)["_known"] = 3 if name[:1].isupper() else 2
        return value

    def _name(self, names: list[list[str]]) -> type[Exception]:
        """The class for an exception that the tests have from the program."""
        self._named += (self._exception(names),)
        return self._named[-1]

    def import_name(self, name: str) -> Any:
        """``look_up`` for tests that import the program: they may go on otherwise if it lacks the name."""
        self.asked = True
        return self.look_up(name)

    def find(self, data: list[Any], plain: Any = None) -> Any:
        """The stand-in for an object of the program: always the same. With its plain data, a new ``Both``."""
        kind, number = data
        if kind != "object":
            raise ValueError(f"unknown kind of data {kind!r}")
        remote = self._remotes.setdefault(number, Remote(self, int(number)))
        if plain is None:
            return remote
        both = _BOTH[type(plain)](plain)
        both.remote = remote
        return both

    def _refer(self, value: Any) -> list[Any]:
        if isinstance(value, Both):
            value = value.remote
        if isinstance(value, Remote):
            return ["object", value._number]
        if isinstance(value, (int, float, str, tuple)):
            return []  # plain data of the tests, of a subclass
        kind = value if isinstance(value, type) else type(value)
        why = f"they pass a {type(value).__name__} to the program, which accepts only plain data"
        # the row is at fault, unless the program may have led the tests to do this
        if self._blame and not issubclass(kind, BaseException):
            self.unusable = why
        raise TypeError(why)

    def _exception(self, names: list[list[str]]) -> type[Exception]:
        """The class for an exception of the program, given its base classes: that of a class of the standard library
        (``_raised_by_program``), or a new one derived from it."""
        (module, name), *bases = names or [["builtins", "Exception"]]
        if (known := _standard(module, name)) is not None:
            return _raised_by_program(known)
        if name not in self._exceptions:
            base = self._exception(bases)
            self._exceptions[name] = type(name, (base,), {"__str__": _text_of(base)})
        return self._exceptions[name]


def _standard(module: str, name: str) -> type[Exception] | None:
    """A built-in exception, or one of a standard module that the tests have imported, except those that skip a test."""
    top = module.partition(".")[0]
    if module == "builtins" or (top in sys.stdlib_module_names and top != "unittest"):
        found = getattr(sys.modules.get(module), name, None)
        if isinstance(found, type) and issubclass(found, Exception):
            return found
    return None


def _text_of(base: type[Exception]) -> Callable[[Exception], str]:
    return lambda error: vars(error).get("_text") or base.__str__(error)


def _safe_builtins() -> dict[str, Any]:
    """Built-ins in which a StopIteration from a mapped function does not end the loop: ``all`` of nothing is true."""

    def mapped(function: Any, *iterables: Any) -> Iterator[Any]:
        return (function(*items) for items in zip(*iterables, strict=False))

    def filtered(function: Any, iterable: Any) -> Iterator[Any]:
        return (item for item in iterable if (item if function is None else function(item)))

    return vars(builtins) | {"map": mapped, "filter": filtered}


def main(source: bytes, reads: int, writes: int) -> None:
    """Run the tests of a task, given as JSON."""
    results = os.dup(1)
    os.dup2(2, 1)

    def report(message: dict[str, Any]) -> None:
        os.write(results, json.dumps(message).encode() + b"\n")

    task = json.loads(source)
    steps = plan.plan(task)
    report({"tests": sum(step.counts for step in steps)})
    link = Link(wire.Wire(reads, writes))
    signal.signal(signal.SIGALRM, wire.raise_timeout)
    sys.modules["solution"] = solution = ModuleType("solution")  # for ``from solution import name``
    vars(solution)["__getattr__"] = link.import_name
    sys.modules["tests"] = module = ModuleType("tests")
    given = module.__dict__
    own = plan.strings_of(task)
    evaluate = guard.evaluator(own, link.look_up, is_remote)
    given["__builtins__"] = _safe_builtins() | {"eval": evaluate} | guard.readers(own, is_remote)
    guard.watch(own, ("tests.py", main.__code__.co_filename))
    preparing = plan.Step(False, lambda given: _prepare(task, given, link))
    broken = None
    for step in [preparing, *steps]:
        error = broken or _run(step.run, given, task, link)
        if link.unusable is not None:
            report({"unusable": link.unusable})
            return
        if step.counts:
            report({"error": error})
            if task["stop"] and error is not None:
                return
        else:
            broken = error


def _run(run: Callable[[dict[str, Any]], None], given: dict[str, Any], task: dict[str, Any], link: Link) -> str | None:
    """Run a step, and return its error."""
    signal.setitimer(signal.ITIMER_REAL, task["seconds"])
    try:
        run(given)
    except BaseException as error:  # SystemExit included: tests do not end this process
        signal.setitimer(signal.ITIMER_REAL, 0)
        message = f"{type(error).__name__}: {error}"[:300]
        if isinstance(error, ImportError):
            link.unusable = link.unusable or plan.missing_import(task)
        elif isinstance(error, plan.UnclearError) and not link.asked:
            link.unusable = message
        return message
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return None


def _prepare(task: dict[str, Any], given: dict[str, Any], link: Link) -> None:
    """Give the tests the names that they use and do not define."""
    program = given["__program__"] = {}
    for name, source in plan.free_names(task):
        if source:  # ``math`` in the tests is the real module, even if the program defines the name
            module, _, attribute = source.partition(":")
            try:
                found = __import__(module)
            except ImportError as error:
                raise plan.UnclearError(f"they use {name} without importing it: {error}") from None
            given[name] = getattr(found, attribute) if attribute else found
        else:
            with contextlib.suppress(AttributeError):
                program[name] = given[name] = link.look_up(name)
    for name, *attributes in plan.caught(task):
        with contextlib.suppress(Exception):  # what is caught is asked for when it is raised, which is too late
            functools.reduce(getattr, attributes, link.look_up(name))
    link.asked = False  # by the tests
    plan.run_helpers(task, given)
