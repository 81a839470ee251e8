"""Lines of code in ``src/cohort`` by room, without docstrings, comments and blank lines.

    python scripts/count_code.py [--limit 13500]

With a limit, exits with 1 if there are more.
"""

from __future__ import annotations

import argparse
import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent / "src" / "cohort"
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(text: str) -> int:
    """Number of lines that hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def main() -> int:
    """Print the rooms, largest first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=int)
    limit = parser.parse_args().limit
    rooms: Counter[str] = Counter()
    for path in sorted(ROOT.rglob("*.py")):
        room = path.relative_to(ROOT).parts[0]
        rooms[room] += code_lines(path.read_text(encoding="utf-8"))
    for room, count in rooms.most_common():
        print(f"{count:6,}  {room}")
    print(f"{rooms.total():6,}  in all")
    return int(limit is not None and rooms.total() > limit)


if __name__ == "__main__":
    sys.exit(main())
