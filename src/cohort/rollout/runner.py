"""The tensor side of the local engine: computes and draws what the scheduler decides on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cohort.errors import ConfigError
from cohort.rollout.backend import Backend
from cohort.rollout.capacity import moves_for_removal, order_after_removal
from cohort.rollout.sampling import Drawn, RowSettings, draw_tokens, support_of
from cohort.rollout.scheduler import Draw
from cohort.rollout.trajectory import Trajectory

# ----------------------------------------
# The rows being decoded, as tensors: their random numbers, their settings, and the tokens that they may draw.


UNIFORMS_BLOCK = 64
"""Positions for which random numbers are made at a time."""


class ActiveSequences:
    """The rows, numbered densely from 0. When some are removed, the last ones take their numbers, as in the backend.

    Args:
        rows: maximum number of rows.
        end_token_ids: tokens that end a turn.
        vocabulary: V.
        device: of the logits.
    """

    def __init__(self, rows: int, end_token_ids: Sequence[int], vocabulary: int, device: torch.device) -> None:
        self.trajectories: list[Trajectory] = []
        self._device = device
        self._uniforms_SW = torch.zeros(rows, UNIFORMS_BLOCK, dtype=torch.float64, device=device)
        self._column = UNIFORMS_BLOCK
        self._seen_SV: Tensor | None = None  # tokens of prompt and completion, once a row has a repetition penalty
        self._shape = (rows, vocabulary)
        ends_V = torch.zeros(vocabulary, dtype=torch.bool)
        ends_V[[end for end in end_token_ids if end < vocabulary]] = True
        self._ends_V = ends_V.to(device)
        self._settings: RowSettings | None = None

    def __len__(self) -> int:
        return len(self.trajectories)

    def add(self, new: Sequence[Trajectory]) -> None:
        """Add rows."""
        rows = slice(len(self), len(self) + len(new))
        self.trajectories += new
        if self._column < UNIFORMS_BLOCK:
            self._uniforms_SW[rows, self._column :] = self._make_uniforms(new, UNIFORMS_BLOCK - self._column)
        if self._seen_SV is None and any(t.request.sampling.repetition_penalty != 1 for t in new):
            self._seen_SV = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
            rows = slice(0, len(self))
        if self._seen_SV is not None:
            self._seen_SV[rows] = False
            for row, trajectory in enumerate(self.trajectories[rows], rows.start):
                self._seen_SV[row, [*trajectory.request.prompt.token_ids, *trajectory.tokens]] = True
        self._settings = None

    def remove(self, rows: Sequence[int]) -> None:
        """Remove rows."""
        tensors = [self._uniforms_SW] if self._seen_SV is None else [self._uniforms_SW, self._seen_SV]
        for source, target in moves_for_removal(rows, len(self)):
            self.trajectories[target] = self.trajectories[source]
            for tensor in tensors:
                tensor[target] = tensor[source]
        del self.trajectories[len(self) - len(rows) :]
        self._settings = None

    def draw(self, logits_SV: Tensor) -> Drawn:
        """Draw a token for each row."""
        if self._settings is None:
            self._settings = RowSettings.of([t.request.sampling for t in self.trajectories], self._device)
        seen_SV = None if self._seen_SV is None else self._seen_SV[: len(self)]
        drawn = draw_tokens(
            logits_SV, self._uniforms(), self._settings, forbidden_SV=self._forbidden(), seen_SV=seen_SV
        )
        if seen_SV is not None:
            seen_SV.scatter_(1, drawn.tokens_S[:, None], True)
        return drawn

    def _uniforms(self) -> Tensor:
        """The random numbers of the coming draw, ``[S]``."""
        if self._column == UNIFORMS_BLOCK:
            self._uniforms_SW[: len(self)] = self._make_uniforms(self.trajectories, UNIFORMS_BLOCK)
            self._column = 0
        self._column += 1
        return self._uniforms_SW[: len(self), self._column - 1]

    def _make_uniforms(self, trajectories: Sequence[Trajectory], positions: int) -> Tensor:
        uniforms_SW = np.empty((len(trajectories), positions))
        for key in dict.fromkeys(t.request.key for t in trajectories):
            chosen = [(row, t) for row, t in enumerate(trajectories) if t.request.key == key]
            numbers = [(row, t.request.prompt.uid, t.request.sample, t.position) for row, t in chosen]
            rows, uids, samples, starts = np.array(numbers, np.uint64).T
            uniforms_SW[rows.astype(np.int64)] = key.uniforms(uids, samples, starts, positions)
        return torch.from_numpy(uniforms_SW).to(self._device)

    def _forbidden(self) -> Tensor | None:
        """Tokens that grammars and minimum lengths exclude from the coming draw, boolean ``[S, V]``. None: no token."""
        rows = list(enumerate(self.trajectories))
        young = [row for row, t in rows if len(t.tokens) < t.request.sampling.min_completion_length]
        constrained = [row for row, t in rows if t.matcher is not None]
        if not young and not constrained:
            return None
        forbidden_SV = torch.zeros(len(self), len(self._ends_V), dtype=torch.bool)
        if constrained:
            forbidden_SV[constrained] = ~_allowed([self.trajectories[row].matcher for row in constrained], forbidden_SV)
        forbidden_SV = forbidden_SV.to(self._device)
        for row in young:
            # A text that its grammar only allows to end is complete, and may end before the minimum.
            without_end_V = forbidden_SV[row] | self._ends_V
            if self.trajectories[row].matcher is None or not bool(without_end_V.all()):
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
        self._prefixes: list[int] = []  # by their index in the backend
        self._first_logits: dict[int, Tensor] = {}
        self._logits: list[Tensor] = []  # of all rows, in parts
        self._tokens_S = torch.empty(0, dtype=torch.int64)  # drawn and not yet read

    @torch.no_grad()
    def prefill(self, prefixes: dict[int, Sequence[int]]) -> None:
        """See ``ModelRunner``."""
        logits_PV = self._backend.prefill(list(prefixes.values()))
        self._first_logits.update(zip(prefixes, logits_PV, strict=True))
        self._prefixes += prefixes

    def drop(self, prefixes: Sequence[int]) -> None:
        """See ``ModelRunner``."""
        indices = [self._prefixes.index(prefix) for prefix in prefixes]
        self._backend.remove_prompts(indices)
        self._prefixes = [self._prefixes[index] for index in order_after_removal(indices, len(self._prefixes))]

    @torch.no_grad()
    def add(self, trajectories: Sequence[Trajectory], waiting: int | None) -> None:
        """See ``ModelRunner``."""
        first = len(self._sequences)
        if handles := [t.handle for t in trajectories if t.handle is not None]:
            self._backend.resume(handles)
        if begun := trajectories[len(handles) :]:
            self._backend.add_rows([self._prefixes.index(t.prefix) for t in begun])
        logits = {row: self._first_logits[t.prefix] for row, t in enumerate(trajectories) if not t.unread}
        if unread := {row: t.unread for row, t in enumerate(trajectories) if t.unread}:
            read = self._backend.extend([first + row for row in unread], list(unread.values()))
            logits.update(zip(unread, read, strict=True))
        self._first_logits = {prefix: row_V for prefix, row_V in self._first_logits.items() if prefix == waiting}
        self._logits.append(torch.stack([logits[row] for row in range(len(trajectories))]))
        for trajectory in trajectories:
            trajectory.handle, trajectory.unread = None, []
        self._sequences.add(trajectories)

    @torch.no_grad()
    def draw(self) -> Draw:
        """See ``ModelRunner``."""
        logits_SV = self._logits[0] if len(self._logits) == 1 else torch.cat(self._logits)
        self._logits = []
        drawn = self._sequences.draw(logits_SV)
        self._tokens_S = drawn.tokens_S
        # One transfer to the host for everything; float64 holds a token id exactly.
        columns = (drawn.tokens_S, drawn.valid_S, drawn.logps_S, drawn.full_logps_S)
        distinct = columns[:3] if drawn.full_logps_S is drawn.logps_S else columns
        values = torch.stack([column.double() for column in distinct]).tolist()
        supports = None
        if any(t.supports is not None for t in self._sequences.trajectories):
            everything = [(np.zeros(0, np.int32), True)] * len(logits_SV)
            supports = everything if drawn.kept_SV is None else support_of(drawn.kept_SV)
        return Draw(
            tokens=[int(token) for token in values[0]],
            logps=values[2],
            full_logps=values[-1],
            valid=values[1],
            supports=supports,
        )

    @torch.no_grad()
    def step(self) -> None:
        """See ``ModelRunner``."""
        self._logits = [self._backend.step(self._tokens_S)]

    def park(self, row: int) -> int:
        """See ``ModelRunner``."""
        return self._backend.park(row)

    def release(self, handle: int) -> None:
        """See ``ModelRunner``."""
        self._backend.release(handle)

    def remove(self, rows: Sequence[int]) -> None:
        """See ``ModelRunner``."""
        self._tokens_S = self._tokens_S[order_after_removal(rows, len(self._sequences))]
        self._sequences.remove(rows)
        self._backend.remove_rows(rows)
