"""Links between the repository's pages lead somewhere: files exist, and so do the headings they name. Lists are lists,
and cells are cells, for every reader of Markdown.

python scripts/check_docs.py
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as code hosts make them."""
    headings = re.findall(r"^#+\s+(.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    """Relative links of a page that lead nowhere."""
    found = []
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" in target or target.startswith("mailto:"):
            continue
        name, _, anchor = target.partition("#")
        other = (page.parent / name).resolve() if name else page
        missing = not other.exists() or (anchor and other.suffix == ".md" and anchor not in anchors(other))
        if missing:
            found.append(f"{page.relative_to(ROOT)}: {target} leads nowhere")
    return found


def lists_without_a_blank_line(page: Path) -> list[str]:
    """Lists that follow a line of text at once, which are lists for some readers of Markdown and text for others."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    found = re.findall(r"^(?![-#|<>]|\d+\. |\s)(.+)\n(?=(?:-|1\.) )", text, flags=re.MULTILINE)
    return [
        f"{page.relative_to(ROOT)}: no blank line between '...{line[-40:]}' and the list after it" for line in found
    ]


def bars_in_cells(page: Path) -> list[str]:
    """Bars in the code of a table's cell, where code hosts end the cell."""
    rows = re.findall(r"^\|.*\|$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    codes = [code for row in rows for code in re.findall(r"`([^`]*)`", row) if re.search(r"(?<!\\)\|", code)]
    return [f"{page.relative_to(ROOT)}: write \\| for | in `{code}`, which is in a table" for code in codes]


def main() -> int:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    checks = (broken_links, lists_without_a_blank_line, bars_in_cells)
    found = [line for page in sorted(pages) for check in checks for line in check(page)]
    print("\n".join(found) or f"links: ok in {len(pages)} pages")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
