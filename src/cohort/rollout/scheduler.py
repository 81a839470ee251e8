"""The scheduler of the local engine: which trajectories are prefilled, decoded, parked and removed, and when.

It imports no torch. A ``ModelRunner`` computes; it numbers the rows that it decodes densely from 0. The trajectory in
row ``r`` is ``Scheduler.active[r]``: when rows are removed, the last ones take their numbers (``order_after_removal``).

Before a trajectory decodes, a text is prefilled for it: its prefix. Trajectories of one prompt share the prompt as
their prefix. When a turn ends, a runner with ``keeps_rows`` keeps what it computed for the row, and later reads only
the tokens that the row has not read. For any other runner the prefix of the continued trajectory is its whole history.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import count, groupby
from typing import NamedTuple, Protocol

from cohort.rollout.capacity import Capacity, order_after_removal
from cohort.rollout.engine import TokenEvent
from cohort.rollout.trajectory import Kept, Trajectory
from cohort.types import FinishReason


class Draw(NamedTuple):
    """One drawn token for each row, on the host."""

    tokens: Sequence[int]
    logps: Sequence[float]
    full_logps: Sequence[float]
    """Under the full softmax at the same temperature."""
    valid: Sequence[bool]
    """False where the logits held NaN or nothing finite: nothing was drawn."""
    supports: Sequence[Kept] | None = None
    """None: no row records its support."""


class ModelRunner(Protocol):
    """Computes and draws for the scheduler."""

    refills: bool
    """Whether rows may be added while others are being decoded."""
    mixed_lengths: bool
    """Whether prefixes of different length may be prefilled together."""
    keeps_rows: bool
    """Whether rows can be parked."""

    def prefill(self, prefixes: dict[int, Sequence[int]]) -> None:
        """Read new prefixes, given by number."""

    def drop(self, prefixes: Sequence[int]) -> None:
        """Forget prefixes."""

    def add(self, trajectories: Sequence[Trajectory], waiting: int | None) -> None:
        """New rows after those there are: first parked trajectories, then those that begin after their prefix. Reads
        and clears their ``unread`` tokens. ``waiting`` is a prefix from which more trajectories will begin."""

    def draw(self) -> Draw:
        """Draw the next token of every row."""

    def step(self) -> None:
        """Read the tokens that were drawn for the rows that are left."""

    def park(self, row: int) -> int:
        """Keep what was computed for a row that is about to be removed; returns a handle."""

    def release(self, handle: int) -> None:
        """Forget a parked row."""

    def remove(self, rows: Sequence[int]) -> None:
        """Remove rows."""


class Scheduler:
    """Decodes trajectories with a runner, as many at a time as the capacity allows.

    Args:
        runner: computes.
        capacity: how much is held at a time. Parked rows count.
        end_token_ids: tokens that end a turn when they are drawn.
    """

    def __init__(self, runner: ModelRunner, capacity: Capacity, end_token_ids: frozenset[int]) -> None:
        self.active: list[Trajectory] = []
        """The trajectories being decoded, by row."""
        self.parked: dict[int, Trajectory] = {}
        """Trajectories whose turn has ended and which may continue, by number."""
        self.capacity = capacity
        self.ended: dict[Trajectory, FinishReason] = {}
        """The trajectories whose turn has ended in the latest ``advance``."""
        self.tokens_read_again = 0
        """Tokens of histories that were prefilled although they had been read before."""
        self._runner, self._ends = runner, end_token_ids
        self._queue: deque[Trajectory] = deque()
        self._preempted: deque[Trajectory] = deque()  # those that have made room for longer ones
        self._resumed: list[Trajectory] = []  # continued ones that keep their row
        self._numbers = count()
        self._texts: dict[int, Sequence[int]] = {}  # prefixes by number
        self._users: Counter[int] = Counter()  # unfinished trajectories of each prefix
        self._prefilled: list[int] = []

    @property
    def unfinished(self) -> int:
        """Number of trajectories that are queued, being decoded or parked."""
        return len(self.active) + len(self.parked) + len(self._waiting)

    @property
    def _waiting(self) -> list[Trajectory]:
        return [*self._resumed, *self._preempted, *self._queue]

    def submit(self, trajectories: Sequence[Trajectory]) -> None:
        """Queue trajectories. Those of one prompt that follow each other share a prefix."""
        for _, same in groupby(trajectories, key=lambda t: id(t.request.prompt)):
            shared = None
            for trajectory in same:
                if trajectory.unread and not self._runner.keeps_rows:
                    self._enqueue_history(trajectory)
                else:
                    shared = self._new_prefix(trajectory.request.prompt.token_ids) if shared is None else shared
                    self._enqueue(trajectory, shared)

    def resume(self, number: int) -> None:
        """Continue a parked trajectory, which has been extended."""
        trajectory = self.parked.pop(number)
        if not self._runner.keeps_rows:
            self._enqueue_history(trajectory)
            return
        if trajectory.unread == trajectory.tokens:  # as after a rewrite: nothing that was computed is of use
            self._release_row(trajectory)
        self._resumed.append(trajectory)

    def release(self, number: int) -> None:
        """End a parked trajectory."""
        trajectory = self.parked.pop(number)
        if self._runner.keeps_rows:
            self._release_row(trajectory)
            self._users[trajectory.prefix] -= 1
            self._drop_prefixes()

    def advance(self, on_token: Callable[[TokenEvent], None] | None = None) -> dict[Trajectory, FinishReason] | None:
        """Decode one token for every row, after adding the rows that there is room for.

        Returns:
            the trajectories whose turn ended, or None if there was nothing to decode.

        Raises:
            Exception: the runner ran out of memory. ``ended`` and ``take_unfinished`` are valid nevertheless.
        """
        self.ended = {}
        self._make_room()
        if self.active:
            self._runner.step()
        self._admit()
        if not self.active:
            return None
        ended = self._record(self._runner.draw(), on_token)
        self.ended = {self.active[row]: reason for row, reason in ended.items()}
        self._retire(ended)
        return self.ended

    def take_unfinished(self) -> list[Trajectory]:
        """The trajectories that are being decoded or wait for it, for another scheduler, in the order of their numbers.
        This one is of no further use."""
        unfinished = [t for t in (*self.active, *self._waiting) if t not in self.ended]
        for trajectory in unfinished:
            trajectory.forget()
        return sorted(unfinished, key=lambda trajectory: trajectory.number)

    def cancel(self) -> list[Trajectory]:
        """End all trajectories that are being decoded or wait for it."""
        cancelled = [*self.active, *self._waiting]
        for trajectory in self._waiting:
            self._release_row(trajectory)
            self._users[trajectory.prefix] -= 1
        self._resumed.clear()
        self._preempted.clear()
        self._queue.clear()
        self._retire(dict.fromkeys(range(len(self.active)), FinishReason.CANCELLED))
        return cancelled

    def _new_prefix(self, text: Sequence[int]) -> int:
        number = next(self._numbers)
        self._texts[number] = text
        return number

    def _enqueue(self, trajectory: Trajectory, prefix: int) -> None:
        trajectory.prefix = prefix
        self._users[prefix] += 1
        self._queue.append(trajectory)

    def _enqueue_history(self, trajectory: Trajectory) -> None:
        self.tokens_read_again += len(trajectory.request.prompt.token_ids) * bool(trajectory.logps)
        self.tokens_read_again += len(trajectory.tokens) - len(trajectory.unread)
        trajectory.unread = []
        self._enqueue(trajectory, self._new_prefix([*trajectory.request.prompt.token_ids, *trajectory.tokens]))

    def _release_row(self, trajectory: Trajectory) -> None:
        if trajectory.handle is not None:
            self._runner.release(trajectory.handle)
            trajectory.handle = None

    def _admit(self) -> None:
        """Add as many rows as there is room for."""
        if self.active and not self._runner.refills:
            return
        new = sorted(self._resumed, key=lambda trajectory: trajectory.handle is None)
        room = self.capacity.rows - len(self.active) - self._kept - len(new)
        self._resumed = []
        prefixes: list[int] = []
        while (self._preempted or self._queue) and room > 0:
            source = self._preempted or self._queue
            if self.capacity.row_tokens is not None and not self._has_room([*self.active, *new, source[0]]):
                break
            prefix = source[0].prefix
            if prefix not in self._prefilled and prefix not in prefixes:
                if len(self._prefilled) + len(prefixes) == self.capacity.prompts or not self._fits(prefix, prefixes):
                    break
                prefixes.append(prefix)
            new.append(source.popleft())
            room -= 1
        self.active += new  # before memory may run out
        if prefixes:
            self._runner.prefill({prefix: self._texts[prefix] for prefix in prefixes})
            self._prefilled += prefixes
        if new:
            for trajectory in new:
                trajectory.begin_turn()
            # Trajectories of a prefix are neighbours in the queue: only the prefix at its head can be needed again.
            self._runner.add(new, self._queue[0].prefix if self._queue else None)

    @property
    def _kept(self) -> int:
        """Parked rows."""
        return sum(trajectory.handle is not None for trajectory in self.parked.values())

    def _has_room(self, rows: Sequence[Trajectory]) -> bool:
        """Whether rows can get another token each. One always can."""
        longest = max(len(trajectory.tokens) for trajectory in rows) + 1
        return len(rows) == 1 or len(rows) + self._kept <= self.capacity.rows_of(longest)

    def _make_room(self) -> None:
        """Preempt the rows with the fewest tokens, until the others and those that are resumed have room. What they
        have drawn is read again later."""
        if self.capacity.row_tokens is None:
            return
        rows = sorted(range(len(self.active)), key=lambda row: -len(self.active[row].tokens))
        left = list(rows)
        while left and not self._has_room([*(self.active[row] for row in left), *self._resumed]):
            left.pop()
        while not left and len(self._resumed) > 1 and not self._has_room(self._resumed):
            self._release_row(self._resumed[-1])
            self._resumed[-1].forget()
            self._preempted.append(self._resumed.pop())
        if preempted := rows[len(left) :]:
            for row in preempted:
                self.active[row].forget()
                self.tokens_read_again += len(self.active[row].tokens) - 1
            self._preempted.extendleft(self.active[row] for row in preempted)
            self._runner.remove(preempted)
            self.active = [self.active[row] for row in order_after_removal(preempted, len(self.active))]

    def _fits(self, prefix: int, others: Sequence[int]) -> bool:
        mixed = self._runner.mixed_lengths or not others
        return mixed or len(self._texts[others[0]]) == len(self._texts[prefix])

    def _record(self, draw: Draw, on_token: Callable[[TokenEvent], None] | None) -> dict[int, FinishReason]:
        """Append what was drawn; returns the rows whose turn ends, and why."""
        ended: dict[int, FinishReason] = {}
        columns = zip(self.active, draw.tokens, draw.logps, draw.full_logps, draw.valid, strict=True)
        for row, (trajectory, token, logp, full_logp, valid) in enumerate(columns):
            if not valid:
                ended[row] = FinishReason.ERROR
                continue
            tokens = trajectory.tokens
            tokens.append(token)
            trajectory.logps.append(logp)
            if trajectory.full_logps is not None:
                trajectory.full_logps.append(full_logp)
            if trajectory.supports is not None:
                assert draw.supports is not None
                trajectory.supports.append(draw.supports[row])
            if token in self._ends:
                ended[row] = FinishReason.EOS
            elif trajectory.has_stops and trajectory.stopped():
                ended[row] = FinishReason.STOP
            elif len(tokens) == trajectory.limit:
                ended[row] = FinishReason.LENGTH
            elif trajectory.matcher is not None:
                trajectory.matcher.consume(token)
            if on_token:
                request = trajectory.request
                position = trajectory.position - 1
                on_token(TokenEvent(request.prompt_index, request.sample, position, token, logp, ended.get(row)))
        return ended

    def _retire(self, ended: dict[int, FinishReason]) -> None:
        """Remove rows, parking those that may continue, and drop prefixes that are no longer needed."""
        if not ended:
            return
        turns = {row: self.active[row] for row in ended}
        parks = {row for row, t in turns.items() if t.request.continues and ended[row].usable and t.room > 0}
        self.parked |= {turns[row].number: turns[row] for row in parks}  # before memory may run out
        for row, trajectory in turns.items():
            if row in parks and self._runner.keeps_rows:
                trajectory.handle = self._runner.park(row)
            else:
                self._users[trajectory.prefix] -= 1
        self._runner.remove(list(ended))
        self.active = [self.active[row] for row in order_after_removal(list(ended), len(self.active))]
        self._drop_prefixes()

    def _drop_prefixes(self) -> None:
        if self._runner.refills:
            needed = {prefix for prefix in self._prefilled if self._users[prefix]}
        else:
            needed = {trajectory.prefix for trajectory in self.active}
        if unused := [prefix for prefix in self._prefilled if prefix not in needed]:
            self._runner.drop(unused)
            self._prefilled = [prefix for prefix in self._prefilled if prefix in needed]
