"""What a run is made of: its collaborators, which do not change while it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cohort.config import GRPOConfig
from cohort.data import PromptLoader
from cohort.evaluation import Evaluator
from cohort.rewards import RewardRunner
from cohort.rollout import Engine, Sampler
from cohort.runs.checkpoints import Models
from cohort.train.context import StepContext
from cohort.train.first_save import FirstSave
from cohort.train.observers import Observers
from cohort.train.signals import Requests


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerParts(StepContext):
    """The collaborators of a run. ``GRPOTrainer`` puts them together; the loop uses them. Those of a step are the same
    with the step's objective and clock."""

    config: GRPOConfig
    engine: Engine
    sampler: Sampler
    """The engine or, with tools or environments, what drives it through episodes."""
    rewards: RewardRunner
    prompts: PromptLoader
    evaluator: Evaluator | None
    tokenizer: Any
    facts: dict[str, str]
    """Facts that are not settings and that a resumed run compares: see ``train.inputs``."""
    first_save: FirstSave
    """Compares the first save with the policy."""
    requests: Requests
    """Whether the run is to stop, or to write a checkpoint."""
    observers: Observers
    """What watches the run."""

    @property
    def models(self) -> Models:
        """The models, as checkpoints store them."""
        return Models(self.policy, self.reference, self.tokenizer)

    def wants_stop(self) -> bool:
        """Whether the run is to stop: asked while it samples, scores and evaluates."""
        return self.requests.wants_stop(self.world)
