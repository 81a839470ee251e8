"""The lower bounds of the dependencies in ``pyproject.toml`` as pip constraints.

``make lowest`` runs the tests with them.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def main() -> None:
    """Print ``name==lower bound`` for each requirement that has one, those of the extras included."""
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    requirements = [
        *project["dependencies"],
        *(one for name, some in extras.items() if name != "bench" for one in some),
    ]
    for requirement in dict.fromkeys(requirements):
        if found := re.match(r"([\w.-]+)>=([\w.]+)", requirement):
            print(f"{found[1]}=={found[2]}")


if __name__ == "__main__":
    main()
