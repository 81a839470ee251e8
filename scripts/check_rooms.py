"""The rooms in CONTRIBUTING.md are those of the import contract in pyproject.toml, floor by floor.

python scripts/check_rooms.py
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def contract_floors() -> list[set[str]]:
    """The floors of the layers contract, from the top."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    (layers,) = [one["layers"] for one in settings["contracts"] if one["type"] == "layers"]
    return [{name.strip().removeprefix("cohort.") for name in re.split("[|:]", floor)} for floor in layers]


def page_floors() -> list[set[str]]:
    """The floors of the table in CONTRIBUTING.md, from the top: the names in code in its first column."""
    section = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Rooms", 1)[1].split("\n## ", 1)[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return [set(re.findall(r"`(\w+)`", row)) for row in rows]


def main() -> int:
    """Compare and print."""
    contract, page = contract_floors(), page_floors()
    found = [f"contract {sorted(a)}, page {sorted(b)}" for a, b in zip(contract, page, strict=False) if a != b]
    if len(contract) != len(page):
        found.append(f"{len(contract)} floors in pyproject.toml, {len(page)} in CONTRIBUTING.md")
    print("\n".join(found) or f"rooms: {len(page)} floors agree")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
