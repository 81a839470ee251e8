"""The models of a run as before the updates of a step: log-probs that are not stored, gradients in all parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cohort.config import GRPOConfig
from cohort.errors import NonFiniteError, RunFolderError
from cohort.objective import Objective
from cohort.policy import Policy, load_policy, load_tokenizer, read_config
from cohort.replay.compare import Laid, Products, laid_out
from cohort.replay.stored import Known, Stored
from cohort.rollout import Sampling
from cohort.runs.changes import take_threads
from cohort.runs.checkpoints import Models, check_checkpoint, load_checkpoint, saved_identity
from cohort.runs.reader import Run
from cohort.runs.reading import damage_named
from cohort.runs.starts import last_start
from cohort.train import (
    Adaptive,
    NonFinite,
    Optimizer,
    StepContext,
    TokenBudget,
    part_of,
    policy_logps,
    update,
)
from cohort.train.inputs import chosen_model
from cohort.train.metrics import term_gradients
from cohort.train.sweep import token_logps

WHOLE = ""
"""Stands for the sum of the terms."""
PLAIN = Objective(group_filter=None)
"""An objective that uses every group, for the layout of all usable completions."""


class NoWeightsError(RunFolderError):
    """There are no weights from before the step; the message says why."""


@dataclass(frozen=True, slots=True)
class Before:
    """The run's models as they were before the updates of a step."""

    context: StepContext
    """With the objective of the run."""
    adaptive: Adaptive
    tokenizer: Any
    source: str
    """Where the weights are from."""

    def entropy_coefficient(self, objective: Objective) -> float:
        """The entropy bonus's weight in the next update under an objective. One that is not the run's begins with its
        first weight."""
        own = self.context.objective.entropy == objective.entropy
        start = self.adaptive if own else replace(Adaptive.of(objective), entropy=self.adaptive.entropy)
        return start.applied_entropy_coefficient(objective)


def load_before(run: Path, config: GRPOConfig, stored: Stored, objective: Objective, *, reference: bool) -> Before:
    """Load the policy, the optimizer and, if asked for, the reference as before the updates of a step.

    Args:
        run: the run folder. Its settings are checked: see ``runs.check_code``.
        config: its settings.
        stored: the step, whose weights are those of ``checkpoints/step-(N-1)``, or the initial model's for step 1.
        objective: the run's, with the beta of the step.
        reference: whether a reference is needed, also if the run had none.

    Raises:
        NoWeightsError: there are no such weights.
        CohortError: they cannot be loaded.
    """
    folder = _checkpoint(run, stored.step)
    lora, missing = config.model.lora.wanted, reference and not objective.beta
    initial = _initial_model(run, config) if folder is None or lora or missing else ""
    policy = _policy(str(folder) if folder and not lora else initial, config)
    held = policy.reference(moves=config.objective.sync_ref_model) if objective.beta else None
    tokenizer = load_tokenizer(str(folder or initial), trust_remote_code=config.model.trust_remote_code)
    optimizer = Optimizer(policy.model, config.optim, 1)  # the store has each update's learning rate
    adaptive, budget = Adaptive.of(config.resolved_objective), TokenBudget(stored.facts.microbatch_tokens)
    models = Models(policy, held, tokenizer)
    if missing:
        held = (policy if lora else _policy(initial, config)).reference()
    if folder is not None:
        take_threads(saved_identity(folder), 1)
        with damage_named(folder):
            saved = load_checkpoint(folder, models)
            optimizer.load_state_dict(saved.optimizer)
            adaptive = Adaptive(**saved.loop["adaptive"])
    context = StepContext(policy, optimizer, objective, Sampling.of(config.rollout), budget, held)
    source = f"checkpoints/{folder.name}" if folder else f"the initial model, {initial}"
    return Before(context, adaptive, tokenizer, source)


def _checkpoint(run: Path, step: int) -> Path | None:
    """The checkpoint between a step and the one before; None for the first step without one."""
    folder, there = run / "checkpoints" / f"step-{step - 1}", list(Run(run).checkpoints)
    if not folder.is_dir():
        if step == 1:
            return None
        shown = f"it has those of steps {', '.join(map(str, there[-6:]))}" if there else "it has none"
        raise NoWeightsError(
            f"the run has no checkpoint of step {step - 1}, whose weights step {step} began with; {shown} "
            "(run.save_steps and run.save_total_limit keep more)"
        )
    check_checkpoint(folder)
    return folder


def _initial_model(run: Path, config: GRPOConfig) -> str:
    """The folder or hub id of the initial model."""
    if not config.model.path or "model" in last_start(run).missing:
        raise NoWeightsError("the run's initial model was given in Python, so its settings do not name it (model.path)")
    return str(chosen_model(None, config.model))


def _policy(name: str, config: GRPOConfig) -> Policy:
    read = read_config(name, trust_remote_code=config.model.trust_remote_code)
    return load_policy(name, config.model, read, seed=config.run.seed)


# Passes ---------------------------------------------------------------------------------------------------------------


def measured(before: Before, stored: Stored) -> Known:
    """The log-probs of all usable completions under the weights before the step, and under the reference.

    Raises:
        RunFolderError: the step holds token ids that the model does not have.
    """
    context = before.context
    laid = laid_out(stored, PLAIN)
    _check_ids(context.policy, laid)
    part = part_of(laid.batch, range(laid.batch.num_sequences))
    found = context.within_memory(token_logps, context.policy, laid.batch, part)
    ref_N = torch.full_like(found.logps_N, torch.nan)
    if context.reference is not None:
        ref_N = context.within_memory(policy_logps, context.reference, laid.batch, part)
    numbers = (found.logps_N, found.logps_N, ref_N, found.entropy_N, found.collision_N)
    return Known(*(laid.on_axis(values_N.double(), torch.nan) for values_N in numbers))


def _check_ids(policy: Policy, laid: Laid) -> None:
    model: Any = policy.model
    count = model.get_input_embeddings().num_embeddings
    ids = torch.cat([laid.batch.ids_T, *(torch.tensor(prompt) for prompt in laid.batch.prompt_ids)])
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < count:
        raise RunFolderError(
            f"{laid.stored.path} holds token ids up to {int(ids.max())}, and the model has {count} tokens"
        )


def gap(stored: Stored, found: Known) -> float | None:
    """The largest difference between stored log-probs of the policy before the step and measured ones; None: no
    log-probs are stored."""
    known_N = stored.known.old_logps_N
    if bool(known_N.isnan().all()):
        first_S = (
            torch.ones(len(stored.is_used_S), dtype=torch.bool)
            if stored.minibatch_S is None
            else torch.tensor(stored.minibatch_S == 0)
        )
        known_N = stored.known.logps_N.where(first_S.repeat_interleave(stored.lengths_S), torch.nan)
    gaps_N = (known_N - found.logps_N).abs()
    gaps_N = gaps_N[~gaps_N.isnan()]
    return float(gaps_N.max()) if len(gaps_N) else None


def parameter_gradients(before: Before, stored: Stored, objective: Objective) -> dict[str, Any]:
    """Compare the gradients of the run's objective and of another in all trained parameters, at each update of the
    first pass over the rollout. The updates between are made under the run's objective, as the run made them.

    Args:
        before: the models, whose weights change if there are several updates.
        stored: the step.
        objective: the other objective.

    Returns:
        Norms, ratios and cosines of the whole gradient and of its terms, root mean squares over the updates, and those
        of the whole gradient at each update.

    Raises:
        NonFiniteError: a value is not finite.
        RunFolderError: an update between was skipped because a value was not finite.
    """
    updates: list[dict[str, Products]] = []
    contexts = before.context, replace(before.context, objective=objective)
    run, replay = (laid_out(stored, context.objective) for context in contexts)
    pairs = list(zip(run.minibatches, replay.minibatches, strict=False))
    rates = [rate for rate in stored.facts.learning_rates if rate is not None]
    if len(run.minibatches) > 1 and len(rates) < len(stored.facts.learning_rates):
        raise RunFolderError(f"an update of step {stored.step} was skipped, because a value was not finite")
    for number, (own, other) in enumerate(pairs):
        found = []
        for context, laid, part in zip(contexts, (run, replay), (own, other), strict=True):
            coefficient = before.entropy_coefficient(context.objective)
            found.append(context.within_memory(term_gradients, laid.batch, part, coefficient))
        updates.append(_products(*found))
        if number + 1 < len(pairs):
            # One update as the loop makes it, with which the next one begins.
            for group in (group for rule in before.context.optimizer.rules for group in rule.param_groups):
                group["lr"] = rates[number]
            coefficient = before.entropy_coefficient(before.context.objective)
            outcome = before.context.within_memory(update, run.batch, own, coefficient)
            if isinstance(outcome, NonFinite):
                raise NonFiniteError(outcome.message)
            before = replace(before, adaptive=before.adaptive.after_update(before.context.objective, outcome))
    names = dict.fromkeys(name for one in updates for name in one if name != WHOLE)
    return {
        **Products.mean([one[WHOLE] for one in updates]).as_json(),
        "terms": {name: Products.mean([one.get(name, Products()) for one in updates]).as_json() for name in names},
        "updates": [one[WHOLE].as_json() for one in updates],
    }


def _products(run: Mapping[str, Tensor], replay: Mapping[str, Tensor]) -> dict[str, Products]:
    """Those of the gradients' terms, and of the whole gradients. A term that one of them lacks is 0."""
    both, names = (run, replay), dict.fromkeys([*run, *replay])
    if not names:  # no sequence has a gradient
        return {WHOLE: Products()}
    zero = torch.zeros_like(next(iter((run or replay).values())))
    found = {name: Products.of(*(one.get(name, zero) for one in both)) for name in names}
    wholes = (sum(one.values(), zero) for one in both)
    return found | {WHOLE: Products.of(*wholes)}
