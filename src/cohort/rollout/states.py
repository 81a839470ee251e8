"""States of recurrent layers: of prompts, once per group, and of rows, which begin as copies of their prompt's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from cohort.native import DTYPES
from cohort.policy.passes import KeysValues
from cohort.policy.recurrent import Recurrence, StateKey, convolve_into, convolve_step
from cohort.rollout.capacity import moves_for_removal, order_after_removal
from cohort.rollout.native.recurrent import STEPS

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

    def add_prompts(self, found: KeysValues, number: int) -> None:
        """Add prompts, numbered after those held, with what recurrent layers left of them, ``[prompts, ...]`` each."""
        states = states_in(found)
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

    def park(self, row: int, handle: int) -> None:
        """Copy the states of a row, to be found by a handle."""
        self._parked[handle] = {key: states[row].clone() for key, states in self._rows.items()}

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

    def write(self, rows: Sequence[int], found: KeysValues) -> None:
        """Store new states of some rows."""
        index = torch.tensor(list(rows))
        for key, parts in states_in(found).items():
            self._rows[key][index.to(parts.device)] = parts.to(self._rows[key].dtype)


def states_in(found: KeysValues) -> dict[StateKey, Tensor]:
    """The states of recurrent layers in what a pass reads; the rest are keys and values, by the layer's number."""
    return {key: parts[0] for key, parts in found.items() if isinstance(key, tuple)}


class StateStep:
    """What mixes the tokens of recurrent layers in a decode step, one of each row; see ``policy.recurrent.Recurring``.

    Args:
        states: of the rows; written over.
        count: the number of rows.
        native: whether to use native kernels.
    """

    def __init__(self, states: RowStates, count: int, *, native: bool) -> None:
        self._states, self._count, self._native = states, count, native
        self._starts = torch.arange(count + 1)

    def convolve(
        self, key: StateKey, x_TH: Tensor, weight: Tensor, bias: Tensor | None = None, **flags: bool
    ) -> Tensor:
        """See ``Recurring``."""
        tails = self._states[key]
        if self._native and x_TH.dtype in DTYPES:
            out = x_TH.new_zeros(len(x_TH), tails.shape[2])
            bias = None if bias is None else bias.float()
            convolve_into(out, tails, x_TH, tails, weight.T.float(), bias, self._starts, **flags)
            return out
        return convolve_step(x_TH, tails, weight, bias, **flags)

    def recur(self, key: StateKey, recurrence: Recurrence, values: Sequence[Tensor], zeros: Tensor) -> Tensor:  # noqa: ARG002
        """See ``Recurring``."""
        step, padding = STEPS[recurrence] if self._native else recurrence.step, len(values[0]) - self._count
        out = step(*(part[: self._count] if part.ndim > 1 else part for part in values), self._states[key])
        return functional.pad(out, (0, 0) * (out.ndim - 1) + (0, padding)) if padding else out
