"""The rows of a forward pass, laid end to end in flat tensors, and the distribution that their drawn tokens came from:
temperature, repetition penalty and supports."""

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
    routes_T: Tensor | None = None
    """How the inputs that the tokens come after are routed, ``[T, L, K]``; see ``Segment``. None: freely."""

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
            row_T, position_T = cls(prompt_B, ids_T, lengths_B).rows_and_positions
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
        row_T = torch.arange(len(self.lengths_B)).repeat_interleave(self.lengths_B)
        return row_T, torch.arange(len(row_T)) - self.starts_B[row_T]

    def inputs_T(self, prompt_ids: Sequence[Sequence[int]]) -> Tensor:
        """The ids after which ``ids_T`` come: rows shifted by one, each beginning with the last token of its prompt."""
        last_P = torch.tensor([int(ids[-1]) for ids in prompt_ids])
        inputs_T = self.ids_T.roll(1)
        inputs_T[self.starts_B] = last_P[self.prompt_B]
        return inputs_T


class Distribution:
    """The distribution that the drawn tokens of rows were drawn from.

    Args:
        rows: the tokens. Those outside a token's support have probability 0.
        prompt_ids: token ids of the prompts that ``rows.prompt_B`` refers to.
        temperature: divides the logits.
        repetition_penalty: logits of ids that occur in the prompt or earlier in the row, drawn or given, are divided by
            it where they are positive and multiplied where they are negative, as in sampling. 1: no penalty.
        device: of the tensors.

    Source of the penalty: CTRL (arXiv 1909.05858) 4.1; transformers' ``RepetitionPenaltyLogitsProcessor``.
    """

    def __init__(
        self,
        rows: PackedRows,
        prompt_ids: Sequence[Sequence[int]],
        temperature: float,
        repetition_penalty: float = 1.0,
        device: torch.device | None = None,
    ) -> None:
        self.temperature = temperature
        self.host_targets_N = rows.targets_N
        """``targets_N`` where the rows are: reading them waits for no GPU."""
        self.targets_N = self.host_targets_N.to(device)
        self._rows, self._prompt_ids = rows, prompt_ids
        self._penalty = repetition_penalty
        self._support: tuple[Tensor, ...] = ()
        if (support := rows.support) is not None and not bool((support.excluded_N & (support.counts_N == 0)).all()):
            parts = (support.token_ids_U, support.counts_N, support.counts_N.cumsum(), support.excluded_N)
            self._support = tuple(torch.from_numpy(part).to(self.targets_N.device) for part in parts)

    @property
    def is_plain(self) -> bool:
        """Whether it is the softmax of the logits divided by the temperature, with no penalty and no support."""
        return self._penalty == 1 and not self._support

    def scores(self, logits_CV: Tensor, start: int) -> tuple[Tensor, Tensor | float]:
        """Scores ``z``, whose softmax is the distribution, of the tokens from ``start`` on, and the diagonal of
        ``dz / dlogits``: ``[C, V]``, or one number.

        Args:
            logits_CV: float32 or wider. Overwritten where they need no gradient.
            start: index of the first token on axis N.
        """
        factor: Tensor | float = 1 / self.temperature
        if self._penalty != 1:
            seen_CV = self._seen(start, *logits_CV.shape)
            of_seen_CV = torch.where(logits_CV.detach() < 0, logits_CV.new_tensor(self._penalty), 1 / self._penalty)
            factor = torch.where(seen_CV, of_seen_CV, 1.0) / self.temperature
            logits_CV = penalized_where(seen_CV, logits_CV, self._penalty)
        in_place = not logits_CV.requires_grad
        if self.temperature != 1:
            logits_CV = logits_CV.div_(self.temperature) if in_place else logits_CV / self.temperature
        if self._support:
            outside_CV = self._outside(start, *logits_CV.shape)
            fill = logits_CV.masked_fill_ if in_place else logits_CV.masked_fill
            logits_CV = fill(outside_CV, -torch.inf)
        return logits_CV, factor

    def _outside(self, start: int, count: int, vocabulary: int) -> Tensor:
        """Which ids each of ``count`` tokens could not have been, boolean ``[count, V]``; see ``Support``."""
        token_ids_U, counts_N, ends_N, excluded_N = self._support
        stop = start + count
        excluded_C, counts_C = excluded_N[start:stop], counts_N[start:stop]
        token_ids_U = token_ids_U[int(ends_N[start] - counts_N[start]) : int(ends_N[stop - 1])]
        row_U = torch.arange(count, device=counts_C.device).repeat_interleave(counts_C)
        outside_CV = excluded_C.logical_not()[:, None].repeat(1, vocabulary)
        outside_CV[row_U, token_ids_U.long()] = excluded_C[row_U]
        return outside_CV

    def _seen(self, start: int, count: int, vocabulary: int) -> Tensor:
        """Which ids occur in the prompt or before each of ``count`` drawn tokens in its row, ``[count, V]``."""
        rows, device, span = self._rows, self.targets_N.device, slice(start, start + count)
        row_C, position_C = (
            (each if rows.drawn_N is None else each[rows.drawn_N])[span] for each in rows.rows_and_positions
        )
        ids_by_row = rows.ids_T.split(rows.lengths_B.tolist())
        pieces = []
        for row, counted in zip(*(each.tolist() for each in row_C.unique_consecutive(return_counts=True)), strict=True):
            ids, prompt = ids_by_row[row], torch.as_tensor(self._prompt_ids[int(rows.prompt_B[row])])
            # The position in the row from which on each id of the vocabulary has occurred. Ids that the head has no
            # logit for are collected in one more entry.
            since = torch.arange(1 - len(prompt), len(ids) + 1).clamp(min=0).to(device)
            text = torch.cat([prompt, ids]).clamp(max=vocabulary).to(device)
            since_V = since.new_full((vocabulary + 1,), len(ids)).scatter_reduce_(0, text, since, "amin")[:-1]
            before, position_C = position_C[:counted], position_C[counted:]
            pieces.append(since_V <= before.to(device)[:, None])
        return torch.cat(pieces)


def penalized_where(seen: Tensor, logits: Tensor, penalty: Tensor | float) -> Tensor:
    """The repetition penalty of sampling and of the update: logits of seen tokens are divided by it where they are
    positive and multiplied where they are negative."""
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)
