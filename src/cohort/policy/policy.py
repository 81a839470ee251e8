"""A causal language model as a policy: what it is, and the log-probabilities it gives to completions."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import torch

from cohort.policy.adapters import (
    REFERENCE,
    TRAINED,
    add_reference_adapter,
    has_adapters,
    is_untouched,
    keep_in_compute_dtype,
)
from cohort.policy.choose import choose_passes
from cohort.policy.compute import ComputeModel
from cohort.policy.distribution import Distribution
from cohort.policy.head import CompletionStates, TokenLogps
from cohort.policy.load import Precision
from cohort.policy.passes import Passes, Prefixes
from cohort.types import Support


class Policy(ComputeModel):
    """A model with the number of updates it has seen, and the log-probs that it gives to completions. See
    ``ComputeModel`` for its arguments."""

    def __init__(
        self, model: Any, precision: Precision, *, dropout: bool = False, adapter: str | None = TRAINED
    ) -> None:
        super().__init__(model, precision, dropout=dropout, adapter=adapter)
        self.version = 0
        """Optimizer updates that these weights have seen. Completions carry it."""

    @functools.cached_property
    def passes(self) -> Passes:
        """How the trainer runs the model, chosen by a trial on a few tokens at the first access."""
        return choose_passes(self)

    def states(
        self,
        prefixes: Prefixes,
        prompt_ids: Sequence[Sequence[int]],
        completion_ids: Sequence[Sequence[int]],
        temperature: float,
        supports: Sequence[Support | None] = (),
        repetition_penalty: float = 1.0,
    ) -> CompletionStates:
        """What log-probs of completions are made of.

        Args:
            prefixes: the prompts that have been read, by ``passes.read``.
            prompt_ids, completion_ids: the token ids of S completions and of their prompts, which are among those
                read. No completion may be empty.
            temperature: divides the logits, as it did in sampling.
            supports: what their tokens were drawn from. All others count as impossible, so that whatever is computed is
                of the distribution drawn from. Empty: the whole vocabulary.
            repetition_penalty: as it was in sampling; see ``Distribution``. 1: none.
        """
        passes = self.passes
        prompt_S = [prefixes.numbers[tuple(prompt)] for prompt in prompt_ids]
        distribution = Distribution(prompt_ids, completion_ids, temperature, supports, repetition_penalty, self.device)
        hidden = passes.hidden(prefixes, prompt_S, completion_ids)
        return CompletionStates(
            hidden.states_NH, passes.head, distribution, hidden.router_logits, adds_gradient=self.adds_gradients
        )

    def logps(
        self,
        prompt_ids: Sequence[Sequence[int]],
        completion_ids: Sequence[Sequence[int]],
        temperature: float,
        supports: Sequence[Support | None] = (),
        repetition_penalty: float = 1.0,
    ) -> TokenLogps:
        """Log-probs of completions' tokens, and statistics of the distributions they were drawn from.

        Args:
            prompt_ids, completion_ids: the token ids of S completions and of their prompts. No completion may be empty.
                Equal prompts are computed once.
            temperature, supports, repetition_penalty: as ``states`` takes them.

        Returns:
            Flat in sequence order, float32 (float64 for a float64 policy). Gradients flow through the log-probs when
            they are enabled.
        """
        prefixes = self.passes.read(list(dict.fromkeys(map(tuple, prompt_ids))), attached=True)
        return self.states(prefixes, prompt_ids, completion_ids, temperature, supports, repetition_penalty).logps()

    def reference(self, *, moves: bool = False) -> Policy:
        """The policy as it is now, to be compared with later. Of a model with adapters, the same model with them
        switched off or, where they have been trained already, with a copy of them; else a frozen copy.

        Args:
            moves: it will be moved toward the policy: its weights are kept in the master dtype.
        """
        if not has_adapters(self.model) or TRAINED not in self.model.peft_config:
            frozen = self.copy_frozen()
            if not moves:
                keep_in_compute_dtype(frozen.model, self.precision)
            return frozen
        untouched = is_untouched(self.model)
        if not untouched:
            add_reference_adapter(self.model)
        adapter = None if untouched else REFERENCE
        seen = Policy(self.model, self.precision, dropout=self.dropout, adapter=adapter)
        seen.version, seen.native_kernels = self.version, self.native_kernels
        return seen

    def copy_frozen(self) -> Policy:
        """A copy of the policy as it is now, in memory, that needs no gradients."""
        model = copy.deepcopy(self.model)
        model.requires_grad_(False)
        frozen = Policy(model, self.precision, dropout=self.dropout)
        frozen.version, frozen.native_kernels = self.version, self.native_kernels
        return frozen

    @torch.no_grad()
    def move_toward(self, other: Policy, alpha: float) -> None:
        """Move weight by weight: self <- alpha * other + (1 - alpha) * self (TR-DPO, arXiv 2404.09656, soft update)."""
        for mine, theirs in zip(self.model.parameters(), other.model.parameters(), strict=True):
            mine.lerp_(theirs.to(mine.dtype), alpha)
        self.version = other.version
