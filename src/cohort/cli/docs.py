"""The command that shows the pages of the documentation, which the package brings along: docs."""

from __future__ import annotations

import os
import sys

from cohort.cli.app import app
from cohort.errors import ConfigError, did_you_mean


@app.command(
    sort_key=33,
    usage="Usage: cohort docs [NAME]",
    help_epilogue="Example: cohort docs metrics. Into a pipe or a file, the page is written as it is, in Markdown.",
)
def docs(name: str | None = None, /) -> None:
    """List the pages of the documentation, or show one.

    Args:
        name: A page, as messages name it.
    """
    from cohort.shipped import folder

    place = folder("docs")
    pages = {path.relative_to(place).with_suffix("").as_posix(): path for path in sorted(place.rglob("*.md"))}
    if name is None:
        width = max(map(len, pages))
        for page, path in pages.items():
            with path.open(encoding="utf-8") as lines:
                title = next((line[2:].strip() for line in lines if line.startswith("# ")), "")
            print(f"{page:<{width}}  {title}")
        print("\ncohort docs NAME shows one")
        return
    wanted = name.removeprefix("docs/").removesuffix(".md")
    if wanted not in pages:
        raise ConfigError(f"no page {name!r}; 'cohort docs' lists them{did_you_mean(wanted, pages)}")
    text = pages[wanted].read_text(encoding="utf-8")
    if not sys.stdout.isatty():
        print(text, end="")
        return
    from rich.console import Console
    from rich.markdown import Markdown

    os.environ.setdefault("LESS", "-RF")  # colours; and a page that fits the screen is only printed
    console = Console()
    with console.pager(styles=True):
        console.print(Markdown(text, hyperlinks=False))
