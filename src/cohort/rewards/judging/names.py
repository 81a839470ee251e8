"""Which names of the tests are the program's, and which the standard library's."""

from __future__ import annotations

import ast
import builtins
import contextlib
import symtable
import sys

from . import plan

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any


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
    entry = {"Solution": False} if "calls" in task else {}
    if task.get("entry_point"):
        tree = ast.parse(task["entry_point"], "entry_point", "eval")
        entry |= {node.id: False for node in ast.walk(tree) if isinstance(node, ast.Name)}
    used: dict[str, bool] = {}  # whether the tests assign the name
    defined: set[str] = set()
    trees = [ast.parse(text) for text in plan.texts_of(task)]
    for text in plan.texts_of(task):
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
        raise plan.UnclearError(f"the tests use {judging} without importing it")
    sources = _sources(free, trees, defined)
    others = [name for name in free if not (name in sources or hasattr(builtins, name))]
    imports = any("solution" in plan.imported(node) for tree in trees for node in ast.walk(tree))
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
    trees = [ast.parse(text) for text in plan.texts_of(task)]
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
    entry = {node.id for node in ast.walk(ast.parse(task.get("entry_point") or "None")) if isinstance(node, ast.Name)}
    wanted = [name for name, source in free_names(task) if not source and name not in entry]
    needed: dict[str, Any] = {}
    used: set[str] = set()
    while wanted:
        if (name := wanted.pop()) in functions and name not in needed:
            needed[name] = functions[name]
            found = {node.id for node in ast.walk(functions[name]) if isinstance(node, ast.Name)}
            wanted += found
            used |= found
    imports = [node for node in body if used & {(a.asname or a.name).split(".")[0] for a in _aliases(node)}]
    return "\n".join(map(ast.unparse, [*imports, *needed.values()]))


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
        yield [n.id for target in targets if target for n in ast.walk(target) if isinstance(n, ast.Name)], value


def _tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _tables(child)
