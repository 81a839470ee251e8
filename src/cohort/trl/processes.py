"""``trainer.accelerator``: what scripts ask accelerate's ``Accelerator`` about the processes of a run."""

from __future__ import annotations

from typing import Any

from cohort.parallel import World


class Processes:
    """The processes of a run, by the names of accelerate.

    Args:
        world: the ranks.
        device: of this process.
    """

    def __init__(self, world: World, device: Any) -> None:
        self._world, self.device = world, device
        self.is_main_process, self.is_local_main_process = world.is_main, world.local_rank == 0
        self.process_index, self.local_process_index = world.rank, world.local_rank
        self.num_processes = world.size

    def wait_for_everyone(self) -> None:
        """Wait until every process is here."""
        self._world.barrier()

    def print(self, *values: Any, **options: Any) -> None:
        """Print on the first process of each machine."""
        if self.is_local_main_process:
            print(*values, **options)

    def unwrap_model(self, model: Any, **_: Any) -> Any:
        """The model, which nothing wraps here."""
        return model
