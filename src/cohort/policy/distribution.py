"""The distribution that tokens were drawn from, given the logits: temperature, repetition penalty and supports."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cohort.policy.rows import PackedRows
from cohort.types import Support


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
        self.targets_N = rows.targets_N.to(device)
        self._rows, self._prompt_ids = rows, prompt_ids
        self._penalty = repetition_penalty
        self._support = None
        if rows.support is not None and _excludes(rows.support):
            self._support = _SupportMask(rows.support, self.targets_N.device)

    @property
    def is_plain(self) -> bool:
        """Whether it is the softmax of the logits divided by the temperature, with no penalty and no support."""
        return self._penalty == 1 and self._support is None

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
        if self._support is not None:
            outside_CV = self._support.outside(start, *logits_CV.shape)
            fill = logits_CV.masked_fill_ if in_place else logits_CV.masked_fill
            logits_CV = fill(outside_CV, -torch.inf)
        return logits_CV, factor

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


def _excludes(support: Support) -> bool:
    """Whether some token could not have been drawn."""
    return not bool((support.excluded_N & (support.counts_N == 0)).all())


class _SupportMask:
    """A support on the device, as a mask of a chunk's logits."""

    def __init__(self, support: Support, device: torch.device) -> None:
        self._token_ids_U, self._counts_N, self._excluded_N = (
            torch.from_numpy(part).to(device) for part in (support.token_ids_U, support.counts_N, support.excluded_N)
        )
        self._ends_N = self._counts_N.cumsum(0)

    def outside(self, start: int, count: int, vocabulary: int) -> Tensor:
        """Which ids each of ``count`` tokens could not have been, boolean ``[count, V]``."""
        stop = start + count
        excluded_C, counts_C = self._excluded_N[start:stop], self._counts_N[start:stop]
        first = int(self._ends_N[start] - self._counts_N[start])
        token_ids_U = self._token_ids_U[first : int(self._ends_N[stop - 1])]
        row_U = torch.arange(count, device=counts_C.device).repeat_interleave(counts_C)
        outside_CV = excluded_C.logical_not()[:, None].repeat(1, vocabulary)
        outside_CV[row_U, token_ids_U.long()] = excluded_C[row_U]
        return outside_CV
