"""Write the tables of TRL's fields in docs/trl.md from ``cohort.trl.config``, between two comments.

Run ``python scripts/write_trl_fields.py``. With ``--check`` nothing is written, and the exit code is 1 if the page is
not up to date.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from cohort.config import GRPOConfig
from cohort.trl.config import FIELDS, Field

PAGE = Path(__file__).parents[1] / "docs" / "trl.md"
BEGIN, END = "<!-- fields: written by scripts/write_trl_fields.py -->", "<!-- end of fields -->"
HEADS = {
    "same": ("### Same meaning", "", "| TRL | here |", "|---|---|"),
    "translated": ("### Translated", "", "| TRL | here | how |", "|---|---|---|"),
    "no effect": ("### No effect", "", "| TRL | why |", "|---|---|"),
    "refused": ("### Refused unless at the default", "", "| TRL | instead |", "|---|---|"),
    "old": ("### Old names", "", "| name | verdict | here | |", "|---|---|---|---|"),
}


def main() -> int:
    page = PAGE.read_text(encoding="utf-8")
    if BEGIN not in page or END not in page:
        print(f"{PAGE.name} lacks the comments {BEGIN} and {END}")
        return 1
    before, rest = page.split(BEGIN)
    text = f"{before}{BEGIN}\n\n{tables()}\n{END}{rest.split(END)[1]}"
    if "--check" in sys.argv[1:]:
        is_new = page == text
        print("TRL's fields: up to date" if is_new else "docs/trl.md is out of date: run scripts/write_trl_fields.py")
        return 0 if is_new else 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


def tables() -> str:
    """One table for each verdict; fields with the same row share it."""
    rows: dict[tuple[str, Field], list[str]] = {}
    for name, field in FIELDS.items():
        rows.setdefault(("old" if field.old else field.verdict, replace(field, value=None)), []).append(f"`{name}`")
    return "\n".join("\n".join([*head, *_rows(rows, verdict), ""]) for verdict, head in HEADS.items())


def _rows(rows: dict[tuple[str, Field], list[str]], verdict: str) -> Iterator[str]:
    for (kind, field), names in rows.items():
        if kind == verdict:
            cells = {
                "same": [_code(field.to)],
                "translated": [_code(field.to), field.why],
                "no effect": [field.why],
                "refused": [field.why],
                "old": [field.verdict, _code(field.to), field.why],
            }[verdict]
            yield f"| {' | '.join([', '.join(names), *cells])} |"


def _code(to: str) -> str:
    """A setting or a name in code type; other words as they are."""
    setting = to.strip("[]").partition(".")[0] in GRPOConfig.model_fields
    return f"`{to}`" if setting or to in FIELDS or to.endswith(("()", "_history", "-N")) else to


if __name__ == "__main__":
    sys.exit(main())
