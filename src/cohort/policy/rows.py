"""The rows of a forward pass: what follows the prompts, laid end to end in flat tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cohort.types import Support


@dataclass(frozen=True, slots=True, eq=False)
class PackedRows:
    """Rows of token ids, each after a prompt. A token of a row was drawn from the policy, or it was given: what a tool
    answered, for instance. Drawn tokens have log-probs; given tokens are only read.

    All tensors are on the CPU. Rows of one prompt should be neighbours: they then attend to its keys and values in one
    product. Build it with ``pack`` from flat arrays or with ``of`` from sequences.

    Example: after prompt 0 the policy drew 4, 6, 1; after prompt 1 it drew 8, was given 7 and 9, and drew 1::

        prompt_B = [0, 1]
        lengths_B = [3, 4]
        ids_T = [4, 6, 1, 8, 7, 9, 1]
        drawn_T = [T, T, T, T, F, F, T]
        targets_N = [4, 6, 1, 8, 1]
    """

    prompt_B: Tensor
    """The index of each row's prompt among the prompts that were read."""
    ids_T: Tensor
    lengths_B: Tensor
    drawn_T: Tensor | None = None
    """Which tokens were drawn, boolean. The last token of each row is. None: all of them."""
    support: Support | None = None
    """What the N drawn tokens were drawn from. None: the whole vocabulary."""

    @classmethod
    def pack(
        cls, prompt_B: Any, ids_T: Any, lengths_B: Any, drawn_T: Any = None, support: Support | None = None
    ) -> PackedRows:
        """Rows from flat arrays, NumPy's or torch's. Given tokens after the last drawn token of a row are cut: nothing
        depends on them.

        Raises:
            ValueError: lengths do not fit, or a row has no drawn token.
        """
        prompt_B, ids_T, lengths_B = (
            torch.as_tensor(values, dtype=torch.int64, device="cpu") for values in (prompt_B, ids_T, lengths_B)
        )
        if len(prompt_B) != len(lengths_B) or int(lengths_B.sum()) != len(ids_T):
            raise ValueError(
                f"rows of {int(lengths_B.sum())} tokens after {len(lengths_B)} prompts were expected, got {len(ids_T)} "
                f"tokens and {len(prompt_B)} prompts"
            )
        if drawn_T is not None:
            drawn_T = torch.as_tensor(drawn_T, dtype=torch.bool, device="cpu")
            if len(drawn_T) != len(ids_T):
                raise ValueError(f"drawn_T has {len(drawn_T)} entries for {len(ids_T)} tokens")
            row_T, position_T = _rows_and_positions(lengths_B)
            used_B = torch.zeros_like(lengths_B).scatter_reduce(0, row_T, (position_T + 1) * drawn_T, "amax")
            kept_T = position_T < used_B[row_T]
            ids_T, drawn_T, lengths_B = ids_T[kept_T], drawn_T[kept_T], used_B
            drawn_T = None if bool(drawn_T.all()) else drawn_T
        if len(lengths_B) and int(lengths_B.min()) == 0:
            raise ValueError(f"row {int(lengths_B.argmin())} has no drawn token")
        return cls(prompt_B, ids_T, lengths_B, drawn_T, support)

    @classmethod
    def of(
        cls,
        prompts: Sequence[int],
        token_ids: Sequence[Sequence[int]],
        supports: Sequence[Support | None] = (),
        drawn: Sequence[Sequence[bool]] | None = None,
    ) -> PackedRows:
        """Rows from sequences: for each row the index of its prompt, its token ids, what its drawn tokens were drawn
        from (empty: the whole vocabulary), and which tokens were drawn (None: all of them)."""
        lengths = [len(ids) for ids in token_ids]
        ids_T = np.concatenate([np.asarray(ids, np.int64) for ids in token_ids])
        drawn_T = None if drawn is None else np.concatenate([np.asarray(row, np.bool_) for row in drawn])
        counts = lengths if drawn is None else [int(np.sum(row)) for row in drawn]
        return cls.pack(list(prompts), ids_T, lengths, drawn_T, Support.join(supports, counts))

    @property
    def starts_B(self) -> Tensor:
        """The first token of each row on axis T."""
        return self.lengths_B.cumsum(0) - self.lengths_B

    @property
    def drawn_N(self) -> Tensor | None:
        """The indices of drawn tokens on axis T. None: all of them."""
        return None if self.drawn_T is None else self.drawn_T.nonzero().squeeze(-1)

    @property
    def targets_N(self) -> Tensor:
        """The drawn tokens' ids."""
        return self.ids_T if self.drawn_T is None else self.ids_T[self.drawn_T]

    @property
    def rows_and_positions(self) -> tuple[Tensor, Tensor]:
        """The row of each token, and the number of tokens before it in its row. Shape ``[T]`` each."""
        return _rows_and_positions(self.lengths_B)

    def inputs_T(self, prompt_ids: Sequence[Sequence[int]]) -> Tensor:
        """The ids after which ``ids_T`` come: rows shifted by one, each beginning with the last token of its prompt."""
        last_P = torch.tensor([int(ids[-1]) for ids in prompt_ids])
        inputs_T = self.ids_T.roll(1)
        inputs_T[self.starts_B] = last_P[self.prompt_B]
        return inputs_T


def _rows_and_positions(lengths_B: Tensor) -> tuple[Tensor, Tensor]:
    row_T = torch.arange(len(lengths_B)).repeat_interleave(lengths_B)
    starts_B = lengths_B.cumsum(0) - lengths_B
    return row_T, torch.arange(len(row_T)) - starts_B[row_T]
