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

    A name that the tests only give a value to, outside of functions, is among them: ``total = total([1])`` first uses
    the program's. The entry point always is. Names of built-ins are the built-ins, so that a program that defines
    ``all`` changes no test; unless nothing else is left, when the tested function itself must be named so.
    """
    texts = [] if "calls" in task else [task["tests"]] if isinstance(task["tests"], str) else task["tests"]
    entry = {"Solution": False} if "calls" in task else {}
    if task.get("entry_point"):
        tree = ast.parse(task["entry_point"], "entry_point", "eval")
        entry |= {node.id: False for node in ast.walk(tree) if isinstance(node, ast.Name)}
    used: dict[str, bool] = {}  # whether the tests give it a value
    defined: set[str] = set()
    bare: set[str] = set()  # not only ever used as ``name.attribute``
    for text in texts:
        whole = symtable.symtable(text, "tests.py", "exec")
        for table in _tables(whole):
            for symbol in table.get_symbols():
                name = symbol.get_name()
                if table is not whole and not symbol.is_global():
                    continue
                if symbol.is_imported() or symbol.is_namespace():
                    defined.add(name)
                elif symbol.is_referenced() or symbol.is_assigned():
                    used[name] = used.get(name, False) or symbol.is_assigned()
        for node in ast.walk(ast.parse(text)):
            for child in () if isinstance(node, ast.Attribute) else ast.iter_child_nodes(node):
                if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Load):
                    bare.add(child.id)
    used = {name: given for name, given in used.items() if name not in defined}
    free = [name for name, given in used.items() if not given and name not in entry]
    wanted = [*entry, *(name for name in free if not hasattr(builtins, name))] or free
    wanted += [name for name, given in used.items() if given and name not in entry]
    is_module = {name for name in wanted if name in sys.stdlib_module_names and name not in bare and name not in entry}
    return [(name, name in is_module) for name in wanted]


def _tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _tables(child)
