"""What ``cohort train`` and ``cohort resume`` share: make the trainer, train, and print what was reached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from cohort.cli.app import STARTED
from cohort.errors import Stopped
from cohort.terminal import output_outlasted

if TYPE_CHECKING:
    from cohort.config import GRPOConfig
    from cohort.runs.output import Resume
    from cohort.runs.starts import Start
    from cohort.trainer import GRPOTrainer

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
    from cohort.runs.output import Beginning, closed_on_error, find_folder
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
        trainer = _trainer(settings, start, checkpoint)
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


def _trainer(config: GRPOConfig, started_by: Start, checkpoint: Path | None) -> GRPOTrainer:
    """The trainer of settings that name model, data and rewards.

    Args:
        config: the settings.
        started_by: how the process was started. What a resumed run has no name for is read from its checkpoint.
        checkpoint: that of a run that goes on.

    Raises:
        CohortError: as ``GRPOTrainer``.
    """
    from cohort.policy import load_tokenizer
    from cohort.trainer import GRPOTrainer

    model, tokenizer = None, None
    if checkpoint:
        model = checkpoint if "model" in started_by.missing else None
        if "processing_class" in started_by.missing:
            tokenizer = load_tokenizer(str(checkpoint), trust_remote_code=config.model.trust_remote_code)
    return GRPOTrainer(model, args=config, processing_class=tokenizer)


def _state_after_interrupt(trainer: GRPOTrainer) -> str:
    """What an interrupted run has written, and how to continue it."""
    if trainer.folder is None:
        return "nothing was written yet"
    path, steps = trainer.folder.path, trainer.folder.checkpoint_steps()
    what = f"a checkpoint of step {steps[-1]}: continue" if steps else "no checkpoint yet: start it again"
    return f"{path} has {what} with 'cohort resume {path}'"
