"""Choose how the trainer runs a model: the fastest implementation whose logits are those of its own forward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from cohort.policy.anatomy import UnsupportedModel
from cohort.policy.compute import ComputeModel
from cohort.policy.custom_attention import CustomAttention
from cohort.policy.float32_head import is_float32
from cohort.policy.head import Head
from cohort.policy.lean import LeanLayers
from cohort.policy.passes import Passes, PlainPasses, SharedPasses, base_of
from cohort.policy.rows import PackedRows

TRIAL_PROMPTS = (7, 1, 4)
"""Lengths of the prompts of a trial, in tokens."""
TRIAL_COMPLETIONS = ((0, 3), (0, 5), (1, 4), (2, 1))
"""The completions of a trial: the number of the prompt, and the length in tokens."""


def find_head(model: ComputeModel) -> Head | None:
    """The model's head if it is a linear layer after a decoder, else None."""
    base = base_of(model.model)
    if not hasattr(base, "get_output_embeddings") or not hasattr(base, "get_decoder"):
        return None
    linear = base.get_output_embeddings()
    if type(linear) is not nn.Linear:
        return None
    config = base.config.get_text_config()
    multiplier = float(getattr(config, "logit_scale", None) or 1.0)  # Cohere
    multiplier /= float(getattr(config, "logits_scaling", None) or 1.0)  # Granite
    cap = getattr(config, "final_logit_softcapping", None)
    own_dtype = is_float32(linear)
    compute = torch.float32 if own_dtype else model.precision.compute
    return Head(linear, compute, multiplier, cap, native=not model.why_no_kernels(), own_dtype=own_dtype)


def choose_passes(model: ComputeModel) -> Passes:
    """The first implementation that computes what the model's own forward pass computes. Its description says which it
    is, and why no better one is used."""
    if model.dropout:
        return PlainPasses(model, Head())
    head = find_head(model)
    failures = [] if head is not None else ["its head is not a plain linear layer after a decoder"]
    candidates = () if head is None else _candidates(model, head)
    passes = first_correct(candidates, lambda candidate: logit_gap(candidate, model), model, failures)
    if passes is None:
        passes = PlainPasses(model, Head(compute=model.precision.compute))
        passes.description += in_parentheses(failures)
    return passes


def _candidates(model: ComputeModel, head: Head) -> Iterator[tuple[str, Callable[[], Passes]]]:
    with contextlib.suppress(
        UnsupportedModel, AttributeError
    ):  # no reason is given: most families run with transformers' own layers
        layers = LeanLayers(model)
        yield "lean", lambda: SharedPasses(model, head, layers)
    yield "custom attention", lambda: SharedPasses(model, head, CustomAttention(model))
    yield "padded", lambda: PlainPasses(model, head)


@torch.no_grad()
def logit_gap(passes: Passes, model: ComputeModel) -> float:
    """``relative_gap`` to the model's own forward pass on a few random tokens."""
    tokens = token_source(model)
    prompts = [tokens(length) for length in TRIAL_PROMPTS]
    completions = [tokens(length) for _, length in TRIAL_COMPLETIONS]
    rows = PackedRows.of([prompt for prompt, _ in TRIAL_COMPLETIONS], completions)
    logits_NV = passes.head.logits(passes.hidden(passes.read(prompts), rows).states)
    expected = [
        own_logits(model, [*prompts[prompt], *completion], len(completion) + 1)[:-1]
        for (prompt, _), completion in zip(TRIAL_COMPLETIONS, completions, strict=True)
    ]
    return relative_gap(logits_NV, torch.cat(expected))


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
