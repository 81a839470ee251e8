"""Choose how the trainer runs a model: the fastest implementation whose logits are those of its own forward pass."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from cohort.errors import ModelError
from cohort.policy.anatomy import logit_multiplier
from cohort.policy.compute import ComputeModel, modes_restored, without_dropout
from cohort.policy.custom_attention import CustomAttention
from cohort.policy.device import kind_of
from cohort.policy.experts import own_experts
from cohort.policy.head import Head, is_float32
from cohort.policy.lean import LeanLayers
from cohort.policy.load import context_length, placeholder_ids
from cohort.policy.narrow import changed_call
from cohort.policy.parts import UnsupportedModel, need
from cohort.policy.passes import Passes, PlainPasses, SharedPasses, base_of
from cohort.policy.rows import PackedRows

TRIAL_PROMPTS = (7, 1, 4)
"""Lengths of the prompts of a trial, in tokens."""
TRIAL_TOKENS = 64
"""Length of the text on which training mode is compared with evaluation mode: experts drawn at random are the likeliest
for most tokens."""
SMALL, GRADIENT_SHARE = 2**16, 0.1
"""Maximum numbers of a weight whose gradient a trial compares, and the share of its error that counts: it is a sum over
all tokens and layers."""
TRIAL_COMPLETIONS = ((0, 3), (0, 5), (1, 4), (2, 1))
"""The completions of a trial: the number of the prompt, and the length in tokens."""


def find_head(model: ComputeModel) -> Head | None:
    """The model's head if it is a linear layer after a decoder, else None."""
    base = base_of(model.model)
    if not hasattr(base, "get_output_embeddings") or not hasattr(base, "get_decoder"):
        return None
    linear = base.get_output_embeddings()
    if type(linear) is not nn.Linear or changed_call(outside_of_decoder(model.model)):
        return None
    config = base.config.get_text_config()
    cap = getattr(config, "final_logit_softcapping", None)
    multiplier = logit_multiplier(config)
    own_dtype = is_float32(linear)
    compute = torch.float32 if own_dtype else model.precision.compute
    return Head(linear, compute, multiplier, cap, native=not model.why_no_kernels(), own_dtype=own_dtype)


def outside_of_decoder(model: nn.Module) -> list[nn.Module]:
    """The modules of a model that do not belong to its decoder: the head, and what contains both."""
    base: Any = base_of(model)
    inside = set(base.get_decoder().modules()) if hasattr(base, "get_decoder") else set()
    return [module for module in model.modules() if module not in inside]


def choose_passes(model: ComputeModel) -> Passes:
    """The first implementation that computes what the model's own forward pass computes. Its description says which it
    is, and why no better one is used.

    Raises:
        ModelError: no implementation does, or training mode changes more than dropout.
    """
    if model.dropout:
        check_training_mode(model)
        return PlainPasses(model, Head())
    has_head = find_head(model) is not None
    failures = [] if has_head else ["its head is not a plain linear layer after a decoder"]
    candidates = _candidates(model) if has_head else ()
    passes = first_correct(candidates, lambda candidate: logit_gaps(candidate, model), model, failures)
    if passes is None:
        passes = PlainPasses(model, Head(compute=model.precision.compute))
        # A module that is no model of transformers cannot be tried.
        gap = float(logit_gaps(passes, model).median()) if hasattr(model.model, "config") else 0.0
        if math.isfinite(gap) and gap > MAX_GAP[model.precision.compute]:
            raise ModelError(
                f"{type(model.model).__name__} cannot be trained: a text's logits depend on the texts beside it, as in "
                f"models that read later tokens (off by {gap:.2g})"
            )
        passes.description += in_parentheses(failures)
    return passes


@torch.no_grad()
def check_training_mode(model: ComputeModel) -> None:
    """Check that without dropout a model computes the same in training mode.

    Raises:
        ModelError: it does not: its layers or experts are drawn at random, or routers get noise.
    """
    tokens = token_source(model)(min(TRIAL_TOKENS, context_length(model.model.config) or TRIAL_TOKENS))
    with model.in_float32() if model.can_widen(copying=False) else contextlib.nullcontext():
        expected = own_logits(model, tokens, len(tokens))
        with torch.random.fork_rng(), without_dropout(model.model), model.training():
            gaps_N = relative_gaps(own_logits(model, tokens, len(tokens)), expected)
        try:
            _check(gaps_N, model.precision.compute)
        except UnsupportedModel as reason:
            raise ModelError(
                "model.dropout = true: training mode changes more than dropout (router noise, layers or experts drawn "
                f"at random), and an update would be of another function than was sampled: {reason}. Set it to false"
            ) from None


def _candidates(model: ComputeModel) -> Iterator[Candidate[Passes]]:
    def head() -> Head:
        found = find_head(model)
        assert found is not None
        return found

    with contextlib.suppress(
        UnsupportedModel, AttributeError
    ):  # no reason is given: most families run with transformers' own layers
        counted = LeanLayers(model).anatomy.has_experts and model.router_aux_loss_coef
        need(not counted, "the load-balancing loss needs what routers say")
        if model.torch_compile and kind_of(model.device) == "cuda":
            yield Candidate("compiled", lambda: SharedPasses(model, head(), LeanLayers(model, compiled=True)))
        yield Candidate("lean", lambda: SharedPasses(model, head(), LeanLayers(model)))
    yield Candidate("custom attention", lambda: SharedPasses(model, head(), CustomAttention(model)))
    yield Candidate("padded", lambda: PlainPasses(model, head()))


@torch.no_grad()
def logit_gaps(passes: Passes, model: ComputeModel) -> Tensor:
    """``relative_gaps`` to the model's own forward pass on a few random tokens, computed as in an update: in its mode,
    with a graph. The last is that of the gradients of weights that are small or few, if the dtype is not narrow."""
    tokens = token_source(model)
    prompts = [tokens(length) for length in TRIAL_PROMPTS]
    completions = [tokens(length) for _, length in TRIAL_COMPLETIONS]
    rows = PackedRows.of([prompt for prompt, _ in TRIAL_COMPLETIONS], completions)

    def own() -> Tensor:
        texts = [
            own_logits(model, [*prompts[prompt], *completion], len(completion) + 1)[:-1]
            for (prompt, _), completion in zip(TRIAL_COMPLETIONS, completions, strict=True)
        ]
        return torch.cat(texts)

    with torch.enable_grad(), model.training(), model.compute(), ComputeModel.gradients_in_place(model):
        logits_NV = passes.head.logits(passes.hidden(passes.read(prompts), rows).states).detach()
    gaps_N = relative_gaps(logits_NV, own())
    weights = [weight for weight in model.model.parameters() if weight.requires_grad and weight.numel() <= SMALL]
    if not weights or model.precision.compute.itemsize < torch.float32.itemsize or model.stores_narrow:
        return gaps_N
    with torch.enable_grad(), model.compute():
        expected = gradient(own(), weights)
        with model.training():
            found_NV = passes.head.logits(passes.hidden(passes.read(prompts, attached=True), rows).states)
            found = gradient(found_NV, weights)
    gap = (found - expected).norm() / expected.norm().clamp(min=1e-30)
    return torch.cat([gaps_N, gap[None].to(gaps_N) * GRADIENT_SHARE])


def gradient(logits_NV: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """The gradient of fixed multiples of the logits with respect to weights, as one vector; zeros if there is none, as
    of a reference."""
    shape = logits_NV.shape
    if not logits_NV.requires_grad:
        return torch.zeros(sum(weight.numel() for weight in weights), dtype=logits_NV.dtype, device=logits_NV.device)
    factors = torch.linspace(-1, 1, logits_NV.numel(), dtype=logits_NV.dtype, device=logits_NV.device).view(shape)
    grads = torch.autograd.grad(torch.sum(logits_NV * factors.cos()), weights, allow_unused=True)
    parts = [torch.zeros_like(weight) if grad is None else grad for weight, grad in zip(weights, grads, strict=True)]
    return torch.cat([part.flatten().to(logits_NV) for part in parts])


MAX_GAP = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.03}
"""Largest accepted relative error of logits, by compute dtype. Rounding gives about 1e-6 in float32 (transformers
normalises float64 models in float32, too) and 0.02 in bfloat16, a soft cap that is left out 1e-3, a wrong position or
mask 0.1 or more. So float32 and wider dtypes decide what is computed, by the worst token. A trial in half precision
decides only whether the kernels of that dtype work, by the median token: of two correct implementations, one may send a
token to another expert."""


class Implementation(Protocol):
    """One way of running a model."""

    description: str


Chosen = TypeVar("Chosen", bound=Implementation)


@dataclass(frozen=True, slots=True)
class Candidate(Generic[Chosen]):
    """An implementation that may be tried."""

    name: str
    construct: Callable[[], Chosen]
    copies_weights: bool = False
    """Whether it copies weights that are stored in another dtype than the compute dtype."""


@torch.no_grad()
def first_correct(
    candidates: Iterable[Candidate[Chosen]],
    gaps: Callable[[Chosen], Tensor],
    model: ComputeModel,
    failures: list[str],
) -> Chosen | None:
    """The first implementation whose logits are those of the model's own forward pass, or None. With a half-precision
    compute dtype it is tried in float32 first.

    Args:
        candidates: the implementations, best first.
        gaps: the relative errors of an implementation's logits; see ``relative_gaps``.
        model: the model, which is in evaluation mode meanwhile.
        failures: reasons why better implementations cannot be used. Extended here, and added to the description of the
            implementation that is returned.
    """
    with modes_restored(list(model.model.modules())):
        model.model.eval()
        for candidate in candidates:
            try:
                if model.can_widen(copying=candidate.copies_weights):
                    with model.in_float32():
                        _check(gaps(candidate.construct()), torch.float32)
                chosen = candidate.construct()
                _check(gaps(chosen), model.precision.compute)
            except UnsupportedModel as reason:
                failures.append(f"{candidate.name}: {reason}")
            except Exception as reason:  # models bring their own code
                failures.append(f"{candidate.name}: {one_line(reason)}")
            else:
                chosen.description += in_parentheses(failures)
                return chosen
    return None


def _check(gaps_N: Tensor, dtype: torch.dtype) -> None:
    """Raise ``UnsupportedModel`` if relative errors of logits in a dtype are larger than rounding."""
    decisive = gaps_N.max() if dtype.itemsize >= torch.float32.itemsize or gaps_N.isinf().any() else gaps_N.median()
    need(float(decisive) <= MAX_GAP[dtype], f"off by {float(decisive):.2g} from the model's forward pass")


def one_line(error: Exception) -> str:
    """An error's type and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def in_parentheses(failures: Sequence[str]) -> str:
    """Reasons as the end of a description."""
    return f" ({'; '.join(failures)})" if failures else ""


def token_source(model: ComputeModel) -> Callable[[int], list[int]]:
    """A function that draws so many token ids uniformly, the same in every trial."""
    generator = torch.Generator().manual_seed(0)
    # A head may be padded beyond the size of the embedding.
    known = min(model.vocab_size, getattr(model.model.get_input_embeddings(), "num_embeddings", model.vocab_size))
    placeholders = placeholder_ids(model.model.config)
    text = next(token for token in range(known) if token not in placeholders)

    def draw(count: int) -> list[int]:
        ids: list[int] = torch.randint(known, (count,), generator=generator).tolist()
        return [text if token in placeholders else token for token in ids]

    return draw


def own_logits(model: ComputeModel, token_ids: Sequence[int], count: int) -> Tensor:
    """Logits of the model's own forward pass at the last ``count`` tokens, ``[count, V]``."""
    with model.compute(), own_experts(model.model):
        output = model.logits(torch.tensor([token_ids], device=model.device), keep=count, use_cache=False)
    logits: Tensor = output.logits[0]
    return logits


def relative_gaps(logits_NV: Tensor, expected_NV: Tensor) -> Tensor:
    """For each token the norm of the difference, divided by the norm of the centred expected logits, ``[N]``. Infinite
    if a logit is NaN."""
    expected_NV = expected_NV.to(logits_NV.dtype)
    spread_N = (expected_NV - expected_NV.mean(-1, keepdim=True)).norm(dim=-1)
    gap_N: Tensor = (logits_NV - expected_NV).norm(dim=-1) / torch.where(spread_N > 0, spread_N, 1.0)
    return torch.nan_to_num(gap_N, nan=torch.inf)
