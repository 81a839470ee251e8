"""A user's own functions, named in the settings: "module:function" or "file.py:function"."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
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
        available = [n for n, v in vars(module).items() if inspect.isfunction(v) and not n.startswith("_")]
        raise error(f"{place} has no function {name!r}; it has: {', '.join(available) or 'none'}")
    found: Callable[..., Any] = function
    return found


def file_modules() -> list[tuple[str, str]]:
    """Name and path of every module that was loaded from a file of the settings, for ``load_file_module``."""
    return list(_FILE_MODULES.items())


def load_file_module(named: tuple[str, str]) -> ModuleType:
    """Load a file under a module's name, once: what another process has loaded is found here under the same name."""
    name, place = named
    if name in sys.modules:
        return sys.modules[name]
    path = Path(place)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # so that the file can import its neighbours
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    _FILE_MODULES[name] = place
    return module


_FILE_MODULES: dict[str, str] = {}


def _load_file(place: str, what: str, error: type[CohortError]) -> ModuleType:
    path = Path(place).expanduser().resolve()
    if not path.is_file():
        raise error(f"no {what} file {place} (looked for {path})")
    # The path is in the name: two files of the same name in two folders are two modules.
    name = f"cohort_{what.replace(' ', '_')}_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    sys.modules.pop(name, None)  # the file may have changed since, in a notebook
    try:
        return load_file_module((name, str(path)))
    except Exception as failure:
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
