"""How many tokens one pass of the update may take: measured before the first step, halved when memory runs out."""

from __future__ import annotations

import resource
import sys
import warnings
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cohort.errors import ModelError, out_of_memory
from cohort.policy import PackedRows, Policy, context_length
from cohort.policy.device import kind_of, release_memory
from cohort.policy.head import chunk_tokens
from cohort.policy.pieces import can_cut, memory_of_token
from cohort.rollout.local.backend import free_bytes

MOST_TOKENS = {"cpu": 4096, "cuda": 16384}
"""More tokens in a pass save little time and need memory in proportion."""
PLAIN_TOKENS, MORE_BYTES = 1024, 2**28
"""On a CPU, a pass has more tokens than the first only if its activations take at most so many bytes: more tokens save
5 to 10% of a small model's time, and little of a large one's."""
FEWEST_TOKENS = 256
PROBED_TOKENS = (64, 192)
PROBED_PIECE, PROBED_PIECES = 64, (4, 8)
"""Completions of so many small pieces are the base of what long completions take."""
FREE_SHARE = 0.5
"""Share of the free memory that a pass may take."""
MEBI = 2**20
SMALLER = "set model.gradient_checkpointing, lower rollout.max_completion_length, or use a smaller model"


EARLIER_PEAKS: dict[torch.device, int] = {}
"""Peaks of CUDA's allocator from before its counter was set back, in bytes."""


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Peak memory so far, in MiB: of this process and, on a GPU, of its tensors there."""
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes
    metrics = {"memory/peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MEBI}
    if device.type == "cuda":
        metrics["memory/device_peak_mib"] = _peak_so_far(device) / MEBI
    return metrics


def _peak_so_far(device: torch.device) -> int:
    return max(torch.cuda.max_memory_allocated(device), EARLIER_PEAKS.get(device, 0))


@dataclass(slots=True)
class TokenBudget:
    """Tokens of one pass of the update. It changes memory and time, never a gradient."""

    tokens: int
    predicted_bytes: int | None = None
    """Peak memory of the largest pass; None: unknown."""
    free: int | None = None
    """Free memory when it was predicted; None: unknown."""
    longest: int = 0
    """Tokens of the longest completion; 0: unknown, or completions cannot be computed in pieces."""

    @property
    def piece(self) -> int:
        """Tokens of the pieces in which longer rows are computed; see ``policy.pieces``."""
        return max(self.tokens, FEWEST_TOKENS)

    def halve(self) -> None:
        """Halve the budget after memory ran out, and free what the failed pass left.

        Raises:
            ModelError: the budget is one token already, so that every pass has one prompt or one completion.
        """
        if self.tokens == 1:
            raise ModelError(f"out of memory with one prompt or completion in a pass: {SMALLER}")
        self.tokens = max(1, self.tokens // 2)
        release_memory()
        warnings.warn(
            f"out of memory: repeating with {self.tokens:,} tokens a pass. To begin with fewer, set "
            "optim.microbatch_tokens",
            stacklevel=2,
        )

    def describe(self) -> str:
        """The budget in words."""
        text = f"passes of at most {self.tokens:,} tokens"
        if self.longest > self.piece:
            text += f", longer completions in pieces of {self.piece:,}"
        if self.predicted_bytes is not None:
            text += f"; the largest needs {self.predicted_bytes / MEBI:,.0f} MiB"
        if self.free is not None:
            text += f"; {self.free / MEBI:,.0f} MiB are free"
            if self.predicted_bytes is not None and self.predicted_bytes > self.free:
                text += ", likely too little: set model.gradient_checkpointing or shorter completions"
        return text


def find_budget(
    policy: Policy, given: int | None, longest_prompt: int, longest_completion: int, reserved: int = 0
) -> TokenBudget:
    """The budget of the settings, or the one that fills half of the free memory, with its predicted peak.

    Passes over arbitrary tokens are tried: two short ones to measure the memory of one token, and one with the longest
    prompt and the longest completion that is computed whole. If longer ones are computed in pieces, two short
    completions in small pieces are the base of what those take. The passes change nothing.

    Args:
        policy: the model to be trained.
        given: the setting; None: choose.
        longest_prompt: in tokens.
        longest_completion: in tokens.
        reserved: bytes of the free memory that the sampler will take.

    Raises:
        ModelError: memory runs out in one of these passes.
    """
    try:
        return _measured_budget(policy, given, longest_prompt, longest_completion, reserved)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        tokens = longest_prompt + longest_completion
        raise ModelError(
            f"out of memory in a pass over one prompt and completion, {tokens:,} tokens: {SMALLER}"
        ) from error


def _measured_budget(
    policy: Policy, given: int | None, longest_prompt: int, longest_completion: int, reserved: int
) -> TokenBudget:
    context = context_length(policy.model.config) or 2 * max(PROBED_TOKENS)
    small, large = (min(size, context * size // (2 * max(PROBED_TOKENS))) for size in PROBED_TOKENS)
    if policy.device.type == "cuda":  # the first pass allocates what libraries work in, and they keep it
        peak_bytes(policy, small, small, forward_only=True)
    few, many = (peak_bytes(policy, size, size, forward_only=True) for size in (small, large))
    per_token = max(1.0, (many - few) / (large - small))
    most = MOST_TOKENS.get(kind_of(policy.device), FEWEST_TOKENS)
    if kind_of(policy.device) == "cpu":
        most = min(most, max(PLAIN_TOKENS, int(MORE_BYTES / per_token)))
    cut, free = can_cut(policy.passes), free_bytes(policy.device)
    if free is not None:
        free = max(0, free - reserved)
        most = min(most, max(FEWEST_TOKENS, int(free * FREE_SHARE / per_token)))
    whole = min(longest_completion, max(given or most, FEWEST_TOKENS)) if cut else longest_completion
    longest = peak_bytes(policy, longest_prompt, whole)
    # Gradients do not grow with the budget, logits to a bound.
    fixed = max(0.0, longest - per_token * (longest_prompt + whole) / 2)
    fixed += max(0, _logits_bytes(policy, given or most) - _logits_bytes(policy, whole))
    tokens = given
    if tokens is None:
        tokens = most
        if free is not None:
            tokens = min(tokens, max(FEWEST_TOKENS, int((free * FREE_SHARE - fixed) / per_token)))
    budget = TokenBudget(tokens, free=free, longest=longest_completion if cut else 0)
    if budget.longest > budget.piece:
        in_pieces = _peak_in_pieces(policy, longest_prompt, longest_completion, budget.piece, per_token)
        longest = max(longest, in_pieces)
    budget.predicted_bytes = int(max(longest, fixed + per_token * tokens))
    return budget


def _peak_in_pieces(policy: Policy, prompt_length: int, completion_length: int, piece: int, per_token: float) -> int:
    """A bound of the peak of a completion in pieces: that of a short one in small pieces, what further tokens take, and
    the activations of a stage for larger pieces. Which stage has the peak changes with the length: the difference
    between two short completions may say too little of long ones. It counts where it is larger, as with the states of
    recurrent layers, which each piece keeps."""
    small, large = (min(count * PROBED_PIECE, completion_length) for count in PROBED_PIECES)
    few, many = (peak_bytes(policy, prompt_length, length, most_tokens=PROBED_PIECE) for length in (small, large))
    in_few, in_many, in_all = (_logits_bytes(policy, length) for length in (small, large, completion_length))
    known, share = (memory_of_token(policy.passes) if can_cut(policy.passes) else None) or (0, 1.0)
    slope = max(known, (many - few - (in_many - in_few)) / max(1, large - small))
    # While the logits exist, no piece has activations.
    at_once = max(share * per_token * (piece - PROBED_PIECE), in_all - in_many)
    return int(many + slope * (completion_length - large) + at_once)


def _logits_bytes(policy: Policy, tokens: int) -> int:
    """Most bytes of logits at a time in a pass of so many tokens, in native kernels or in CUDA's larger chunks."""
    head = getattr(policy.passes, "head", None)
    if head is None or head.linear is None:
        return 0
    if kind_of(policy.device) == "cuda":
        vocabulary = len(head.linear.weight)
        return 8 * vocabulary * min(tokens, chunk_tokens(vocabulary, policy.device))
    return min(tokens, head.kept_tokens) * head.native_bytes if head.native_bytes else 0


def peak_bytes(
    policy: Policy,
    prompt_length: int,
    completion_length: int,
    *,
    forward_only: bool = False,
    most_tokens: int | None = None,
) -> int:
    """Peak bytes of live tensors in a forward and backward pass over one prompt and one completion, with the gradients
    of the parameters; ``forward_only``: up to the last hidden states. ``most_tokens``: see ``Policy.states``. On CUDA
    with what kernels allocate and free themselves."""
    token, context = 0, context_length(policy.model.config)
    passes = policy.passes  # choosing them must not be counted
    live = AllocatedBytes(policy.device) if policy.device.type == "cuda" else LiveBytes()
    # Shared passes read a prompt without its last token. Some models have no positions beyond the context.
    fits = context is None or prompt_length + 1 + completion_length <= context
    prompt = (token,) * max(1, prompt_length + fits)
    with live, policy.training(), policy.compute(), policy.gradients_in_place():
        prefixes = passes.read([prompt])
        rows = PackedRows.of([0], [(token,) * completion_length])
        states = policy.states(prefixes, rows, temperature=1.0, most_tokens=most_tokens)
        if not forward_only:
            logps_N = states.logps().logps_N
            del states
            logps_N.sum().backward()
            prefixes.backward()
    for parameter in policy.model.parameters():
        parameter.grad = None
    return live.peak


class AllocatedBytes:
    """``LiveBytes`` by the counters of CUDA's allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.peak = 0

    def __enter__(self) -> None:
        EARLIER_PEAKS[self._device] = _peak_so_far(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_allocated(self._device)

    def __exit__(self, *_: object) -> None:
        self.peak = torch.cuda.max_memory_allocated(self._device) - self._before


class LiveBytes(TorchDispatchMode):
    """Counts the live bytes of tensors that are made inside the block. Memory that a kernel allocates and frees itself
    is not counted."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live: dict[int, int] = {}
        self.now = 0
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count its new tensors."""
        out = func(*args, **(kwargs or {}))
        given = {value.untyped_storage()._cdata for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)}
        for value in tree_leaves(out):
            if isinstance(value, Tensor) and value.untyped_storage()._cdata not in given:  # not a view
                self._add(value.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._live:
            return
        self._live[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.now -= self._live.pop(key)
