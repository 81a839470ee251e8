"""Commands that explain: objective, rewards, config."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from cyclopts import Parameter

from cohort.cli.app import app
from cohort.errors import ConfigError


@app.command(
    sort_key=30,
    usage="Usage: cohort objective [NAME] [--set PART=VALUE ...]",
    help_epilogue="Example: cohort objective dapo --set trust_region.high=1.4 beta=0.01 scale=none",
)
def objective(
    name: str | None = None,
    /,
    *assignments: Annotated[str, Parameter(show=False)],
    changes: Annotated[Sequence[str], Parameter("--set", consume_multiple=True, metavar="PART=VALUE...")] = (),
) -> None:
    """List the presets, or explain one: its formula, its numbers, its coefficients.

    Args:
        name: A preset, or NAME@VERSION.
        assignments: The same as changes.
        changes: Change parts of it, as in trust_region.high=1.4.
    """
    from cohort.config import parse_settings
    from cohort.config.objective import ObjectiveConfig
    from cohort.config.section import explain_errors
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
    sort_key=31,
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


@app.command(sort_key=32)
def config() -> None:
    """Print every setting with its default and meaning, as a TOML file."""
    from cohort.config import annotated_toml

    print(annotated_toml(), end="")
