"""Tools: functions that the policy can call, with the JSON schemas that chat templates show to it."""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import json
import operator
import re
import typing
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from decimal import Context, Decimal, Inexact
from fractions import Fraction
from typing import Any

from cohort.calls import is_async, partial_layers
from cohort.environments.contract import EpisodeFailed, ToolCall
from cohort.environments.schemas import problem_with
from cohort.errors import ConfigError, DataError, SandboxError
from cohort.plugins import load_function
from cohort.sandbox import Executor, Limits, Outcome, Program, Result, Sandbox

# ----------------------------------------
# The tool "calculator": exact arithmetic that cannot hang.


MAX_LENGTH = 1000
"""Maximum number of characters of an expression."""
MAX_BITS = 4096
"""Maximum size of numerators and denominators: about 1,200 digits."""
EXACT_DIGITS = 50
"""Results of at most that many digits are shown exactly, others rounded to ``ROUNDED_DIGITS``."""
ROUNDED_DIGITS = 15
_CHARACTERS = re.compile(r"[0-9.eE_+\-*/%()\s]+", re.ASCII)
_SYNTAX = "cannot read the expression; it may have numbers, + - * / // % ** and parentheses"
_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def calculator(expression: str) -> str:
    """Computes an arithmetic expression exactly.

    Args:
        expression: Numbers with + - * / // % ** and parentheses, as in Python, for example "(3 + 4.5) * 2 ** 10".

    Returns:
        The result, rounded to 15 digits if it has no short exact form; or "error:" and the reason.

    >>> calculator("0.1 + 0.2"), calculator("2 ** 100"), calculator("2 / 3"), calculator("1 / 0")
    ('0.3', '1267650600228229401496703205376', '0.666666666666667', 'error: division by zero')
    """
    try:
        if len(expression) > MAX_LENGTH:
            raise ValueError(f"the expression has more than {MAX_LENGTH} characters")
        source = expression.strip()
        if not _CHARACTERS.fullmatch(source):
            raise ValueError(_SYNTAX)
        return _shown(_value(ast.parse(source, mode="eval").body, source))
    except (SyntaxError, MemoryError, RecursionError):  # the last two: too many parentheses or signs
        return f"error: {_SYNTAX}"
    except ZeroDivisionError:
        return "error: division by zero"
    except ValueError as error:
        return f"error: {error}"


def _value(node: ast.expr, source: str) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        value = _number(node, source)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        operand = _value(node.operand, source)
        value = -operand if isinstance(node.op, ast.USub) else operand
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        value = _power(_value(node.left, source), _value(node.right, source))
    elif isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        value = Fraction(_BINARY[type(node.op)](_value(node.left, source), _value(node.right, source)))
    else:
        raise ValueError(_SYNTAX)
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ValueError("the number is too large")
    return value


def _number(node: ast.Constant, source: str) -> Fraction:
    """A number as it is written: 0.1 is a tenth, not the nearest double."""
    if isinstance(node.value, int):
        return Fraction(node.value)
    written = Decimal((ast.get_source_segment(source, node) or "").replace("_", ""))
    if abs(written.adjusted()) > MAX_BITS:
        raise ValueError("the number is too large")
    return Fraction(written)


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ValueError("the exponent must be an integer")
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if bits > 1 and (bits - 1) * abs(exponent) > MAX_BITS:
        raise ValueError("the number is too large")
    return Fraction(base ** int(exponent))


def _shown(value: Fraction) -> str:
    for digits in (EXACT_DIGITS, ROUNDED_DIGITS):
        context = Context(prec=digits, Emax=10 * MAX_BITS, Emin=-10 * MAX_BITS)
        result = context.divide(Decimal(value.numerator), Decimal(value.denominator)).normalize(context)
        if not context.flags[Inexact]:
            break
    return f"{result:f}" if -7 < result.adjusted() < digits else f"{result}".replace("E", "e")


# ----------------------------------------
# The tool "python": run a program in the sandbox and read what it prints.


LIMITS = Limits(seconds=10.0, memory=512, disk=16, output=1 << 16)
"""Limits of a program of the tool "python"."""
MAX_ERROR_LINES = 8
"""Lines of a traceback that the policy reads, from its end."""


def python_tool(executor: Executor | None = None, limits: Limits = LIMITS) -> Callable[[str], Awaitable[str]]:
    """The tool "python", which keeps nothing from one call to the next.

    Args:
        executor: what runs the programs. None: a ``Sandbox`` with the standard library only.
        limits: the limits of a program.

    Raises:
        ConfigError: programs cannot be run here.
    """
    runner = executor or Sandbox()
    try:
        runner.check()
    except SandboxError as error:
        raise ConfigError(f"the tool 'python' cannot run programs: {error}") from None

    async def python(code: str) -> str:
        """Runs a Python program and returns what it prints. Nothing is kept between calls.

        Args:
            code: The program. It must print its results.

        Returns:
            Standard output, then the error if there is one.
        """
        try:
            return output_of(await runner.run(Program(code), limits), limits)
        except SandboxError as error:  # never because of the program
            raise EpisodeFailed(f"the sandbox failed: {error}") from error

    return python


def output_of(result: Result, limits: Limits) -> str:
    """What the policy reads of a program's result."""
    if result.outcome is Outcome.FINISHED:
        return result.stdout or "(the program printed nothing)"
    reasons = {
        Outcome.TIMEOUT: f"error: stopped after {limits.seconds:g} seconds",
        Outcome.MEMORY: f"error: the program needs more than {limits.memory} MB of memory",
        Outcome.OUTPUT: f"error: stopped after {limits.output} bytes of output",
    }
    error = "\n".join(result.stderr.strip().splitlines()[-MAX_ERROR_LINES:])
    reason = reasons.get(result.outcome) or error or f"error: exit code {result.exit_code}"
    return "\n".join(filter(None, [result.stdout.rstrip("\n"), reason]))


BUILTIN_TOOLS: Mapping[str, Callable[[], Callable[..., Any]]] = {
    "calculator": lambda: calculator,
    "python": python_tool,
}
"""Makers of the functions behind built-in names."""
_NAME = re.compile(r"[A-Za-z_][\w-]{0,63}", re.ASCII)
SURROGATES = re.compile("[\ud800-\udfff]")
"""Halves of surrogate pairs, which JSON can spell and tokenizers refuse."""
_EXAMPLE = """

    def add(a: int, b: int) -> int:
        '''Adds two integers.

        Args:
            a: The first number.
            b: The second number.
        '''
        return a + b"""


@dataclasses.dataclass(frozen=True, slots=True)
class Tool:
    """A function that the policy can call."""

    name: str
    schema: Mapping[str, Any]
    """The JSON schema as chat templates take it: ``{"type": "function", "function": {"name": ..., "description": ...,
    "parameters": {...}}}``."""
    function: Callable[..., Any]
    """Called as ``function(**arguments)``. ``text_of`` makes of its result what the policy reads."""
    is_async: bool = False

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The JSON schema of the arguments, an object."""
        parameters: Mapping[str, Any] = self.schema["function"].get("parameters") or {}
        return parameters

    def problem(self, arguments: Mapping[str, Any]) -> str:
        """Why the function cannot be called with these arguments, for the policy to read. Empty: it can.

        >>> as_tool("calculator").problem({"expr": "1+1"})
        "calculator: the argument 'expression' is missing; unknown argument 'expr'"
        """
        found = problem_with(arguments, {**self.parameters, "type": "object"})
        return f"{self.name}: {found}" if found else ""


class Toolbox(dict[str, Tool]):
    """Tools by their names.

    Args:
        tools: the tools, or what ``as_tool`` takes.

    Raises:
        ConfigError: two tools have the same name.
    """

    def __init__(self, tools: Iterable[Any] = ()) -> None:
        super().__init__()
        for tool in map(as_tool, tools):
            if tool.name in self:
                raise ConfigError(
                    f"two tools have the name {tool.name!r}, and the policy could not tell them apart: rename one "
                    "function, or give it another __name__"
                )
            self[tool.name] = tool

    @property
    def schemas(self) -> list[Mapping[str, Any]]:
        """The JSON schemas, for ``apply_chat_template(tools=...)``."""
        return [tool.schema for tool in self.values()]

    def subset(self, names: Collection[str]) -> Toolbox:
        """The tools that a row may use, in this order.

        Args:
            names: the names in the row.

        Raises:
            DataError: there is no tool of such a name.
        """
        if unknown := [name for name in names if not isinstance(name, str) or name not in self]:
            raise DataError(
                f"column 'tools' must list names of environment.tools, which are {', '.join(self) or 'none'}; got "
                f"{unknown[0]!r:.80}"
            )
        return Toolbox(self[name] for name in dict.fromkeys(names))

    def problem(self, call: ToolCall) -> str:
        """Why a call cannot be made, for the policy to read: it is malformed, names no tool, or has wrong arguments.
        Empty: it can be made.
        """
        if call.error:
            return call.error
        if call.name not in self:
            return f"unknown tool {call.name[:64]!r}; the tools are: {', '.join(self) or 'none'}"
        return self[call.name].problem(call.arguments)


def as_tool(given: Any) -> Tool:
    """A tool.

    Args:
        given: a ``Tool``; a function, method, ``functools.partial`` or object with ``__call__``, plain or async, with
            type hints and a docstring in Google's style; "calculator" or "python"; "module:function" or
            "file.py:function". Arguments that a partial binds are not shown to the policy.

    Raises:
        ConfigError: there is no such function, or no JSON schema can be made of it.

    >>> tool = as_tool("calculator")
    >>> tool.name, tool.parameters["required"]
    ('calculator', ['expression'])
    """
    if isinstance(given, Tool):
        return given
    if isinstance(given, str):
        if given not in BUILTIN_TOOLS and ":" not in given:
            raise ConfigError(
                f"unknown tool {given!r}: expected one of {', '.join(BUILTIN_TOOLS)}, 'module:function' or "
                "'file.py:function'"
            )
        given = BUILTIN_TOOLS[given]() if given in BUILTIN_TOOLS else load_function(given, what="tool")
    if not callable(given):
        raise ConfigError(f"a tool must be a function or a name, got {given!r:.80}")
    return Tool(_name(given), _schema(given), given, is_async(given))


def _name(function: Callable[..., Any]) -> str:
    inner = partial_layers(function)[-1]
    name = getattr(function, "__name__", None) or getattr(inner, "__name__", None) or type(inner).__name__
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(
            f"the tool {name!r} needs a name of at most 64 letters, digits, '_' and '-': write it as\n{_EXAMPLE}\n"
        )
    return name


# -- schemas -----------------------------------------------------------------------------------------------------------


def _schema(function: Callable[..., Any]) -> Mapping[str, Any]:
    """The JSON schema of a function, from its type hints and docstring."""
    from transformers.utils import get_json_schema

    name = _name(function)
    try:
        schema: dict[str, Any] = get_json_schema(_described(function, name))
    except ConfigError:
        raise
    except Exception as error:  # transformers' own two classes, and what evaluating hints or "choices" raises
        raise _no_schema(name, f"{error}".strip()) from error
    if not schema["function"]["description"]:
        raise _no_schema(name, "the docstring begins with no description")
    return schema


def _described(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A stand-in with the name, docstring and parameters of a function, methods' receivers and bound arguments left
    out, and with evaluated type hints: the form that ``get_json_schema`` takes.
    """
    inner = partial_layers(function)[-1]
    plain = inner if inspect.isroutine(inner) or inspect.isclass(inner) else type(inner).__call__
    if inspect.isclass(inner) or inspect.isgeneratorfunction(plain) or inspect.isasyncgenfunction(plain):
        kind = "a class" if inspect.isclass(inner) else "a generator"
        raise ConfigError(f"the tool {name!r} must be a function that returns its result, got {kind}")
    try:
        parameters = [p for p in inspect.signature(function).parameters.values() if not _is_bound(p, function)]
    except (TypeError, ValueError) as error:
        raise _no_schema(name, f"it has no signature ({error})") from error
    hints = typing.get_type_hints(inspect.unwrap(plain))
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise _no_schema(name, f"the policy gives arguments by name, and {parameter} is not a named one")
        if parameter.name not in hints:
            raise _no_schema(name, f"the argument {parameter.name!r} has no type hint")
        if isinstance(hints[parameter.name], enum.EnumMeta):
            values = ", ".join(repr(member.value) for member in hints[parameter.name])
            raise _no_schema(name, f"arguments are JSON values: for {parameter.name!r}, write Literal[{values}]")

    def stand_in() -> None: ...

    named = [*(parameter.name for parameter in parameters), "return"]
    stand_in.__name__, stand_in.__doc__ = name, inspect.getdoc(plain) or inspect.getdoc(inner)
    stand_in.__annotations__ = {key: hints[key] for key in named if key in hints}
    stand_in.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [parameter.replace(annotation=hints[parameter.name]) for parameter in parameters]
    )
    return stand_in


def _is_bound(parameter: inspect.Parameter, function: Callable[..., Any]) -> bool:
    """Whether a parameter is the receiver of a method of a class, or has its value from a partial."""
    bound = {key for layer in partial_layers(function)[:-1] for key in layer.keywords}  # type: ignore[attr-defined]
    is_receiver = parameter.name in ("self", "cls") and parameter.annotation is parameter.empty
    return is_receiver or parameter.name in bound


def _no_schema(name: str, reason: str) -> ConfigError:
    return ConfigError(
        f"the tool {name!r} cannot be shown to the policy: {reason}. A tool needs a type hint for each argument, and a "
        f"docstring that describes the function and, under 'Args:', each argument:\n{_EXAMPLE}\n"
    )


# -- results -----------------------------------------------------------------------------------------------------------


def text_of(result: Any) -> str:
    """What the policy reads of a tool's result.

    Text as it is; bytes as UTF-8, with U+FFFD for other bytes; everything else as JSON. Where JSON has no such value, a
    set, array or tensor is a list, a dataclass an object, and everything else its ``str``. None is "null". Halves of
    surrogate pairs, which no tokenizer takes, become U+FFFD.

    Raises:
        Exception: what an object's ``__str__`` raises, or ValueError for a structure that contains itself.

    >>> text_of("π"), text_of({"π": [1, None, 2.5]}), text_of(b"ok"), text_of(None)
    ('π', '{"π": [1, null, 2.5]}', 'ok', 'null')
    """
    if isinstance(result, bytes | bytearray | memoryview):
        return bytes(result).decode("utf-8", "replace")
    text = result if isinstance(result, str) else _as_json(result)
    return SURROGATES.sub("\ufffd", text)


def _as_json(value: Any) -> str:
    plain = value if isinstance(value, dict | list | tuple | int | float | None) else _plain(value)
    if isinstance(plain, str):
        return plain
    try:
        return json.dumps(plain, ensure_ascii=False, default=_plain)
    except TypeError:  # keys that JSON does not have
        return str(plain)


def _plain(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    if isinstance(value, bytes | bytearray | memoryview):
        return text_of(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return value.tolist() if callable(getattr(value, "tolist", None)) else str(value)
