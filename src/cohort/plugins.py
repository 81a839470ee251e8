"""User functions, named in the settings as "module:function" or "file.py:function"."""

from __future__ import annotations

import hashlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from cohort.errors import CohortError, ConfigError


def load_function(spec: str, *, what: str, error: type[CohortError] = ConfigError) -> Callable[..., Any]:
    """Load a user function.

    Args:
        spec: "module:function" or "file.py:function".
        what: the kind of function, for messages: "reward".
        error: the class of error to raise.

    Raises:
        CohortError: of the given class: the spec has another form, or the module, file or function does not exist, or
            is not callable.
    """
    source, _, name = spec.rpartition(":")
    if not source:
        raise error(f"unknown {what} {spec!r}: expected 'module:function' or 'file.py:function'")
    module = _load_file(source, what, error) if source.endswith(".py") else _load_module(source, what, error)
    function = getattr(module, name, None)
    if not callable(function):
        functions = [
            key
            for key, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__ and not key.startswith("_")
        ]
        raise error(f"{source} has no function {name!r}; it has: {', '.join(functions) or 'none'}")
    found: Callable[..., Any] = function
    return found


_FILE_MODULES: dict[str, tuple[str, str]] = {}
"""Modules that were loaded from files: name to path, and to the file's text at that time."""


def file_modules() -> dict[str, tuple[str, str]]:
    """All modules loaded from files, for ``know_file_modules`` in another process."""
    return dict(_FILE_MODULES)


def know_file_modules(modules: Mapping[str, tuple[str, str]]) -> None:
    """Make these modules importable by name, as another process loaded them. The files may have changed since."""
    _FILE_MODULES.update(modules)
    if _Importer not in sys.meta_path:
        sys.meta_path.append(_Importer)


class _Importer(importlib.machinery.SourceFileLoader):
    """Finds the modules of ``know_file_modules``, and compiles the recorded text instead of the file's current one."""

    @classmethod
    def find_spec(cls, name: str, _path: Any = None, _target: Any = None) -> ModuleSpec | None:
        if name not in _FILE_MODULES:
            return None
        path, _ = _FILE_MODULES[name]
        if (folder := str(Path(path).parent)) not in sys.path:
            sys.path.append(folder)  # lets the file import its neighbours
        return importlib.util.spec_from_file_location(name, path, loader=cls(name, path))

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(_FILE_MODULES[fullname][1].encode(), self.path)


def _load_file(file: str, what: str, error: type[CohortError]) -> ModuleType:
    try:
        path = Path(file).expanduser().resolve()
        found = path.is_file()
    except (OSError, RuntimeError, ValueError) as failure:  # a NUL, too long, or the home of an unknown user
        raise error(f"no {what} file {file!r:.100}: {failure!s:.100}") from None
    if not found:
        raise error(f"no {what} file {file} (looked for {path})")
    # The name contains a hash of the path: files of the same name in two folders are two modules.
    name = f"cohort_{what.replace(' ', '_')}_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    sys.modules.pop(name, None)  # in a notebook, the file may have changed
    try:
        know_file_modules({name: (str(path), importlib.util.decode_source(path.read_bytes()))})
        return importlib.import_module(name)
    except (Exception, SystemExit) as failure:
        _FILE_MODULES.pop(name, None)
        raise error(f"{what} file {file} failed to load: {type(failure).__name__}: {failure}") from failure


_MODULE_FOLDERS: dict[str, str] = {}
"""The folders of top-level modules that are not looked for in the working folder."""


def know_module_folders(folders: Mapping[str, str]) -> None:
    """Look for these top-level modules in these folders instead of the working folder. A folder is searched from the
    time on that its module is loaded: what else it holds is imported by nothing before."""
    _MODULE_FOLDERS.update(folders)


def _load_module(module: str, what: str, error: type[CohortError]) -> ModuleType:
    folder = _MODULE_FOLDERS.get(module.partition(".")[0], str(Path.cwd()))
    if folder not in sys.path:
        sys.path.append(folder)  # `cohort`, unlike `python -m`, does not search the working folder
    try:
        return importlib.import_module(module)
    except ImportError as failure:
        raise error(f"cannot import {what} module {module!r}: {failure}") from failure
    except (Exception, SystemExit) as failure:
        raise error(f"{what} module {module!r} failed to load: {type(failure).__name__}: {failure}") from failure
