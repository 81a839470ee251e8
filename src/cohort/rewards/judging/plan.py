"""The tests of a row: how many there are, and how to run each. Planning does not need the program."""

from __future__ import annotations

import ast
import json
from collections import namedtuple

from . import guard

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITIONS = (*FUNCTIONS, ast.ClassDef)
UNREACHABLE = {"redirect_stdout", "redirect_stderr", "unittest.mock", "mock", "asyncio"}
"""Names whose effect would have to reach into the program's process."""
RUNS_TEXT = {"sympify", "S", "parse_expr", "lambdify", "marshal", "shelve", "runpy"}
RUNS_TEXT |= {"unsafe_load", "unsafe_load_all", "Loader", "CLoader", "UnsafeLoader", "CUnsafeLoader"}
"""Modules and functions that run a text as Python."""

Step = namedtuple("Step", ["counts", "run"])
Step.__doc__ = """A test, or a statement between tests: whether it counts as a test, and a function of the tests' names
that runs it. A test passes if it raises nothing."""


class UnclearError(ValueError):
    """The row does not say what is tested."""


def plan(task: dict[str, Any]) -> list[Step]:
    """The steps of a row's tests, in order.

    Args:
        task: either "tests": a list of programs, each of which is a test, or one program with several tests: each
            top-level statement that asserts or calls a function of the tests that does, each function named
            ``test...``, each method of that name, and ``check(candidate)``. Or "calls": pairs of arguments and expected
            result. "entry_point": the name of what is tested, or None.

    Raises:
        SyntaxError: the tests are not Python.
        UnclearError: a test has arguments without values, or no test would run any assertion.
    """
    entry = task.get("entry_point")
    if "calls" in task:
        return [_call_step(entry, arguments, expected) for arguments, expected in task["calls"]]
    if isinstance(task["tests"], list):
        return [_join(_plan_program(text, entry)) for text in task["tests"]]
    return _plan_program(task["tests"], entry)


def run_helpers(task: dict[str, Any], names: dict[str, Any]) -> None:
    """Define the functions that the tests have from the prompt."""
    _runner(*ast.parse(task.get("helpers", "")).body)(names)


def _join(steps: list[Step]) -> Step:
    def run(names: dict[str, Any]) -> None:
        for step in steps:
            step.run(names)

    return Step(True, run)


def _plan_program(text: str, entry: str | None) -> list[Step]:
    tree = ast.parse(text, "tests.py")
    _check_reach(tree)
    body: list[ast.stmt] = []
    guarded: list[ast.stmt] = []
    for statement in tree.body:
        is_guard = isinstance(statement, ast.If) and "__name__" in ast.dump(statement.test)
        for inner in statement.body if isinstance(statement, ast.If) and is_guard else [statement]:
            if not _is_main(inner):
                (guarded if is_guard else body).append(inner)
    definitions = {
        node.name: node
        for statement in [*body, *guarded]
        for node in _executed(statement)
        if isinstance(node, DEFINITIONS)
    }
    asserting = _asserting(definitions)
    if any(_counts(statement, asserting) for statement in guarded):
        body += guarded
    called = {name for statement in body for name in _called(_executed(statement))}
    steps = [Step(_counts(statement, asserting), _runner(statement)) for statement in body]
    # test functions and classes run after all statements, in the order of the file
    for definition in definitions.values():
        steps += _plan_definition(definition, definitions, called, entry)
    if any(step.counts for step in steps):
        return steps
    if any(_is_assert(node) for node in ast.walk(tree)):
        raise UnclearError("the tests assert only in functions that nothing calls")
    return [Step(True, _runner(*body, *guarded))]


def _check_reach(tree: ast.Module) -> None:
    """Refuse tests that patch or await something in their own process, where the program is not, and tests that may run
    a text of the program in their process. ``eval`` and ``pickle`` are allowed: see ``guard.py``."""
    for node in ast.walk(tree):
        found: str | None = None
        if names := imported(node):
            found = next((name for name in names if name in UNREACHABLE), None)
        elif isinstance(node, ast.Attribute):
            is_patch = isinstance(node.ctx, ast.Store) and ast.unparse(node.value) in ("sys", "builtins")
            found = ast.unparse(node) if node.attr in UNREACHABLE or is_patch else None
            names = [node.attr]
        elif isinstance(node, (ast.Await, ast.AsyncFor, ast.AsyncWith)):
            found = "await"
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("exec", "compile"):
            names = [] if node.args and isinstance(node.args[0], ast.Constant) else ["exec"]
        if found:
            raise UnclearError(f"the tests use {found}, which does not reach the program: it is in another process")
        if runs := next((name for name in names if name in RUNS_TEXT | {"exec"}), None):
            raise UnclearError(f"the tests use {runs}: a text of the program could run where its results are compared")


def missing_import(task: dict[str, Any]) -> str | None:
    """Why an import of the tests fails with any program; None if none does.

    An import under ``try`` or ``if`` may fail: with it, a program that raises ImportError would decide that the row has
    no score.
    """
    for text in texts_of(task):
        for node in _unconditional(ast.parse(text)):
            if (names := imported(node)) and "solution" not in names:
                try:
                    _runner(node)({"__name__": "tests"})
                except ImportError as error:
                    return f"{type(error).__name__}: {error}"
    return None


def imported(node: ast.AST) -> list[str | None]:
    """The modules and names that a statement imports; none for others."""
    if not isinstance(node, (ast.Import, ast.ImportFrom)):
        return []
    return [getattr(node, "module", None), *(alias.name for alias in node.names)]


def _unconditional(node: ast.AST) -> Iterator[Any]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.Try, ast.If)):
            yield child
            yield from _unconditional(child)


def texts_of(task: dict[str, Any]) -> list[str]:
    """The programs of a task's tests, with the functions that they have from the prompt."""
    tests = task.get("tests", [])
    return [*([tests] if isinstance(tests, str) else tests), *([task["helpers"]] if task.get("helpers") else [])]


def strings_of(task: dict[str, Any]) -> set[str]:
    """The strings that stand in the tests, except names: a program could return that of a variable, as of a key."""
    nodes = (node for text in texts_of(task) for node in ast.walk(ast.parse(text)))
    found = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {text for text in found if not text.strip().isidentifier()}


# -- the content of a test program -------------------------------------------------------------------------------------


def _executed(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run with a statement: not those inside functions and classes."""
    yield node
    if not isinstance(node, (*DEFINITIONS, ast.Lambda)):
        for child in ast.iter_child_nodes(node):
            yield from _executed(child)


def _is_main(statement: ast.stmt) -> bool:
    """Whether a statement is ``unittest.main()``, whose tests are found here instead."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and ast.unparse(call.func) in ("unittest.main", "pytest.main")


def _is_assert(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        return str(name).startswith("assert")
    return isinstance(node, ast.Assert)


def _asserting(definitions: dict[str, Any]) -> set[str]:
    """The names of functions and classes that assert, or that use others that do."""
    found = {name for name, node in definitions.items() if any(_is_assert(part) for part in ast.walk(node))}
    used = {name: {n.id for n in ast.walk(d) if isinstance(n, ast.Name)} for name, d in definitions.items()}
    while more := {name for name in used if name not in found and used[name] & found}:
        found |= more
    return found


def _called(nodes: Iterator[ast.AST]) -> set[str]:
    return {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}


def _counts(statement: ast.stmt, asserting: set[str]) -> bool:
    called = _called(_executed(statement))
    named = isinstance(statement, ast.Expr) and any(name.startswith(("test", "check")) for name in called)
    return named or bool(called & asserting) or any(_is_assert(node) for node in _executed(statement))


def _plan_definition(node: Any, definitions: dict[str, Any], called: set[str], entry: str | None) -> list[Step]:
    """The tests of a function or a class."""
    if isinstance(node, ast.ClassDef):
        bases = {ast.unparse(base) for other in definitions.values() for base in getattr(other, "bases", [])}
        is_mixin = not node.bases and not node.name.startswith("Test") and node.name in bases
        return [] if is_mixin else [_method_step(node.name, method) for method in _methods(node, definitions)]
    if node.name in called:
        return []
    if node.name == "check" and not entry:
        raise UnclearError("the tests define check(candidate): set the column entry_point")
    if not node.name.startswith("test") and node.name != "check":
        return []
    required = len(node.args.args) - len(node.args.defaults)
    if required <= (1 if entry and not node.decorator_list else 0) and not isinstance(node, ast.AsyncFunctionDef):
        return [_function_step(node.name, entry if required else None)]
    if any(node.name in _called(ast.walk(other)) for other in definitions.values() if other is not node):
        return []  # another function calls it with arguments
    raise UnclearError(
        f"the test function {node.name} must have no parameters, or one for the tested function (entry_point)"
    )


def _methods(node: ast.ClassDef, definitions: dict[str, Any]) -> list[str]:
    """The names of a class's test methods, inherited ones included."""
    found = []
    for base in node.bases:
        parent = definitions.get(ast.unparse(base))
        found += _methods(parent, definitions) if isinstance(parent, ast.ClassDef) else []
    for method in node.body:
        if isinstance(method, FUNCTIONS) and method.name.startswith(("test", "runTest")):
            if isinstance(method, ast.AsyncFunctionDef) or len(method.args.args) - len(method.args.defaults) > 1:
                raise UnclearError(
                    f"the test {node.name}.{method.name} must have no parameters but self, and not be async"
                )
            found.append(method.name)
    return list(dict.fromkeys(found))


# -- running a test ----------------------------------------------------------------------------------------------------


def _runner(*statements: ast.stmt) -> Callable[[dict[str, Any]], None]:
    code = compile(guard.guarded(ast.Module(list(statements), [])), "tests.py", "exec", dont_inherit=True)
    return lambda names: exec(code, names)


def _defined(names: dict[str, Any], name: str) -> Any:
    if name not in names:
        raise UnclearError(f"the definition of {name} did not run")
    return names[name]


def _evaluate(entry: str, names: dict[str, Any]) -> Any:
    """Evaluate an entry point in the program's names, whatever the tests or the built-ins define."""
    code = compile(entry, "entry_point", "eval", dont_inherit=True)
    return eval(code, {"__builtins__": {}, **names["__program__"]})


def _function_step(name: str, entry: str | None) -> Step:
    ast.parse(entry or name, "entry_point", "eval")

    def run(names: dict[str, Any]) -> None:
        _defined(names, name)(*([_evaluate(entry, names)] if entry else []))

    return Step(True, run)


def _method_step(name: str, method: str) -> Step:
    def run(names: dict[str, Any]) -> None:
        test_class = _defined(names, name)
        if hasattr(test_class, "setUpClass"):
            import unittest

            unittest.TestSuite([test_class(method)]).debug()  # ``debug`` raises where ``run`` would only record
        else:
            case = test_class()
            if set_up := getattr(case, "setup_method", None):
                takes_method = getattr(getattr(set_up, "__code__", None), "co_argcount", 0) > 1
                set_up(*([getattr(case, method)] if takes_method else []))
            getattr(case, method)()

    return Step(True, run)


def _call_step(entry: str | None, arguments: list[Any], expected: Any) -> Step:
    if not entry:
        raise UnclearError("calls need the name of the function: set entry_point")
    ast.parse(entry, "entry_point", "eval")

    def run(names: dict[str, Any]) -> None:
        if "." in entry or entry in names["__program__"]:
            function = _evaluate(entry, names)
        else:
            function = getattr(_evaluate("Solution", names)(), entry)
        result = _as_json(function(*arguments))
        if result != expected and not (isinstance(expected, list) and len(expected) == 1 and result == expected[0]):
            raise AssertionError(f"expected {expected!r:.100}, got {result!r:.100}")

    return Step(True, run)


def _as_json(value: Any) -> Any:
    """Convert tuples to lists and keys to strings, which is how expected results are given."""
    if isinstance(value, (list, tuple)):
        return [_as_json(item) for item in value]
    if isinstance(value, dict):
        return {
            json.dumps(key) if key is None or isinstance(key, bool) else str(key): _as_json(item)
            for key, item in value.items()
        }
    return value
