"""How many tokens a pass of the update may take: what memory holds, found out before the first step; and less, when
there turns out to be less."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cohort.errors import ModelError
from cohort.policy import PackedRows, Policy
from cohort.rollout.budget import free_bytes

Result = TypeVar("Result")

MOST_TOKENS = {"cpu": 1024, "cuda": 16384}
"""More in a pass saves little time and takes memory in proportion."""
FEWEST_TOKENS = 256
PROBED_TOKENS = (64, 192)
FREE_SHARE = 0.5
"""Share of the free memory that a pass may take."""
MEBI = 2**20


@dataclass(slots=True)
class TokenBudget:
    """Tokens of one pass of the update. Changes memory and time, never a gradient."""

    tokens: int
    predicted_bytes: int | None = None
    """Memory at the peak of a pass; None: not known."""
    free: int | None = None

    def run(self, call: Callable[..., Result]) -> Result:
        """Call with the budget as ``token_budget``; when memory runs out, again with half of it. What is called must
        leave nothing behind when it fails.

        Raises:
            ModelError: memory runs out with one completion at a time.
        """
        while True:
            try:
                return call(token_budget=self.tokens)
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
                if self.tokens == 1:
                    raise ModelError(
                        "out of memory with one prompt or completion in a pass: set model.gradient_checkpointing, "
                        "lower rollout.max_completion_length, or take a smaller model"
                    ) from None
            # Outside the handler: its traceback would keep the tensors of the failed call.
            self.tokens = max(1, self.tokens // 2)
            gc.collect()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
            warnings.warn(
                f"out of memory: the step is repeated with {self.tokens:,} tokens a pass. To begin with fewer, set "
                "optim.microbatch_tokens",
                stacklevel=2,
            )

    def describe(self) -> str:
        """The budget in words."""
        text = f"passes of at most {self.tokens:,} tokens"
        if self.predicted_bytes is not None:
            text += f", {self.predicted_bytes / MEBI:,.0f} MiB at the peak of the longest"
        if self.free is not None:
            text += f" of {self.free / MEBI:,.0f} MiB free"
            if self.predicted_bytes is not None and self.predicted_bytes > self.free:
                text += ": likely too little; set model.gradient_checkpointing or shorter completions"
        return text


def out_of_memory(error: Exception) -> bool:
    """Whether an error says that memory ran out, on any device."""
    said = str(error)
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in said


def find_budget(policy: Policy, given: int | None, longest_prompt: int, longest_completion: int) -> TokenBudget:
    """The budget of the settings, or what half of the free memory holds; with the peak predicted.

    Passes of three sizes are tried on meaningless tokens: two short ones, for what a token takes, and one completion of
    the greatest length after the longest prompt. They change nothing.

    Args:
        policy: what is trained.
        given: the setting; None: to be chosen.
        longest_prompt, longest_completion: in tokens.
    """
    small, large = PROBED_TOKENS
    few, many = (peak_bytes(policy, size, size, forward_only=True) for size in PROBED_TOKENS)
    per_token = max(1.0, (many - few) / (large - small))
    longest = peak_bytes(policy, longest_prompt, longest_completion)
    # What does not grow with the budget: gradients, and the head's chunk.
    fixed = max(0.0, longest - per_token * (longest_prompt + longest_completion) / 2)
    free = free_bytes(policy.device)
    tokens = given
    if tokens is None:
        tokens = MOST_TOKENS.get(policy.device.type, FEWEST_TOKENS)
        if free is not None:
            tokens = min(tokens, max(FEWEST_TOKENS, int((free * FREE_SHARE - fixed) / per_token)))
    return TokenBudget(tokens, int(max(longest, fixed + per_token * tokens)), free)


def peak_bytes(policy: Policy, prompt_length: int, completion_length: int, *, forward_only: bool = False) -> int:
    """Bytes of tensors that live at once, at most, in a forward and backward pass over one prompt and one completion,
    the gradients of the parameters included; ``forward_only``: up to the last hidden states."""
    token = 0
    live, passes = LiveBytes(), policy.passes  # which is chosen before anything is counted
    with live, policy.training(), policy.compute(), policy.gradients_in_place():
        prefixes = passes.read([(token,) * (prompt_length + 1)])
        states = policy.states(prefixes, PackedRows.of([0], [(token,) * completion_length]), temperature=1.0)
        if not forward_only:
            states.logps().logps_N.sum().backward()
            prefixes.backward()
    for parameter in policy.model.parameters():
        parameter.grad = None
    return live.peak


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors made inside the block that are alive at once. What a kernel makes and frees within
    itself is not seen."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live: dict[int, int] = {}
        self.now = 0
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and look at what came out."""
        made = func(*args, **(kwargs or {}))
        given = {value.untyped_storage()._cdata for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)}
        for value in tree_leaves(made):
            if isinstance(value, Tensor) and value.untyped_storage()._cdata not in given:  # not a view
                self._take_up(value.untyped_storage())
        return made

    def _take_up(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._live:
            return
        self._live[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.now -= self._live.pop(key)
