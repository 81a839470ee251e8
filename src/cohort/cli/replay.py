"""The command that puts a stored step under another objective: replay."""

from __future__ import annotations

from cohort.cli.app import app
from cohort.flags import ReplayFlags


@app.command(
    sort_key=16,
    usage="Usage: cohort replay RUN [--step N] [--objective PRESET] [--set PART=VALUE ...] [--train --output FOLDER]",
    help_epilogue="Example: cohort replay runs/mine --step 12 --objective dr_grpo --set beta=0.01. 'cohort docs "
    "replay' explains the result, which is also in RUN/replays/.",
)
def replay(run: str, /, *, flags: ReplayFlags | None = None) -> int:
    """What a stored step would have taught under another objective. Nothing is sampled, and the run is not changed.

    Args:
        run: The run folder.
    """
    from cohort.replay import command

    return command.run(command.Request(run=run, **vars(flags or ReplayFlags())))
