"""The rows being decoded, as tensors: their random numbers, their settings, and the tokens that they may draw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cohort.errors import ConfigError
from cohort.rollout.capacity import moves_for_removal
from cohort.rollout.sampling import Drawn, RowSettings, draw_tokens
from cohort.rollout.trajectory import Trajectory

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
