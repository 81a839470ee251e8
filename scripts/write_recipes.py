"""Write the table of docs/recipes/index.md from the heads of the recipes, or with --check only compare it.

python scripts/write_recipes.py
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from cohort.shipped import recipes

PAGE = Path(__file__).parents[1] / "docs" / "recipes" / "index.md"
TABLE = re.compile(r"(?<=<!-- recipes -->\n).*?(?=<!-- end -->)", re.DOTALL)


def table() -> str:
    lines = ["", "| recipe | what it shows | hardware | time |", "|---|---|---|---|"]
    for one in recipes().values():
        name = f"[{one.name}]({one.name}.md)" if (PAGE.parent / f"{one.name}.md").exists() else one.name
        title = re.sub(r"<[^>]+>", r"`\g<0>`", one.title)  # or a tag in it would be markup
        lines.append(f"| {name} | {title} | {one.hardware} | {one.time} |")
    return "\n".join([*lines, "", ""])


def main() -> int:
    """Write or compare."""
    text = PAGE.read_text(encoding="utf-8")
    written = TABLE.sub(lambda _: table(), text)
    if "--check" not in sys.argv:
        PAGE.write_text(written, encoding="utf-8")
    elif written != text:
        print("docs/recipes/index.md: run python scripts/write_recipes.py", file=sys.stderr)
        return 1
    print(f"recipes: {len(recipes())} in docs/recipes/index.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
