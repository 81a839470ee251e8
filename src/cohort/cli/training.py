"""Commands that train: demo, train, resume, launch, save. What they share comes first."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from cohort.cli.app import ANY_TEXT, FIRST_HOUR, STARTED, app
from cohort.errors import ConfigError, RunFolderError, Stopped
from cohort.flags import LaunchFlags
from cohort.terminal import output_outlasted

if TYPE_CHECKING:
    from cohort.config import GRPOConfig
    from cohort.runs.folder import Resume
    from cohort.trainer import GRPOTrainer


# ----------------------------------------
# What ``cohort train`` and ``cohort resume`` share: make the trainer, train, and print what was reached.


TRUST = Annotated[str | None, Parameter(metavar="RUN")]
ALLOW_CHANGED = Annotated[Sequence[str], Parameter(name="--allow-changed", metavar="KEY")]


@output_outlasted()
def run_training(
    settings: GRPOConfig,
    resume: Resume,
    allow_changed: Sequence[str] = (),
    *,
    overrides: tuple[str, ...] = (),
    missing: Mapping[str, str] | None = None,
) -> None:
    """Train, and print what was reached.

    Args:
        settings: the settings.
        resume, allow_changed: as ``GRPOTrainer.train``.
        overrides: the settings that the command line gave, by name.
        missing: what a run that was begun in Python has no name for.
    """
    from cohort.parallel import World, on_main
    from cohort.runs.folder import Beginning, closed_on_error, find_folder
    from cohort.runs.starts import Start

    world = World.of_environment(timeout=settings.parallel.rank_timeout)
    folder, beginning = find_folder(settings, world, resume, allow_changed)
    if beginning is Beginning.COMPLETE:
        print(f"{settings.run.output_dir} is complete")
        return
    with closed_on_error(folder):
        start = Start(overrides=overrides, missing=missing or {})
        checkpoint = None
        if beginning is Beginning.RESUMED:
            checkpoint = folder.checkpoint(on_main(world, partial(folder.check_resumable, settings, allow_changed)))
        from cohort.policy import load_tokenizer
        from cohort.trainer import GRPOTrainer

        # What a resumed run has no name for is read from its checkpoint.
        absent = start.missing if checkpoint else {}
        tokenizer = None
        if "processing_class" in absent:
            tokenizer = load_tokenizer(str(checkpoint), trust_remote_code=settings.model.trust_remote_code)
        model = checkpoint if "model" in absent else None
        trainer = GRPOTrainer(model, args=settings, processing_class=tokenizer)
        trainer.began_as(start, settings, folder, beginning)
    trainer.started = STARTED
    try:
        summary = trainer.train(resume=resume, allow_changed=allow_changed)
    except Stopped:
        trainer.world.close()
        raise
    except KeyboardInterrupt as interrupt:
        interrupt.args = (_state_after_interrupt(trainer),)
        raise
    trainer.world.close()
    if settings.report.progress and trainer.world.is_main:
        updates = f"{summary['updates']} update{'s' * (summary['updates'] != 1)}"
        print(
            f"done: {updates} on {summary['completions']:,} completions; {summary['seconds']:.0f} s"
            f"{' since it was resumed' if checkpoint else ''}; run folder: {summary['output_dir']}"
        )
        if not summary["updates"]:
            from cohort.report.diagnosis import why_no_gradient

            print(f"nothing was learned; {why_no_gradient(trainer.last_metrics)}")


def _state_after_interrupt(trainer: GRPOTrainer) -> str:
    """What an interrupted run has written, and how to continue it."""
    if trainer.folder is None:
        return "nothing was written yet"
    path, steps = trainer.folder.path, trainer.folder.checkpoint_steps()
    what = f"a checkpoint of step {steps[-1]}: continue" if steps else "no checkpoint yet: start it again"
    return f"{path} has {what} with 'cohort resume {path}'"


# ----------------------------------------
# ``cohort resume``: continue a run from its folder alone.


@app.command(
    group=FIRST_HOUR,
    sort_key=3,
    usage="Usage: cohort resume RUN [--allow-changed KEY] [--trust RUN] [--section.key value ...]",
    help_epilogue="Every setting of 'cohort config' can be given as --section.key value. It overrides the run's.",
)
def resume(
    run: str,
    /,
    *overrides: Annotated[str, ANY_TEXT, Parameter(show=False)],
    allow_changed: ALLOW_CHANGED = (),
    trust: TRUST = None,
) -> None:
    """Continue a run from its folder alone.

    From its newest checkpoint, or from the start if it has none. Nothing is done if it is complete.

    The run's settings are used. Names of files given here belong to the working directory.

    What differs from the run so far is printed; what changes its results is refused.

    Args:
        run: The run folder.
        allow_changed: A setting or fact that may differ from the run's though it changes results. May be repeated.
        trust: Run the code that the settings in this run folder name, though this account has not run it before.
    """
    from cohort.config import load_config, setting_names, with_absolute_names
    from cohort.runs.folder import RunFolder
    from cohort.runs.starts import CONTINUED_BY, last_start
    from cohort.runs.trust import settings_of_run, started_in

    folder = RunFolder(Path(run).expanduser().resolve())
    folder.check_is_run()
    settings = load_config(folder.path / "config.toml", [*overrides, f"--run.output_dir={folder.path}"], of_run=True)
    start, names = last_start(folder.path), setting_names(overrides)
    if how := CONTINUED_BY.get(start.begun_by):
        raise RunFolderError(f"{folder.path} was begun with cohort.trl: continue it with {how}")
    given = {"data.train": "train_dataset", "data.eval": "eval_dataset", "reward.functions": "reward_funcs"}
    given |= {"environment.tools": "tools", "environment.factory": "environment_factory", "model.path": "model"}
    missing = {name: what for name, what in start.missing.items() if name not in {given.get(key) for key in names}}
    has_checkpoint, adapters = bool(folder.checkpoint_steps()), settings.model.lora.wanted
    if needed := replace(start, missing=missing).needed(adapters=adapters) if has_checkpoint else missing:
        names_of = {name: setting for setting, name in given.items()}
        flags = [f"--{names_of[name]} NAME" for name in needed if name in names_of]
        unknown = ", ".join(f"{name} ({what})" for name, what in needed.items())
        raise RunFolderError(
            f"{folder.path} was begun in Python, and its folder does not name {unknown}. Run its script "
            f"again, with train(resume='auto')" + (f"; or name them: {' '.join(flags)}" if flags else "")
        )
    settings = settings_of_run(folder.path, settings, trust, given=names)
    if (home := started_in(folder.path)) and home.is_dir():
        os.chdir(home)  # where the user's code was started, and may look for files
    settings = with_absolute_names(settings)  # those of an older run are relative
    run_training(settings, "auto", allow_changed, overrides=(*start.overrides, *names), missing=missing)


# ----------------------------------------
# ``cohort save``: a checkpoint of a run without stopping it.


POLL_SECONDS = 0.2


@app.command(sort_key=3, usage="Usage: cohort save RUN [--timeout SECONDS]")
def save(run: str, /, *, timeout: float = 600.0) -> None:
    """Let a run write a checkpoint between two steps, and go on.

    It may run on another machine.

    Args:
        run: The run folder.
        timeout: Seconds to wait for the checkpoint. [default: 600]
    """
    from cohort.lock import is_written
    from cohort.runs.folder import RunFolder

    folder = RunFolder(Path(run).expanduser())
    folder.check_is_run()
    last = (f"its last checkpoint is of step {step}" for step in reversed(folder.checkpoint_steps()))
    if folder.has_summary:
        raise RunFolderError(f"{run} is complete: {next(last, 'it has no checkpoint')}")
    file, until = folder.save_request, time.monotonic() + timeout
    try:
        file.touch()
        while file.exists():
            if not is_written(folder.path):
                raise RunFolderError(f"no process writes {run}: {next(last, 'it has no checkpoint')}")
            if time.monotonic() > until:
                raise RunFolderError(f"no run has answered in {run} for {timeout:g} s: is it running? (--timeout)")
            time.sleep(POLL_SECONDS)
    finally:
        file.unlink(missing_ok=True)  # also if no run has answered
    print(f"{folder.checkpoint(folder.checkpoint_steps()[-1])} is written")


@app.command(sort_key=1, usage="Usage: cohort demo [tool] [--seed N] [--output-dir FOLDER]")
def demo(
    task: Literal["addition", "tool"] = "addition",
    /,
    *,
    seed: int = 0,
    output_dir: Annotated[str | None, Parameter(metavar="FOLDER")] = None,
) -> None:
    """Train a small model in 90 seconds, without a download.

    It learns column addition, or when to call a calculator: about 90 seconds on two cores.

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
    group=FIRST_HOUR,
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
        from cohort.runs.trust import with_overrides_of_start

        settings, names = with_overrides_of_start(settings, overrides, trust)
        again = ", ".join(name for name in names if name not in setting_names(overrides))
        if again and settings.report.progress and os.environ.get("RANK", "0") == "0":
            print(f"settings that earlier command lines of the run gave apply again: {again}")
    run_training(settings, resume, allow_changed, overrides=names)


@app.command(
    sort_key=2,
    usage="Usage: cohort launch [--ranks N] [options] train CONFIG.toml [--section.key value ...]",
    help_epilogue="'cohort resume RUN' and 'cohort demo' can be launched too. 'cohort docs scale' explains ranks, "
    "layouts and several machines.",
)
def launch(*command: Annotated[str, ANY_TEXT], flags: LaunchFlags | None = None) -> int:
    """Train on several GPUs or machines, with a process for each GPU.

    Args:
        command: The command that every rank runs: 'train', 'resume' or 'demo' with its arguments.
    """
    from cohort.config import file_and_overrides
    from cohort.launch import job_of, settings_of
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
        resumed: bool | Literal["auto"] = "auto" if inner is resume else bound.kwargs.get("resume", False)
        job = job_of(command, flags, settings, output_dir=folder or settings.run.output_dir, resume=resumed)
    elif inner is demo:
        job = job_of(command, flags, None, output_dir=bound.kwargs.get("output_dir"))
    else:
        raise ConfigError(f"cohort launch cannot start 'cohort {' '.join(command)}'")
    check_files(job.folder)  # before the ranks write logs into it
    return run(job)
