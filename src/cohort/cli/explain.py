"""Commands that explain: objective, rewards, config, docs; and ``cohort new``, which writes a recipe into a folder."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from cohort import shipped
from cohort.cli.app import FIRST_HOUR, app
from cohort.errors import ConfigError, did_you_mean


@app.command(
    sort_key=10,
    usage="Usage: cohort objective [NAME] [--set PART=VALUE ...]",
    help_epilogue="Example: cohort objective dapo --set trust_region.high=1.4 beta=0.01 scale=none",
)
def objective(
    name: str | None = None,
    /,
    *assignments: Annotated[str, Parameter(show=False)],
    changes: Annotated[Sequence[str], Parameter("--set", consume_multiple=True, metavar="PART=VALUE...")] = (),
) -> None:
    """List the presets of the objective, or explain one.

    It shows the formula, the numbers and the coefficients.

    Args:
        name: A preset, or NAME@VERSION.
        assignments: The same as changes.
        changes: Change parts of it, as in trust_region.high=1.4.
    """
    from cohort.config import parse_settings
    from cohort.config.schema import ObjectiveConfig, explain_errors
    from cohort.presets import PRESETS, preset

    # Before torch is imported, so that mistakes are reported at once. A preset carries its minibatches too.
    parts = parse_settings([*assignments, *changes], also=("minibatches",))
    if name is None:
        if parts:
            raise ConfigError("--set needs a preset to change: cohort objective NAME --set ...")
        width = max(len(row.identity) for row in PRESETS.values())
        for row in PRESETS.values():
            print(f"{row.identity:<{width}}  {row.summary}")
        print('\ncohort objective NAME explains one; objective.preset = "NAME" trains with it')
        return
    minibatches = parts.pop("minibatches", None)  # a number of updates, which no part of the objective depends on
    resolved = preset(name).replace(**parts)
    if minibatches is not None:
        with explain_errors(ObjectiveConfig):
            number = ObjectiveConfig(minibatches=minibatches).resolved_minibatches
        resolved = resolved.model_copy(update={"minibatches": number})
    from cohort.objective import explain, try_user_functions

    try_user_functions(resolved)
    print(explain(resolved))


@app.command(
    sort_key=11,
    usage="Usage: cohort rewards [NAME]",
    help_epilogue='Example of the settings: reward.functions = ["math", "soft_overlong(max_length=1024, buffer=256)"]',
)
def rewards(name: str | None = None, /) -> None:
    """List the built-in rewards, or explain one.

    Args:
        name: A built-in reward.
    """
    from cohort.rewards.names import explain_reward, list_rewards

    print(list_rewards() if name is None else explain_reward(name))


@app.command(sort_key=9)
def config() -> None:
    """Print every setting with its default and meaning, as TOML."""
    from cohort.config import annotated_toml

    print(annotated_toml(), end="")


# ----------------------------------------
# The command that shows the pages of the documentation, which the package brings along: docs.


@app.command(
    sort_key=12,
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


# ----------------------------------------
# ``cohort new``: lists the recipes, and writes one into a folder to start from.


WIDTH = 100


@app.command(
    group=FIRST_HOUR,
    sort_key=1,
    usage="Usage: cohort new [RECIPE [FOLDER]]",
    help_epilogue="Without a recipe, lists them all: what each does, the hardware it needs, and the time it takes.",
)
def new(recipe: str | None = None, folder: str | None = None, /) -> None:
    """List the recipes, or write one into a new folder to start from.

    A recipe has settings and reward functions.

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
