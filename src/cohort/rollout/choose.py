"""Which way a model is sampled from: the first that computes what the model's own forward pass computes."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from cohort.errors import ModelError
from cohort.policy import Policy
from cohort.policy.anatomy import Anatomy, UnknownAnatomy
from cohort.rollout.backend import Backend
from cohort.rollout.capacity import Capacity
from cohort.rollout.generic import RecomputeBackend, RefillBackend, StaticBackend, cache_kind
from cohort.rollout.lean import LeanBackend

CHECK_LENGTHS = (11, 5)
"""Prompts of the check, in tokens."""
CHECK_STEPS = 3
MAX_GAP = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.03}
"""Largest relative error of the logits, by compute dtype: rounding gives about 1e-6 in float32 (transformers normalises
float64 models in it too) and 0.02 in bfloat16; a wrong position or mask gives 0.1 and more."""


def choose_backend(policy: Policy, *, native_kernels: bool = True) -> Backend:
    """The fastest way that is right for this model, tried on it; ``native_kernels``: see ``LeanBackend``.

    Raises:
        ModelError: none is.
    """
    failures: list[str] = []
    for backend in _candidates(policy, failures, native_kernels=native_kernels):
        name = backend.description.split(" (")[0]
        try:
            gap = logit_gap(backend, policy)
        except Exception as error:  # models bring their own code, and their caches their own ideas
            failures.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
            continue
        if gap <= MAX_GAP[policy.precision.compute]:
            if failures:
                backend.description += f" ({'; '.join(failures)})"
            return backend
        failures.append(f"{name}: off by {gap:.2g} from the model's forward pass")
    raise ModelError(f"{type(policy.model).__name__} cannot be sampled from: {'; '.join(failures)}")


def _candidates(policy: Policy, failures: list[str], *, native_kernels: bool) -> Iterator[Backend]:
    try:
        lean = LeanBackend(policy, Anatomy.of(policy.model), native_kernels=native_kernels)
        yield lean
        if lean.is_native:
            yield LeanBackend(policy, lean.anatomy, native_kernels=False)
    except UnknownAnatomy as unknown:
        failures.append(f"not lean: {unknown}")
    kind = cache_kind(policy)
    if kind == "attention":
        yield RefillBackend(policy)
    if kind is not None:
        yield StaticBackend(policy, mixed_lengths=kind != "recurrent")
    yield RecomputeBackend(policy)


@torch.no_grad()
def logit_gap(backend: Backend, policy: Policy) -> float:
    """Root mean square of the difference to the model's forward pass over that of the (centred) logits, at worst, over
    a few tokens: prefilled, decoded, and with two rows on one prompt. Infinite when a number is none."""
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        drawn: list[int] = torch.randint(policy.vocab_size, (count,), generator=generator).tolist()
        return drawn

    prompts = [tokens(length) for length in CHECK_LENGTHS if backend.mixed_lengths or length == CHECK_LENGTHS[0]]
    owners = [*range(len(prompts)), 0]
    texts = [list(prompts[owner]) for owner in owners]
    backend.begin(Capacity(len(owners), len(prompts), CHECK_LENGTHS[0], CHECK_STEPS))
    try:
        steps = [backend.prefill(prompts)[owners]]
        backend.add_rows(owners)
        for _ in range(CHECK_STEPS - 1):
            new = tokens(len(texts))
            for text, token in zip(texts, new, strict=True):
                text.append(token)
            steps.append(backend.step(torch.tensor(new, device=policy.device)))
    finally:
        backend.end()
    logits_STV = torch.stack(steps, 1)
    return max(_relative_gap(logits_TV, policy, text) for logits_TV, text in zip(logits_STV, texts, strict=True))


def _relative_gap(logits_TV: Tensor, policy: Policy, text: list[int]) -> float:
    """At worst over a text's last places, all from one forward pass."""
    with policy.compute():
        output = policy.logits(torch.tensor([text], device=policy.device), keep=len(logits_TV), use_cache=False)
    worst = 0.0
    for row_V, expected_V in zip(logits_TV, output.logits[0].to(logits_TV.dtype), strict=True):
        spread = (expected_V - expected_V.mean()).norm()
        gap = float((row_V - expected_V).norm() / spread) if spread > 0 else float((row_V - expected_V).norm())
        worst = max(worst, math.inf if math.isnan(gap) else gap)
    return worst
