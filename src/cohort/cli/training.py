"""Commands that train: demo, train, launch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from cohort.cli.app import ANY_TEXT, STARTED, app
from cohort.cli.resuming import resume
from cohort.cli.start import ALLOW_CHANGED, TRUST, run_training
from cohort.errors import ConfigError
from cohort.flags import LaunchFlags


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
    usage="Usage: cohort train [CONFIG.toml] [--resume [auto]] [--section.key value ...]",
    help_epilogue="Every setting of 'cohort config' can be given as --section.key value. It overrides the file.",
)
def train(
    *arguments: Annotated[str, ANY_TEXT, Parameter(name="CONFIG")],
    resume: Annotated[bool | Literal["auto"], Parameter(show_choices=False)] = False,
    allow_changed: ALLOW_CHANGED = (),
    trust: TRUST = None,
) -> None:
    """Train your model on your data and rewards.

    Args:
        arguments: The settings: a TOML file, unless all are given as --section.key value.
        resume: Continue the run in run.output_dir, with the settings that its command line gave; without a checkpoint,
            start it again. auto: also start it if there is none, and do nothing if it is complete.
        allow_changed: A setting or fact that may differ from the run's though it changes results. May be repeated.
        trust: With --resume, run the code that the overrides in this run folder name, though it was not run before.
    """
    from cohort.config import file_and_overrides, load_config, setting_names

    if allow_changed and not resume:
        raise ConfigError("--allow-changed is for a run that goes on: add --resume")
    config, overrides = file_and_overrides(arguments)
    settings = load_config(config, overrides)  # before torch is imported, so that mistakes are reported at once
    names = setting_names(overrides)
    if resume:
        from cohort.runs.settings import with_overrides_of_start

        settings, names = with_overrides_of_start(settings, overrides, trust)
        again = ", ".join(name for name in names if name not in setting_names(overrides))
        if again and settings.report.progress and os.environ.get("RANK", "0") == "0":
            print(f"settings that earlier command lines of the run gave apply again: {again}")
    run_training(settings, resume, allow_changed, overrides=names)


@app.command(
    sort_key=5,
    usage="Usage: cohort launch [--ranks N] [options] train CONFIG.toml [--section.key value ...]",
    help_epilogue="'cohort resume RUN' and 'cohort demo' can be launched too. 'cohort docs scale' explains ranks, "
    "layouts and several machines.",
)
def launch(*command: Annotated[str, ANY_TEXT], flags: LaunchFlags | None = None) -> int:
    """Train on several processes: one per GPU, on one machine or several.

    Args:
        command: The command that every rank runs: 'train', 'resume' or 'demo' with its arguments.
    """
    from cohort.config import file_and_overrides
    from cohort.launch import check_settings, job_of, settings_of
    from cohort.launch import launch as run
    from cohort.runs.trust import check_files

    # torch's warnings about a rank that has died are pages long, and the launcher says what is to be known.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    flags = flags or LaunchFlags()
    if not command or command[0] not in ("train", "resume", "demo"):
        given = f", got {command[0]!r}" if command else ""
        raise ConfigError(f"cohort launch starts 'train', 'resume' or 'demo'{given}; others run in one process")
    inner, bound, _ = app.parse_args(list(command), exit_on_error=False, print_error=False)
    if inner in (train, resume):
        folder = bound.args[0] if inner is resume else None
        arguments = (str(Path(folder) / "config.toml"), *bound.args[1:]) if folder else bound.args
        path, overrides = file_and_overrides(arguments)
        settings = settings_of(path, overrides, flags, of_run=inner is resume)  # mistakes are reported once
        job = job_of(
            command,
            flags,
            output_dir=folder or settings.run.output_dir,
            device=settings.model.device,
            layout=settings.parallel.layout,
            prompts=settings.rollout.prompts_per_step,
            resume="auto" if inner is resume else bound.kwargs.get("resume", False),
        )
        check_settings(settings, job.ranks * job.nodes)
    elif inner is demo:
        job = job_of(command, flags, output_dir=bound.kwargs.get("output_dir"), device="cpu")
    else:
        raise ConfigError(f"cohort launch cannot start 'cohort {' '.join(command)}'")
    check_files(job.folder)  # before the ranks write logs into it
    return run(job, ray=flags.ray, dry_run=flags.dry_run)
