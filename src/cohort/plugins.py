"""A user's own functions, named in the settings: "module:function" or "file.py:function"."""

from __future__ import annotations

import hashlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from cohort.errors import CohortError, ConfigError


def load_function(spec: str, *, what: str, error: type[CohortError] = ConfigError) -> Callable[..., Any]:
    """The function that ``spec`` names.

    Args:
        spec: "module:function" or "file.py:function".
        what: what the function is to be, for messages: "reward".
        error: the class to raise.

    Raises:
        CohortError: of the given class: there is no such module, file or function, or it is not callable.
    """
    place, _, name = spec.rpartition(":")
    module = _load_file(place, what, error) if place.endswith(".py") else _load_module(place, what, error)
    function = getattr(module, name, None)
    if not callable(function):
        own = {n: v for n, v in vars(module).items() if inspect.isfunction(v) and not n.startswith("_")}
        available = [n for n, v in own.items() if v.__module__ == module.__name__]  # not those that it imports
        raise error(f"{place} has no function {name!r}; it has: {', '.join(available) or 'none'}")
    found: Callable[..., Any] = function
    return found


@dataclass(frozen=True, slots=True)
class FileModule:
    """A file of the settings as it was when it was loaded."""

    name: str
    """The module's."""
    path: str
    source: str


def file_modules() -> list[FileModule]:
    """Every module that was loaded from a file of the settings, for ``know_file_modules`` of another process."""
    return list(_FILE_MODULES.values())


def know_file_modules(modules: Iterable[FileModule]) -> None:
    """Let these modules be imported by their names, as another process loaded them: the file may have changed since."""
    _FILE_MODULES.update({module.name: module for module in modules})
    if _Finder not in sys.meta_path:
        sys.meta_path.append(_Finder)


_FILE_MODULES: dict[str, FileModule] = {}


class _Finder(importlib.abc.MetaPathFinder):
    """Finds what ``know_file_modules`` was told of."""

    @classmethod
    def find_spec(cls, name: str, _path: Any = None, _target: Any = None) -> ModuleSpec | None:
        module = _FILE_MODULES.get(name)
        if module is None:
            return None
        folder = str(Path(module.path).parent)
        if folder not in sys.path:
            sys.path.append(folder)  # so that the file can import its neighbours
        return importlib.util.spec_from_file_location(name, module.path, loader=_Loader(name, module.path))


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles what was read, not what stands in the file now."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(_FILE_MODULES[fullname].source.encode(), self.path)


def _load_file(place: str, what: str, error: type[CohortError]) -> ModuleType:
    path = Path(place).expanduser().resolve()
    if not path.is_file():
        raise error(f"no {what} file {place} (looked for {path})")
    # The path is in the name: two files of the same name in two folders are two modules.
    name = f"cohort_{what.replace(' ', '_')}_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    sys.modules.pop(name, None)  # the file may have changed since, in a notebook
    try:
        know_file_modules([FileModule(name, str(path), importlib.util.decode_source(path.read_bytes()))])
        return importlib.import_module(name)
    except Exception as failure:
        _FILE_MODULES.pop(name, None)
        raise error(f"{what} file {place} failed to load: {type(failure).__name__}: {failure}") from failure


def _load_module(place: str, what: str, error: type[CohortError]) -> ModuleType:
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # a command, unlike ``python -m``, does not look in the working folder
    try:
        return importlib.import_module(place)
    except ImportError as failure:
        raise error(f"cannot import {what} module {place!r}: {failure}") from failure
    except Exception as failure:
        raise error(f"{what} module {place!r} failed to load: {type(failure).__name__}: {failure}") from failure
