"""Keep what the program returns from running as code, and from reading, in the process that compares results.

``eval`` of the tests computes with plain data, and calls the program in its own process. Templates of the program fill
in what they are given, and read no attributes of the tests' objects. Unpickling makes plain data only. An audit hook,
which cannot be removed, refuses what goes around both.
"""

from __future__ import annotations

import _string  # type: ignore[import-not-found]
import ast
import operator
import os
import string
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
READS = {*FORMATS, "vformat", "substitute", "safe_substitute", "query", "eval"}
"""Methods that fill in or run a text."""
READ, FILL = "_cohort_read_", "_cohort_fill_"
"""What the code of the tests calls in the place of ``value.format``, and of ``template % locals()``."""
VARIABLES = {"globals", "locals", "vars"}
INSIDES = {"__globals__", "__builtins__", "__code__", "__closure__", "__dict__", "__self__", "__func__"}
INSIDES |= {"__subclasses__", "f_globals", "f_locals", "f_back", "f_builtins"}
INSIDES |= {"tb_frame", "gi_frame", "cr_frame", "ag_frame"}
"""Attributes by which an object leads to everything."""
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
            code = compile(guarded(ast.parse(source.strip(), mode="eval")), "tests.py", "eval")
            return eval(code, found, caller.f_locals if local is None and names is None else local)
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


def guarded(tree: Any) -> Any:
    """The code of tests that calls ``READ`` and ``FILL`` of ``readers`` where a text could read the tests' objects."""
    return ast.fix_missing_locations(_Guarded().visit(tree))


class _Guarded(ast.NodeTransformer):
    def visit_Attribute(self, node: ast.Attribute) -> Any:
        self.generic_visit(node)
        if node.attr not in READS or not isinstance(node.ctx, ast.Load):
            return node
        return ast.copy_location(_call(READ, node.value, ast.Constant(node.attr)), node)

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        calls = [part.func for part in ast.walk(node.right) if isinstance(part, ast.Call)]
        self.generic_visit(node)
        if isinstance(node.op, ast.Mod) and any(isinstance(one, ast.Name) and one.id in VARIABLES for one in calls):
            return ast.copy_location(_call(FILL, node.left, node.right), node)
        return node


def _call(name: str, *arguments: Any) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), list(arguments), [])


def readers(own: set[str], is_remote: Callable[[Any], bool]) -> dict[str, Any]:
    """Built-ins for the tests: what ``guarded`` makes them call, and a ``getattr`` that leads nowhere else.

    A template that stands in the tests does what it does anywhere. Any other may be the program's: it is filled in with
    what the call passes, but reads attributes of plain data and of the program's objects only, and never a variable of
    the tests.

    Args:
        own: the strings of the tests; see ``plan.strings_of``.
        is_remote: whether a value stands for one in the program.
    """
    fields = _Fields(is_remote)

    def fill_in(template: Any, arguments: tuple[Any, ...], names: Mapping[str, Any]) -> str:
        if type(template) is str and template in own:
            return template.format(*arguments, **names)
        return fields.vformat(str.__str__(template), arguments, _passed(names, sys._getframe(2)))

    def read(value: Any, name: str, *default: Any) -> Any:
        kind = value if isinstance(value, type) else type(value)
        if name in INSIDES:
            raise ValueError(f"the tests do not read .{name}: a text of the program could name it")
        if is_remote(value) and not isinstance(value, str):
            return getattr(value, name, *default)
        if issubclass(kind, (str, string.Formatter)) and name in (*FORMATS, "vformat"):
            takes_names = name != "format"

            def filled(*arguments: Any, **names: Any) -> str:
                template, *rest = arguments
                if name == "vformat":
                    return fill_in(template, tuple(rest[0]), rest[1])
                return fill_in(template, () if takes_names else tuple(rest), rest[0] if takes_names else names)

            bound = isinstance(value, str)
            return (lambda *arguments, **names: filled(value, *arguments, **names)) if bound else filled
        if issubclass(kind, string.Template) and name.endswith("substitute") and value.template not in own:
            return lambda names={}, /, **more: getattr(value, name)(_passed({**names, **more}, sys._getframe(1)))
        if kind.__module__.partition(".")[0] == "pandas" or getattr(value, "__name__", "") == "pandas":
            found = getattr(value, name, *default)

            def run(text: Any, *arguments: Any, **named: Any) -> Any:
                if text not in own:
                    raise ValueError("the tests do not run a text of the program")
                return found(text, *arguments, **named)

            return run if name in ("query", "eval") else found
        return getattr(value, name, *default)

    def fill(template: Any, names: Any) -> Any:
        if isinstance(template, str) and template not in own and isinstance(names, dict):
            return str.__str__(template) % _passed(names, sys._getframe(1))
        return template % names

    return {READ: read, FILL: fill, "getattr": read}


class _Fields(string.Formatter):
    """Fills in a template of the program."""

    def __init__(self, is_remote: Callable[[Any], bool]) -> None:
        self._is_remote = is_remote

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        """The value of a field. Raises ``ValueError`` if it would read the tests' objects."""
        first, rest = _string.formatter_field_name_split(field_name)
        value = self.get_value(first, args, kwargs)
        for is_attribute, name in rest:
            if is_attribute and (name.startswith("_") or not (type(value) in PLAIN or self._is_remote(value))):
                raise ValueError(f"a template of the program does not read .{name} of {type(value).__name__}")
            value = getattr(value, name) if is_attribute else value[name]
        return value, first


def watch(own: set[str], files: tuple[str, ...]) -> None:
    """Refuse code from texts and pickles in the tests from now on, except from the strings of the tests.

    Args:
        own: see ``plan.strings_of``.
        files: those whose code calls functions of the tests.
    """

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], (str, bytes)):
            if os.path.realpath(os.fsdecode(arguments[0])).startswith("/proc/"):  # the tests themselves, among others
                raise ValueError("the tests do not read /proc: a text of the program could name it")
        elif event == "pickle.find_class":
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
