"""Keep what the program returns from running as code in the process that compares results.

``eval`` of the tests computes with plain data, and calls the program in its own process. Unpickling makes plain data
only. An audit hook, which cannot be removed, refuses what goes around both.
"""

from __future__ import annotations

import ast
import operator
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

PLAIN = (bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict, type(None))
FUNCTIONS: tuple[Any, ...] = (
    *(abs, bool, bytes, complex, dict, divmod, float, frozenset, int, len, list, max, min, pow, range, repr),
    *(reversed, round, set, sorted, str, sum, tuple, zip),
)
FORMATS = ("format", "format_map")  # read attributes of their arguments
PICKLED = {
    "builtins": {"bytearray", "complex", "frozenset", "range", "set", "slice"},
    "collections": {"OrderedDict", "defaultdict", "deque"},
    "datetime": {"date", "datetime", "time", "timedelta", "timezone"},
    "decimal": {"Decimal"},
}
"""What may be unpickled besides numbers, texts and containers: classes whose ``__eq__`` no pickle can replace."""
OPERATORS: dict[type, Callable[..., Any]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv},
    **{ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow, ast.MatMult: operator.matmul},
    **{ast.LShift: operator.lshift, ast.RShift: operator.rshift, ast.BitAnd: operator.and_, ast.BitOr: operator.or_},
    **{ast.BitXor: operator.xor, ast.UAdd: operator.pos, ast.USub: operator.neg, ast.Invert: operator.inv},
    **{ast.Not: operator.not_, ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le},
    **{ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not},
    **{ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b},
}


def evaluator(own: set[str], look_up: Callable[[str], Any], is_remote: Callable[[Any], bool]) -> Callable[..., Any]:
    """``eval`` for the tests.

    A string of the tests is evaluated as Python. Any other text may be the program's: its names are those that the call
    passes, some built-ins and the program's, never the variables of the tests, which may hold what is expected: not
    even if the call passes them all, as ``globals()`` or ``locals()``.

    Args:
        own: the strings of the tests; see ``plan.strings_of``.
        look_up: finds a name of the program.
        is_remote: whether a value stands for one in the program.
    """

    def evaluate(source: Any, names: Any = None, local: Any = None, /) -> Any:
        caller: Any = sys._getframe(1)
        while caller.f_code.co_filename != "tests.py":  # ``map(eval, texts)`` calls from another file
            caller = caller.f_back
        if type(source) is str and source in own:
            found = caller.f_globals if names is None else names
            return eval(source, found, caller.f_locals if local is None and names is None else local)
        text = source.decode() if isinstance(source, bytes) else str.__str__(source)
        given = {**_passed(names or {}, caller), **_passed(local or {}, caller)}
        return _Expression(given, look_up, is_remote).value(ast.parse(text.strip(), mode="eval").body)

    return evaluate


def _passed(names: Mapping[str, Any], frame: Any) -> Mapping[str, Any]:
    """Names that a call passes, without the variables of the tests if it passes ``globals()``, ``locals()``, ``vars()``
    or a copy of them."""
    hidden: list[tuple[str, Any]] = []
    while frame:
        if frame.f_code.co_filename == "tests.py":
            hidden += frame.f_globals.items() if "__program__" in names else ()
            hidden += frame.f_locals.items() if {"locals", "vars"} & {*frame.f_code.co_names} else ()
        frame = frame.f_back
    variables = {(name, id(value)) for name, value in hidden}
    return {name: value for name, value in names.items() if (name, id(value)) not in variables}


class _Expression:
    """Evaluates a text of the program. ``given``: the names that the call of ``eval`` passes."""

    def __init__(
        self, given: Mapping[str, Any], look_up: Callable[[str], Any], is_remote: Callable[[Any], bool]
    ) -> None:
        self._given, self._look_up, self._is_remote = given, look_up, is_remote

    def value(self, node: Any) -> Any:
        """The value of an expression of constants, containers, operators, attributes, items and calls.

        Raises:
            ValueError: it contains anything else.
        """
        kind, value = type(node), self.value
        if kind is ast.Constant:
            return node.value
        if kind is ast.Name:
            return self._name(node.id)
        if kind in (ast.List, ast.Tuple, ast.Set):
            return {ast.List: list, ast.Tuple: tuple, ast.Set: set}[kind](map(value, node.elts))
        if kind is ast.Dict and None not in node.keys:
            return {value(key): value(item) for key, item in zip(node.keys, node.values, strict=True)}
        if kind in (ast.BinOp, ast.UnaryOp):
            sides = (node.left, node.right) if kind is ast.BinOp else (node.operand,)
            return OPERATORS[type(node.op)](*map(value, sides))
        if kind is ast.Compare:
            items = [value(item) for item in (node.left, *node.comparators)]
            pairs = zip(node.ops, items, items[1:], strict=False)
            return all(OPERATORS[type(sign)](*pair) for sign, *pair in pairs)
        if kind is ast.BoolOp:
            for item in node.values:
                found = value(item)
                if bool(found) is isinstance(node.op, ast.Or):
                    break
            return found
        if kind is ast.IfExp:
            return value(node.body) if value(node.test) else value(node.orelse)
        if kind is ast.Subscript:
            return value(node.value)[value(node.slice)]
        if kind is ast.Slice:
            return slice(*(part and value(part) for part in (node.lower, node.upper, node.step)))
        if kind is ast.Attribute:
            return self._attribute(node)
        if kind is ast.Call:
            return self._call(node)
        raise ValueError(f"eval of the tests does not run a text of the program with {kind.__name__}")

    def _name(self, name: str) -> Any:
        if name in self._given:
            return self._given[name]
        function = next((function for function in FUNCTIONS if function.__name__ == name), None)
        return self._look_up(name) if function is None else function

    def _attribute(self, node: ast.Attribute) -> Any:
        owner = self.value(node.value)
        is_allowed = type(owner) in PLAIN and node.attr not in FORMATS
        if node.attr.startswith("_") or not (is_allowed or self._is_remote(owner)):
            raise ValueError(f"eval of the tests does not read .{node.attr} of {type(owner).__name__}")
        return getattr(owner, node.attr)

    def _call(self, node: ast.Call) -> Any:
        function = self.value(node.func)
        is_method = isinstance(node.func, ast.Attribute)  # allowed by ``_attribute``
        if not (is_method or any(function is allowed for allowed in FUNCTIONS) or self._is_remote(function)):
            raise ValueError(f"eval of the tests does not call a {type(function).__name__}")
        named = {str(keyword.arg): self.value(keyword.value) for keyword in node.keywords}
        return function(*map(self.value, node.args), **named)


def watch(own: set[str], files: tuple[str, ...]) -> None:
    """Refuse code from texts and pickles in the tests from now on, except from the strings of the tests.

    Args:
        own: see ``plan.strings_of``.
        files: those whose code calls functions of the tests.
    """

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "pickle.find_class":
            module, name = arguments
            if name not in PICKLED.get(module, ()):
                raise ValueError(f"the tests do not unpickle a {module}.{name}: it could run as code")
        elif event in ("compile", "marshal.loads", "marshal.load"):
            frame, text = sys._getframe(1), arguments[0]
            is_parser = frame.f_code.co_filename.endswith("sympy_parser.py")
            text = _parsed(frame) if is_parser else text
            text = text.decode(errors="replace") if isinstance(text, bytes) else text
            if is_parser and text.isidentifier():  # a symbol, as in ``subs("x", 2)``
                return
            if (is_parser or frame.f_code.co_filename in files) and text not in own:
                raise ValueError("the tests do not run a text of the program")

    sys.addaudithook(audit)


def _parsed(frame: Any) -> str:
    """The text from which sympy's parser has made the code that it is about to run; empty if it is unknown."""
    while frame and frame.f_code.co_name != "parse_expr":
        frame = frame.f_back
    text = frame.f_locals.get("s") if frame else None
    return text if type(text) is str else ""
