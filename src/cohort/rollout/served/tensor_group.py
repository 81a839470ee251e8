"""The ranks that are one tensor-parallel ``LLM``: what they exchange, and how they hear that one of them has failed.

A rank that fails tells the others at their next exchange. One that waits for it inside vLLM cannot come there, and
vLLM's collectives end for no error elsewhere: a thread looks for what was told, and ends such a process.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from cohort.errors import RankError
from cohort.parallel import World
from cohort.parallel.agree import Failure

log = logging.getLogger("cohort.rollout")
LOOK_SECONDS = 0.5
"""Between two looks for what another rank has told."""
GRACE_SECONDS = 10.0
"""How long a call of vLLM may go on after another rank has failed."""
SHARED_MEMORY = Path("/dev/shm")


class TensorGroup:
    """A group's place, on one of its ranks.

    Args:
        world: all ranks.
        group: the process group.
        size: its ranks.
    """

    def __init__(self, world: World, group: Any, size: int) -> None:
        self.world, self.group, self.size = world, group, size
        self.over = True
        """Whether the ranks exchange nothing more in this session."""
        self.closed = False
        self._session = 0
        self._entered: float | None = None
        self.name = str(self.gather(f"cohort-{secrets.token_hex(4)}")[0])
        """Of this group alone among those of all runs."""
        Thread(target=self._look, name=self.name, daemon=True).start()

    @classmethod
    def of(cls, world: World, size: int) -> TensorGroup | None:
        """The group of this rank; None if each rank is alone. Every rank calls."""
        if size == 1:
            return None
        own: Any = None
        for first in range(0, world.size, size):
            ranks = list(range(first, first + size))
            group = torch.distributed.new_group(ranks, backend="gloo")
            own = group if world.rank in ranks else own
        return cls(world, own, size)

    def gather(self, value: Any) -> list[Any]:
        """The values of the group's ranks.

        Raises:
            BaseException: of the type and with the text of the rank that has failed instead.
            RankError: a rank has ended.
        """
        values: list[Any] = [None] * self.size
        try:
            torch.distributed.all_gather_object(values, value, group=self.group)
        except RuntimeError as error:
            place = f"rank {self.world.rank} of {self.world.size}"
            why = "its log says why (logs/ in the run folder)"
            raise RankError(f"{place} lost another rank of its vLLM: {why}") from error
        failure = next((one for one in values if isinstance(one, Failure)), None)
        if failure is not None and not isinstance(value, Failure):
            self.over = True
            raise failure.error(self.world.size)
        return values

    @contextmanager
    def session(self) -> Iterator[None]:
        """A block in which the ranks exchange values until ``over``. An error in it is told to the others."""
        self.over, self._session = False, self._session + 1
        try:
            yield
        except BaseException as error:
            if not self.over:
                failure, self.over = Failure.of(self.world.rank, error), True
                self.world.tell(self._key, f"rank {failure.rank} of {self.world.size}: {failure.text}")
                with suppress(RankError):  # they have ended
                    self.gather(failure)
            raise

    @contextmanager
    def inside(self) -> Iterator[None]:
        """A block in which vLLM may wait for the other ranks."""
        self._entered = time.monotonic()
        try:
            yield
        finally:
            self._entered = None

    def free_names(self) -> None:
        """Remove the names of the memory that vLLM's workers share on a CPU, once all have opened it. vLLM leaves them
        when a process ends."""
        torch.distributed.barrier(self.group)
        for path in SHARED_MEMORY.glob(f"{self.name}-*"):
            path.unlink(missing_ok=True)

    @property
    def _key(self) -> str:
        return f"{self.name}/{self._session}"

    def _look(self) -> None:
        """Look for what another rank has told, and end a process that waits for that rank inside vLLM."""
        while not self.closed:
            time.sleep(LOOK_SECONDS)
            entered = self._entered
            if entered is None or not (told := self._told()):
                continue
            time.sleep(GRACE_SECONDS)
            if self._entered == entered:
                log.critical("rank %d of %d waits inside vLLM and ends: %s", self.world.rank, self.world.size, told)
                os._exit(1)

    def _told(self) -> str | None:
        try:
            return self.world.told(self._key)
        except Exception as error:
            return f"the rank that keeps the store of all ranks has ended ({type(error).__name__})"
