"""Environments that note in a file when they are made and closed, and misbehave as told. Worker processes import this."""

import asyncio
import math
import os
import signal
import sys
import time
from pathlib import Path

from cohort.environments.contract import Step


class World:
    """Plays a plan: an action for ``reset`` and for each turn."""

    def __init__(self, log):
        self._log = Path(log)
        self.name = f"{os.getpid()}-{id(self)}-{time.monotonic_ns()}"
        self.turns = 0
        self.lock = open(os.devnull)  # noqa: PTH123, SIM115 - cannot be pickled
        self._note("made")

    def _note(self, what):
        with self._log.open("a") as file:
            file.write(f"{what} {self.name}\n")

    def reset(self, plan, seed=None):
        self._plan = list(plan)
        self.seed = seed
        return self._act("start").observation

    def step(self, text):
        self.turns += 1
        return self._act(text)

    def _act(self, text):
        match self._plan.pop(0) if self._plan else "done":
            case "raise":
                raise ValueError("no way")
            case "exit":
                sys.exit(3)
            case "hang":
                time.sleep(60)
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "nan":
                return Step("x", math.nan)
            case "text":
                return "just text"
            case "done":
                return Step(f"bye {text}", 1.0, done=True)
        return Step(f"heard {text}", 0.25)

    def get_reward(self):
        return self._act("").reward

    def close(self):
        self.lock.close()
        self._note("closed")


class AsyncWorld(World):
    """The same, with an ``async`` method."""

    async def step(self, text):
        if self._plan[:1] == ["hang"]:
            await asyncio.sleep(60)
        return super().step(text)


class Desk:
    """Methods that are tools."""

    def __init__(self):
        self.total = 0
        self.order = []

    def reset(self, text=None):
        return text

    def add(self, number: int) -> int:
        """Adds to the total.

        Args:
            number: What to add.
        """
        self.order.append(number)
        self.total += number
        return self.total

    def fail(self) -> str:
        """Fails."""
        raise LookupError("nothing there")

    def hang(self) -> str:
        """Never returns."""
        time.sleep(60)
        return ""

    def get_reward(self):
        return self.total


class AsyncDesk(Desk):
    """The same, with ``async`` tools."""

    def __init__(self):
        super().__init__()
        self.inside = 0

    async def add(self, number: int) -> int:
        """Adds to the total.

        Args:
            number: What to add.
        """
        self.inside += 1
        assert self.inside == 1, "two calls at a time"
        await asyncio.sleep(0.01)
        self.inside -= 1
        return super().add(number)

    async def hang(self) -> str:
        """Never returns."""
        await asyncio.sleep(60)
        return ""


class Faulty(World):
    """Three turns, each rewarded by its digit. At the digit 7 it misbehaves, in each turn in another way."""

    def __init__(self, log, *faults):
        super().__init__(log)
        self._faults = faults

    def reset(self):
        self._plan = []

    def step(self, text):
        digit = int(text.strip()[-1:])
        if digit == 7:
            self._plan = [self._faults[self.turns % len(self._faults)]]
            return super().step(text)
        self.turns += 1
        return Step("Go on.", digit / 10, done=self.turns == 3)

    def get_reward(self):
        return None


class AsyncFaulty(Faulty):
    """The same, with an ``async`` method."""

    async def step(self, text):
        if "7" in text and self._faults[self.turns % len(self._faults)] == "hang":
            await asyncio.sleep(60)
        return super().step(text)
