"""Which names of a row's tests are the program's."""

from __future__ import annotations

import ast
import builtins
import symtable
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any


def free_names(task: dict[str, Any]) -> list[tuple[str, bool]]:
    """The names that tests use and do not define, and whether each is a module of the standard library.

    They include the entry point, and names that the tests assign outside of functions: ``total = total([1])`` first
    uses the program's ``total``. Names of built-ins stand for the built-ins, so that a program that defines ``all``
    changes no test, unless there are no other names: then the tested function itself has the name of a built-in.
    """
    tests = task.get("tests", [])
    entry = {"Solution": False} if "calls" in task else {}
    if task.get("entry_point"):
        tree = ast.parse(task["entry_point"], "entry_point", "eval")
        entry |= {node.id: False for node in ast.walk(tree) if isinstance(node, ast.Name)}
    used: dict[str, bool] = {}  # whether the tests assign the name
    defined: set[str] = set()
    bare: set[str] = set()  # names that are also used other than as ``name.attribute``
    for text in [tests] if isinstance(tests, str) else tests:
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
        for node in ast.walk(ast.parse(text)):
            for child in () if isinstance(node, ast.Attribute) else ast.iter_child_nodes(node):
                if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Load):
                    bare.add(child.id)
    used = {name: assigned for name, assigned in used.items() if name not in defined and name not in entry}
    free = [name for name, assigned in used.items() if not assigned]
    wanted = [*entry, *(name for name in free if not hasattr(builtins, name))] or free
    wanted += [name for name, assigned in used.items() if assigned]
    return [(name, name in sys.stdlib_module_names and name not in bare and name not in entry) for name in wanted]


def _tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _tables(child)
