"""A hash of a user's code, which tells whether a reward function or a tool has changed since a run began.

What counts is the source that a function can reach: itself, the names of its module that it uses, and the modules
beside it that it imports. Comments, formatting and unrelated functions do not count. Attributes of objects, names that
are made up at run time, and files that the code reads are not seen.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import json
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cohort.calls import partial_layers
from cohort.config import hide_secrets
from cohort.plugins import file_modules

STANDARD_LIBRARY = Path(inspect.__file__).resolve().parent
UNKNOWN = "unknown"
"""The hash of code without a source, as of a function typed into an interpreter."""


def code_hash(function: Callable[..., Any]) -> str:
    """A hash of a function's source and of what ``functools.partial`` binds; of an object, of its class.

    Code of Cohort itself counts by its name.
    """
    layers = partial_layers(function)
    inner = inspect.unwrap(layers[-1])
    owner = inner if hasattr(inner, "__qualname__") else type(inner)
    bound = [[_plain(layer.args), _plain(layer.keywords)] for layer in layers if isinstance(layer, partial)]
    return _hashed(_source(owner), hide_secrets(bound))  # a new key is not new code


def named_code_hash(spec: str) -> str:
    """The hash of a function named in the settings: "module:function" or "file.py:function"."""
    source, _, name = spec.rpartition(":")
    if source.endswith(".py"):
        path = str(Path(source).expanduser().resolve())
        source = next((name for name, (file, _) in file_modules().items() if file == path), "")
    return _hashed(_reached(source, name), []) if source else UNKNOWN


def _hashed(found: Any, bound: Any) -> str:
    return UNKNOWN if found is None else hashlib.sha256(json.dumps([found, bound]).encode()).hexdigest()[:12]


def _plain(value: Any) -> Any:
    """A bound value in types of JSON; of anything else, its type's name."""
    try:
        return json.loads(json.dumps(value, sort_keys=True))
    except (TypeError, ValueError):
        return type(value).__name__


def _source(owner: Any) -> Any:
    """The source that a function or class reaches; None if it has none."""
    if str(owner.__module__).partition(".")[0] == "cohort":
        return f"{owner.__module__}:{owner.__qualname__}"
    found = _reached(str(owner.__module__), owner.__qualname__.partition(".")[0])
    if found is None:
        with suppress(OSError, TypeError, SyntaxError):  # a cell of a notebook
            return [ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(owner))))]
    return found


def _reached(name: str, first: str) -> list[str] | None:
    """The statements that a name of a module leads to, sorted; None if they cannot be read."""
    module = _module(name, _path(name))
    if module is None or (first not in module.bound and name == "__main__"):
        return None
    reached = _Reached(module)
    reached.visit(module, first) if first in module.bound else reached.visit_all(module)  # a lambda has no name
    return sorted(reached.all().values())


@dataclass(frozen=True, slots=True)
class _Module:
    """The source of a module: what binds each name at its top level, and the statements that bind none."""

    name: str
    package: str
    path: Path
    bound: dict[str, list[ast.stmt]]
    others: list[ast.stmt]


def _path(name: str) -> Path | None:
    """The file of a module; None if it has none, or there is no such module. Of modules that are not loaded, only
    top-level ones are found: looking for others would import their package."""
    if name in file_modules():
        return Path(file_modules()[name][0])
    file = getattr(sys.modules.get(name), "__file__", None)
    if name not in sys.modules and "." not in name:
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            return None
        file = spec.origin if spec else None
    return Path(file).resolve() if file and str(file).endswith(".py") else None


def _module(name: str, path: Path | None) -> _Module | None:
    """A module's source; None if it cannot be read."""
    if path is None:
        return None
    try:
        text = file_modules()[name][1] if name in file_modules() else path.read_text(encoding="utf-8")
        body = ast.parse(text).body
    except (OSError, UnicodeDecodeError, SyntaxError):
        return None
    bound: dict[str, list[ast.stmt]] = {}
    others = []
    for statement in body:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue  # the docstring
        if isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test):
            continue
        names = set(bindings(statement))
        for found in names:
            bound.setdefault(found, []).append(statement)
        if not names and name != "__main__":  # a script's own statements are its training
            others.append(statement)
    package = getattr(sys.modules.get(name), "__package__", None) or ""
    return _Module(name, package, path, bound, others)


def bindings(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement at a module's top level binds."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
        return
    for node in ast.walk(statement):
        if isinstance(node, ast.alias):
            yield node.asname or node.name.partition(".")[0]
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name


class _Reached:
    """The statements that names lead to, over the modules in one folder or package."""

    def __init__(self, first: _Module) -> None:
        self._sources: dict[tuple[str, int, int], str] = {}
        """By module and place, so that each statement counts once. The key does not count."""
        self._waiting: list[tuple[_Module, ast.stmt]] = []
        self._root = first.name.partition(".")[0]
        self._folder = None if _installed(first.path) else first.path.parent
        self._modules: dict[str, _Module | None] = {first.name: first}

    def visit(self, module: _Module, name: str) -> None:
        """Add what binds a name, and what that uses."""
        self._waiting += [(module, statement) for statement in (*module.bound.get(name, ()), *module.others)]

    def all(self) -> dict[tuple[str, int, int], str]:
        """The source of every statement that is reached."""
        while self._waiting:
            module, statement = self._waiting.pop()
            if (key := (module.name, statement.lineno, statement.col_offset)) not in self._sources:
                self._sources[key] = ast.unparse(statement)
                self._follow(module, statement)
        return self._sources

    def _follow(self, module: _Module, statement: ast.stmt) -> None:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name):
                self.visit(module, node.id)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    self.visit_all(self._local(alias.name))
            elif isinstance(node, ast.ImportFrom):
                self._from(module, node)

    def _from(self, module: _Module, node: ast.ImportFrom) -> None:
        try:
            source = importlib.util.resolve_name("." * node.level + (node.module or ""), module.package or None)
        except ImportError:
            return
        found = self._local(source)
        for alias in node.names:
            if found is not None and alias.name in found.bound:
                self.visit(found, alias.name)
            elif found is not None and alias.name == "*":
                self.visit_all(found)
            else:
                self.visit_all(self._local(f"{source}.{alias.name}"))  # a module of the package

    def visit_all(self, module: _Module | None) -> None:
        """Add all of a module: which of its names are used is not known."""
        if module is not None:
            for statements in (*module.bound.values(), module.others):
                self._waiting += [(module, statement) for statement in statements]

    def _local(self, name: str) -> _Module | None:
        """A module, if it is the user's code: of the first one's package, or beside it and not installed."""
        if name not in self._modules:
            path, root = _path(name), name.partition(".")[0]
            beside = path and self._folder and path.is_relative_to(self._folder) and not _installed(path)
            local = root != "cohort" and (root == self._root or beside)
            self._modules[name] = _module(name, path) if local else None
        return self._modules[name]


def _installed(path: Path) -> bool:
    """Whether a file belongs to an installed package or to Python."""
    return not {"site-packages", "dist-packages"}.isdisjoint(path.parts) or path.is_relative_to(STANDARD_LIBRARY)
