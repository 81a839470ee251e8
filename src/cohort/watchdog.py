"""Reports waits that take far longer than before, with where the code is.

    with waiting("scoring"):
        with waiting("reward judge", lambda: "sample 41"):
            ...

After a while, a thread logs "scoring: 214 s so far, at most 3.1 s before; reward judge: 212 s, sample 41". Entering and
leaving a block takes a few microseconds, and the thread wakes up every few seconds.

A function that holds the interpreter lock stops this thread too. Then a thread of ``faulthandler`` prints the stacks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

log = logging.getLogger("cohort.watchdog")
FACTOR = 5.0
"""What takes this many times as long as ever before is reported."""
LEAST_SECONDS = 60.0
"""Nothing is reported earlier."""
FIRST_SECONDS = 300.0
"""A wait that has never ended before, and a wait for other ranks, is reported after this time. It is reported again
only after as long a time without progress."""
TICK = 2.0
"""Seconds between looks."""
HELD_SECONDS = 300.0
"""Stacks are printed when the interpreter lock is held for this time, or for ``ARM_SECONDS`` less."""
ARM_SECONDS = 60.0
SHARED_SECONDS = 10.0
"""Other ranks are told of what takes longer than this."""
MAX_NAMED = 5
"""Maximum number of completions that are named in a message."""
RANKS = "the other ranks"
"""What a rank waits for in an exchange."""

dumping: set[int] = set()
"""Process ids of workers that print their stack on SIGQUIT, which is sent on to them."""


@dataclass(slots=True, eq=False)
class _Wait:
    what: str
    detail: Callable[[], str]
    start: float = field(default_factory=time.monotonic)
    next_report: float = 0.0
    reported: bool = False
    details: tuple[str, ...] = ()
    """What it and those in it said when last looked at."""


_threads: dict[int, list[_Wait]] = {}
"""What each thread waits for, from the outermost to the innermost."""
_longest: dict[str, float] = {}
"""Seconds that each wait has taken at most."""


@contextlib.contextmanager
def waiting(what: str, detail: Callable[[], str] = str) -> Iterator[None]:
    """A block, or a decorated function, that may hang.

    Args:
        what: what it waits for. Durations under the same name are compared.
        detail: what more to say; called in another thread. Errors in it are ignored.
    """
    _watch(os.getpid())
    wait = _Wait(what, detail)
    wait.next_report = wait.start + _patience(what)
    thread = threading.get_ident()
    stack = _threads.setdefault(thread, [])
    stack.append(wait)
    try:
        yield
    finally:
        stack.remove(wait)
        if not stack:
            _threads.pop(thread, None)
        seconds = time.monotonic() - wait.start
        _longest[what] = max(seconds, _longest.get(what, 0.0))
        if wait.reported:
            log.warning("%s: ended after %.0f s", what, seconds)


def samples(numbers: Iterable[int]) -> str:
    """Completions by their numbers in the rollout, for a message.

    >>> samples([41]), samples(range(8)), samples([])
    ('sample 41', 'samples 0, 1, 2, 3, 4 and 3 more', '')
    """
    found = list(map(str, numbers))
    more = f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
    return f"sample{'s' * (len(found) > 1)} {', '.join(found[:MAX_NAMED])}{more}" if found else ""


def _patience(what: str) -> float:
    least = LEAST_SECONDS if what in _longest and what != RANKS else FIRST_SECONDS
    return max(least, FACTOR * _longest.get(what, 0.0))


@functools.cache
def _watch(process: int) -> None:
    """Start the thread of a process."""
    threading.Thread(target=_look_forever, name=f"cohort-watchdog-{process}", daemon=True).start()


def _look_forever() -> None:
    armed: float | None = None
    while True:
        time.sleep(TICK)
        now = time.monotonic()
        if _threads and (armed is None or now - armed >= ARM_SECONDS):
            faulthandler.dump_traceback_later(HELD_SECONDS, file=2)
            armed = now
        elif not _threads and armed is not None:
            faulthandler.cancel_dump_traceback_later()
            armed = None
        _look(now)


def _look(now: float) -> None:
    """Report what has taken too long, at first and each time that its duration has doubled. While it progresses, as its
    details show, once is enough."""
    for stack in map(list, list(_threads.values())):
        late = next((number for number, wait in enumerate(stack) if now >= wait.next_report), None)
        if late is None:
            continue
        inside = stack[late:]
        details = tuple(_detail(wait) for wait in inside if wait.what != RANKS)  # with them, seconds change
        progresses = inside[0].reported and details != inside[0].details
        inside[0].details = details
        for wait in inside:
            again = now + FIRST_SECONDS if progresses else 2 * now - wait.start
            wait.next_report, wait.reported = max(wait.next_report, again), True
        if not progresses:
            log.warning("%s. kill -QUIT %d prints the stack of every thread", _text(inside, now), os.getpid())
    _share(now)


def _detail(wait: _Wait) -> str:
    with contextlib.suppress(Exception):
        return wait.detail()
    return ""


def _text(stack: list[_Wait], now: float) -> str:
    """A wait and those in it, with their seconds and details."""
    parts: list[str] = []
    for wait in stack:
        with_detail = f"{wait.what}: {now - wait.start:.0f} s"
        if not parts:
            before = _longest.get(wait.what)
            with_detail += " so far" + ("" if before is None else f", at most {max(before, 0.1):.1f} s before")
        detail = _detail(wait)
        parts.append(with_detail + (f", {detail}" if detail else ""))
    return "; ".join(parts)


def waits_of(thread: int) -> list[tuple[str, float, str]]:
    """What a thread waits for, from the outermost to the innermost: name, seconds so far, and what more there is to
    say. If it waits for nothing, what another thread waits for, such as one that samples ahead."""
    now = time.monotonic()
    stack = list(_threads.get(thread, ())) or next(map(list, list(_threads.values())), [])
    return [(one.what, now - one.start, _detail(one)) for one in stack]


def waits() -> str:
    """What every thread waits for, in one line each."""
    now = time.monotonic()
    return "\n".join(_text(list(one), now) for one in list(_threads.values()) if one)


# Ranks ----------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Ranks:
    store: Any
    rank: int
    size: int
    shared: str = ""


_ranks: list[_Ranks] = []
"""This rank among others; empty for a single process."""


def share(store: Any, rank: int, size: int) -> None:
    """Tell other ranks what this one waits for, and report what they wait for beside ``RANKS``.

    Args:
        store: a ``torch.distributed.Store`` of all ranks.
        rank, size: this rank, and how many there are.
    """
    _ranks[:] = [_Ranks(store, rank, size)]


def _share(now: float) -> None:
    long = [one for one in map(list, list(_threads.values())) if one and now - one[0].start >= SHARED_SECONDS]
    text = "; ".join(_text(one, now) for one in long if one[-1].what != RANKS)
    for one in _ranks:
        if text or one.shared:
            with contextlib.suppress(Exception):  # the process that held the store has ended
                one.store.set(f"waits/{one.rank}", text)
                one.shared = text


def other_ranks() -> str:
    """What the other ranks wait for that do not wait for this one, as they have shared it."""
    found = []
    for one in _ranks:
        for rank in range(one.size):
            key = f"waits/{rank}"
            if rank != one.rank and one.store.check([key]) and (text := one.store.get(key).decode()):
                found.append(f"rank {rank} in {text}")
    return "; ".join(found)


# SIGQUIT --------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _handling(number: int, handler: Callable[..., None]) -> Iterator[bool]:
    """In this block, a signal has a handler. Gives False outside the main thread, or if the signal has another handler:
    then nothing changes."""
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(number) is not signal.SIG_DFL:
        yield False
        return
    signal.signal(number, handler)
    try:
        yield True
    finally:
        signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def dumps_on_quit() -> Iterator[None]:
    """In this block, SIGQUIT prints the stack of every thread of this process and of its workers, and what they wait
    for. It does nothing outside the main thread, or if the signal has another handler."""
    with _handling(signal.SIGQUIT, _on_quit) as is_set:
        if not is_set:
            yield
            return
        faulthandler.register(signal.SIGQUIT, file=2, chain=True)  # at once, also while the interpreter lock is held
        try:
            yield
        finally:
            faulthandler.unregister(signal.SIGQUIT)


def ignored(*_: Any) -> None:
    """A handler that does nothing. Unlike SIG_IGN, processes that are started do not inherit it."""


@contextlib.contextmanager
def save_signal_ignored() -> Iterator[None]:
    """In this block, SIGUSR2 does not end the process. It asks a run for a checkpoint, and may come before the run has
    loaded its model. It does nothing outside the main thread, or if the signal has another handler."""
    with _handling(signal.SIGUSR2, ignored):
        yield


def _on_quit(number: int, _frame: Any) -> None:
    print(waits() or "nothing that takes long", file=sys.stderr, flush=True)
    for process in list(dumping):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)
