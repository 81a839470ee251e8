"""Choose how the trainer runs a model: the fastest implementation whose logits are those of its own forward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn

from cohort.policy.anatomy import UnsupportedModel
from cohort.policy.compute import ComputeModel
from cohort.policy.custom_attention import CustomAttention
from cohort.policy.head import Head
from cohort.policy.kernels import kernels_for
from cohort.policy.lean import LeanLayers
from cohort.policy.passes import Passes, PlainPasses, SharedPasses, base_of
from cohort.policy.rows import PackedRows
from cohort.policy.trial import first_correct, in_parentheses, own_logits, relative_gap, token_source

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
    return Head(linear, model.precision.compute, multiplier, cap, kernels_for(model)[0])


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
