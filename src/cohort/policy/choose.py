"""Which way the trainer runs a model: the first that computes what the model's own forward pass computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from cohort.policy.anatomy import UnknownAnatomy
from cohort.policy.exchanged import ExchangedAttention
from cohort.policy.head import Head
from cohort.policy.kernels import kernels_for
from cohort.policy.lean import LeanLayers
from cohort.policy.passes import NotShared, Passes, PlainPasses, SharedPasses, base_of

if TYPE_CHECKING:
    from cohort.policy.policy import Policy

MAX_GAP = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.03}
"""Largest relative error of logits beside the model's own forward pass, by compute dtype: rounding gives about 1e-6 in
float32 and 0.02 in bfloat16; a wrong position or mask gives 0.1 or more."""
TRIED_PROMPTS = (7, 1, 4)
TRIED_COMPLETIONS = ((0, 3), (0, 5), (1, 4), (2, 1))
"""Lengths in tokens of what is tried; a completion's first number is its prompt's."""


def find_head(policy: Policy) -> Head | None:
    """The model's head, where it is a linear layer; None: something else."""
    model = base_of(policy.model)
    if not hasattr(model, "get_output_embeddings") or not hasattr(model, "get_decoder"):
        return None
    linear = model.get_output_embeddings()
    if type(linear) is not nn.Linear:
        return None
    config = model.config.get_text_config()
    multiplier = float(getattr(config, "logit_scale", None) or 1.0)  # Cohere
    multiplier /= float(getattr(config, "logits_scaling", None) or 1.0)  # Granite
    return Head(
        linear,
        policy.precision.compute,
        multiplier,
        getattr(config, "final_logit_softcapping", None),
        kernels_for(policy)[0],
    )


@torch.no_grad()
def choose_passes(policy: Policy) -> Passes:
    """The first way that computes what the model's own forward pass computes, tried on a few tokens.

    Its description says which, and why not a better one.
    """
    head = find_head(policy)
    failures = [] if head is not None else ["its head is not a plain linear layer after a decoder"]
    mode = policy.model.training
    policy.model.eval()
    try:
        for way in (_lean, _exchanged, PlainPasses) if head is not None else ():
            assert head is not None
            try:
                passes = way(policy, head)
                gap = logit_gap(passes, policy)
            except UnknownAnatomy:
                continue  # few are lean; the next way does not need it
            except Exception as error:  # models bring their own code
                failures.append(f"{type(error).__name__}: {error}" if not isinstance(error, NotShared) else str(error))
                continue
            if gap <= MAX_GAP[policy.precision.compute]:
                passes.description += f" ({'; '.join(failures)})" if failures else ""
                return passes
            failures.append(f"off by {gap:.2g} from the model's forward pass")
    finally:
        policy.model.train(mode)
    plain = PlainPasses(policy, Head(compute=policy.precision.compute))
    plain.description += f" ({'; '.join(failures)})" if failures else ""
    return plain


def _lean(policy: Policy, head: Head) -> Passes:
    return SharedPasses(policy, head, LeanLayers(policy))


def _exchanged(policy: Policy, head: Head) -> Passes:
    return SharedPasses(policy, head, ExchangedAttention(policy))


def logit_gap(passes: Passes, policy: Policy) -> float:
    """``relative_gap`` to the model's own forward pass, at worst, over a few tokens drawn at random."""
    generator = torch.Generator().manual_seed(0)
    # A head may be rounded up beyond what the embedding holds.
    known = min(policy.vocab_size, getattr(policy.model.get_input_embeddings(), "num_embeddings", policy.vocab_size))

    def tokens(count: int) -> list[int]:
        drawn: list[int] = torch.randint(known, (count,), generator=generator).tolist()
        return drawn

    prompts = [tokens(length) for length in TRIED_PROMPTS]
    prompt_S = [prompt for prompt, _ in TRIED_COMPLETIONS]
    completions = [tokens(length) for _, length in TRIED_COMPLETIONS]
    logits_NV = passes.head.logits(passes.hidden(passes.read(prompts), prompt_S, completions).states_NH)
    expected = []
    for prompt, completion in zip(prompt_S, completions, strict=True):
        ids = torch.tensor([[*prompts[prompt], *completion]], device=policy.device)
        with policy.compute():
            output = policy.logits(ids, keep=len(completion) + 1, use_cache=False)
        expected.append(output.logits[0, :-1])
    return relative_gap(logits_NV, torch.cat(expected))


def relative_gap(logits_NV: Tensor, expected_NV: Tensor) -> float:
    """Root mean square of the difference over that of the (centred) expected logits, at the worst token. Infinite when
    a number is none."""
    expected_NV = expected_NV.to(logits_NV.dtype)
    spread_N = (expected_NV - expected_NV.mean(-1, keepdim=True)).norm(dim=-1)
    gap_N = (logits_NV - expected_NV).norm(dim=-1) / torch.where(spread_N > 0, spread_N, 1.0)
    return float(gap_N.nan_to_num(nan=torch.inf).max())
