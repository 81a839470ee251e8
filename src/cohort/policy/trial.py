"""Choose among implementations of a model by trying them against its own forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from cohort.policy.anatomy import UnsupportedModel
from cohort.policy.compute import ComputeModel

MAX_GAP = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.03}
"""Largest accepted relative error of logits, by compute dtype. Rounding gives about 1e-6 in float32 (transformers
normalises float64 models in float32, too) and 0.02 in bfloat16; a wrong position or mask gives 0.1 or more."""


class Implementation(Protocol):
    """One way of running a model."""

    description: str


Chosen = TypeVar("Chosen", bound=Implementation)


@torch.no_grad()
def first_correct(
    candidates: Iterable[tuple[str, Callable[[], Chosen]]],
    gap: Callable[[Chosen], float],
    model: ComputeModel,
    failures: list[str],
) -> Chosen | None:
    """The first implementation whose logits are those of the model's own forward pass, or None.

    Args:
        candidates: names and constructors, best first.
        gap: the largest relative error of an implementation's logits; see ``relative_gap``.
        model: the model, which is in evaluation mode meanwhile.
        failures: reasons why better implementations cannot be used. Extended here, and added to the description of the
            implementation that is returned.
    """
    mode = model.model.training
    model.model.eval()
    try:
        for name, construct in candidates:
            try:
                candidate = construct()
                error = gap(candidate)
            except UnsupportedModel as reason:
                failures.append(f"{name}: {reason}")
                continue
            except Exception as reason:  # models bring their own code
                failures.append(f"{name}: {type(reason).__name__}: {(str(reason).splitlines() or [''])[0]}")
                continue
            if error <= MAX_GAP[model.precision.compute]:
                candidate.description += in_parentheses(failures)
                return candidate
            failures.append(f"{name}: off by {error:.2g} from the model's forward pass")
    finally:
        model.model.train(mode)
    return None


def in_parentheses(failures: Sequence[str]) -> str:
    """Reasons as the end of a description."""
    return f" ({'; '.join(failures)})" if failures else ""


def token_source(model: ComputeModel) -> Callable[[int], list[int]]:
    """A function that draws so many token ids uniformly, the same in every trial."""
    generator = torch.Generator().manual_seed(0)
    # A head may be padded beyond the size of the embedding.
    known = min(model.vocab_size, getattr(model.model.get_input_embeddings(), "num_embeddings", model.vocab_size))

    def draw(count: int) -> list[int]:
        ids: list[int] = torch.randint(known, (count,), generator=generator).tolist()
        return ids

    return draw


def own_logits(model: ComputeModel, token_ids: Sequence[int], count: int) -> Tensor:
    """Logits of the model's own forward pass at the last ``count`` tokens, ``[count, V]``."""
    with model.compute():
        output = model.logits(torch.tensor([token_ids], device=model.device), keep=count, use_cache=False)
    logits: Tensor = output.logits[0]
    return logits


def relative_gap(logits_NV: Tensor, expected_NV: Tensor) -> float:
    """The largest over tokens of the norm of the difference, divided by the norm of the centred expected logits.
    Infinite if a logit is NaN."""
    expected_NV = expected_NV.to(logits_NV.dtype)
    spread_N = (expected_NV - expected_NV.mean(-1, keepdim=True)).norm(dim=-1)
    gap_N = (logits_NV - expected_NV).norm(dim=-1) / torch.where(spread_N > 0, spread_N, 1.0)
    return float(gap_N.nan_to_num(nan=torch.inf).max())
