"""An object that goes along with a run on every rank, unlike callbacks, and keeps its state in the checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cohort.errors import RunFolderError
from cohort.evaluation import Evaluation


class Companion:
    """Goes along with a run: ``GRPOTrainer.steps(companion=...)`` takes an object with these methods. This one does
    nothing."""

    asks_for_evaluations = False
    """Whether the run evaluates after a step only when this object asks for it, even after the last step."""
    initial_can_be_best = True
    """Whether the initial model, which is evaluated before the first step, can be the best one."""

    def evaluated(self, step: int, evaluations: Mapping[str, Evaluation], metrics: Mapping[str, Any]) -> None:
        """An evaluation ended; a due checkpoint follows.

        Args:
            step: complete steps; 0 for the evaluation before the first.
            evaluations: the evaluation of each set, "" if there is one.
            metrics: theirs, ``eval/...``.
        """

    def updated(self, metrics: Mapping[str, Any]) -> None:
        """A step's updates are made; a due evaluation and checkpoint follow. ``GRPOTrainer.evaluate_now`` may be called
        here. A run that was stopped in this evaluation and resumed tells of the step again.

        Args:
            metrics: the step's, without those of its evaluation.
        """

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint is to hold, in types of JSON. Rank 0's is written."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what ``state_dict`` gave to the checkpoint that the run goes on from; empty if it gave nothing.

        Raises:
            RunFolderError: the state is that of another companion, which the run needs to continue.
        """
        if state:
            raise RunFolderError(
                "the run was begun with cohort.trl: continue it with the script or command that began it"
            )
