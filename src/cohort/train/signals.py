"""Signals of a run: the first one asks it to stop, the second one ends the process."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cohort import terminal
from cohort.calls import interrupt
from cohort.errors import STOPPED
from cohort.parallel import World
from cohort.watchdog import ignored

# ----------------------------------------
# Requests to a run, from signals or from Python: stop, write a checkpoint, or evaluate.


SECONDS_BETWEEN_LOOKS = 1.0
"""How often a run looks for a request of another rank."""
STOP = "cohort/stop"


@dataclass(slots=True)
class Requests:
    """What is asked of a run. The loop looks at ``stop_point``; sampling, scoring and evaluation ask ``stop`` too.

    Handlers of signals set the attributes, so they are plain values: a handler that takes a lock waits for ever if it
    has interrupted the code that holds it.
    """

    stop: bool = False
    """End the run, with a checkpoint."""
    save: bool = False
    """Write a checkpoint, and go on."""
    evaluate: bool = False
    """Evaluate after the step in progress."""
    reason: str = "stop()"
    """What asked to stop: the name of a signal."""
    met: bool = False
    """Whether the run has stopped, and its checkpoint is written."""
    _looked: float = -math.inf
    """When another rank was last asked."""

    def take_evaluate(self, world: World) -> bool:
        """Whether an evaluation was asked for on any rank. Forgets the request. Every rank must call."""
        evaluate, self.evaluate = self.evaluate, False
        return any(world.gather(evaluate))

    def wants_stop(self, world: World) -> bool:
        """Whether this rank or another one was asked to stop. Exchanges nothing: ranks sample at their own pace, and
        ``stop_point`` lets them agree."""
        if world.size > 1 and (now := time.monotonic()) - self._looked >= SECONDS_BETWEEN_LOOKS:
            self._looked = now
            if self.stop:
                world.tell(STOP, self.reason)
            elif (reason := world.told(STOP)) is not None:
                self.reason, self.stop = reason, True
        return self.stop


STOPPING, SAVING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP), signal.SIGUSR2
NUDGE = signal.SIGUSR1
"""Interrupts a function in the main thread."""
DEFAULT = (signal.SIG_DFL, signal.default_int_handler, ignored)
"""Handlers that may be replaced: a handler of the user's program stays."""


@contextlib.contextmanager
def obeying_signals(requests: Requests, seconds: float) -> Iterator[None]:
    """While the block runs, ``STOPPING`` ask for a stop, and SIGUSR2 for a checkpoint.

    A second signal ends the process at once, as it would without Cohort, and so does the end of ``seconds`` after the
    first. When half of them are over, a reward function that runs in the main thread is interrupted: its call is made
    again by the run that goes on. Outside of the main thread, where Python has no signals, nothing changes.

    A rank gets the first signal twice, from a scheduler that signals all processes of a job and from its launcher. A
    second one does nothing there; one to the launcher ends all ranks.

    Args:
        requests: of the run.
        seconds: time to stop; 0: no limit.
    """
    nudged, is_rank = False, os.environ.get("WORLD_SIZE", "1") != "1" or "TORCHELASTIC_RUN_ID" in os.environ
    is_main = threading.current_thread() is threading.main_thread()
    numbers = (*STOPPING, SAVING) if is_main else ()
    before = {number: found for number in numbers if (found := signal.getsignal(number)) in DEFAULT}
    timers: list[threading.Timer] = []

    def stop(number: int, _: Any) -> None:
        requests.reason, requests.stop = signal.Signals(number).name, True
        terminal.release()  # before a second signal may end the process
        _expect_second(before, is_rank=is_rank)
        again = "" if is_rank else "; a second signal ends the process at once"
        _say(f"{requests.reason}: stopping with a checkpoint{again}")
        if seconds:
            timers.append(threading.Timer(seconds, _end, [requests, number, seconds]))
        if seconds and NUDGE in before:
            signal.signal(NUDGE, second)
            timers.append(threading.Timer(seconds / 2, interrupt_main))
        for timer in timers:
            timer.daemon = True
            timer.start()

    def interrupt_main() -> None:
        nonlocal nudged
        nudged = True
        signal.pthread_kill(threading.main_thread().ident or 0, NUDGE)

    def second(number: int, _: Any) -> None:
        nonlocal nudged
        if nudged:
            nudged = False
            interrupt()
        elif not is_rank:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def save(*_: Any) -> None:
        requests.save = True

    for number in before:
        signal.signal(number, save if number == SAVING else stop)
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()
        for number, handler in before.items():
            # A rank that has stopped is told to end when another one has ended.
            signal.signal(number, ignored if requests.met and is_rank else handler)


def _expect_second(before: Mapping[Any, Any], *, is_rank: bool) -> None:
    """After the first signal, let a second one end the process, or do nothing to a rank."""
    for number, handler in before.items():
        if is_rank:
            signal.signal(number, ignored)
        elif number != SAVING:
            # In a notebook or console, the second Ctrl-C raises KeyboardInterrupt.
            signal.signal(number, handler if hasattr(sys, "ps1") else signal.SIG_DFL)


def _end(requests: Requests, number: int, seconds: float) -> None:
    if not requests.met:
        _say(f"the run has not stopped within {seconds:g} s (run.stop_seconds): its last checkpoint stands")
    os._exit(STOPPED if requests.met else 128 + number)


def _say(text: str) -> None:
    """Print from a signal handler, which may have interrupted a print, to a terminal that may be closed. What a display
    shows below the cursor is erased, and drawn again by it."""
    with contextlib.suppress(OSError):
        erase = "\x1b[J" if os.isatty(2) and os.environ.get("TERM", "dumb") != "dumb" else ""
        os.write(2, f"\n{erase}cohort: {text}\n".encode())
