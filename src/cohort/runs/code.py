"""Hashes of a user's code and of what the settings bind to it, which tell whether they have changed since a run began.

The hash of a function is that of the file that defines it, without comments, formatting, and what is below ``if
__name__ == "__main__"``. What the file imports, and other files that it reads, are not seen.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import sys
import textwrap
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from tokenize import TokenError
from typing import Any

from cohort.calls import partial_layers
from cohort.config import hide_secrets
from cohort.plugins import file_modules

UNKNOWN = "unknown"
"""The hash of code without a source, as of a function typed into an interpreter."""


def code_hash(function: Callable[..., Any]) -> str:
    """A hash of the file that defines a function, or the class of an object. Of a function of Cohort, a hash of its
    name; of one whose file is a script that trains when it is imported, of the function alone."""
    inner = inspect.unwrap(partial_layers(function)[-1])
    owner = inner if hasattr(inner, "__qualname__") else type(inner)
    module = str(owner.__module__)
    if module.partition(".")[0] == "cohort":
        return _hashed(f"{module}:{owner.__qualname__}")
    if (found := _hash_of_module(module)) != UNKNOWN:
        return found
    with suppress(OSError, TypeError, SyntaxError, TokenError):  # a cell of a notebook has a source too
        return _hashed(ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(owner)))))
    return UNKNOWN


def named_code_hash(spec: str) -> str:
    """The hash of the file of a function that is loaded by its name: "module:function" or "file.py:function"."""
    source = spec.rpartition(":")[0]
    if source.endswith(".py"):
        path = str(Path(source).expanduser().resolve())
        source = next((name for name, (file, _) in file_modules().items() if file == path), "")
    return _hash_of_module(source)


def values_hash(function: Callable[..., Any]) -> str:
    """A hash of what ``functools.partial`` binds to a function; empty if that is nothing. A new key is no new value."""
    layers = [layer for layer in partial_layers(function) if isinstance(layer, partial)]
    bound = hide_secrets([[_plain(layer.args), _plain(layer.keywords)] for layer in layers])
    return _hashed(json.dumps(bound)) if bound else ""


def _hash_of_module(name: str) -> str:
    """The hash of the file of a loaded module, as it was read."""
    with suppress(OSError, TypeError, UnicodeDecodeError, SyntaxError):
        file = getattr(sys.modules.get(name), "__file__", None)
        text = file_modules()[name][1] if name in file_modules() else Path(file or "").read_text(encoding="utf-8")
        kept, others = _statements(text)
        if name != "__main__" or others:
            return _hashed(kept)
    return UNKNOWN


@cache
def _statements(text: str) -> tuple[str, bool]:
    """The statements of a module, and whether it has some that are for a script only."""
    body = ast.parse(text).body
    kept = [one for one in body if not (isinstance(one, ast.If) and "__name__" in ast.unparse(one.test))]
    return "\n".join(map(ast.unparse, kept)), len(kept) < len(body)


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _plain(value: Any) -> Any:
    """A bound value in types of JSON; of anything else, its type's name."""
    try:
        return json.loads(json.dumps(value, sort_keys=True))
    except (TypeError, ValueError):
        return type(value).__name__
