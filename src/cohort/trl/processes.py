"""``trainer.accelerator``: what scripts ask accelerate's ``Accelerator`` about the processes of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cohort.parallel import World


@dataclass(frozen=True, slots=True)
class Processes:
    """The processes of a run, by the names of accelerate."""

    world: World
    device: Any
    """The device of this process."""

    @property
    def is_main_process(self) -> bool:
        """Whether this is the first process of all."""
        return self.world.is_main

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its machine."""
        return self.world.local_rank == 0

    @property
    def process_index(self) -> int:
        """Number of this process among all."""
        return self.world.rank

    @property
    def local_process_index(self) -> int:
        """Number of this process on its machine."""
        return self.world.local_rank

    @property
    def num_processes(self) -> int:
        """Processes of the run."""
        return self.world.size

    def wait_for_everyone(self) -> None:
        """Wait until every process is here."""
        self.world.barrier()

    def print(self, *values: Any, **options: Any) -> None:
        """Print on the first process of each machine."""
        if self.is_local_main_process:
            print(*values, **options)

    def unwrap_model(self, model: Any, **_: Any) -> Any:
        """The model, which nothing wraps here."""
        return model
