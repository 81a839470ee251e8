"""From logits to tokens: truncation, the draw, and its log-probabilities. Pure functions of tensors.

Axis letters: S rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cohort.policy import penalized_where
from cohort.rollout.settings import Sampling

BLOCK = 128
"""Tokens of the vocabulary that the search for a drawn token skips at a time."""


class Drawn(NamedTuple):
    """One drawn token per row."""

    tokens_S: Tensor
    logps_S: Tensor
    """Under the distribution that the token was drawn from."""
    full_logps_S: Tensor
    """Under the full softmax of the given logits at the same temperature (at 1 for a greedy row)."""
    valid_S: Tensor
    """False where the logits contain NaN, or nothing finite. The other entries of such a row have no meaning."""
    kept_SV: Tensor | None = None
    """Tokens that could have been drawn, boolean. None: all tokens."""


@dataclass(frozen=True, slots=True)
class RowSettings:
    """The sampling settings of the rows, shape ``[S]`` or ``[S, 1]``. None: off for every row."""

    temperatures_S1: Tensor | float
    """1 for greedy rows."""
    greedy_S: Tensor | None
    top_k_S: Tensor | None
    top_p_S1: Tensor | None
    min_p_S1: Tensor | None
    penalties_S1: Tensor | None

    @classmethod
    def of(cls, samplings: Sequence[Sampling], device: torch.device) -> RowSettings:
        """The settings of the rows, in their order."""

        def column(name: str, off: float) -> Tensor | None:
            values = [getattr(sampling, name) for sampling in samplings]
            if all(value == off for value in values):
                return None
            return torch.tensor(values, dtype=torch.float64, device=device)[:, None]

        temperatures = [sampling.temperature or 1.0 for sampling in samplings]
        one = temperatures[0] if len(set(temperatures)) == 1 else None
        greedy = [sampling.temperature == 0 for sampling in samplings]
        top_k = column("top_k", 0)
        return cls(
            temperatures_S1=torch.tensor(temperatures, dtype=torch.float64, device=device)[:, None]
            if one is None
            else one,
            greedy_S=torch.tensor(greedy, device=device) if any(greedy) else None,
            top_k_S=None if top_k is None else top_k[:, 0].long(),
            top_p_S1=column("top_p", 1),
            min_p_S1=column("min_p", 0),
            penalties_S1=column("repetition_penalty", 1),
        )

    @property
    def reweights(self) -> bool:
        """Whether these settings can change the distribution of a row."""
        rules = (self.greedy_S, self.top_k_S, self.top_p_S1, self.min_p_S1, self.penalties_S1)
        return any(rule is not None for rule in rules)


def draw_tokens(
    logits_SV: Tensor,
    uniforms_S: Tensor,
    settings: RowSettings,
    *,
    forbidden_SV: Tensor | None = None,
    seen_SV: Tensor | None = None,
) -> Drawn:
    """Draw one token per row.

    Args:
        logits_SV: float32 or float64. Not modified.
        uniforms_S: in [0, 1), float64.
        settings: of the rows.
        forbidden_SV: tokens that a grammar or a minimum length excludes, boolean. None: no token.
        seen_SV: tokens of the row's prompt and completion, boolean, for the repetition penalty.

    >>> one = RowSettings.of([Sampling(9)], torch.device("cpu"))
    >>> draw = draw_tokens(torch.log(torch.tensor([[0.25, 0.0, 0.75]])), torch.tensor([0.25], dtype=torch.float64), one)
    >>> draw.tokens_S, draw.logps_S
    (tensor([2]), tensor([-0.2877]))
    """
    if not settings.reweights and forbidden_SV is None:
        probs_SV = torch.softmax(_divided(logits_SV, settings), dim=-1)
        tokens_S, logps_S, valid_S = invert(probs_SV, uniforms_S)
        return Drawn(tokens_S, logps_S, logps_S, valid_S)
    scores_SV = _restricted(logits_SV, settings, forbidden_SV, seen_SV)
    tokens_S, logps_S, valid_S = invert(torch.softmax(scores_SV, dim=-1), uniforms_S)
    kept_SV = scores_SV > -torch.inf
    full_SV = torch.log_softmax(_divided(logits_SV, settings), dim=-1)
    full_logps_S = full_SV.gather(-1, tokens_S[:, None])[:, 0]
    return Drawn(tokens_S, logps_S, full_logps_S, valid_S & full_logps_S.isfinite(), kept_SV)


def _divided(logits_SV: Tensor, settings: RowSettings) -> Tensor:
    temperatures = settings.temperatures_S1
    if isinstance(temperatures, float | int):
        return logits_SV if temperatures == 1 else logits_SV / temperatures
    return logits_SV / temperatures.to(logits_SV.dtype)


def _restricted(
    logits_SV: Tensor, settings: RowSettings, forbidden_SV: Tensor | None, seen_SV: Tensor | None
) -> Tensor:
    """The scores whose softmax is drawn from: -inf for excluded tokens."""
    scores_SV = logits_SV
    if settings.penalties_S1 is not None:
        assert seen_SV is not None
        scores_SV = penalized_where(seen_SV, scores_SV, settings.penalties_S1.to(logits_SV.dtype))
    if forbidden_SV is not None:
        scores_SV = scores_SV.masked_fill(forbidden_SV, -torch.inf)
    scores_SV = _divided(scores_SV, settings)
    if settings.top_k_S is not None:
        scores_SV = keep_top_k(scores_SV, settings.top_k_S)
    if settings.top_p_S1 is not None:
        scores_SV = keep_top_p(scores_SV, settings.top_p_S1)
    if settings.min_p_S1 is not None:
        scores_SV = keep_min_p(scores_SV, settings.min_p_S1)
    if settings.greedy_S is not None:
        best_S1 = scores_SV.argmax(-1, keepdim=True)
        only_SV = torch.full_like(scores_SV, -torch.inf).scatter_(-1, best_S1, scores_SV.gather(-1, best_S1))
        scores_SV = torch.where(settings.greedy_S[:, None], only_SV, scores_SV)
    return scores_SV


def keep_top_k(scores_SV: Tensor, top_k_S: Tensor) -> Tensor:
    """-inf for all but the k highest scores of a row and those equal to the k-th. k = 0: unchanged.

    >>> keep_top_k(torch.tensor([[1.0, 3.0, 2.0, 2.0]]), torch.tensor([2]))
    tensor([[-inf, 3., 2., 2.]])
    """
    vocabulary = scores_SV.shape[-1]
    k_S = torch.where(top_k_S == 0, vocabulary, top_k_S).clamp(max=vocabulary)
    largest = int(torch.where(top_k_S == 0, 1, k_S).max())
    best_SK = torch.topk(scores_SV, largest, dim=-1).values
    lowest_S1 = best_SK.gather(-1, (k_S - 1).clamp(max=largest - 1)[:, None])
    below_SV = (scores_SV < lowest_S1) & (top_k_S > 0)[:, None]
    return scores_SV.masked_fill(below_SV, -torch.inf)


def keep_top_p(scores_SV: Tensor, top_p_S1: Tensor) -> Tensor:
    """-inf outside the smallest set of likeliest tokens whose probabilities reach p. p = 1: unchanged.

    A token stays if the tokens likelier than it have a total probability below p. At least one token stays.

    >>> keep_top_p(torch.log(torch.tensor([[0.5, 0.3, 0.2]])), torch.tensor([[0.7]])).exp()
    tensor([[0.5000, 0.3000, 0.0000]])
    """
    sorted_SV, order_SV = scores_SV.sort(dim=-1, descending=True, stable=True)
    probs_SV = torch.softmax(sorted_SV, dim=-1, dtype=torch.float64)
    before_SV = probs_SV.cumsum(-1) - probs_SV
    # The bound is a rounding error below p: a set that reaches p exactly is not enlarged by the last bit of the sum.
    outside_SV = (before_SV >= top_p_S1.double() * (1 - 1e-7)) & (top_p_S1 < 1)
    outside_SV[:, 0] = False
    outside_SV = torch.empty_like(outside_SV).scatter_(-1, order_SV, outside_SV)
    return scores_SV.masked_fill(outside_SV, -torch.inf)


def keep_min_p(scores_SV: Tensor, min_p_S1: Tensor) -> Tensor:
    """-inf for tokens less than ``min_p`` times as likely as the likeliest. 0: unchanged.

    >>> keep_min_p(torch.log(torch.tensor([[0.5, 0.3, 0.2]])), torch.tensor([[0.5]])).exp()
    tensor([[0.5000, 0.3000, 0.0000]])
    """
    top_S1 = scores_SV.amax(-1, keepdim=True)
    return scores_SV.masked_fill(scores_SV - top_S1 < min_p_S1.log().to(scores_SV.dtype), -torch.inf)


def invert(weights_SV: Tensor, uniforms_S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Draw from weights by inverting their cumulative sums, in two steps: the block of the vocabulary, then the token.

    Args:
        weights_SV: not negative; need not sum to 1.
        uniforms_S: in [0, 1), float64. Token v is drawn if u falls into its interval of [0, 1).

    Returns:
        ``(tokens_S, logps_S, valid_S)``: the log of each token's share of the sum, in the weights' dtype. A token of
        weight 0 is never drawn. A row is not valid if its sum is NaN or 0.
    """
    rows, vocabulary = weights_SV.shape
    if rest := -vocabulary % BLOCK:
        weights_SV = torch.nn.functional.pad(weights_SV, (0, rest))
    blocks_SBW = weights_SV.view(rows, -1, BLOCK)
    sums_SB = blocks_SBW.sum(-1, dtype=torch.float64)
    block_S, within_S, totals_S = _find_interval(sums_SB, uniforms_S.clamp(max=1 - 2**-53))
    rows_S = torch.arange(rows, device=weights_SV.device)
    inner_SW = blocks_SBW[rows_S, block_S].double()
    token_S, _, _ = _find_interval(inner_SW, within_S)
    picked_S = inner_SW[rows_S, token_S]
    logps_S = (picked_S.log() - totals_S.log()).to(weights_SV.dtype)
    # The clamp is for rows that are not valid: their search may end in the padding.
    return (block_S * BLOCK + token_S).clamp(max=vocabulary - 1), logps_S, logps_S.isfinite()


def _find_interval(weights_SN: Tensor, shares_S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The entry into which a share of each row's sum falls, the share of that entry that lies before it, and the sums.

    The entry has positive weight, unless no entry of the row has.
    """
    cumulative_SN = weights_SN.cumsum(-1)
    totals_S1 = cumulative_SN[:, -1:]
    # Always below the last sum: the first cumulative sum above it belongs to an entry of positive weight.
    targets_S1 = torch.minimum(shares_S[:, None] * totals_S1, totals_S1.nextafter(torch.zeros_like(totals_S1)))
    entries_S1 = torch.searchsorted(cumulative_SN, targets_S1, right=True).clamp_(max=weights_SN.shape[-1] - 1)
    weight_S1 = weights_SN.gather(-1, entries_S1)
    before_S1 = targets_S1 - (cumulative_SN.gather(-1, entries_S1) - weight_S1)
    shares_S1 = (before_S1 / weight_S1).clamp_(0, 1)
    return entries_S1[:, 0], shares_S1[:, 0], totals_S1[:, 0]


def support_of(kept_SV: Tensor) -> list[tuple[np.ndarray, bool]]:
    """For each row the shorter of two lists: the tokens that could be drawn, or (True) those that could not."""
    vocabulary = kept_SV.shape[-1]
    excluded_S = kept_SV.sum(-1) > vocabulary // 2
    listed_SV = kept_SV ^ excluded_S[:, None]
    rows, tokens = (index.cpu().numpy() for index in listed_SV.nonzero(as_tuple=True))
    pieces = np.split(tokens.astype(np.int32), np.searchsorted(rows, np.arange(1, len(kept_SV))))
    return list(zip(pieces, excluded_S.tolist(), strict=True))
