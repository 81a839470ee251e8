"""The collaborators of one step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Concatenate, ParamSpec, TypeVar

import torch

from cohort.errors import out_of_memory
from cohort.objective import Objective
from cohort.parallel import Layout, World
from cohort.policy import Policy
from cohort.rollout import Sampling
from cohort.train.memory import TokenBudget
from cohort.train.optim import Optimizer
from cohort.watchdog import waiting

# ----------------------------------------
# Seconds of each phase of a step.


WORK = {"generate": "sampling", "reward": "scoring", "logps": "log-probs", "measure": "measuring"}
"""Phases by their names in the messages of the watchdog, where these differ."""


@dataclass(slots=True)
class PhaseClock:
    """Seconds of each phase of a step."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, phase: str, detail: Callable[[], str] = str) -> Iterator[None]:
        """Add the time of a block to ``phase``. ``detail`` adds to the watchdog's message if the block hangs."""
        start = time.perf_counter()
        with waiting(WORK.get(phase, phase), detail):
            yield
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def metrics(self, tokens: int) -> dict[str, float]:
        """Seconds by phase, their sum, and tokens per second of the step."""
        total = sum(self.seconds.values())
        phases = {f"seconds/{phase}": seconds for phase, seconds in self.seconds.items()}
        return {**phases, "seconds/step": total, "tokens_per_second": tokens / total}


P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StepContext:
    """The collaborators of one step."""

    policy: Policy
    """The model that is trained."""
    optimizer: Optimizer
    objective: Objective
    """With this step's beta."""
    sampling: Sampling
    """How the completions were drawn; every policy's log-probs are of the same distribution."""
    budget: TokenBudget
    """Tokens of one forward or backward pass. It shrinks when memory runs out."""
    reference: Policy | None = None
    """The policy of the KL term."""
    layout: Layout = field(default_factory=Layout)
    """How the ranks hold the policy."""
    clock: PhaseClock = field(default_factory=PhaseClock)

    def within_memory(
        self, passes: Callable[Concatenate[StepContext, P], T], *arguments: P.args, **named: P.kwargs
    ) -> T:
        """``passes(self, *arguments, **named)``; when memory runs out, halve the budget and call again: smaller passes
        give the same result.

        Args:
            passes: makes passes of the model. What it changes before memory runs out must not matter to the next call.
            arguments, named: its arguments after the context.

        Raises:
            ModelError: memory runs out with a budget of one token.
        """
        while True:
            try:
                return passes(self, *arguments, **named)
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
            self.budget.halve()  # after the block: the error holds the failed pass's tensors

    @property
    def world(self) -> World:
        """The ranks that share the step's work."""
        return self.layout.world

    @property
    def repetition_penalty(self) -> float:
        """The penalty inside every policy's log-probs; 1 when the sampler's is not replayed."""
        return self.sampling.repetition_penalty if self.sampling.record_support else 1.0
