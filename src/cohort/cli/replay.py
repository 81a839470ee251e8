"""The command that puts a stored step under another objective: replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from cyclopts import Parameter

from cohort.cli.app import app
from cohort.cli.start import TRUST


@app.command(
    sort_key=16,
    usage="Usage: cohort replay RUN [--step N] [--objective PRESET] [--set PART=VALUE ...] [--train --output FOLDER]",
    help_epilogue="Example: cohort replay runs/mine --step 12 --objective dr_grpo --set beta=0.01. 'cohort docs "
    "replay' explains the result, which is also in RUN/replays/.",
)
def replay(
    run: str,
    /,
    *,
    step: int | None = None,
    objective: str | None = None,
    changes: Annotated[Sequence[str], Parameter("--set", consume_multiple=True, metavar="PART=VALUE...")] = (),
    name: str | None = None,
    json_output: Annotated[bool, Parameter("--json")] = False,
    no_model: bool = False,
    train: bool = False,
    output: Annotated[str | None, Parameter(metavar="FOLDER")] = None,
    trust: TRUST = None,
) -> int:
    """What a stored step would have taught under another objective. Nothing is sampled, and the run is not changed.

    Args:
        run: The run folder.
        step: The step, from 1. Default: the last stored one.
        objective: A preset, or NAME@VERSION. Default: the run's own objective.
        changes: Change parts of it, as in trust_region.high=1.4.
        name: Name of the result, in RUN/replays/step-N-NAME.json. Default: from the objective and its changes.
        json_output: Print the result as JSON.
        no_model: Do not load a checkpoint: compare the gradients in the space of the logits, from the store alone.
        train: Also repeat the step's updates under the objective, on a copy of the checkpoint before the step.
        output: The folder for the model that --train gives.
        trust: Run the code that the settings in this run folder name, though this account has not run it before.
    """
    from cohort.replay.command import Request
    from cohort.replay.command import run as run_replay

    return run_replay(Request(run, step, objective, tuple(changes), name, json_output, no_model, train, output, trust))
