"""README.md as the package's description: its relative links lead into the repository of ``[project.urls]``.

A metadata hook of the build (``[tool.hatch.metadata.hooks.custom]``); no command.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

RELATIVE = re.compile(r"(!?)(\[[^\]]*\])\((?![a-z]+:|#)([^)\s]+)\)")


def absolute(text: str, repository: str) -> str:
    """The Markdown with relative links as addresses of pages, and relative images as addresses of files."""
    return RELATIVE.sub(lambda it: f"{it[1]}{it[2]}({repository}/{'raw' if it[1] else 'blob'}/HEAD/{it[3]})", text)


class Readme(MetadataHookInterface):
    """Sets ``readme``."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Read README.md and make its links absolute."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        readme = absolute(text, metadata["urls"]["Repository"])
        metadata["readme"] = {"content-type": "text/markdown", "text": readme}
