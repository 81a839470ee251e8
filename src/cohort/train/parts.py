"""What a run is made of: its collaborators, and the state that changes from step to step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import count, takewhile
from typing import Any

import torch
from torch import Tensor

from cohort.data import DataCursor, PromptLoader
from cohort.errors import RunFolderError
from cohort.evaluation import Best, Evaluation, Evaluator
from cohort.objective import (
    Objective,
    TokenStatistics,
    applied_entropy_coefficient,
    next_beta,
    next_entropy_coefficient,
)
from cohort.parallel import Layout, World
from cohort.policy import Policy
from cohort.rewards import RewardRunner
from cohort.rollout import Engine, Sampler
from cohort.runs.checkpoints import Models, SavedState, random_state
from cohort.train.first_save import FirstSave
from cohort.train.layout import Part
from cohort.train.memory import TokenBudget
from cohort.train.optim import Optimizer
from cohort.train.ranks import sampler_copy
from cohort.train.rollout import Ahead, Rollout, Unfinished, uses_rounds
from cohort.train.signals import Requests
from cohort.train.update import NonFinite, Seen, UpdateResult, bits_of, of_bits
from cohort.types import TokenBatch

# ----------------------------------------
# Weights of the objective that follow a target from update to update: the KL's and the entropy bonus's.


@dataclass(slots=True)
class Adaptive:
    """Weights that follow a target; a weight without a target is constant. Part of a checkpoint."""

    beta: float
    entropy_coefficient: float
    entropy: float | None = None
    """Mean entropy in the last update."""

    @classmethod
    def of(cls, objective: Objective) -> Adaptive:
        """The weights at the start of a run."""
        return cls(objective.beta, objective.entropy.coefficient if objective.entropy else 0.0)

    def applied_to(self, objective: Objective) -> Objective:
        """The objective with the current weight of the KL."""
        return objective if objective.kl.target is None else objective.replace(beta=self.beta)

    def applied_entropy_coefficient(self, objective: Objective) -> float:
        """The entropy bonus's weight in the next update."""
        return applied_entropy_coefficient(objective.entropy, self.entropy_coefficient, self.entropy)

    def after_update(self, objective: Objective, result: UpdateResult) -> None:
        """Adapt to the entropy of an update."""
        sums = result.statistics.sums
        if sums["tokens"]:
            self.entropy = sums["entropy"] / sums["tokens"]
        if objective.entropy and self.entropy is not None:
            self.entropy_coefficient = next_entropy_coefficient(
                objective.entropy, self.entropy_coefficient, self.entropy
            )

    def after_step(self, objective: Objective, results: list[UpdateResult], completions: int) -> None:
        """Adapt to the KL: its mean over the tokens of the step's last update."""
        sums = results[-1].statistics.sums if results else {}
        if "k3" in sums and sums["tokens"]:
            self.beta = next_beta(objective.kl, self.beta, sums["k3"] / sums["tokens"], completions)

    def state_dict(self) -> dict[str, Any]:
        """The state as a checkpoint stores it."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of ``state_dict``."""
        for name, value in state.items():
            setattr(self, name, value)


# ----------------------------------------
# An object that goes along with a run on every rank, unlike callbacks, and keeps its state in the checkpoints.


class Companion:
    """Goes along with a run: ``GRPOTrainer.steps(companion=...)`` takes an object with these methods. This one does
    nothing."""

    asks_for_evaluations = False
    """Whether the run evaluates after a step only when this object asks for it, even after the last step."""
    initial_can_be_best = True
    """Whether the initial model, which is evaluated before the first step, can be the best one."""

    def evaluated(self, step: int, evaluations: Mapping[str, Evaluation], metrics: Mapping[str, Any]) -> None:
        """An evaluation ended; a due checkpoint follows.

        Args:
            step: complete steps; 0 for the evaluation before the first.
            evaluations: the evaluation of each set, "" if there is one.
            metrics: theirs, ``eval/...``.
        """

    def updated(self, metrics: Mapping[str, Any]) -> None:
        """A step's updates are made; a due evaluation and checkpoint follow. ``GRPOTrainer.evaluate_now`` may be called
        here. A run that was stopped in this evaluation and resumed tells of the step again.

        Args:
            metrics: the step's, without those of its evaluation.
        """

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint is to hold, in types of JSON. Rank 0's is written."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what ``state_dict`` gave to the checkpoint that the run goes on from; empty if it gave nothing.

        Raises:
            RunFolderError: the state is that of another companion, which the run needs to continue.
        """
        if state:
            raise RunFolderError(
                "the run was begun with cohort.trl: continue it with the script or command that began it"
            )


# ----------------------------------------
# How far a run is within a step, so that a checkpoint can be of the instant between any two updates.


@dataclass(slots=True)
class Updates:
    """The updates of a step: what is done of them, and what they share. Part of a checkpoint that is written between
    two of them."""

    version_before: int
    """``Policy.version`` before the first of them."""
    results: list[UpdateResult] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    """Numbers, from 0, of those that were skipped because a value was not finite."""
    old_logps_N: Tensor | None = None
    """Of the batch, with the weights before the first update."""
    ref_logps_N: Tensor | None = None
    term_norms: dict[str, Any] = field(default_factory=dict)
    """Metrics that were measured before the first update."""
    seen: Seen | None = None
    """What the updates have seen of the batch; None before ``share``."""

    @property
    def num_nonfinite(self) -> int:
        """Number of updates that were skipped."""
        return len(self.skipped)

    @property
    def done(self) -> int:
        """Updates that were made or skipped."""
        return len(self.results) + self.num_nonfinite

    def left(self, minibatches: Sequence[Part]) -> Sequence[Part]:
        """The minibatches whose updates are still to be made."""
        return minibatches[self.done :]

    def resumed(self, batch: TokenBatch) -> TokenBatch:
        """The batch with the log-probs that were shared before the run was stopped."""
        return replace(batch, old_logps_N=self.old_logps_N, ref_logps_N=self.ref_logps_N)

    def share(self, batch: TokenBatch) -> TokenBatch:
        """Remember what the updates share."""
        self.old_logps_N, self.ref_logps_N = batch.old_logps_N, batch.ref_logps_N
        self.seen = self.seen or Seen.nothing(batch)
        return batch

    def ended(self, outcome: UpdateResult | NonFinite) -> UpdateResult | NonFinite:
        """Count an update. Returns its outcome without ``used``, whose tensors the record has no use for."""
        if isinstance(outcome, NonFinite):
            self.skipped.append(self.done)
            return outcome
        if self.seen is not None and outcome.used is not None:
            self.seen.add(self.done, outcome.used, len(outcome.logps_N))
        self.results.append(replace(outcome, used=None))
        return self.results[-1]

    def to_store(self) -> dict[str, Any]:
        """Everything, in types that files hold."""
        return {
            "version_before": self.version_before,
            "results": [_plain(result) for result in self.results],
            "skipped": self.skipped,
            "old_logps_N": _bits(self.old_logps_N),
            "ref_logps_N": _bits(self.ref_logps_N),
            "term_norms": self.term_norms,
            "seen": self.seen and self.seen.to_store(),
        }

    @classmethod
    def stored(cls, stored: Mapping[str, Any], device: torch.device) -> Updates:
        """The inverse of ``to_store``.

        Raises:
            RunFolderError: another version of Cohort has stored them.
        """
        if set(stored) != {one.name for one in fields(cls)}:
            raise RunFolderError(
                "the newest checkpoint is of the middle of a step, and another version of Cohort wrote it: finish the "
                "step with that version, or remove the checkpoint to go on from the one before"
            )
        values = dict(stored)
        for name in ("old_logps_N", "ref_logps_N"):
            values[name] = _of_bits(values[name], device)
        values["seen"] = values["seen"] and Seen.stored(values["seen"], device)
        values["results"] = [
            UpdateResult(
                **{
                    **result,
                    "statistics": TokenStatistics(**result["statistics"]),
                    "logps_N": _of_bits(result["logps_N"], device),
                }
            )
            for result in values["results"]
        ]
        return cls(**values)


def _plain(result: UpdateResult) -> dict[str, Any]:
    values = {one.name: getattr(result, one.name) for one in fields(result) if one.name != "used"}
    statistics = {one.name: getattr(result.statistics, one.name) for one in fields(result.statistics)}
    return values | {"statistics": statistics, "logps_N": _bits(result.logps_N)}


def _bits(values_N: Tensor | None) -> tuple[str, Tensor] | None:
    return None if values_N is None else bits_of(values_N)


def _of_bits(bits: tuple[str, Tensor] | None, device: torch.device) -> Tensor | None:
    return None if bits is None else of_bits(bits, device)


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
