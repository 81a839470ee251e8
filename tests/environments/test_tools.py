"""Tools from functions and names, the check of arguments, and the text of results."""

import datetime
import enum
import functools
import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import cloudpickle
import numpy as np
import pytest

from cohort.environments.contract import ToolCall
from cohort.environments.tools import Tool, Toolbox, as_tool, text_of
from cohort.errors import ConfigError, DataError
from tests.conftest import each


def add(a: int, b: int = 1) -> int:
    """Adds two integers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


async def search(query: str, limit: int | None = None, kind: Literal["web", "news"] = "web") -> list[str]:
    """Searches.

    Args:
        query: What for.
        limit: How many results.
        kind: Where.

    Returns:
        Titles.
    """
    return [query, kind, str(limit)]


class Counter:
    """A counter."""

    def __init__(self) -> None:
        self.count = 0

    def increase(self, by: int) -> int:
        """Increases the counter.

        Args:
            by: How much.
        """
        self.count += by
        return self.count

    async def __call__(self, word: str) -> str:
        """Echoes.

        Args:
            word: The word.
        """
        return word

    @staticmethod
    def half(number: float) -> float:
        """Halves.

        Args:
            number: A number.
        """
        return number / 2


class TestAsTool:
    def test_a_function(self):
        tool = as_tool(add)
        assert tool == Tool(
            "add",
            {
                "type": "function",
                "function": {
                    "name": "add",
                    "description": "Adds two integers.",
                    "parameters": {
                        "type": "object",
                        "properties": {
                            "a": {"type": "integer", "description": "The first."},
                            "b": {"type": "integer", "description": "The second."},
                        },
                        "required": ["a"],
                    },
                    "return": {"type": "integer"},
                },
            },
            add,
            False,
        )
        assert as_tool(tool) is tool

    def test_an_async_function(self):
        tool = as_tool(search)
        assert tool.is_async
        assert tool.parameters["properties"] == {
            "query": {"type": "string", "description": "What for."},
            "limit": {"type": "integer", "nullable": True, "description": "How many results."},
            "kind": {"type": "string", "enum": ["web", "news"], "description": "Where."},
        }
        assert tool.parameters["required"] == ["query"]

    def test_methods(self):
        counter = Counter()
        tool = as_tool(counter.increase)
        assert (tool.name, list(tool.parameters["properties"]), tool.function(by=3)) == ("increase", ["by"], 3)
        assert counter.count == 3
        assert as_tool(Counter.increase).schema == tool.schema, "a class shows its methods without an instance"
        assert as_tool(counter.half).function(number=3) == 1.5

    def test_an_object_with_call(self):
        tool = as_tool(Counter())
        assert (tool.name, tool.is_async, list(tool.parameters["properties"])) == ("Counter", True, ["word"])
        assert tool.schema["function"]["description"] == "Echoes."

    def test_what_a_partial_binds_is_not_shown(self):
        tool = as_tool(functools.partial(add, b=40))
        assert (tool.name, list(tool.parameters["properties"]), tool.function(a=2)) == ("add", ["a"], 42)
        assert list(as_tool(functools.partial(functools.partial(search, "x"), limit=1)).parameters["properties"]) == [
            "kind"
        ]
        assert as_tool(functools.partial(search, kind="web")).is_async

    def test_a_decorated_function(self):
        @functools.wraps(add)
        def logged(*args, **kwargs):
            return add(*args, **kwargs)

        tool = as_tool(logged)
        assert tool.schema == as_tool(add).schema
        assert tool.function(a=1, b=2) == 3

    def test_names_in_settings(self, tmp_path, monkeypatch):
        (tmp_path / "mine.py").write_text(
            "from __future__ import annotations\ndef double(number: int) -> int:\n    '''Doubles.\n\n    Args:\n"
            "        number: A number.\n    '''\n    return 2 * number\n"
        )
        monkeypatch.chdir(tmp_path)
        assert as_tool("mine.py:double").function(number=21) == 42
        assert as_tool("calculator").function(expression="6*7") == "42"

    def test_tools_are_picklable(self):
        tool = cloudpickle.loads(cloudpickle.dumps(as_tool(functools.partial(add, b=2))))
        assert tool.function(a=1) == 3

    def test_annotations_with_more_than_a_type(self):
        def one(x: Annotated[int, "more"]) -> None:
            """One.

            Args:
                x: A number.
            """

        assert as_tool(one).parameters["properties"]["x"]["type"] == "integer"


def no_hints(a, b: int):
    """Adds.

    Args:
        a: One.
        b: Two.
    """


def no_docstring(a: int):
    return a


def no_entry(a: int, b: int):
    """Adds.

    Args:
        a: One.
    """


def no_description():
    """
    Returns:
        Nothing.
    """


def wrong_hint(a: Counter):
    """Uses a counter.

    Args:
        a: One.
    """


def unknown_hint(a: "Missing"):  # noqa: F821
    """Uses something.

    Args:
        a: One.
    """


def any_arguments(**arguments: int):
    """Takes anything."""


def positional(a: int, /):
    """Takes one.

    Args:
        a: One.
    """


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


def with_enum(color: Color):
    """Paints.

    Args:
        color: The color.
    """


def generator(a: int):
    """Counts.

    Args:
        a: One.
    """
    yield a


class TestRefused:
    @each(
        ("function", "message"),
        [
            (no_hints, "'no_hints' cannot be shown to the policy: the argument 'a' has no type hint"),
            (no_docstring, "'no_docstring'.* has no docstring"),
            (no_entry, "'no_entry'.*no description for the argument 'b'"),
            (no_description, "'no_description'.*begins with no description"),
            (wrong_hint, "'wrong_hint'.*Counter"),
            (unknown_hint, "'unknown_hint'.*'Missing' is not defined"),
            (any_arguments, r"'any_arguments'.*\*\*arguments: int is not a named one"),
            (positional, "'positional'.*is not a named one"),
            (with_enum, r"'with_enum'.*for 'color', write Literal\['red', 'blue'\]"),
        ],
    )
    def test_says_what_to_write(self, function, message):
        with pytest.raises(ConfigError, match=message) as caught:
            as_tool(function)
        assert "Args:\n            a: The first number." in str(caught.value)

    @each(
        ("given", "message"),
        [
            (lambda a: a, "the tool '<lambda>' needs a name"),
            (generator, "'generator' must be a function that returns its result, got a generator"),
            (Counter, "'Counter' must be a function that returns its result, got a class"),
            (3, "a tool must be a function or a name, got 3"),
            ("calculater", r"unknown tool 'calculater': expected one of calculator, python, 'module:function'"),
            ("missing.py:f", "no tool file missing.py"),
            ("math:missing", "math has no function 'missing'"),
        ],
    )
    def test_what_is_no_tool(self, given, message):
        with pytest.raises(ConfigError, match=message):
            as_tool(given)


class TestToolbox:
    box = Toolbox([add, search, "calculator"])

    def test_a_row_s_subset(self):
        assert list(self.box.subset(["calculator", "add", "add"])) == ["calculator", "add"]
        assert list(self.box.subset([])) == []
        for names, got in [(["add", "sub"], "'sub'"), ([{"type": "function"}], "{'type': 'function'}")]:
            with pytest.raises(DataError, match=f"column 'tools'.*are add, search, calculator; got {got}"):
                self.box.subset(names)

    @each(
        ("call", "problem"),
        [
            (ToolCall("add", {"a": 2}), ""),
            (ToolCall("add", {"a": 2, "b": 3}), ""),
            (ToolCall("search", {"query": "x", "limit": None, "kind": "news"}), ""),
            (ToolCall("", error="invalid tool call: x"), "invalid tool call: x"),
            (ToolCall("sub", {"a": 2}), "unknown tool 'sub'; the tools are: add, search, calculator"),
            (ToolCall("add"), "add: the argument 'a' is missing"),
            (ToolCall("add", {"a": "2"}), "add: the argument 'a' must be an integer, got '2'"),
            (ToolCall("add", {"a": True}), "add: the argument 'a' must be an integer, got True"),
            (ToolCall("add", {"a": 2.0}), "add: the argument 'a' must be an integer, got 2.0"),
            (ToolCall("add", {"a": None}), "add: the argument 'a' must be an integer, got None"),
            (ToolCall("add", {"a": 2, "c": 3}), "add: unknown argument 'c'"),
            (
                ToolCall("search", {"query": "x" * 999, "kind": "x" * 999}),
                f"search: the argument 'kind' must be one of ['web', 'news'], got 'x{'x' * 55}...",
            ),
            (
                ToolCall("search", {"quary": 3}),
                "search: the argument 'query' is missing; unknown argument 'quary'",
            ),
        ],
    )
    def test_problems_of_calls(self, call, problem):
        assert self.box.problem(call) == problem


@dataclass
class Point:
    x: int
    y: Any


class Broken:
    def __str__(self):
        raise RuntimeError("no text")


class TestTextOf:
    @each(
        ("result", "text"),
        [
            ("as it is\n", "as it is\n"),
            ("", ""),
            (None, "null"),
            (True, "true"),
            (3, "3"),
            (0.1, "0.1"),
            (math.nan, "NaN"),
            ([1, "ü", None], '[1, "ü", null]'),
            ((1, 2), "[1, 2]"),
            ({"a": {"b": (1,)}}, '{"a": {"b": [1]}}'),
            ({1: 2}, '{"1": 2}'),
            ({(1, 2): 3}, "{(1, 2): 3}"),
            ({"b", "a"}, '["a", "b"]'),
            (b"caf\xc3\xa9 \xff", "café \ufffd"),
            (bytearray(b"x"), "x"),
            ([b"x"], '["x"]'),
            (Point(1, {2}), '{"x": 1, "y": [2]}'),
            (np.float32(0.5), "0.5"),
            (np.arange(3), "[0, 1, 2]"),
            ({"n": np.int64(3)}, '{"n": 3}'),
            (datetime.date(2026, 1, 2), "2026-01-02"),
            ([datetime.date(2026, 1, 2)], '["2026-01-02"]'),
            (ValueError("odd"), "odd"),
            ("half \ud800 pair", "half \ufffd pair"),
            ({"k": "\ud800"}, '{"k": "\ufffd"}'),
        ],
    )
    def test_of(self, result, text):
        assert text_of(result) == text

    def test_an_object_without_a_text_raises_its_error(self):
        """The caller treats it as an exception of the tool."""
        for result in (Broken(), [Broken()]):
            with pytest.raises(RuntimeError, match="no text"):
                text_of(result)

    def test_a_list_that_contains_itself_raises(self):
        itself = []
        itself.append(itself)
        with pytest.raises(ValueError, match="Circular"):
            text_of(itself)
