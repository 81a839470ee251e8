"""The tensor side of the local engine: computes and draws what the scheduler decides on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cohort.errors import ConfigError
from cohort.rollout.local.backend import Backend
from cohort.rollout.local.scheduler import Draw
from cohort.rollout.sampling import Drawn, RowSettings, draw_tokens, support_of
from cohort.rollout.trajectory import Prefix, Trajectory

# ----------------------------------------
# The rows being decoded, as tensors: their random numbers, their settings, and the tokens that they may draw.


UNIFORMS_BLOCK = 64
"""Positions for which random numbers are made at a time."""


class ActiveSequences:
    """The trajectories, by their slots.

    Args:
        rows: number of slots.
        end_token_ids: tokens that end a turn.
        vocabulary: V.
        device: of the logits.
    """

    def __init__(self, rows: int, end_token_ids: Sequence[int], vocabulary: int, device: torch.device) -> None:
        self._device = device
        self._uniforms_RW = torch.zeros(rows, UNIFORMS_BLOCK, dtype=torch.float64, device=device)
        self._column = UNIFORMS_BLOCK
        self._drawn_R = torch.zeros(rows, dtype=torch.int64, device=device)
        self._seen_RV: Tensor | None = None  # tokens of prompt and completion, once a row has a repetition penalty
        self._shape = (rows, vocabulary)
        ends_V = torch.zeros(vocabulary, dtype=torch.bool)
        ends_V[[end for end in end_token_ids if end < vocabulary]] = True
        self._ends_V = ends_V.to(device)
        self._rows: tuple[list[tuple[Trajectory, int | None]], Tensor, RowSettings] | None = None  # of the latest draw

    def add(self, new: Sequence[Trajectory]) -> None:
        """Begin trajectories, or go on with parked ones."""
        if self._column < UNIFORMS_BLOCK:
            uniforms = self._make_uniforms(new, UNIFORMS_BLOCK - self._column)
            self._uniforms_RW[self._slots(new), self._column :] = uniforms
        if self._seen_RV is not None:
            self._see(new)

    def draw(self, trajectories: Sequence[Trajectory], logits_SV: Tensor) -> Drawn:
        """Draw a token for each."""
        slots_S, settings = self._of(trajectories)
        seen_SV = None if self._seen_RV is None else self._seen_RV[slots_S]
        drawn = draw_tokens(
            logits_SV,
            self._uniforms(trajectories),
            settings,
            forbidden_SV=self._forbidden(trajectories),
            seen_SV=seen_SV,
        )
        self._drawn_R[slots_S] = drawn.tokens_S
        if self._seen_RV is not None:
            self._seen_RV[slots_S, drawn.tokens_S] = True
        return drawn

    def drawn(self, trajectories: Sequence[Trajectory]) -> Tensor:
        """The token that was drawn last for each, ``[S]``."""
        return self._drawn_R[self._of(trajectories)[0]]

    def _of(self, trajectories: Sequence[Trajectory]) -> tuple[Tensor, RowSettings]:
        """Slots and settings, which are the same as long as the trajectories are."""
        places = [(trajectory, trajectory.slot) for trajectory in trajectories]
        if self._rows is None or self._rows[0] != places:
            settings = RowSettings.of([t.request.sampling for t in trajectories], self._device)
            self._rows = places, self._slots(trajectories), settings
            if self._seen_RV is None and any(t.request.sampling.repetition_penalty != 1 for t in trajectories):
                self._seen_RV = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
                self._see(trajectories)
        return self._rows[1:]

    def _see(self, trajectories: Sequence[Trajectory]) -> None:
        """Mark the tokens that each has, and no others."""
        assert self._seen_RV is not None
        self._seen_RV[self._slots(trajectories)] = False
        for trajectory in trajectories:
            self._seen_RV[trajectory.slot, [*trajectory.request.prompt.token_ids, *trajectory.tokens]] = True

    def _slots(self, trajectories: Sequence[Trajectory]) -> Tensor:
        return torch.tensor([trajectory.slot for trajectory in trajectories], device=self._device)

    def _uniforms(self, trajectories: Sequence[Trajectory]) -> Tensor:
        """The random numbers of the coming draw, ``[S]``."""
        slots_S, _ = self._of(trajectories)
        if self._column == UNIFORMS_BLOCK:
            self._uniforms_RW[slots_S] = self._make_uniforms(trajectories, UNIFORMS_BLOCK)
            self._column = 0
        self._column += 1
        return self._uniforms_RW[slots_S, self._column - 1]

    def _make_uniforms(self, trajectories: Sequence[Trajectory], positions: int) -> Tensor:
        uniforms_SW = np.empty((len(trajectories), positions))
        for key in dict.fromkeys(t.request.key for t in trajectories):
            chosen = [(row, t) for row, t in enumerate(trajectories) if t.request.key == key]
            numbers = [(row, t.request.prompt.uid, t.request.sample, t.position) for row, t in chosen]
            rows, uids, samples, starts = np.array(numbers, np.uint64).T
            uniforms_SW[rows.astype(np.int64)] = key.uniforms(uids, samples, starts, positions)
        return torch.from_numpy(uniforms_SW).to(self._device)

    def _forbidden(self, trajectories: Sequence[Trajectory]) -> Tensor | None:
        """Tokens that grammars and minimum lengths exclude from the coming draw, boolean ``[S, V]``. None: no token."""
        rows = list(enumerate(trajectories))
        young = [row for row, t in rows if len(t.tokens) < t.request.sampling.min_completion_length]
        constrained = [row for row, t in rows if t.matcher is not None]
        if not young and not constrained:
            return None
        forbidden_SV = torch.zeros(len(rows), len(self._ends_V), dtype=torch.bool)
        if constrained:
            forbidden_SV[constrained] = ~_allowed([trajectories[row].matcher for row in constrained], forbidden_SV)
        forbidden_SV = forbidden_SV.to(self._device)
        for row in young:
            # A text that its grammar only allows to end is complete, and may end before the minimum.
            without_end_V = forbidden_SV[row] | self._ends_V
            if trajectories[row].matcher is None or not bool(without_end_V.all()):
                forbidden_SV[row] = without_end_V
        return forbidden_SV


def _allowed(matchers: Sequence[Any], like_SV: Tensor) -> Tensor:
    """The tokens that each grammar allows next. A grammar at a dead end allows none, so that only its row fails."""
    allowed_SV = torch.zeros(len(matchers), like_SV.shape[1], dtype=torch.bool)
    for matcher, row_V in zip(matchers, allowed_SV, strict=True):
        try:
            matcher.fill(row_V)
        except ConfigError:
            row_V.fill_(False)
    return allowed_SV


class BackendRunner:
    """A ``ModelRunner`` over a backend.

    Args:
        backend: computes logits; has memory allocated.
        sequences: draws.
    """

    def __init__(self, backend: Backend, sequences: ActiveSequences) -> None:
        self.refills, self.mixed_lengths = backend.refills, backend.mixed_lengths
        self.keeps_rows = backend.keeps_rows
        self._backend, self._sequences = backend, sequences
        self._first_logits: dict[Prefix, Tensor] = {}
        self._logits: list[Tensor] = []  # of the coming draw, in parts

    @torch.no_grad()
    def step(self, trajectories: Sequence[Trajectory]) -> None:
        """See ``ModelRunner``."""
        self._logits = [self._backend.step(slots_of(trajectories), self._sequences.drawn(trajectories))]

    @torch.no_grad()
    def prefill(self, prefixes: Sequence[Prefix]) -> None:
        """See ``ModelRunner``."""
        logits_PV = self._backend.prefill(slots_of(prefixes), [prefix.token_ids for prefix in prefixes])
        self._first_logits.update(zip(prefixes, logits_PV, strict=True))

    @torch.no_grad()
    def add(self, begun: Sequence[Trajectory], continued: Sequence[Trajectory], waiting: Prefix | None) -> None:
        """See ``ModelRunner``."""
        trajectories = [*begun, *continued]
        if begun:
            self._backend.add_rows(slots_of(begun), slots_of([t.prefix for t in begun]))
        logits = {t: self._first_logits[t.prefix] for t in trajectories if not t.unread}
        if unread := [t for t in trajectories if t.unread]:
            read = self._backend.extend(slots_of(unread), [t.unread for t in unread])
            logits.update(zip(unread, read, strict=True))
        self._first_logits = {prefix: row_V for prefix, row_V in self._first_logits.items() if prefix is waiting}
        self._logits.append(torch.stack([logits[t] for t in trajectories]))
        for trajectory in trajectories:
            trajectory.unread = []
        self._sequences.add(trajectories)

    @torch.no_grad()
    def draw(self, trajectories: Sequence[Trajectory]) -> Draw:
        """See ``ModelRunner``."""
        logits_SV = self._logits[0] if len(self._logits) == 1 else torch.cat(self._logits)
        self._logits = []
        drawn = self._sequences.draw(trajectories, logits_SV)
        # One transfer to the host for everything; float64 holds a token id exactly.
        columns = (drawn.tokens_S, drawn.valid_S, drawn.logps_S, drawn.full_logps_S)
        distinct = columns[:3] if drawn.full_logps_S is drawn.logps_S else columns
        values = torch.stack([column.double() for column in distinct]).tolist()
        supports = None
        if any(t.supports is not None for t in trajectories):
            everything = [(np.zeros(0, np.int32), True)] * len(logits_SV)
            supports = everything if drawn.kept_SV is None else support_of(drawn.kept_SV)
        return Draw(
            tokens=[int(token) for token in values[0]],
            logps=values[2],
            full_logps=values[-1],
            valid=values[1],
            supports=supports,
        )

    def release(self, slots: Sequence[int]) -> None:
        """See ``ModelRunner``."""
        self._backend.release(slots)

    def drop(self, prefixes: Sequence[Prefix]) -> None:
        """See ``ModelRunner``."""
        self._backend.remove_prompts(slots_of(prefixes))


def slots_of(holders: Sequence[Prefix | Trajectory]) -> list[int]:
    """The slots of trajectories or prefixes that have one."""
    slots = [holder.slot for holder in holders]
    assert None not in slots
    return slots  # type: ignore[return-value]
