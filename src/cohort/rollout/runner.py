"""The tensor side of the local engine: computes and draws what the scheduler decides on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from cohort.rollout.backend import Backend
from cohort.rollout.capacity import order_after_removal
from cohort.rollout.sampling import support_of
from cohort.rollout.scheduler import Draw
from cohort.rollout.sequences import ActiveSequences
from cohort.rollout.trajectory import Trajectory


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
