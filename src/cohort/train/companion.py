"""An object that goes along with a run on every rank, unlike callbacks, and keeps its state in the checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cohort.errors import RunFolderError


class Companion:
    """Goes along with a run: ``GRPOTrainer.steps(companion=...)`` takes an object with these methods. This one does
    nothing."""

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
            RunFolderError: there is a state, and this companion takes none: the run goes on only with its own.
        """
        if state:
            raise RunFolderError(
                "the run was begun with cohort.trl: continue it with the script or command that began it"
            )
