"""The moments between two steps: where a run meets requests, what a checkpoint holds, and how a resumed run begins.

A checkpoint is always of such a moment. Before a step's first optimizer step, weights and optimizer are still those of
the moment before the step, so that a checkpoint of it can be written; after it, the run goes on to the next moment. The
journal has the step's rollout, so that nothing is sampled or scored again.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from cohort.config import GRPOConfig, Schedule
from cohort.errors import ConfigError, RunFolderError, Stopped
from cohort.parallel import on_main, together
from cohort.policy.device import Generators, generators
from cohort.runs.changes import UNSTEADY, Change, fact_changes, refuse, take_threads
from cohort.runs.changes import describe as describe_changes
from cohort.runs.checkpoints import SavedState, load_checkpoint, random_state, saved_identity
from cohort.runs.folder import RunFolder
from cohort.runs.journal import EXACT
from cohort.runs.reading import damage_named
from cohort.train.parts import TrainerParts
from cohort.train.source import RolloutSource
from cohort.train.state import State


class Training:
    """A run that trains, with the last moment between two steps that it has reached.

    Args:
        parts: the collaborators of the run.
        schedule: its schedule.
        folder: its folder.
        state: the state that it goes on from.
        is_saved: whether a checkpoint of this state exists.
    """

    def __init__(
        self, parts: TrainerParts, schedule: Schedule, folder: RunFolder, state: State, *, is_saved: bool = False
    ) -> None:
        self.parts, self.schedule, self.folder = parts, schedule, folder
        self.source = RolloutSource(parts, schedule, folder, state)
        """Its rollouts."""
        self.state = state
        """That of the moment."""
        self._saved = state if is_saved else None
        self._generators: Generators | None = None

    def reached(self, state: State) -> State:
        """A step, or its evaluation, is complete. Returns the state."""
        self.state, self._generators = state, None
        return state

    def begin_step(self) -> None:
        """A step begins, unless the run is to stop. User functions will draw random numbers; a checkpoint of this
        moment has the generators as they are now."""
        self.stop_point()
        self._generators = generators()

    @property
    def is_at_boundary(self) -> bool:
        """Whether weights and optimizer are those of this moment: no optimizer step was made since."""
        return self.parts.policy.version == self.state.version

    def save(self, *, wait: bool = False) -> None:
        """Write a checkpoint of this moment, unless there is one. Every rank must call.

        Args:
            wait: whether to return only when it is written.
        """
        parts, state = self.parts, self.state
        self.source.journal_pending()
        if state is not self._saved:
            random = random_state(self._generators)
            if self._generators and parts.config.rollout.lag:  # functions have drawn for pending rollouts
                random |= {name: value for name, value in random_state().items() if name in ("python", "numpy")}
            loop = {
                **state.to_store(),
                "identity": parts.facts,
                "random": parts.world.gather(random),
                "microbatch_tokens": parts.budget.tokens,
                "observers": parts.observers.state_dict(),
            }
            saved = SavedState(state.complete_steps, parts.optimizer.state_dict(), loop)
            self.folder.save_checkpoint(parts.models, saved, parts.world, wait=wait)
            self._saved = state
        elif wait:
            on_main(parts.world, self.folder.settle)

    def stop_point(self) -> None:
        """Write a checkpoint if one is asked for, and end the run if it is to stop, unless an optimizer step was made
        since this moment: then the next one is waited for. A request to one rank is one to all, and every rank must
        call.

        Raises:
            Stopped: the run is to stop, and the checkpoint is written.
        """
        requests, world, step = self.parts.requests, self.parts.world, self.state.complete_steps
        if not self.is_at_boundary:
            return
        if world.is_main:
            requests.save |= self.folder.save_request.exists()
        asked = world.gather((requests.stop, requests.save, requests.reason))
        stop = next((reason for stops, _, reason in asked if stops), None)
        if stop is None and not any(saves for _, saves, _ in asked):
            return
        requests.save = False  # before it is written: a request meanwhile is for a newer one
        self.save(wait=True)
        on_main(world, lambda: self.folder.save_request.unlink(missing_ok=True))
        if stop is not None:
            requests.met = True
            where = f"after step {step}" if self.state.metrics is None else f"in the evaluation after step {step}"
            raise Stopped(f"stopped by {stop} {where}; {self.folder.checkpoint(step)} holds this moment")

    def save_before_end(self) -> str:
        """Write what can be written when an error, or the caller, ends the run here. Returns what it is, in words.
        Every rank must call."""
        self.source.end("scores")
        if self.is_at_boundary:
            self.save(wait=True)
            return f"a checkpoint of step {self.state.complete_steps} is kept"
        self.source.journal_pending()
        return "the newest checkpoint is kept, and the rollouts since"


@contextmanager
def with_resume_hint(how: str, *, show: bool) -> Iterator[None]:
    """Add to ``Stopped`` how to continue the run that the block trains.

    Args:
        how: how to continue the run, in words.
        show: whether to print it: Python prints nothing of a script that ends with a code.
    """
    try:
        yield
    except Stopped as stopped:
        stopped.text += f"; continue with {how}"
        if show:
            print(f"cohort: {stopped}", file=sys.stderr)
            stopped.is_printed = True
        raise


class RunEndedError(ConfigError):
    """The run to resume has made all its steps, or stopped early."""


def resume(
    folder: RunFolder,
    parts: TrainerParts,
    schedule: Schedule,
    state: State,
    config: GRPOConfig,
    allowed: Collection[str],
) -> tuple[State, Schedule, list[str]]:
    """Continue a run from its newest whole checkpoint. Every rank must call.

    Args:
        folder: the run's folder.
        parts: the collaborators: policy, reference, optimizer, observers and the random generators of this process take
            what the checkpoint has.
        schedule: of the settings.
        state: of a run that begins.
        config: the settings, which the folder holds from now on.
        allowed: keys of changes that are allowed though they change results.

    Returns:
        The state to go on from, the schedule of the rest, and what differs from before in words, line by line.

    Raises:
        RunFolderError: there is no whole checkpoint, or a change is not allowed.
        RunEndedError: the run has ended; weights and optimizer are those of its end.
    """
    step = on_main(parts.world, partial(folder.check_resumable, config, allowed))
    checkpoint = folder.checkpoint(step)
    note, changes = together(parts.world, lambda: _changes(folder, checkpoint, parts, config, allowed))
    best = on_main(parts.world, folder.best_record)

    def restore() -> State:
        with damage_named(checkpoint):
            saved = load_checkpoint(checkpoint, parts.models, rank=parts.world.rank)
            restored = state.restored(saved.loop, best)
            parts.optimizer.load_state_dict(saved.optimizer)
            parts.observers.load_state_dict(dict(saved.loop["observers"]))
            tokens = max(0, int(saved.loop["microbatch_tokens"]))
        if config.optim.microbatch_tokens is None:  # sums in the order of the run, whatever memory is free now
            parts.budget.tokens = tokens or parts.budget.tokens
        return restored

    state = together(parts.world, restore)
    schedule = schedule.resumed(step, state.cursor.position)
    # Without a summary, the process was killed after the last step: the end is made now.
    if state.metrics is None and on_main(parts.world, lambda: folder.has_summary):
        _check_incomplete(folder, state, schedule)
    on_main(parts.world, lambda: _drop_outdated(folder, changes, step))
    # A process that was killed after this evaluation has written the line that this one will write.
    written = step if state.metrics is None else step - 1
    on_main(parts.world, lambda: folder.resume(config, step, written))
    return state, schedule, [*filter(None, [note]), *describe_changes(changes)]


def _changes(
    folder: RunFolder, checkpoint: Path, parts: TrainerParts, config: GRPOConfig, allowed: Collection[str]
) -> tuple[str, list[Change]]:
    """What differs from the run that wrote a checkpoint. Takes its number of threads, and says so in a note.

    Raises:
        RunFolderError: it changes results and is not allowed.
    """
    saved = saved_identity(checkpoint)
    note = "" if "threads" in allowed else take_threads(saved, parts.world.size)
    parts.facts["threads"] = str(torch.get_num_threads())
    changes = fact_changes(saved, parts.facts)
    refuse(folder.path, changes, allowed)
    return note, [*folder.check_settings(config, allowed), *changes]


SCORING = {"rewards", "values", "code"}
"""Facts after whose change completions are as before, and their scores are not."""


def _drop_outdated(folder: RunFolder, changes: Collection[Change], step: int) -> None:
    """Remove from the journal what the changed run would not have sampled, and the scores that it would not have given.

    Args:
        folder: the run's folder.
        changes: what differs from before.
        step: complete steps.
    """
    changed = {one.key for one in changes if one.reaches_weights}
    if not changed:
        return
    is_other = any(key not in UNSTEADY | SCORING | {"rollout.lag"} and not key.startswith("optim.") for key in changed)
    folder.forget_journal([one for one in folder.journal_steps() if one <= step])  # for an older checkpoint
    for later in folder.journal_steps():
        try:
            stored = folder.read_journal(later)
        except RunFolderError:
            continue  # whoever reads it says so
        is_of_later_weights = int(stored.facts["weights_step"]) > step
        if is_other or is_of_later_weights or (changed & SCORING and not stored.facts[EXACT]):
            folder.forget_journal([later])
        elif stored.scores is not None and changed & SCORING:
            folder.write_journal(later, replace(stored, scores=None))


def _check_incomplete(folder: RunFolder, state: State, schedule: Schedule) -> None:
    step = state.complete_steps
    if step >= schedule.steps:
        raise RunEndedError(
            f"{folder.path} is complete: it is at step {step} of {schedule.steps}; "
            "raise run.num_epochs or run.max_steps to train longer"
        )
    if state.best.exhausted:
        raise RunEndedError(
            f"{folder.path} stopped early, at step {step}: {state.best.describe()}; "
            "raise eval.early_stopping_patience, or set it to 0, to train longer"
        )
