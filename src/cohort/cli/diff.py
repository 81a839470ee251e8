"""The command that compares runs: diff."""

from __future__ import annotations

from itertools import islice

from cohort.cli.app import app

SHOWN = 12
"""Differences of the first step that are printed."""


@app.command(
    sort_key=12,
    usage="Usage: cohort diff RUN_A RUN_B",
    help_epilogue="The exit code is 0 if all that both runs have is equal, even if one is longer, and 1 if not. Times "
    "are not compared.",
)
def diff(run_a: str, run_b: str, /) -> int:
    """Find the first step and the first quantity in which two runs part, bit by bit.

    Args:
        run_a: A run folder.
        run_b: Another run folder.
    """
    from cohort.report.compare import changed_facts, changed_settings, differences, last_step, only_in, read_whole

    a, b = read_whole(run_a), read_whole(run_b)
    for title, changed in (("settings", changed_settings(a, b)), ("data and versions", changed_facts(a, b))):
        if changed:
            print(f"{title} that differ:", *(f"  {key}: {values}" for key, values in changed), sep="\n")
    found = differences(a, b)
    first = next(found, None)
    if first is None:
        print(f"no difference in what both runs have, up to step {last_step(a, b)}")
    else:
        print(f"the runs part in step {first.step}, {first.quantity}: {first.detail}")
        later = [one for one in islice(found, SHOWN) if one.step == first.step]
        if later:
            print(f"then in step {first.step}:", *(f"  {one.quantity}: {one.detail}" for one in later), sep="\n")
    for name, missing in (("A", only_in(a, b)), ("B", only_in(b, a))):
        if missing:
            more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
            print(f"only {name} has {', '.join(missing[:4])}{more}")
    return 1 if first else 0
