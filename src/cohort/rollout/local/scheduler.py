"""The scheduler of the local engine: which trajectories are prefilled, decoded, parked and removed, and when.

It imports no torch. A ``ModelRunner`` computes, and keeps what it computes in slots. A trajectory has one slot from its
first token to its end, decoded or parked: nothing is renumbered or copied when another one ends.

Before a trajectory decodes, a text is prefilled for it: its prefix. Trajectories of one prompt share the prompt as
their prefix. When a turn ends, a runner with ``keeps_rows`` keeps the trajectory's slot, and later reads only the
tokens that it has not read. For any other runner the prefix of the continued trajectory is its whole history.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from itertools import groupby
from typing import NamedTuple, Protocol

from cohort.rollout.engine import TokenEvent
from cohort.rollout.local.capacity import Capacity, Slots
from cohort.rollout.trajectory import Kept, Prefix, Trajectory
from cohort.types import FinishReason


class Draw(NamedTuple):
    """One drawn token for each trajectory, on the host."""

    tokens: Sequence[int]
    logps: Sequence[float]
    full_logps: Sequence[float]
    """Under the full softmax at the same temperature."""
    valid: Sequence[bool]
    """False where the logits held NaN or nothing finite: nothing was drawn."""
    supports: Sequence[Kept] | None = None
    """None: no trajectory records its support."""


class ModelRunner(Protocol):
    """Computes and draws for the scheduler."""

    refills: bool
    """Whether trajectories may begin while others are being decoded."""
    mixed_lengths: bool
    """Whether prefixes of different length may be prefilled together."""
    keeps_rows: bool
    """Whether trajectories can be parked."""

    def step(self, trajectories: Sequence[Trajectory]) -> None:
        """Read the newest token of each."""

    def prefill(self, prefixes: Sequence[Prefix]) -> None:
        """Read new prefixes."""

    def add(self, begun: Sequence[Trajectory], continued: Sequence[Trajectory], waiting: Prefix | None) -> None:
        """Begin trajectories after their prefixes, and go on with parked ones. Reads and clears the ``unread`` tokens
        of both. ``waiting`` is a prefix after which more trajectories will begin."""

    def draw(self, trajectories: Sequence[Trajectory]) -> Draw:
        """Draw the next token of each: of those in ``step``, then of those begun and continued in ``add``."""

    def release(self, slots: Sequence[int]) -> None:
        """Forget trajectories."""

    def drop(self, prefixes: Sequence[Prefix]) -> None:
        """Forget prefixes."""


class Scheduler:
    """Decodes trajectories with a runner, as many at a time as the capacity allows.

    Args:
        runner: computes.
        capacity: how much is held at a time. Parked trajectories count.
        end_token_ids: tokens that end a turn when they are drawn.
    """

    def __init__(self, runner: ModelRunner, capacity: Capacity, end_token_ids: frozenset[int]) -> None:
        self.active: list[Trajectory] = []
        """The trajectories being decoded."""
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
        self._resumed: list[Trajectory] = []  # continued ones, which keep their slot
        self._slots, self._prefix_slots = Slots(capacity.rows), Slots(capacity.prompts)
        self._prefilled: list[Prefix] = []

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
            shared: Prefix | None = None
            for trajectory in same:
                if trajectory.unread and not self._runner.keeps_rows:
                    self._enqueue_history(trajectory)
                else:
                    shared = shared or Prefix(trajectory.request.prompt.token_ids)
                    self._enqueue(trajectory, shared)

    def resume(self, number: int) -> None:
        """Continue a parked trajectory, which has been extended."""
        trajectory = self.parked.pop(number)
        if not self._runner.keeps_rows:
            self._enqueue_history(trajectory)
        elif trajectory.slot is not None:
            self._resumed.append(trajectory)
        else:
            trajectory.forget()
            self._preempted.append(trajectory)

    def release(self, number: int) -> None:
        """End a parked trajectory."""
        trajectory = self.parked.pop(number)
        if self._runner.keeps_rows:
            self._leave([trajectory])

    def advance(self, on_token: Callable[[TokenEvent], None] | None = None) -> dict[Trajectory, FinishReason] | None:
        """Decode one token for every trajectory, after adding those that there is room for.

        Returns:
            the trajectories whose turn ended, or None if there was nothing to decode.

        Raises:
            Exception: the runner ran out of memory. ``ended`` and ``take_unfinished`` are valid nevertheless.
        """
        self.ended = {}
        self._make_room()
        if self.active:
            self._runner.step(self.active)
        self._admit()
        if not self.active:
            return None
        self.ended = self._record(self._runner.draw(self.active), on_token)
        self._retire(self.ended)
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
        for going in (self.active, self._resumed, self._preempted, self._queue):
            going.clear()
        self._leave(cancelled)
        return cancelled

    def _enqueue(self, trajectory: Trajectory, prefix: Prefix) -> None:
        trajectory.prefix = prefix
        prefix.users += 1
        self._queue.append(trajectory)

    def _enqueue_history(self, trajectory: Trajectory) -> None:
        self.tokens_read_again += len(trajectory.request.prompt.token_ids) * bool(trajectory.logps)
        self.tokens_read_again += len(trajectory.tokens) - len(trajectory.unread)
        trajectory.unread = []
        self._enqueue(trajectory, Prefix([*trajectory.request.prompt.token_ids, *trajectory.tokens]))

    def _free(self, trajectories: Sequence[Trajectory]) -> None:
        """Free the slots of trajectories that have one."""
        slots = [trajectory.slot for trajectory in trajectories if trajectory.slot is not None]
        for slot in slots:
            self._slots.give(slot)
        if slots:
            self._runner.release(slots)
        for trajectory in trajectories:
            trajectory.slot = None

    def _leave(self, trajectories: Sequence[Trajectory]) -> None:
        """End trajectories here, and free the slots of prefixes that are no longer needed."""
        self._free(trajectories)
        for trajectory in trajectories:
            trajectory.prefix.users -= 1
        self._drop_prefixes()

    def _drop_prefixes(self) -> None:
        needed = [prefix for prefix in self._prefilled if prefix.users]
        if not self._runner.refills:  # the next batch reads its prefixes anew
            needed = [trajectory.prefix for trajectory in self.active]
        unused = [prefix for prefix in self._prefilled if prefix not in needed]
        if unused:
            self._runner.drop(unused)
        for prefix in unused:
            assert prefix.slot is not None
            self._prefix_slots.give(prefix.slot)
            prefix.slot = None
        self._prefilled = [prefix for prefix in self._prefilled if prefix.slot is not None]

    def _admit(self) -> None:
        """Add as many trajectories as there is room for."""
        if self.active and not self._runner.refills:
            return
        # After a rewrite nothing that was computed is of use.
        begun = [trajectory for trajectory in self._resumed if trajectory.unread == trajectory.tokens]
        continued = [trajectory for trajectory in self._resumed if trajectory.unread != trajectory.tokens]
        self._resumed, prefixes = [], list[Prefix]()
        while (source := self._preempted or self._queue) and self._slots:
            trajectory, prefix = source[0], source[0].prefix
            others = [*self.active, *begun, *continued]
            if others and not self._has_room([*others, trajectory]):
                break
            self._make_room_beside([*others, trajectory])
            if prefix.slot is None:
                if not self._prefix_slots or not self._fits(prefix, prefixes):
                    break
                prefix.slot = self._prefix_slots.take()
                prefixes.append(prefix)
            trajectory.slot = self._slots.take()
            begun.append(source.popleft())
        new = [*begun, *continued]
        self.active += new  # before memory may run out
        if prefixes:
            self._prefilled += prefixes
            self._runner.prefill(prefixes)
        if new:
            for trajectory in new:
                trajectory.begin_turn()
            # Trajectories of a prefix are neighbours in the queue: only the prefix at its head can be needed again.
            self._runner.add(begun, continued, self._queue[0].prefix if self._queue else None)

    def _has_room(self, trajectories: Collection[Trajectory]) -> bool:
        """Whether trajectories can get another token each, beside those parked."""
        if self.capacity.row_tokens is None:
            return True
        held = [*trajectories, *self._parked_in_memory]
        return len(held) <= self.capacity.rows_of(max(len(trajectory.tokens) for trajectory in held) + 1)

    @property
    def _parked_in_memory(self) -> list[Trajectory]:
        return [trajectory for trajectory in self.parked.values() if trajectory.slot is not None]

    def _make_room(self) -> None:
        """Preempt trajectories that are decoded, those with the fewest tokens first, until the others have room; then,
        beside the last one, those parked. What they have drawn is read again later."""
        going = deque([*sorted(self.active, key=lambda trajectory: len(trajectory.tokens)), *self._resumed])
        while len(going) > 1 and not self._has_room(going):
            self._preempted.appendleft(going.popleft())
            self._forget(self._preempted[0])
        self._make_room_beside(going)
        self.active = [trajectory for trajectory in self.active if trajectory.slot is not None]
        self._resumed = [trajectory for trajectory in self._resumed if trajectory.slot is not None]

    def _make_room_beside(self, trajectories: Collection[Trajectory]) -> None:
        while trajectories and not self._has_room(trajectories) and (parked := self._parked_in_memory):
            self._forget(min(parked, key=lambda trajectory: len(trajectory.tokens)))

    def _forget(self, trajectory: Trajectory) -> None:
        self.tokens_read_again += len(trajectory.tokens) - max(1, len(trajectory.unread))
        self._free([trajectory])
        trajectory.forget()

    def _fits(self, prefix: Prefix, others: Sequence[Prefix]) -> bool:
        mixed = self._runner.mixed_lengths or not others
        return mixed or len(others[0].token_ids) == len(prefix.token_ids)

    def _record(self, draw: Draw, on_token: Callable[[TokenEvent], None] | None) -> dict[Trajectory, FinishReason]:
        """Append what was drawn; returns the trajectories whose turn ends, and why."""
        ended: dict[Trajectory, FinishReason] = {}
        columns = zip(self.active, draw.tokens, draw.logps, draw.full_logps, draw.valid, strict=True)
        for row, (trajectory, token, logp, full_logp, valid) in enumerate(columns):
            if not valid:
                ended[trajectory] = FinishReason.ERROR
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
                ended[trajectory] = FinishReason.EOS
            elif trajectory.has_stops and trajectory.stopped():
                ended[trajectory] = FinishReason.STOP
            elif len(tokens) == trajectory.limit:
                ended[trajectory] = FinishReason.LENGTH
            elif trajectory.matcher is not None:
                trajectory.matcher.consume(token)
            if on_token:
                request = trajectory.request
                reason = ended.get(trajectory)
                on_token(TokenEvent(request.prompt_index, request.sample, trajectory.position - 1, token, logp, reason))
        return ended

    def _retire(self, ended: dict[Trajectory, FinishReason]) -> None:
        """Park the trajectories that may continue, and end the others."""
        if not ended:
            return
        parks = [t for t, reason in ended.items() if t.request.continues and reason.usable and t.room > 0]
        self.parked |= {trajectory.number: trajectory for trajectory in parks}  # before memory may run out
        self.active = [trajectory for trajectory in self.active if trajectory not in ended]
        kept = set(parks) if self._runner.keeps_rows else set()
        self._leave([trajectory for trajectory in ended if trajectory not in kept])
