"""What a row's tests are: how many, and how each is run. Nothing of the program is needed to say so."""

from __future__ import annotations

import ast

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITIONS = (*FUNCTIONS, ast.ClassDef)
ELSEWHERE = {"redirect_stdout", "redirect_stderr", "unittest.mock", "mock", "asyncio"}
"""What would have to reach into the program's process."""


class UnclearError(ValueError):
    """What is to be tested cannot be told from the row."""


class Step:
    """A test, or what stands between tests.

    Args:
        counts: whether it is a test: it passes when it raises nothing.
        run: run it, given the tests' names.
    """

    def __init__(self, counts: bool, run: Callable[[dict[str, Any]], None]) -> None:
        self.counts = counts
        self.run = run


def plan(task: dict[str, Any]) -> list[Step]:
    """The steps of a row's tests, in order.

    Args:
        task: "tests": a list of programs, each a test; or one program, in which each statement at the top is a test
            that asserts or calls a function of the tests' that does, each function named ``test...``, each method of
            that name of a class, and ``check(candidate)``. Or "calls": pairs of arguments and the expected result.
            "entry_point": the name of what is tested, or None.

    Raises:
        SyntaxError: it is no Python.
        UnclearError: a test needs arguments that there are none for, or nothing would run what asserts.
    """
    entry = task.get("entry_point")
    if "calls" in task:
        return [_call_step(entry, arguments, expected) for arguments, expected in task["calls"]]
    if isinstance(task["tests"], list):
        return [_as_one(_of_program(text, entry)) for text in task["tests"]]
    return _of_program(task["tests"], entry)


def _as_one(steps: list[Step]) -> Step:
    def run(names: dict[str, Any]) -> None:
        for step in steps:
            step.run(names)

    return Step(True, run)


def _of_program(text: str, entry: str | None) -> list[Step]:
    tree = ast.parse(text, "tests.py")
    _see_that_it_is_here(tree)
    body: list[ast.stmt] = []
    guarded: list[ast.stmt] = []
    for statement in tree.body:
        is_guard = isinstance(statement, ast.If) and "__name__" in ast.dump(statement.test)
        for inner in statement.body if isinstance(statement, ast.If) and is_guard else [statement]:
            if not _is_main(inner):
                (guarded if is_guard else body).append(inner)
    definitions = {d.name: d for statement in [*body, *guarded] for d in _definitions(statement)}
    asserting = _asserting(definitions)
    if any(_counts(statement, asserting) for statement in guarded):
        body += guarded
    called = {name for statement in body for name in _called(_live(statement))}
    steps = [Step(_counts(statement, asserting), _runner(statement)) for statement in body]
    # functions and classes are tests after all statements have run, in the order of the file
    for definition in definitions.values():
        steps += _of_definition(definition, definitions, called, entry)
    if any(step.counts for step in steps):
        return steps
    if any(_is_assert(node) for node in ast.walk(tree)):
        raise UnclearError("the tests assert only in functions that nothing calls")
    return [Step(True, _runner(*body, *guarded))]


def _see_that_it_is_here(tree: ast.Module) -> None:
    """What tests change in their own process, or await there, does not happen in the program's."""
    for node in ast.walk(tree):
        found: str | None = None
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            module = getattr(node, "module", None)
            found = next((n for n in [module, *(alias.name for alias in node.names)] if n in ELSEWHERE), None)
        elif isinstance(node, ast.Attribute):
            changed = isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name)
            if node.attr in ELSEWHERE or (changed and ast.unparse(node.value) in ("sys", "builtins")):
                found = ast.unparse(node)
        elif isinstance(node, (ast.Await, ast.AsyncFor, ast.AsyncWith)):
            found = "await"
        if found:
            raise UnclearError(f"the tests use {found}, which does not reach the program: it is in another process")


# -- what is in a program of tests -------------------------------------------------------------------------------------


def _live(node: ast.AST) -> Iterator[ast.AST]:
    """What runs where it stands: not the insides of functions and classes."""
    yield node
    if not isinstance(node, (*DEFINITIONS, ast.Lambda)):
        for child in ast.iter_child_nodes(node):
            yield from _live(child)


def _definitions(statement: ast.stmt) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    for node in _live(statement):
        if isinstance(node, DEFINITIONS):
            yield node


def _is_main(statement: ast.stmt) -> bool:
    """``unittest.main()``: the tests that it would find are found here."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and ast.unparse(call.func) in ("unittest.main", "pytest.main")


def _is_assert(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        return str(name).startswith("assert")
    return isinstance(node, ast.Assert)


def _asserting(definitions: dict[str, Any]) -> set[str]:
    """The functions and classes that assert, or use others that do."""
    found = {name for name, node in definitions.items() if any(_is_assert(part) for part in ast.walk(node))}
    used = {name: {n.id for n in ast.walk(d) if isinstance(n, ast.Name)} for name, d in definitions.items()}
    while more := {name for name in used if name not in found and used[name] & found}:
        found |= more
    return found


def _called(nodes: Iterator[ast.AST]) -> set[str]:
    return {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}


def _counts(statement: ast.stmt, asserting: set[str]) -> bool:
    nodes = list(_live(statement))
    called = _called(iter(nodes))
    named = isinstance(statement, ast.Expr) and any(name.startswith(("test", "check")) for name in called)
    return named or bool(called & asserting) or any(_is_assert(node) for node in nodes)


def _of_definition(
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef,
    definitions: dict[str, Any],
    called: set[str],
    entry: str | None,
) -> list[Step]:
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
    fits = required <= (1 if entry and not node.decorator_list else 0) and not isinstance(node, ast.AsyncFunctionDef)
    if not fits and any(node.name in _called(ast.walk(other)) for other in definitions.values() if other is not node):
        return []  # others hand it what it takes
    if not fits:
        raise UnclearError(f"the test function {node.name} must take nothing, or the tested function (entry_point)")
    return [_function_step(node.name, entry if required else None)]


def _methods(node: ast.ClassDef, definitions: dict[str, Any]) -> list[str]:
    """The names of a class's tests, those of its bases among them."""
    found = []
    for base in node.bases:
        above = definitions.get(ast.unparse(base))
        found += _methods(above, definitions) if isinstance(above, ast.ClassDef) else []
    for method in node.body:
        if isinstance(method, FUNCTIONS) and method.name.startswith(("test", "runTest")):
            if isinstance(method, ast.AsyncFunctionDef) or len(method.args.args) - len(method.args.defaults) > 1:
                raise UnclearError(f"the test {node.name}.{method.name} must take nothing but self, and not be async")
            found.append(method.name)
    return list(dict.fromkeys(found))


# -- how each is run ---------------------------------------------------------------------------------------------------


def _runner(*statements: ast.stmt) -> Callable[[dict[str, Any]], None]:
    code = compile(ast.Module(list(statements), []), "tests.py", "exec", dont_inherit=True)
    return lambda names: exec(code, names)


def _defined(names: dict[str, Any], name: str) -> Any:
    if name not in names:  # it stood in a branch that was not taken
        raise UnclearError(f"the tests do not define {name} after all")
    return names[name]


def _program(entry: str, names: dict[str, Any]) -> Any:
    """What the program has for an entry point, whatever the tests or the built-ins have of that name."""
    code = compile(entry, "entry_point", "eval", dont_inherit=True)
    return eval(code, {"__builtins__": {}, **names["__program__"]})


def _function_step(name: str, entry: str | None) -> Step:
    if entry:
        ast.parse(entry, "entry_point", "eval")

    def run(names: dict[str, Any]) -> None:
        _defined(names, name)(*([_program(entry, names)] if entry else []))

    return Step(True, run)


def _method_step(kind: str, method: str) -> Step:
    def run(names: dict[str, Any]) -> None:
        if hasattr(_defined(names, kind), "setUpClass"):
            import unittest

            unittest.TestSuite([names[kind](method)]).debug()  # raises, where run() would only note it
        else:
            case = names[kind]()
            set_up = getattr(case, "setup_method", None)
            if set_up:
                takes = getattr(set_up, "__code__", None)
                set_up(*([getattr(case, method)] if takes and takes.co_argcount > 1 else []))
            getattr(case, method)()

    return Step(True, run)


def _call_step(entry: str | None, arguments: list[Any], expected: Any) -> Step:
    if not entry:
        raise UnclearError("calls need the name of the function: set entry_point")
    ast.parse(entry, "entry_point", "eval")

    def run(names: dict[str, Any]) -> None:
        program = names["__program__"]
        if "." in entry or entry in program:
            function = _program(entry, names)
        else:
            function = getattr(_program("Solution", names)(), entry)
        got = _as_json(function(*arguments))
        if got != expected and not (isinstance(expected, list) and len(expected) == 1 and got == expected[0]):
            raise AssertionError(f"expected {expected!r:.100}, got {got!r:.100}")

    return Step(True, run)


def _as_json(value: Any) -> Any:
    """Tuples as lists and keys as texts, as the expected results have them."""
    if isinstance(value, (list, tuple)):
        return [_as_json(item) for item in value]
    if isinstance(value, dict):
        words = {True: "true", False: "false", None: "null"}
        return {
            words[key] if key is None or isinstance(key, bool) else str(key): _as_json(item)
            for key, item in value.items()
        }
    return value
