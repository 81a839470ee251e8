"""``cohort new``: lists the recipes, and writes one into a folder to start from."""

from __future__ import annotations

import re
import shlex
import shutil
import textwrap
from pathlib import Path

from cohort import shipped
from cohort.cli.app import app
from cohort.errors import ConfigError, did_you_mean

WIDTH = 100


@app.command(
    sort_key=3,
    usage="Usage: cohort new [RECIPE [FOLDER]]",
    help_epilogue="Without a recipe, lists them all: what each does, the hardware it needs, and the time it takes.",
)
def new(recipe: str | None = None, folder: str | None = None, /) -> None:
    """List the recipes, or write one into a new folder: settings and reward functions to start from.

    Args:
        recipe: The recipe's name.
        folder: The folder to write. [default: ./RECIPE]
    """
    known = shipped.recipes()
    if recipe is None:
        print(listed(known))
        return
    if recipe not in known:
        hint = did_you_mean(recipe, known) or f"; there are {', '.join(known)}"
        raise ConfigError(f"no recipe {recipe!r}{hint}")
    print(written(known[recipe], Path(folder or recipe).expanduser()))


def listed(known: dict[str, shipped.Recipe]) -> str:
    """The recipes with what each does, its hardware and its time."""
    width = max(map(len, known))
    lines = []
    for one in known.values():
        for name, text in ((one.name, one.title), ("", f"{one.hardware}; time: {one.time}")):
            lines += textwrap.wrap(text, WIDTH, initial_indent=f"{name:{width}}  ", subsequent_indent=" " * (width + 2))
    return "\n".join([*lines, "", "cohort new RECIPE writes one into ./RECIPE; cohort new RECIPE FOLDER elsewhere"])


def written(recipe: shipped.Recipe, target: Path) -> str:
    """Write a recipe into a folder, and return what to do next.

    Raises:
        ConfigError: the folder is a file, or is not empty.
    """
    if target.exists() and not target.is_dir():
        raise ConfigError(f"{target} is a file: give another folder, as in 'cohort new {recipe.name} FOLDER'")
    if target.is_dir() and any(target.iterdir()):
        raise ConfigError(f"{target} is not empty: give another folder, as in 'cohort new {recipe.name} FOLDER'")
    files = sorted(file for file in recipe.folder.iterdir() if file.is_file())
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror}") from None
    for file in files:
        if file.suffix in (".toml", ".py"):
            text = starter_text(file.read_text(encoding="utf-8"), recipe.name)
            (target / file.name).write_text(text, encoding="utf-8", newline="\n")
        else:
            shutil.copyfile(file, target / file.name)
    names = ", ".join(file.name for file in files)
    steps = [f"cd {shlex.quote(str(target))}"] * (target.resolve() != Path.cwd())
    steps += commands(recipe)
    return "\n".join(
        [
            f"{target} has {names}: {recipe.title}",
            f"hardware: {recipe.hardware}; time: {recipe.time}",
            "next:",
            *(f"    {step}" for step in steps),
            f"'cohort docs recipes/{recipe.name}' explains the settings, and what to expect",
        ]
    )


def commands(recipe: shipped.Recipe) -> list[str]:
    """What to run, with ``cohort doctor`` before the training."""
    found = list(recipe.commands)
    if not any(one.startswith("cohort train config.toml") for one in found):
        found.append("cohort train config.toml")
    first = next(number for number, one in enumerate(found) if one.startswith("cohort train config.toml"))
    return [*found[:first], "cohort doctor config.toml", *found[first:]]


def starter_text(text: str, name: str) -> str:
    r"""A recipe's file for a folder of its own: without the prose of its opening comment, and without the folder that
    the files have in the repository.

    >>> starter_text("# Title\n# hardware: a\n# time: b\n#\n#     make it\n# More.\n\n[model]\n", "x")
    '# Title\n# hardware: a\n# time: b\n#\n#     make it\n\n[model]\n'
    """
    if head := re.match(r"((?:# .+\n){3})((?:#.*\n)*)", text):
        kept = [line for line in head[2].splitlines(keepends=True) if line.startswith("#     ")]
        text = "".join([head[1], *["#\n"][: len(kept)], *kept, text[head.end() :]])
    return text.replace(f"examples/{name}/", "")
