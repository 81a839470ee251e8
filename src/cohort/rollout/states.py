"""States of recurrent layers: of prompts, once per group, and of rows, which begin as copies of their prompt's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count

import torch
from torch import Tensor

from cohort.policy.passes import StateKey
from cohort.rollout.capacity import moves_for_removal, order_after_removal

States = Mapping[StateKey, Tensor]
"""All states of one text."""


class RowStates:
    """States by layer and name, ``[rows, ...]`` each, in memory for a given number of rows.

    Args:
        rows: how many there may be at a time.
    """

    def __init__(self, rows: int) -> None:
        self._capacity = rows
        self._count = 0
        self._rows: dict[StateKey, Tensor] = {}
        self._prompts: list[States] = []
        self._parked: dict[int, States] = {}
        self._handles = count()

    def add_prompts(self, states: Mapping[StateKey, Tensor], number: int) -> None:
        """Add prompts, numbered after those held, with their states, ``[prompts, ...]`` each."""
        self._prompts += [{key: parts[prompt] for key, parts in states.items()} for prompt in range(number)]
        for key, parts in states.items():
            if key not in self._rows:
                self._rows[key] = parts.new_empty(self._capacity, *parts.shape[1:])

    def add_rows(self, prompts: Sequence[int]) -> None:
        """Add rows, each with the states of the given prompt."""
        self._append([self._prompts[prompt] for prompt in prompts])

    def _append(self, texts: Sequence[States]) -> None:
        for row, states in enumerate(texts, self._count):
            for key, state in states.items():
                self._rows[key][row] = state
        self._count += len(texts)

    def remove_rows(self, rows: Sequence[int]) -> None:
        """Forget rows; the last ones take their numbers."""
        for source, target in moves_for_removal(rows, self._count):
            for states in self._rows.values():
                states[target] = states[source]
        self._count -= len(set(rows))

    def remove_prompts(self, prompts: Sequence[int]) -> None:
        """Forget prompts; the last ones take their numbers."""
        self._prompts = [self._prompts[prompt] for prompt in order_after_removal(prompts, len(self._prompts))]

    def park(self, row: int) -> int:
        """Copy the states of a row; returns a handle."""
        handle = next(self._handles)
        self._parked[handle] = {key: states[row].clone() for key, states in self._rows.items()}
        return handle

    def resume(self, handles: Sequence[int]) -> None:
        """Add rows with the states of parked ones."""
        self._append([self._parked.pop(handle) for handle in handles])

    def release(self, handle: int) -> None:
        """Forget a parked row."""
        del self._parked[handle]

    def __getitem__(self, key: StateKey) -> Tensor:
        """A state of all rows, to be read and written."""
        return self._rows[key][: self._count]

    def of_rows(self, rows: Sequence[int]) -> dict[StateKey, tuple[Tensor]]:
        """Copies of the states of some rows."""
        return {key: (states[list(rows)],) for key, states in self._rows.items()}

    def write(self, rows: Sequence[int], states: Mapping[StateKey, Tensor]) -> None:
        """Store new states of some rows."""
        index = torch.tensor(list(rows))
        for key, parts in states.items():
            self._rows[key][index.to(parts.device)] = parts.to(self._rows[key].dtype)
