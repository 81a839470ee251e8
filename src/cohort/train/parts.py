"""What a run is made of."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count, takewhile
from typing import Any

from torch import Tensor

from cohort.data import DataCursor, PromptLoader
from cohort.evaluation import Best, Evaluation, Evaluator
from cohort.objective import Objective
from cohort.parallel import Layout, World
from cohort.policy import Policy
from cohort.rewards import RewardRunner
from cohort.rollout import Engine, Sampler
from cohort.runs.checkpoints import Models, SavedState
from cohort.runs.generators import random_state
from cohort.train.adapt import Adaptive
from cohort.train.ahead import Ahead
from cohort.train.companion import Companion
from cohort.train.first_save import FirstSave
from cohort.train.memory import TokenBudget
from cohort.train.optim import Optimizer
from cohort.train.progress import Updates
from cohort.train.ranks import sampler_copy
from cohort.train.requests import Requests
from cohort.train.rollout import Rollout, uses_rounds
from cohort.train.unfinished import Unfinished
from cohort.train.update import NonFinite, UpdateResult
from cohort.types import TokenBatch


def _nothing(*_: Any) -> None:
    pass


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
    first_save: FirstSave | None = None
    """Compares the first save with the policy; None: nothing is compared."""
    layout: Layout = field(default_factory=Layout)
    """The ranks, and how they hold the policy."""
    requests: Requests = field(default_factory=Requests)
    """Whether the run is to stop, or to write a checkpoint."""
    rollout_scored: Callable[[int, Rollout, TokenBatch], None] = _nothing
    """Told of each step's rollout before its updates: the step, counted from 1, rollout, and tokens with advantages."""
    evaluated: Callable[[int, Mapping[str, Evaluation], Mapping[str, Any]], None] = _nothing
    """Told of each evaluation: complete steps, the evaluations by set, and their metrics."""
    companion: Companion = field(default_factory=Companion)
    """Goes along on every rank."""

    # Where the run is: what a checkpoint of any instant holds besides models, optimizer and ``adaptive``.

    complete_steps: int = 0
    cursor: DataCursor = field(default_factory=DataCursor)
    """Position in the data after the last complete step. The loop advances it once per step."""
    current: Ahead | None = None
    """The rollout of the step in progress, once it is complete."""
    updates: Updates | None = None
    """The updates of the step in progress."""
    nonfinite_in_a_row: int = 0
    """The last updates that were skipped."""
    metrics: dict[str, Any] | None = None
    """The metrics of the last complete step, until it is evaluated and they are written."""
    each_update: list[dict[str, Any]] = field(default_factory=list)
    """The metrics of each update of the last complete step."""
    unfinished: dict[int, Unfinished] = field(default_factory=dict)
    """What a stopped run has sampled and scored of its next rollouts, by step, until they are begun again."""
    saved_instant: tuple[Any, ...] | None = None
    """``instant`` of the newest checkpoint; None: it lacks what was kept since."""
    worlds: dict[int, World] = field(default_factory=dict)
    """The ranks, for exchanges of pending rollouts."""
    pending: deque[Ahead] = field(default_factory=deque)
    """The rollouts of the next steps, which are being sampled and scored. Without ``rollout.lag``, at most the one that
    is waited for."""
    sampler_weights: Mapping[str, Tensor] | None = None
    """A copy of the weights that a cancelled rollout is to go on with, once the engine has taken others."""

    @property
    def world(self) -> World:
        """The ranks that train together."""
        return self.layout.world

    @property
    def models(self) -> Models:
        """The models, as checkpoints store them."""
        return Models(self.policy, self.reference, self.tokenizer, self._weights_to_go_on())

    @property
    def instant(self) -> tuple[Any, ...]:
        """Tells two instants of a run apart that have different checkpoints."""
        updates = self.updates.done if self.updates else 0
        kept = {step: one.size for step, one in self.kept.items()}
        return self.complete_steps, updates, self.metrics is None, self.current is None, kept

    @property
    def where(self) -> str:
        """The instant in words."""
        step = f"in step {self.complete_steps + 1}"
        if self.metrics is not None:
            return f"in the evaluation after step {self.complete_steps}"
        if self.updates and self.updates.done:
            return f"{step}, after {self.updates.done} of its updates"
        if self.current is None and self.complete_steps in self.kept:
            return f"{step}, while it was sampled or scored"
        return f"{step}, before its updates" if self.current else f"after step {self.complete_steps}"

    def for_summary(self, num_generations: int) -> dict[str, Any]:
        """Complete steps, updates and completions so far, and what evaluations count as correct."""
        completions = self.cursor.position * num_generations
        done = {"steps": self.complete_steps, "updates": self.policy.version, "completions": completions}
        success = self.evaluator.success if self.evaluator else None
        return done | ({"success": str(success)} if success else {})

    def saved_state(self) -> SavedState:
        """Everything that a checkpoint stores besides the models. Waits for pending rollouts. Every rank must call."""
        self.wait_for_pending()
        rollouts = {step: one.to_store() for step, one in self.kept.items()}
        complete = [*filter(None, [self.current]), *(one for one in self.pending if one.is_complete)]
        rollouts |= {one.step: one.to_store() for one in complete}
        whole = takewhile(rollouts.__contains__, count(self.complete_steps))
        return SavedState(
            self.complete_steps,
            self.optimizer.state_dict(),
            self.cursor.state_dict(),
            self.adaptive.state_dict(),
            self.best.state_dict(),
            self.facts,
            self.world.gather(random_state()),
            {step: rollouts[step] for step in whole},  # those after one that is missing are sampled anew
            self.updates.to_store() if self.updates and self.updates.done else None,
            self.metrics,
            self.budget.tokens,
            self.nonfinite_in_a_row,
            self.companion.state_dict(),
        )

    def restore(self, state: SavedState, best_record: dict[str, Any] | None) -> None:
        """The inverse of ``saved_state``; ``best_record`` is the contents of the run's ``best/best.json``."""
        self.optimizer.load_state_dict(state.optimizer)
        self.cursor = DataCursor.from_state(state.cursor)
        self.adaptive.load_state_dict(state.adaptive)
        self.best.load_state_dict(state.best, best_record)
        self.complete_steps, self.nonfinite_in_a_row = state.step, state.nonfinite_in_a_row
        self.metrics = None if state.metrics is None else dict(state.metrics)
        self.updates = None if state.updates is None else Updates.stored(state.updates, self.policy.device)
        for step, rollout in sorted(state.rollouts.items()):
            if Unfinished.is_stored(rollout):
                kept = Unfinished.stored(rollout)  # without scores of functions that have changed meanwhile
                same = all(state.identity.get(name) == self.facts.get(name) for name in ("rewards", "code"))
                self.unfinished[step] = kept if same else replace(kept, calls=())
            else:
                self.pending.append(Ahead.stored(step, rollout))
        if (copy := sampler_copy(self.engine)) and state.has_sampler:
            copy.version = max((one.version or 0 for one in self.unfinished.values()), default=copy.version)
        if self.updates:
            self.current = self.pending.popleft()
        self.companion.load_state_dict(state.companion)
        self.saved_instant = self.instant

    def wants_stop(self) -> bool:
        """Whether the run is to stop: asked while it samples, scores and evaluates."""
        return self.requests.wants_stop(self.world)

    def begin_updates(self, current: Ahead) -> Updates:
        """The updates on a rollout: none is made yet, unless the run was stopped between two of them."""
        self.current = current
        self.updates = self.updates or Updates(self.policy.version)
        return self.updates

    def end_update(self, outcome: UpdateResult | NonFinite) -> UpdateResult | NonFinite:
        """An update is made, or skipped. Returns what is kept of its outcome."""
        assert self.updates is not None
        self.nonfinite_in_a_row = self.nonfinite_in_a_row + 1 if isinstance(outcome, NonFinite) else 0
        return self.updates.ended(outcome)

    def end_step(self, cursor: DataCursor, metrics: dict[str, Any]) -> None:
        """All updates are made."""
        self.complete_steps, self.cursor, self.metrics = self.complete_steps + 1, cursor, metrics
        self.current = self.updates = None

    @property
    def kept(self) -> dict[int, Unfinished]:
        """What there is of the rollouts that were cancelled or failed, by step."""
        return self.unfinished | {one.step: one.kept for one in self.pending if one.kept}

    def wait_for_pending(self) -> None:
        """Wait until the engine and the reward functions are idle. A pending rollout's error is raised when its step
        comes."""
        for one in self.pending:
            one.wait_until_ended()

    def free_engine(self) -> None:
        """Wait until the engine is idle, and may take other weights for a while."""
        self.wait_for_pending()
        if weights := self._weights_to_go_on():
            self.sampler_weights = {name: weight.to("cpu", copy=True) for name, weight in weights.items()}

    def cancel_pending(self) -> None:
        """End the pending rollouts; what is complete of them stays."""
        for one in self.pending:
            one.abandon()
        for one in self.pending:
            one.join()

    def copied_weights(self) -> Mapping[str, Tensor] | None:
        """The weights that the engine samples with while the policy is trained; None: it has no copy here."""
        copy = sampler_copy(self.engine)
        return None if copy is None else copy.weights_beside(self.policy)

    def needs_sampler(self, one: Unfinished) -> bool:
        """Whether the rest of a rollout is to be drawn with other weights than the present ones."""
        to_draw = not one.drawn or uses_rounds(self.objective)
        return to_draw and one.version not in (None, self.policy.version)

    def _weights_to_go_on(self) -> Mapping[str, Tensor] | None:
        """The weights to draw the rest of a cancelled rollout with, if they are not the present ones. The engine works
        for one rollout at a time, so there are no others."""
        if not any(map(self.needs_sampler, self.kept.values())):
            return None
        return self.sampler_weights or self.copied_weights()
