"""What completion tokens are drawn from, given the logits: temperature, repetition penalty and supports."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from cohort.types import Support


class Distribution:
    """What completion tokens are drawn from, given the logits: temperature, repetition penalty and supports.

    Args:
        prompt_ids, completion_ids: the token ids of S completions and of their prompts.
        temperature: divides the logits.
        supports: what the tokens were drawn from: all others have probability 0. Empty: the whole vocabulary.
        repetition_penalty: logits of tokens that stand in the prompt or earlier in the completion are divided by it
            where positive and multiplied where negative, as the sampler does it. 1: none.
        device: of the tensors.

    Source of the penalty: CTRL (arXiv 1909.05858) 4.1; transformers' ``RepetitionPenaltyLogitsProcessor``.
    """

    def __init__(
        self,
        prompt_ids: Sequence[Sequence[int]],
        completion_ids: Sequence[Sequence[int]],
        temperature: float,
        supports: Sequence[Support | None] = (),
        repetition_penalty: float = 1.0,
        device: torch.device | None = None,
    ) -> None:
        self.temperature = temperature
        self.targets_N = torch.tensor([token for ids in completion_ids for token in ids], device=device)
        self._prompt_ids, self._completion_ids = prompt_ids, completion_ids
        self._penalty = repetition_penalty
        self._support = None
        if any(support is not None and _excludes(support) for support in supports):
            self._support = _JoinedSupport(supports, completion_ids, self.targets_N.device)

    @property
    def is_plain(self) -> bool:
        """Whether it is the softmax of the logits over the temperature, and no more."""
        return self._penalty == 1 and self._support is None

    def scores(self, logits_CV: Tensor, start: int) -> tuple[Tensor, Tensor | float]:
        """``z`` of the tokens from ``start`` on, and ``dz / dlogits``, which is diagonal: ``[C, V]``, or one number.

        Args:
            logits_CV: float32 or wider. Overwritten where they need no gradient.
            start: the first token's place on axis N.
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
        """Which tokens stand in the prompt or before each token of the completion."""
        device = self.targets_N.device
        pieces = []
        first = 0
        for prompt, completion in zip(self._prompt_ids, self._completion_ids, strict=True):
            wanted = range(max(start - first, 0), min(start + count - first, len(completion)))
            first += len(completion)
            if not wanted:
                continue
            # From which token of the completion on each token of the vocabulary has been seen. An id that the head has
            # no logit for falls off the end.
            places = torch.arange(1 - len(prompt), len(completion) + 1, device=device).clamp(min=0)
            ids = torch.tensor([*prompt, *completion], device=device).clamp(max=vocabulary)
            since_V = places.new_full((vocabulary + 1,), len(completion)).scatter_reduce_(0, ids, places, "amin")[:-1]
            pieces.append(since_V <= torch.arange(wanted.start, wanted.stop, device=device)[:, None])
        return torch.cat(pieces)


def penalized_where(seen: Tensor, logits: Tensor, penalty: Tensor | float) -> Tensor:
    """The repetition penalty, in sampling and in the update alike: seen tokens' logits divided by it where they are
    positive and multiplied where negative."""
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def _excludes(support: Support) -> bool:
    """Whether there is a token that could not have been drawn."""
    return not bool((support.excluded_N & (support.counts_N == 0)).all())


class _JoinedSupport:
    """The supports of several completions, laid end to end."""

    def __init__(
        self, supports: Sequence[Support | None], completion_ids: Sequence[Sequence[int]], device: torch.device
    ) -> None:
        nothing = np.zeros(0, np.int32)
        pairs = list(zip(supports, completion_ids, strict=True))
        assert all(support is None or len(support.counts_N) == len(ids) for support, ids in pairs)
        ragged = [
            (nothing, np.zeros(len(ids), np.int32), np.ones(len(ids), np.bool_))  # nothing is excluded
            if support is None
            else (support.token_ids_K, support.counts_N, support.excluded_N)
            for support, ids in pairs
        ]
        self._token_ids_K, self._counts_N, self._excluded_N = (
            torch.from_numpy(np.concatenate(parts)).to(device) for parts in zip(*ragged, strict=True)
        )
        self._ends_N = self._counts_N.cumsum(0)

    def outside(self, start: int, count: int, vocabulary: int) -> Tensor:
        """Which tokens each of ``count`` completion tokens could not have been, boolean."""
        stop = start + count
        excluded_C, counts_C = self._excluded_N[start:stop], self._counts_N[start:stop]
        first = int(self._ends_N[start] - self._counts_N[start])
        token_ids_K = self._token_ids_K[first : int(self._ends_N[stop - 1])]
        row_K = torch.arange(count, device=counts_C.device).repeat_interleave(counts_C)
        outside_CV = excluded_C.logical_not()[:, None].repeat(1, vocabulary)
        outside_CV[row_K, token_ids_K.long()] = excluded_C[row_K]
        return outside_CV
