"""What a run is made of."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from cohort.data import DataCursor, PromptLoader
from cohort.evaluation import Best, Evaluator
from cohort.objective import Objective
from cohort.parallel import Layout, Replicate, World
from cohort.policy import Policy
from cohort.rewards import RewardRunner
from cohort.rollout import Engine, Sampler
from cohort.runs import Models, SavedState, StoredRollout, random_state
from cohort.train.adapt import Adaptive
from cohort.train.ahead import Ahead
from cohort.train.memory import TokenBudget
from cohort.train.optim import Optimizer


@dataclass(slots=True)
class TrainerParts:
    """What a run is made of. ``GRPOTrainer`` puts it together; the loop uses it."""

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
    adaptive: Adaptive
    """Weights of the objective that follow a target."""
    best: Best
    """The best evaluation so far."""
    facts: dict[str, str]
    """Facts that are not settings and that a resumed run compares: see ``train.facts``."""
    layout: Layout = field(default_factory=Replicate)
    """The ranks, and how they hold the policy."""
    cursor: DataCursor = field(default_factory=DataCursor)
    """Position in the data after the last complete step. The loop advances it once per step."""
    worlds: dict[int, World] = field(default_factory=dict)
    """The ranks, for exchanges of pending rollouts."""
    pending: deque[Ahead] = field(default_factory=deque)
    """The rollouts of the next steps, which are being sampled and scored; empty unless ``rollout.lag`` is set."""

    @property
    def world(self) -> World:
        """The ranks that train together."""
        return self.layout.world

    @property
    def models(self) -> Models:
        """The models, as checkpoints store them."""
        return Models(self.policy, self.reference, self.tokenizer)

    def saved_state(self, step: int) -> SavedState:
        """Everything that a checkpoint stores besides the models. Waits for pending rollouts. Every rank must call."""
        rollouts = self.wait_for_pending()
        return SavedState(
            step,
            self.optimizer.state_dict(),
            self.cursor.state_dict(),
            self.adaptive.state_dict(),
            self.best.state_dict(),
            self.facts,
            self.world.gather(random_state()),
            rollouts,
        )

    def restore(self, state: SavedState, best_record: dict[str, Any] | None) -> None:
        """The inverse of ``saved_state``; ``best_record`` is the contents of the run's ``best/best.json``."""
        self.optimizer.load_state_dict(state.optimizer)
        self.cursor = DataCursor.from_state(state.cursor)
        self.adaptive.load_state_dict(state.adaptive)
        self.best.load_state_dict(state.best, best_record)
        self.pending = deque(Ahead.stored(step, rollout) for step, rollout in sorted(state.rollouts.items()))

    def wait_for_pending(self) -> dict[int, StoredRollout]:
        """Wait until the engine and the reward functions are idle. Returns the pending rollouts by step, up to the
        first that failed: its error is raised when its step comes."""
        ended = [one.wait_until_ended() for one in self.pending]
        complete = ended.index(False) if False in ended else len(ended)
        return {one.step: one.to_store() for one in islice(self.pending, complete)}

    def abandon_pending(self) -> None:
        """End the pending rollouts. A run that goes on samples them anew."""
        for one in self.pending:
            one.abandon()
        while self.pending:
            self.pending.popleft().join()
