"""Choose how to sample from a model: the fastest backend whose logits are those of the model's own forward pass."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from cohort.errors import ModelError
from cohort.policy import Policy
from cohort.policy.anatomy import Anatomy
from cohort.policy.choose import Candidate, first_correct, one_line, own_logits, relative_gaps, token_source
from cohort.policy.custom_attention import find_mixers
from cohort.policy.parts import UnsupportedModel
from cohort.rollout.backend import Backend
from cohort.rollout.capacity import Capacity
from cohort.rollout.generic import RecomputeBackend, RefillBackend, StaticBackend, cache_kind
from cohort.rollout.lean import LeanBackend
from cohort.rollout.shared import SharedBackend

TRIAL_LENGTHS = (11, 5)
"""Lengths of the prompts of a trial, in tokens."""
TRIAL_STEPS = 3
TRIAL_GIVEN = 4
"""Tokens that are given to a parked row; another is given one token."""


def choose_backend(policy: Policy, *, native_kernels: bool = True) -> Backend:
    """The fastest correct backend for this model. ``native_kernels``: see ``LeanBackend``.

    Raises:
        ModelError: no backend is correct.
    """
    failures: list[str] = []
    candidates = _candidates(policy, failures, native_kernels=native_kernels)
    backend = first_correct(candidates, lambda candidate: logit_gaps(candidate, policy), policy, failures)
    if backend is None:
        raise ModelError(f"{type(policy.model).__name__} cannot be sampled from: {'; '.join(failures)}")
    return backend


def _candidates(policy: Policy, failures: list[str], *, native_kernels: bool) -> Iterator[Candidate[Backend]]:
    def lean(native: bool) -> LeanBackend:
        return LeanBackend(policy, Anatomy.of(policy.model), native_kernels=native)

    try:
        is_native = lean(native_kernels).is_native
        yield Candidate("lean", lambda: lean(native_kernels), copies_weights=True)
        if is_native:
            yield Candidate("lean", lambda: lean(False), copies_weights=True)
    except UnsupportedModel as reason:
        failures.append(f"not lean: {reason}")
    latent = hasattr(policy.model.config.get_text_config(), "kv_lora_rank")  # keys and values of different width
    if find_mixers(policy.model) or latent:  # other models keep the numbers of transformers' cache
        yield Candidate("prompts once per group", lambda: SharedBackend(policy))
    kind = None
    try:
        kind = cache_kind(policy)
    except Exception as reason:  # models bring their own code
        failures.append(f"transformers' cache: {one_line(reason)}")
    if kind == "attention":
        yield Candidate("transformers' cache, rows refilled", lambda: RefillBackend(policy))
        yield Candidate("the same without parking", lambda: RefillBackend(policy, keeps_rows=False))
    static = "transformers' cache, static batches"
    if kind in {"attention", "padded"}:
        yield Candidate(static, lambda: StaticBackend(policy, mixed_lengths=True))
    if kind in {"padded", "other"}:
        yield Candidate(f"{static} of one length", lambda: StaticBackend(policy, mixed_lengths=False))
    yield Candidate("without a cache", lambda: RecomputeBackend(policy))


@torch.no_grad()
def logit_gaps(backend: Backend, policy: Policy) -> Tensor:
    """``relative_gaps`` to the model's own forward pass on a few random tokens: prefilled, decoded, with two rows on
    one prompt, and given to rows that were parked."""
    tokens = token_source(policy)
    prompts = [tokens(length) for length in TRIAL_LENGTHS if backend.mixed_lengths or length == TRIAL_LENGTHS[0]]
    owners = [*range(len(prompts)), 0]
    texts = [list(prompts[owner]) for owner in owners]
    given = tokens(TRIAL_GIVEN)
    backend.begin(Capacity(len(owners), len(prompts), TRIAL_LENGTHS[0], TRIAL_STEPS + TRIAL_GIVEN))
    try:
        steps = [backend.prefill(prompts)[owners]]
        backend.add_rows(owners)
        for _ in range(TRIAL_STEPS - 1):
            new = tokens(len(texts))
            for text, token in zip(texts, new, strict=True):
                text.append(token)
            steps.append(backend.step(torch.tensor(new, device=policy.device)))
        logits = [torch.stack(steps, 1).flatten(0, 1)]
        if backend.keeps_rows:
            handles = [backend.park(row) for row in (0, 1)]
            backend.remove_rows([0, 1])
            backend.resume(handles)
            logits.append(backend.extend([len(owners) - 2, len(owners) - 1], [given, given[:1]]))
    finally:
        backend.end()
    expected = [own_logits(policy, text, TRIAL_STEPS) for text in texts]
    if backend.keeps_rows:
        expected += [own_logits(policy, [*texts[0], *given], 1), own_logits(policy, [*texts[1], *given[:1]], 1)]
    return relative_gaps(torch.cat(logits), torch.cat(expected))
