"""A griffe extension: examples in docstrings become fenced code, as Markdown needs it."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^( *)>>> (?:.*\n?)(?:^\1\S.*\n?)*", re.MULTILINE)


class Fenced(griffe.Extension):  # type: ignore[misc]  # checks run without the extra "docs"
    """Fences the examples."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Put each run of lines that begins with ``>>>`` into a fence."""
        if obj.docstring:
            text = obj.docstring.value
            obj.docstring.value = EXAMPLE.sub(lambda m: f"{m[1]}```pycon\n{m[0].rstrip()}\n{m[1]}```\n", text)
