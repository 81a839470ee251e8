"""Whether each room is within its ceiling of code lines, from ``ceilings.toml`` beside this file.

    python scripts/check_limits.py

A room above its ceiling has its present size as ``today``: it falls, and rises only with a change that brings a feature
and says so. Whoever makes it smaller lowers ``today``, and deletes it once the room is within its ceiling.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

from count_code import ROOT, code_lines

TABLE = Path(__file__).with_name("ceilings.toml")


def sizes() -> dict[str, int]:
    """Code lines by room; a file beside the rooms is one by its name."""
    found: dict[str, int] = {}
    for path in sorted(ROOT.rglob("*.py")):
        room = path.relative_to(ROOT).parts[0]
        found[room] = found.get(room, 0) + code_lines(path.read_text(encoding="utf-8"))
    return found


def main() -> int:
    """Print each line of the table that does not hold."""
    left, wrong = sizes(), []
    for name, row in tomllib.loads(TABLE.read_text(encoding="utf-8")).items():
        rooms = row.get("rooms") or [*left]  # the last row: all that is left
        missing = [room for room in rooms if room not in left]
        size = sum(left.pop(room, 0) for room in rooms)
        limit = row.get("today", row["ceiling"])
        print(f"{size:6,} of {limit:6,} (ceiling {row['ceiling']:6,})  {name}")
        if missing:
            wrong.append(f"{name}: there is no {', '.join(missing)} in src/cohort")
        if size > limit:
            wrong.append(f"{name}: {size:,} code lines, at most {limit:,}: make something else smaller or unnecessary")
        elif size < limit and "today" in row:
            rest = f"today = {size}" if size > row["ceiling"] else "no 'today'"
            print(f"{name} has become smaller: give it {rest} in {TABLE.name}")
    print("\n".join(wrong) or "sizes: ok")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
