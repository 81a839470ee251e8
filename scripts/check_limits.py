"""Sizes that keep the code readable: a function at most 60 lines (the loop excepted), a file 800, the loop's file 300.

python scripts/check_limits.py
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

MAX_FUNCTION, MAX_FILE, MAX_LOOP_FILE = 60, 800, 300
SOURCE = Path(__file__).parents[1] / "src" / "cohort"
LOOP = SOURCE / "train" / "loop.py"


def offences(path: Path) -> list[str]:
    """What in a file is longer than allowed. Lines of a function count from ``def`` to its end, docstring included."""
    text = path.read_text(encoding="utf-8")
    name, length = path.relative_to(SOURCE), len(text.splitlines())
    limit = MAX_LOOP_FILE if path == LOOP else MAX_FILE
    found = [f"{name}: {length} lines, at most {limit}"] if length > limit else []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            lines = node.end_lineno - node.lineno + 1
            if lines > MAX_FUNCTION and not (path == LOOP and node.name == "run"):
                found.append(f"{name}:{node.lineno}: {node.name} has {lines} lines, at most {MAX_FUNCTION}")
    return found


def main() -> int:
    found = [offence for path in sorted(SOURCE.rglob("*.py")) for offence in offences(path)]
    print("\n".join(found) or "sizes: ok")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
