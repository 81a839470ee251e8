"""Commands that use a model: generate, eval."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from cohort.cli.app import ANY_TEXT, app
from cohort.flags import EvalFlags, GenerateFlags


@app.command(
    sort_key=20,
    usage="Usage: cohort generate MODEL [PROMPT ...] [--prompts FILE] [--output FILE.jsonl] [options]",
    help_epilogue="If the model is in a run folder, the run's settings for prompts and sampling are the defaults. "
    "The seed and the position of a prompt determine its completions; other prompts do not change them. "
    "A prompt that begins with a dash goes after '--'.",
)
def generate(model: str, /, *prompt: Annotated[str, ANY_TEXT], flags: GenerateFlags | None = None) -> int:
    """Sample from a model: one prompt on the terminal, or a file of prompts.

    Args:
        model: A folder, a hub id, a GGUF file, or a run (its best/ model, else its newest checkpoint).
        prompt: Prompts; '-' is all of stdin, which is also the default in a pipe.
    """
    from cohort.generate.request import Request
    from cohort.generate.run import generate as run

    return run(Request(model=model, prompt=prompt, **vars(flags or GenerateFlags())))


@app.command(
    name="eval",
    sort_key=21,
    usage="Usage: cohort eval MODEL [--data FILE] [--reward NAME] [--against MODEL] [options] [--section.key value]",
    help_epilogue="If the model is in a run folder, the run's settings are the defaults. Every setting of "
    "'cohort config' can be given as --section.key value. 'cohort docs evaluation' explains the metrics.",
)
def evaluate(
    model: str, /, *overrides: Annotated[str, ANY_TEXT, Parameter(show=False)], flags: EvalFlags | None = None
) -> int:
    """Evaluate a model on data, with confidence intervals, or compare two models.

    Args:
        model: A folder, a hub id, a GGUF file, or a run (its best/ model, else its newest checkpoint).
    """
    from cohort.evaluation import command

    return command.evaluate(command.Request(model=model, overrides=overrides, **vars(flags or EvalFlags())))
