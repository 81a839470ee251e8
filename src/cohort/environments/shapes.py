"""Environments, recognised by their shape, and what is done with one where it lives: in this process, on the event
loop, or in a worker process."""

from __future__ import annotations

import asyncio
import inspect
import math
import pickle
import random
import reprlib
import sys
import traceback
import types
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from cohort.calls import copied, partial_layers, run_on_loop
from cohort.environments.contract import Answer, Ended, EpisodeFailed, Step, ToolError
from cohort.environments.tools import Toolbox, text_of
from cohort.errors import ConfigError, DataError
from cohort.plugins import load_function
from cohort.types import Message
from cohort.workers import describe_error

Factory = Callable[[], Any]

STEPS = (
    "Step(observation, reward, done), (observation, reward, terminated, truncated, info), "
    "(observation, reward, done, info), or a dict with the keys observations, reward and done"
)
MAX_ERROR = 1000
"""Maximum number of characters of an error that the policy reads."""
NOT_ASYNC = "it returned an awaitable, but is no `async def`: make it one"
NOT_TOOLS = frozenset({"reset", "step", "get_reward", "close"})


@dataclass(frozen=True, slots=True, eq=False)
class Shape:
    """A factory of environments, and how to talk to them."""

    name: str
    """The class of the environments, for messages."""
    factory: Factory
    steps: bool
    """Whether ``step(text)`` answers a turn. If not, methods are tools."""
    tools: Toolbox
    """Those methods, by their names. Their functions have no object: only names and schemas are used."""
    is_async: bool
    """Whether at least one method is ``async``. The environment then lives on the event loop."""
    columns: frozenset[str] | None
    """The columns of a row that ``reset`` accepts. None: all but ``own``."""
    own: str
    """The parameter of ``reset`` that takes the environment itself, as ``self``."""
    required: frozenset[str]
    """The columns that ``reset`` needs."""
    seeded: bool
    """Whether ``reset`` has a parameter ``seed``."""
    gives_rewards: bool
    """Whether it may give rewards: it has ``step`` or ``get_reward``."""

    def arguments(self, row: Mapping[str, Any], seed: int) -> dict[str, Any]:
        """The arguments of ``reset``: copies, which it may change. A column ``seed`` takes precedence over ``seed``."""
        seeds = {"seed": seed} if self.seeded else {}
        taken = row.keys() - {self.own} if self.columns is None else self.columns
        return seeds | {name: copied(row[name]) for name in row if name in taken}


def find_environments(factory: str | Factory | Mapping[str, str | Factory]) -> dict[str, Shape]:
    """Load factories and recognise the shapes of their environments.

    A class is inspected. Any other factory is called twice, and its environments are closed.

    Args:
        factory: a class or function, or "module:name" or "file.py:name"; or several by name. The column ``environment``
            of a row chooses one of several.

    Returns:
        The shapes by name; a single one has the name "". None for no factory.

    Raises:
        ConfigError: a factory cannot be loaded or called, or its environments have no known shape.
    """
    named = factory if isinstance(factory, Mapping) else {"": factory} if factory else {}
    return {
        name: recognise(load_function(one, what="environment") if isinstance(one, str) else one)
        for name, one in named.items()
    }


def choose(shapes: Mapping[str, Shape], row: Mapping[str, Any]) -> Shape | None:
    """The environment of a row.

    Raises:
        DataError: the row names none of several environments, or lacks a column that ``reset`` needs.
    """
    if not shapes:
        return None
    name = "" if "" in shapes else row.get("environment")
    if not isinstance(name, str) or name not in shapes:
        raise DataError(f"the column 'environment' must name one of {', '.join(shapes)}; a row has {name!r:.80}")
    shape = shapes[name]
    if missing := shape.required - row.keys():
        raise DataError(
            f"{shape.name}.reset needs the column {min(missing)!r}; the data has {', '.join(row) or 'no columns'}. "
            "Give the parameter a default, or add the column"
        )
    return shape


def recognise(factory: Factory) -> Shape:
    """The shape of a factory's environments.

    Raises:
        ConfigError: it cannot be called, or its environments have no known shape.
    """
    if not callable(factory):
        raise ConfigError(
            f"environment.factory must be a class or a function that makes an environment for each completion, got an "
            f"object of the class {type(factory).__name__}: pass the class, or a function that returns a new object"
        )
    inner: Any = partial_layers(factory)[-1]
    try:
        inspect.signature(factory).bind()
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"environment {getattr(inner, '__name__', inner)} must be made without arguments ({error}): give its "
            "parameters defaults, or pass a function that makes it"
        ) from error
    return _shape_of_class(inner if inspect.isclass(inner) else _class_made_by(factory), factory)


def _class_made_by(factory: Factory) -> type:
    """The class of what a factory makes. Two environments are made and closed."""
    what = f"environment.factory {getattr(factory, '__name__', str(factory))}"
    try:
        made, other = factory(), factory()
    except Exception as error:
        raise ConfigError(f"{what} {describe_error(error)}") from error
    if inspect.isawaitable(made):
        for one in (made, other):
            one.close() if inspect.iscoroutine(one) else None
        raise ConfigError(f"{what} must not be async: connect in `async def reset` instead")
    is_async = inspect.iscoroutinefunction(getattr(made, "close", None))
    for one in (made, other):
        if problem := run_on_loop(_close(one, "close")).result() if is_async else run_plain(_close, one, "close"):
            raise ConfigError(f"environment {type(one).__name__} cannot be closed: {problem}")
    if made is other is not None:
        raise ConfigError(f"{what} returned the same object twice: each completion needs its own, so make a new one")
    return type(made)


def _shape_of_class(found: type, factory: Factory) -> Shape:
    what = f"environment {found.__name__}"
    functions = dict(inspect.getmembers(found, inspect.isfunction))
    if "reset" not in functions:
        raise ConfigError(f"{what} has no method reset: write `def reset(self, **row)`, which begins an episode")
    steps = "step" in functions
    public = [name for name in functions if not name.startswith("_") and name not in NOT_TOOLS]
    if not steps and not public:
        raise ConfigError(
            f"{what} has neither a method step nor other public methods: write `def step(self, text: str) -> Step`, "
            "or methods with type hints and docstrings, which become tools of the policy"
        )
    if steps:
        try:
            inspect.signature(functions["step"]).bind(None, "text")
        except TypeError as error:
            raise ConfigError(f"{what}: step must accept the policy's text as its one argument ({error})") from error
    try:
        tools = Toolbox(() if steps else [functions[name] for name in public])
    except ConfigError as error:
        raise ConfigError(
            f"{what}: its public methods are tools of the policy, so name others with an underscore. {error}"
        ) from error
    signature = list(inspect.signature(functions["reset"]).parameters.values())
    parameters, own = signature[1:], [one.name for one in signature[:1] if one.kind is one.POSITIONAL_OR_KEYWORD]
    if any(parameter.kind is parameter.POSITIONAL_ONLY for parameter in parameters):
        raise ConfigError(f"{what}: reset gets the columns of a row by name, so it cannot have positional parameters")
    named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    called = NOT_TOOLS & functions.keys() | set(() if steps else public)
    return Shape(
        name=found.__name__,
        factory=factory,
        steps=steps,
        tools=tools,
        is_async=any(inspect.iscoroutinefunction(functions[name]) for name in called),
        columns=None if any(p.kind is p.VAR_KEYWORD for p in parameters) else frozenset(p.name for p in named),
        own=next(iter(own), ""),
        required=frozenset(p.name for p in named if p.default is p.empty) - {"seed"},
        seeded=any(p.name == "seed" for p in named),
        gives_rewards=steps or "get_reward" in functions,
    )


# What follows runs where the environment lives. ----------------------------------------------------------------------

LIVE: dict[int, Any] = {}
"""The environments in this process, by number."""


async def perform(
    factory: Factory, steps: bool, number: int, method: str, given: Mapping[str, Any], seed: int | None = None
) -> Any:
    """Call a method of an environment.

    Args:
        factory: makes the environment when the method is ``reset``.
        steps: whether ``step`` answers turns.
        number: identifies the environment.
        method: ``reset``, ``step``, ``get_reward``, ``close``, or one that is a tool. There need be no ``get_reward``
            and ``close``.
        given: the arguments.
        seed: of the global random generators while an environment is made and reset.

    Returns:
        Of ``reset`` and ``step``, an ``Answer``. Of ``get_reward``, ``Ended``. Of ``close``, why it failed. Of a tool,
        what the policy reads, and whether it is an error. If the environment cannot go on, ``EpisodeFailed``, as a
        value.
    """
    if method != "reset" and number not in LIVE:
        lost = "the worker process of the environment has ended: another environment in it hung or died"
        return "" if method == "close" else EpisodeFailed(lost)
    what = "the factory of environments"
    try:
        if method == "reset":
            with (draws := SeededDraws(seed)):
                LIVE[number] = factory()  # kept before reset, so that it is closed if reset fails
        environment = LIVE[number]
        what = f"{type(environment).__name__}.{method}"
        match method:
            case "reset":
                with draws:
                    returned = environment.reset(**given)
                returned = draws.during(returned) if inspect.isawaitable(returned) else returned
                return _first(await _value(returned), what, steps)
            case "step":
                return _answer(await _value(environment.step(*given.values())), what)
            case "get_reward":
                return await _ended(environment, what, steps)
            case "close":
                return await _close(LIVE.pop(number), what)
            case _:
                return await call_tool(getattr(environment, method), given)
    except EpisodeFailed as failure:
        return failure
    except (Exception, SystemExit) as error:
        return EpisodeFailed(f"{what} {describe_error(error)}", "".join(traceback.format_exception(error)).rstrip())


States = list[tuple[Callable[[Any], object], Any]]
"""States of generators, each with the function that sets it."""


class SeededDraws:
    """Blocks in which the global generators of Python, NumPy and torch go on from a seed, and not from where they are
    outside. Libraries that are not loaded have no generator.

    Args:
        seed: below 2**32. None: the generators are left alone.
    """

    def __init__(self, seed: int | None) -> None:
        self._seed = seed
        self._inside: States = []
        self._outside: States = []

    def __enter__(self) -> None:
        if self._seed is not None:
            self._outside = _states()
            for _, _, reseed in _generators():
                reseed(self._seed)
            _restore(self._inside)

    def __exit__(self, *_: object) -> None:
        if self._seed is not None:
            self._inside = _states()
            _restore(self._outside)

    @types.coroutine
    def during(self, awaitable: Awaitable[Any]) -> Generator[Any, Any, Any]:
        """Wait for something, whose steps are such blocks: other tasks go on between them."""
        steps, send = awaitable.__await__(), None
        while True:
            try:
                with self:
                    waits_for = steps.send(None) if send is None else send()
            except StopIteration as end:
                return end.value
            try:
                yield waits_for
                send = None
            except BaseException as error:
                send = partial(steps.throw, error)


def _generators() -> list[tuple[Callable[[], Any], Callable[[Any], object], Callable[[int], object]]]:
    """What reads, sets and seeds each global generator."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    return [
        (random.getstate, random.setstate, random.seed),
        *([(numpy.random.get_state, numpy.random.set_state, numpy.random.seed)] if numpy else []),
        *([(torch.get_rng_state, torch.set_rng_state, torch.default_generator.manual_seed)] if torch else []),
    ]


def _states() -> States:
    return [(put, read()) for read, put, _ in _generators()]


def _restore(states: States) -> None:
    for put, state in states:
        put(state)


async def call_tool(function: Callable[..., Any], arguments: Mapping[str, Any]) -> tuple[str, bool] | EpisodeFailed:
    """Call a tool, plain or ``async``.

    Returns:
        What the policy reads, and whether it is an error. ``EpisodeFailed``, as a value, if the tool raised it.
    """
    try:
        return text_of(await _value(function(**arguments))), False
    except EpisodeFailed as failure:
        return failure
    except ToolError as error:
        return error_text(str(error)), True
    except (Exception, SystemExit) as error:
        return error_text(traceback.format_exception_only(error)[-1]), True


def error_text(reason: str) -> str:
    """What the policy reads of a call that failed."""
    return text_of(f"Error: {reason.strip()}"[:MAX_ERROR])


def run_plain(function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
    """Run one of the coroutines above without an event loop: user functions are plain, so nothing is awaited."""
    coroutine = function(*arguments, **named)
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    coroutine.close()
    raise TypeError(NOT_ASYNC)


async def _value(returned: Any) -> Any:
    if not inspect.isawaitable(returned):
        return returned
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        if inspect.iscoroutine(returned):
            returned.close()
        raise TypeError(NOT_ASYNC) from None
    return await returned


async def _ended(environment: Any, what: str, steps: bool) -> Ended:
    reward = 0.0 if steps else None  # of an episode without any reward, the sum
    if callable(get_reward := getattr(environment, "get_reward", None)):
        reward = _number(await _value(get_reward()), what)
    state = {name: value for name, value in getattr(environment, "__dict__", {}).items() if not name.startswith("_")}
    return Ended(reward, {name: copy for name, value in state.items() for copy in _copies(value)})


def _copies(value: Any) -> list[Any]:
    """A copy, as if from another process; nothing if the value cannot be pickled."""
    try:
        return [pickle.loads(pickle.dumps(value))]
    except Exception:
        return []


async def _close(environment: Any, what: str) -> str:
    try:
        if callable(close := getattr(environment, "close", None)):
            await _value(close())
    except (Exception, SystemExit) as error:
        return f"{what} {describe_error(error)}"
    return ""


def _first(returned: Any, what: str, steps: bool) -> Answer:
    """What ``reset`` returned; Gymnasium's has an ``info`` as well."""
    if steps and isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping):
        returned = returned[0]
    if steps and isinstance(returned, Step) and returned.reward is None:
        return _answer(returned, what)
    if not steps and not isinstance(returned, str | None):
        raise EpisodeFailed(f"{what} returned {reprlib.repr(returned)}: expected text for the prompt, or None")
    return Answer(_messages(returned, what))


def _answer(returned: Any, what: str) -> Answer:
    """What ``step`` returned, in any of the known forms."""
    match returned:
        case Step(observation, reward, done):
            pass
        case tuple((observation, reward, terminated, truncated, _)):
            done = _flag(terminated, what) or _flag(truncated, what)
        case tuple((observation, reward, done, _)):
            pass
        case {"observations": observation, "reward": reward, "done": done}:
            pass
        case _:
            kind = f"a tuple of {len(returned)}" if isinstance(returned, tuple) else reprlib.repr(returned)
            hint = ". A tool of the policy needs another name" if isinstance(returned, str) else ""
            raise EpisodeFailed(f"{what} returned {kind}: expected {STEPS}{hint}")
    return Answer(_messages(observation, what), _number(reward, what), _flag(done, what))


def _messages(observation: Any, what: str) -> tuple[Message, ...]:
    if isinstance(observation, str | None):
        return ({"role": "user", "content": text_of(observation)},) if observation else ()
    if not isinstance(observation, Sequence) or isinstance(observation, bytes):
        raise EpisodeFailed(f"{what} gave the observation {reprlib.repr(observation)}: expected text or messages")
    for message in observation:
        fields = message if isinstance(message, Mapping) else {}
        if not isinstance(fields.get("role"), str) or not isinstance(fields.get("content"), str):
            raise EpisodeFailed(
                f"{what} gave the message {reprlib.repr(message)}: expected a dict with the texts role and content"
            )
    return tuple({**message, "content": text_of(message["content"])} for message in observation)


def _number(reward: Any, what: str) -> float | None:
    if reward is None:
        return None
    try:
        number = math.nan if isinstance(reward, str | bytes) else float(reward)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise EpisodeFailed(f"{what} gave the reward {reprlib.repr(reward)}: expected a finite number or None")
    return number


def _flag(value: Any, what: str) -> bool:
    if isinstance(value, bool | int) or type(value).__name__ in ("bool_", "bool"):  # NumPy's, too
        return bool(value)
    raise EpisodeFailed(f"{what} gave {reprlib.repr(value)} for whether the episode is over: expected True or False")
