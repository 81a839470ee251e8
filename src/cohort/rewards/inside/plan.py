"""What a row's tests are: how many, and how each is run. Nothing of the program is needed to say so."""

from __future__ import annotations

import ast
import builtins
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


class UnclearError(ValueError):
    """What is to be tested cannot be told from the row."""


class Step:
    """A test, or what stands between tests.

    Args:
        counts: whether it is a test: it passes when it raises nothing.
        tree: its code, for the names in it.
        run: run it, given the tests' names.
    """

    def __init__(self, counts: bool, tree: ast.AST, run: Callable[[dict[str, Any]], None]) -> None:
        self.counts = counts
        self.tree = tree
        self.run = run


def plan(task: dict[str, Any]) -> list[Step]:
    """The steps of a row's tests, in order.

    Args:
        task: "tests": a list of programs, each a test; or one program, in which each statement at the top with an
            ``assert`` is a test, each function named ``test...``, each method of that name of a class, and
            ``check(candidate)``. Or "calls": pairs of arguments and the expected result. "entry_point": the name of
            what is tested, or None.

    Raises:
        SyntaxError: it is no Python.
        UnclearError: a test needs arguments that there are none for.
    """
    entry = task.get("entry_point")
    if "calls" in task:
        return [_call_step(entry, arguments, expected) for arguments, expected in task["calls"]]
    if isinstance(task["tests"], list):
        trees = [ast.parse(text, f"test {number}") for number, text in enumerate(task["tests"], 1)]
        return [Step(True, tree, _runner(tree)) for tree in trees]
    tree = ast.parse(task["tests"], "tests.py")
    called = {
        node.func.id
        for statement in tree.body
        if isinstance(statement, ast.Expr)
        for node in ast.walk(statement)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    steps = [step for statement in tree.body for step in _of_statement(statement, called, entry)]
    if not any(step.counts for step in steps):
        steps = [Step(True, tree, _runner(tree))]
    # functions and classes are tests after all statements have run, in the order of the file
    return [s for s in steps if not isinstance(s.tree, ast.Expression)] + [
        s for s in steps if isinstance(s.tree, ast.Expression)
    ]


def _of_statement(statement: ast.stmt, called: set[str], entry: str | None) -> list[Step]:
    if isinstance(statement, ast.If) and "__name__" in ast.dump(statement.test):
        return []
    module = ast.Module([statement], [])
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
        steps = [Step(False, module, _runner(module))]
        name = statement.name
        if name not in called and (name.startswith("test") or (name == "check" and entry)):
            steps.append(_function_step(statement, entry))
        elif name == "check" and not entry and name not in called:
            raise UnclearError("the tests define check(candidate): set the column entry_point")
        return steps
    if isinstance(statement, ast.ClassDef):
        methods = [m.name for m in statement.body if isinstance(m, ast.FunctionDef) and m.name.startswith("test")]
        return [Step(False, module, _runner(module)), *(_method_step(statement.name, method) for method in methods)]
    is_call = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
    tests = is_call and any(isinstance(n, ast.Name) and n.id.startswith(("test", "check")) for n in ast.walk(statement))
    has_assert = any(isinstance(node, ast.Assert) for node in ast.walk(statement))
    return [Step(tests or has_assert, module, _runner(module))]


def _runner(tree: ast.Module) -> Callable[[dict[str, Any]], None]:
    code = compile(tree, "tests.py", "exec")
    return lambda names: exec(code, names)


def _function_step(function: ast.FunctionDef | ast.AsyncFunctionDef, entry: str | None) -> Step:
    required = len(function.args.args) - len(function.args.defaults)
    if required > 1 or (required == 1 and not entry) or isinstance(function, ast.AsyncFunctionDef):
        raise UnclearError(f"the test function {function.name} must take nothing, or the tested function (entry_point)")
    tree = ast.parse(entry or "None", "entry_point", "eval")
    code = compile(tree, "entry_point", "eval")

    def run(names: dict[str, Any]) -> None:
        names[function.name](*([eval(code, names)] if required else []))

    return Step(True, tree, run)


def _method_step(kind: str, method: str) -> Step:
    def run(names: dict[str, Any]) -> None:
        if hasattr(names[kind], "setUpClass"):
            import unittest

            result = unittest.TestResult()
            unittest.TestSuite([names[kind](method)]).run(result)
            if not result.wasSuccessful():
                raise AssertionError((result.failures + result.errors)[0][1][-200:])
        else:
            case = names[kind]()
            getattr(case, "setup_method", lambda *_: None)(getattr(case, method))
            getattr(case, method)()

    return Step(True, ast.parse("None", mode="eval"), run)


def _call_step(entry: str | None, arguments: list[Any], expected: Any) -> Step:
    if not entry:
        raise UnclearError("calls need the name of the function: set entry_point")
    name = entry.rpartition(".")[2]
    tree = ast.parse(entry if "." in entry else f"({entry}, Solution)", "entry_point", "eval")

    def run(names: dict[str, Any]) -> None:
        if "." in entry:
            function = eval(entry, names)
        else:
            function = names[name] if name in names else getattr(names["Solution"](), name)
        got = _as_json(function(*arguments))
        if got != expected and not (isinstance(expected, list) and len(expected) == 1 and got == expected[0]):
            raise AssertionError(f"expected {expected!r:.100}, got {got!r:.100}")

    return Step(True, tree, run)


def _as_json(value: Any) -> Any:
    """Tuples as lists, as the expected results have them."""
    if isinstance(value, (list, tuple)):
        return [_as_json(item) for item in value]
    if isinstance(value, dict):
        return {key: _as_json(item) for key, item in value.items()}
    return value


def free_names(steps: list[Step]) -> list[tuple[str, bool]]:
    """The names that tests use and do not define, and whether each is a module of the standard library.

    Names of built-ins are the built-ins, so that a program that defines ``all`` changes no test; unless nothing else is
    left, when the tested function itself must be named so.
    """
    used: dict[str, bool] = {}  # whether it is only ever used as ``name.attribute``
    defined: set[str] = set()
    for node in (node for step in steps for node in ast.walk(step.tree)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            used.setdefault(node.value.id, True)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Load) and not isinstance(node, ast.Attribute):
                used[child.id] = False
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            defined.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.alias):
            defined.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            defined.add(node.name)
    free = {name: only for name, only in used.items() if name not in defined}
    entry = {
        n.id for s in steps if isinstance(s.tree, ast.Expression) for n in ast.walk(s.tree) if isinstance(n, ast.Name)
    }
    others = {name: only for name, only in free.items() if name in entry or not hasattr(builtins, name)}
    wanted = others or free
    return [(name, only and name in sys.stdlib_module_names) for name, only in wanted.items()]
