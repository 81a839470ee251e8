"""Choose how to sample from a model: the fastest backend whose logits are those of the model's own forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from cohort.errors import ModelError
from cohort.policy import Policy
from cohort.policy.choose import Candidate, first_correct, one_line, own_logits, relative_gaps, token_source
from cohort.policy.parts import UnsupportedModel
from cohort.rollout.local.backend import Backend
from cohort.rollout.local.cached import CachedBackend, LeanBody, ModuleBody
from cohort.rollout.local.capacity import Capacity
from cohort.rollout.local.fallback import RecomputeBackend, StaticBackend, cache_kind

TRIAL_LENGTHS = (11, 5)
"""Lengths of the prompts of a trial, in tokens."""
TRIAL_STEPS = 3
TRIAL_GIVEN = 4
"""Tokens that are given to a row; another is given one token."""


def choose_backend(policy: Policy, *, native_kernels: bool = True) -> Backend:
    """The fastest correct backend for this model. ``native_kernels``: whether native kernels are
    used where they are available.

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
    def lean(native: bool) -> CachedBackend:
        return CachedBackend(LeanBody(policy, native=native))

    try:
        is_native = lean(native_kernels).body.native
        yield Candidate("lean", lambda: lean(native_kernels), copies_weights=True)
        if is_native:
            yield Candidate("lean", lambda: lean(False), copies_weights=True)
    except UnsupportedModel as reason:
        failures.append(f"not lean: {reason}")
    yield Candidate("prompts once per group", lambda: CachedBackend(ModuleBody(policy)))
    kind = None
    try:
        kind = cache_kind(policy)
    except Exception as reason:  # models bring their own code
        failures.append(f"transformers' cache: {one_line(reason)}")
    static = "transformers' cache, static batches"
    if kind == "padded":
        yield Candidate(static, lambda: StaticBackend(policy, mixed_lengths=True))
    if kind is not None:
        yield Candidate(f"{static} of one length", lambda: StaticBackend(policy, mixed_lengths=False))
    yield Candidate("without a cache", lambda: RecomputeBackend(policy))


@torch.no_grad()
def logit_gaps(backend: Backend, policy: Policy) -> Tensor:
    """``relative_gaps`` to the model's own forward pass on a few random tokens: prefilled, decoded, with two rows on
    one prompt, and given to rows of which some have waited."""
    tokens = token_source(policy)
    prompts = [tokens(length) for length in TRIAL_LENGTHS if backend.mixed_lengths or length == TRIAL_LENGTHS[0]]
    owners = [*range(len(prompts)), 0]
    texts = [list(prompts[owner]) for owner in owners]
    slots = list(range(len(owners)))
    found, places = list[Tensor](), list[tuple[int, int]]()  # logits, and after how many tokens of which row

    def note(rows: Sequence[int], logits_SV: Tensor) -> None:
        found.append(logits_SV)
        places.extend((row, len(texts[row])) for row in rows)

    def step(rows: Sequence[int]) -> None:
        new = tokens(len(rows))
        for row, token in zip(rows, new, strict=True):
            texts[row].append(token)
        note(rows, backend.step(rows, torch.tensor(new, device=policy.device)))

    backend.begin(Capacity(len(slots), len(prompts), TRIAL_LENGTHS[0], TRIAL_STEPS + TRIAL_GIVEN))
    try:
        note(slots[: len(prompts)], backend.prefill(slots[: len(prompts)], prompts))
        backend.add_rows(slots, owners)
        for _ in range(TRIAL_STEPS - 1):
            step(slots)
        step(slots[-1:])  # from the last place alone
        if backend.keeps_rows:
            given = {slots[-1]: tokens(TRIAL_GIVEN), slots[0]: tokens(1)}
            for row, text in given.items():
                texts[row] += text
            note(list(given), backend.extend(list(given), list(given.values())))
    finally:
        backend.end()
    # Of whole texts: a model that is not causal computes something else for their beginnings.
    whole = [own_logits(policy, text, len(text)) for text in texts]
    return relative_gaps(torch.cat(found), torch.stack([whole[row][length - 1] for row, length in places]))
