"""The tests of a row: how many there are, how to run each, and which of their names are the program's.

Planning does not need the program.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import json
import symtable
import sys
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
    for tree in trees_of(task):
        for node in _walk(tree, (ast.Try, ast.If)):
            if (names := imported(node)) and "solution" not in names:
                try:
                    _runner(node)({"__name__": "tests"})
                except ImportError as error:
                    return f"{type(error).__name__}: {error}"
    return None


def imported(node: ast.AST) -> list[str | None]:
    """The modules and names that a statement imports; none for others."""
    names = [alias.name for alias in _aliases(node)]
    return [getattr(node, "module", None), *names] if names else []


def texts_of(task: dict[str, Any]) -> list[str]:
    """The programs of a task's tests, with the functions that they have from the prompt."""
    tests = task.get("tests", [])
    return [*([tests] if isinstance(tests, str) else tests), *([task["helpers"]] if task.get("helpers") else [])]


def trees_of(task: dict[str, Any]) -> list[ast.Module]:
    """The syntax trees of ``texts_of``."""
    return [ast.parse(text) for text in texts_of(task)]


def strings_of(task: dict[str, Any]) -> set[str]:
    """The strings that stand in the tests, except names: a program could return that of a variable, as of a key."""
    nodes = (node for tree in trees_of(task) for node in ast.walk(tree))
    found = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {text for text in found if not text.strip().isidentifier()}


# -- the content of a test program -------------------------------------------------------------------------------------


def _walk(node: ast.AST, closed: tuple[type[ast.AST], ...]) -> Iterator[Any]:
    """A node and all within it, but nothing inside nodes of the closed kinds."""
    yield node
    if not isinstance(node, closed):
        for child in ast.iter_child_nodes(node):
            yield from _walk(child, closed)


def _executed(node: ast.AST) -> Iterator[Any]:
    """The nodes that run with a statement: not those inside functions and classes."""
    return _walk(node, (*DEFINITIONS, ast.Lambda))


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


# -- which names of the tests are the program's, and which the standard library's --------------------------------------


def _table(rows: dict[str, str]) -> dict[str, str]:
    return {name: f"{module}:{name}" for module, names in rows.items() for name in names.split()}


STANDARD = _table(
    {
        "collections": "Counter OrderedDict defaultdict deque",
        "copy": "deepcopy",
        "datetime": "date datetime timedelta",
        "decimal": "Decimal",
        "fractions": "Fraction",
        "math": "inf isclose isfinite isinf isnan nan pi tau",
        "random": "randint randrange uniform",
        "string": "ascii_letters ascii_lowercase ascii_uppercase punctuation",
        "unittest": "TestCase",
    }
)
"""Names of the standard library that tests use to make inputs and to judge results, often without importing them."""
STANDARD_OF_RESULTS = _table(
    {
        "functools": "reduce",
        "itertools": "accumulate chain combinations groupby islice permutations product starmap zip_longest",
        "math": "ceil cos exp fabs floor gcd hypot log log10 log2 prod sin sqrt tan trunc",
        "statistics": "mean median mode stdev",
    }
)
"""Names that are also the names of exercises. They are the standard library's where every call has a result of the
program among its arguments: ``floor(f(2))``, and not ``gcd(4, 6)``."""
PACKAGES = {"np": "numpy", "pd": "pandas"}
PACKAGES |= {name: name for name in ("numpy", "pandas", "pytest", "scipy", "sympy", "torch")}


def free_names(task: dict[str, Any]) -> list[tuple[str, str]]:
    """The names that tests use and do not define, and where each is from: "module", "module:name", or "": the program.

    They include the entry point, and names that the tests assign outside of functions: ``total = total([1])`` first
    uses the program's ``total``. Names of built-ins, of the standard library's modules, and those in the tables above
    are not the program's, so that a program that defines ``all`` or ``isclose`` changes no test, unless there are no
    other names: then the tested function itself has such a name.

    Raises:
        UnclearError: the tests neither define nor import a function ``assert...``: a program could define it.
    """
    entry = dict.fromkeys([*(["Solution"] if "calls" in task else []), *_entry_names(task)])
    used: dict[str, bool] = {}  # whether the tests assign the name
    defined: set[str] = set()
    trees = trees_of(task)
    for text in texts_of(task):
        module = symtable.symtable(text, "tests.py", "exec")
        for table in _tables(module):
            for symbol in table.get_symbols():
                name = symbol.get_name()
                if table is not module and not symbol.is_global():
                    continue
                if symbol.is_imported() or symbol.is_namespace():
                    defined.add(name)
                elif symbol.is_referenced() or symbol.is_assigned():
                    used[name] = used.get(name, False) or symbol.is_assigned()
    used = {name: assigned for name, assigned in used.items() if name not in defined and name not in entry}
    free = [name for name, assigned in used.items() if not assigned]
    if judging := next(
        (name for name in free if name.lower().startswith("assert") and name not in vars(builtins)), None
    ):
        raise UnclearError(f"the tests use {judging} without importing it")
    sources = _sources(free, trees, defined)
    others = [name for name in free if not (name in sources or hasattr(builtins, name))]
    imports = any("solution" in imported(node) for tree in trees for node in ast.walk(tree))
    if not (entry or others or imports):  # the tested function has the name of a built-in, or one of the tables
        sources = {name: source for name, source in sources.items() if ":" not in source}
        others = [name for name in free if name not in sources]
    wanted = [*entry, *others, *(name for name, assigned in used.items() if assigned)]
    return [*sources.items(), *((name, "") for name in wanted)]


def caught(task: dict[str, Any]) -> list[list[str]]:
    """What ``except`` clauses name with a dot: a name of the program, then attributes.

    >>> caught({"tests": "import solution as s\\ntry: f()\\nexcept (s.Err, Stack.Empty, OSError): pass"})
    [['Err'], ['Stack', 'Empty']]
    """
    trees = trees_of(task)
    modules: set[str] = set()
    given: dict[str, str] = {}
    found: list[list[str]] = []
    for node in (node for tree in trees for node in ast.walk(tree)):
        for alias in _aliases(node):
            if alias.name == "solution":
                modules.add(alias.asname or alias.name)
            elif getattr(node, "module", None) == "solution":
                given[alias.asname or alias.name] = alias.name
        if isinstance(node, ast.ExceptHandler) and node.type:
            kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            found += [ast.unparse(kind).split(".") for kind in kinds if isinstance(kind, ast.Attribute)]
    found = [parts[1:] if parts[0] in modules else [given.get(parts[0], parts[0]), *parts[1:]] for parts in found]
    return [parts for parts in found if all(part.isidentifier() for part in parts)]


def helpers_of(prompt: str, task: dict[str, Any]) -> str:
    """The functions of a prompt that the tests use, and that a program that continues the prompt could replace.

    The last function of the prompt is the one to be continued, and one without a body is a task as well.
    """
    body: list[Any] = []
    for text in (prompt, f"{prompt}\n    pass"):
        with contextlib.suppress(SyntaxError, ValueError):
            body = body or ast.parse(text).body
    functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef) and node is not body[-1]}
    functions = {name: node for name, node in functions.items() if not all(map(_is_empty, node.body))}
    entry = _entry_names(task)
    wanted = [name for name, source in free_names(task) if not source and name not in entry]
    needed: dict[str, Any] = {}
    while wanted:
        if (name := wanted.pop()) in functions and name not in needed:
            needed[name] = functions[name]
            wanted += _names_in(functions[name])
    used = {name for node in needed.values() for name in _names_in(node)}
    imports = [node for node in body if used & {(a.asname or a.name).split(".")[0] for a in _aliases(node)}]
    return "\n".join(map(ast.unparse, [*imports, *needed.values()]))


def _names_in(tree: ast.AST) -> list[str]:
    return list(dict.fromkeys(node.id for node in ast.walk(tree) if isinstance(node, ast.Name)))


def _entry_names(task: dict[str, Any]) -> list[str]:
    return _names_in(ast.parse(task.get("entry_point") or "None", "entry_point", "eval"))


def _aliases(node: ast.AST) -> list[ast.alias]:
    return node.names if isinstance(node, (ast.Import, ast.ImportFrom)) else []


def _is_empty(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Pass) or (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    )


def _sources(free: list[str], trees: list[ast.Module], defined: set[str]) -> dict[str, str]:
    """Where the free names that are not the program's are from."""
    bare = {  # names that are also used other than as ``name.attribute``
        child.id
        for tree in trees
        for node in ast.walk(tree)
        for child in (() if isinstance(node, ast.Attribute) else ast.iter_child_nodes(node))
        if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Load)
    }
    found: dict[str, str] = {}
    for name in free:
        if name not in bare and (name in sys.stdlib_module_names or name in PACKAGES):
            found[name] = PACKAGES.get(name, name)
        elif name in STANDARD:
            found[name] = STANDARD[name]
        elif name in STANDARD_OF_RESULTS and all(_takes_results(name, tree, defined) for tree in trees):
            found[name] = STANDARD_OF_RESULTS[name]
    return found


def _takes_results(name: str, tree: ast.Module, defined: set[str]) -> bool:
    """Whether every call of a name in the tests has a result of the program among its arguments."""
    harmless = {*vars(builtins), *STANDARD, *STANDARD_OF_RESULTS, *defined}
    bound = [(targets, value) for node in ast.walk(tree) for targets, value in _bindings(node)]
    harmless |= {target for targets, _ in bound for target in targets}
    results: set[str] = set()

    def is_result(node: ast.AST) -> bool:
        for part in ast.walk(node):
            root: Any = part.func if isinstance(part, ast.Call) else None
            while isinstance(root, (ast.Attribute, ast.Subscript, ast.Call)):
                root = root.func if isinstance(root, ast.Call) else root.value
            if isinstance(root, ast.Name) and root.id not in harmless:
                return True
            if isinstance(part, ast.Name) and part.id in results:
                return True
        return False

    while more := {t for targets, value in bound if is_result(value) for t in targets} - results:
        results |= more
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == name]
    return all(any(is_result(argument) for argument in call.args) for call in calls)


def _bindings(node: Any) -> Iterator[tuple[list[str], ast.AST]]:
    """The names that a node assigns, with the value."""
    value = getattr(node, "iter", None) or getattr(node, "context_expr", None) or getattr(node, "value", None)
    targets = getattr(node, "targets", None) or [getattr(node, "target", getattr(node, "optional_vars", None))]
    if isinstance(value, ast.AST):
        yield [name for target in targets if target for name in _names_in(target)], value


def _tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _tables(child)
