"""What a run is made of: its collaborators, which do not change while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cohort.config import GRPOConfig
from cohort.data import PromptLoader
from cohort.evaluation import Evaluator
from cohort.objective import Objective
from cohort.parallel import Layout, World
from cohort.policy import Policy
from cohort.rewards import RewardRunner
from cohort.rollout import Engine, Sampler, Sampling
from cohort.runs.checkpoints import Models
from cohort.train.context import StepContext
from cohort.train.first_save import FirstSave
from cohort.train.memory import TokenBudget
from cohort.train.observers import Observers
from cohort.train.optim import Optimizer
from cohort.train.signals import Requests


@dataclass(frozen=True, slots=True)
class TrainerParts:
    """The collaborators of a run. ``GRPOTrainer`` puts them together; the loop uses them."""

    config: GRPOConfig
    policy: Policy
    reference: Policy | None
    engine: Engine
    sampler: Sampler
    """The engine or, with tools or environments, what drives it through episodes."""
    rewards: RewardRunner
    prompts: PromptLoader
    objective: Objective
    optimizer: Optimizer
    evaluator: Evaluator | None
    tokenizer: Any
    budget: TokenBudget
    """Tokens of one pass of the update."""
    facts: dict[str, str]
    """Facts that are not settings and that a resumed run compares: see ``train.inputs``."""
    first_save: FirstSave | None = None
    """Compares the first save with the policy; None: nothing is compared."""
    layout: Layout = field(default_factory=Layout)
    """The ranks, and how they hold the policy."""
    requests: Requests = field(default_factory=Requests)
    """Whether the run is to stop, or to write a checkpoint."""
    observers: Observers = field(default_factory=Observers)
    """What watches the run."""

    @property
    def world(self) -> World:
        """The ranks that train together."""
        return self.layout.world

    @property
    def models(self) -> Models:
        """The models, as checkpoints store them."""
        return Models(self.policy, self.reference, self.tokenizer)

    def context(self, objective: Objective) -> StepContext:
        """The collaborators of a step with this objective."""
        sampling = Sampling.of(self.config.rollout)
        return StepContext(self.policy, self.optimizer, objective, sampling, self.budget, self.reference, self.layout)

    def wants_stop(self) -> bool:
        """Whether the run is to stop: asked while it samples, scores and evaluates."""
        return self.requests.wants_stop(self.world)
