"""Commands that train: demo, train, launch."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from cohort.cli.app import ANY_TEXT, STARTED, app
from cohort.errors import ConfigError, Stopped
from cohort.flags import LaunchFlags

if TYPE_CHECKING:
    from cohort.trainer import GRPOTrainer


@app.command(sort_key=1, usage="Usage: cohort demo [tool] [--seed N] [--output-dir FOLDER]")
def demo(
    task: Literal["addition", "tool"] = "addition",
    /,
    *,
    seed: int = 0,
    output_dir: Annotated[str | None, Parameter(metavar="FOLDER")] = None,
) -> None:
    """Train a small model on column addition, or on when to call a calculator: about 90 seconds on two cores.

    Args:
        task: What it learns. [default: addition]
        seed: Seed of the run. [default: 0]
        output_dir: Run folder. [default: the next free runs/demo-NNN]
    """
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # nothing is downloaded
    if task == "tool":
        from cohort.demo.tool import run_tool_demo as run
    else:
        from cohort.demo.run import run_demo as run

    run(seed=seed, output_dir=output_dir, started=STARTED)


@app.command(
    sort_key=2,
    usage="Usage: cohort train CONFIG.toml [--resume [auto]] [--section.key value ...]",
    help_epilogue="Every setting of 'cohort config' can be given as --section.key value. It overrides the file.",
)
def train(
    config: str,
    /,
    *overrides: Annotated[str, ANY_TEXT, Parameter(show=False)],
    resume: Annotated[bool | Literal["auto"], Parameter(show_choices=False)] = False,
) -> None:
    """Train your model on your data and rewards.

    Args:
        config: The settings: a TOML file.
        resume: Continue the run in run.output_dir. auto: continue it if it has a checkpoint, start it if not, and do
            nothing if it is complete.
    """
    from cohort.config import load_config

    settings = load_config(config, overrides)  # before torch is imported, so that mistakes are reported at once
    from cohort.trainer import trainer_from_config

    if resume == "auto":
        from cohort.runs import resumes

        found = resumes(settings)
        if found is None:
            print(f"{settings.run.output_dir} is complete")
            return
        resume = found
    trainer = trainer_from_config(settings, resume=resume)
    trainer.started = STARTED
    try:
        summary = trainer.train(resume=resume)
    except Stopped as stopped:
        stopped.text += f"; continue with cohort resume {settings.run.output_dir or trainer.summary['output_dir']}"
        trainer.world.close()
        raise
    except KeyboardInterrupt as interrupt:
        interrupt.args = (_state_after_interrupt(trainer),)
        raise
    trainer.world.close()
    if settings.report.progress and trainer.world.is_main:
        print(
            f"done: {summary['updates']} updates on {summary['completions']:,} completions in "
            f"{summary['seconds']:.0f} s; run folder: {summary['output_dir']}"
        )
        if not summary["updates"]:
            from cohort.report.console import why_no_gradient

            print(f"nothing was learned; {why_no_gradient(trainer.last_metrics)}")


@app.command(
    sort_key=5,
    usage="Usage: cohort launch [--ranks N] [options] train CONFIG.toml [--section.key value ...]",
    help_epilogue="'cohort demo' can be launched too. docs/scale.md explains ranks, layouts and several machines.",
)
def launch(*command: Annotated[str, ANY_TEXT], flags: LaunchFlags | None = None) -> int:
    """Train on several processes: one per GPU, on one machine or several.

    Args:
        command: The command that every rank runs: 'train' or 'demo' with its arguments.
    """
    from cohort.launch import check_settings, job_of, settings_of
    from cohort.launch import launch as run

    # torch's warnings about a rank that has died are pages long, and the launcher says what is to be known.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    flags = flags or LaunchFlags()
    if not command or command[0] not in ("train", "demo"):
        given = f", got {command[0]!r}" if command else ""
        raise ConfigError(f"cohort launch starts 'train' or 'demo'{given}; other commands run in one process")
    inner, bound, _ = app.parse_args(list(command), exit_on_error=False, print_error=False)
    if inner is train:
        settings = settings_of(bound.args[0], bound.args[1:], flags)  # mistakes are reported once
        job = job_of(
            command,
            flags,
            output_dir=settings.run.output_dir,
            device=settings.model.device,
            layout=settings.parallel.layout,
            prompts=settings.rollout.prompts_per_step,
            resume=bound.kwargs.get("resume", False),
        )
        check_settings(settings, job.ranks * job.nodes)
    elif inner is demo:
        job = job_of(command, flags, output_dir=bound.kwargs.get("output_dir"), device="cpu")
    else:
        raise ConfigError(f"cohort launch cannot start 'cohort {' '.join(command)}'")
    return run(job, ray=flags.ray, dry_run=flags.dry_run)


def _state_after_interrupt(trainer: GRPOTrainer) -> str:
    """What an interrupted run has written, and how to continue it."""
    if trainer.folder is None:
        return "nothing was written yet"
    path, steps = trainer.folder.path, trainer.folder.checkpoint_steps()
    if not steps:
        return f"{path} has no checkpoint yet: remove it to start over"
    return f"{path} has a checkpoint of step {steps[-1]}: continue with --resume --run.output_dir {path}"
