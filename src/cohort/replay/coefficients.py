"""What an objective makes of a stored step: advantages, coefficients, causes. Pure: no model, no settings file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from cohort.errors import RunFolderError
from cohort.objective import Cause, Objective, coefficients, top_entropy_tokens
from cohort.replay.stored import Stored
from cohort.train import Part, Rollout, active_part, assign_advantages, lay_out, packs, part_of, split_minibatches
from cohort.train.update import at_tokens, term_weights
from cohort.types import TokenBatch

LEFT_OUT = -1
"""In the place of a ``Cause``: no update uses the completion."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """The step under an objective. Shape ``[N]`` each, on the axis of the stored step."""

    objective: Objective
    policy_N: Tensor
    """The policy term's coefficient; 0 where no update uses the token."""
    kl_N: Tensor
    cause_N: Tensor
    """int8: a ``Cause``, or ``LEFT_OUT``."""
    advantages_N: Tensor
    is_used_S: Tensor
    """Whether the updates use the completion."""

    @property
    def total_N(self) -> Tensor:
        """c_N, float64."""
        return (self.policy_N + self.kl_N).double()


@dataclass(frozen=True, slots=True)
class Laid:
    """A stored step as an objective's updates see it."""

    batch: TokenBatch
    minibatches: list[Part]
    """Of one pass over the rollout."""
    tokens_N: Tensor
    """Where the batch's tokens lie on the axis of the stored step."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a run that its coefficients depend on, beside the objective."""

    minibatches: int
    max_completion_length: int
    has_old_logps: bool = False
    """Whether the updates had old log-probs; without them every ratio to the old policy is 1 by identity."""
    top_entropy: float = 1.0
    """The share of tokens that the run's updates chose."""
    microbatch_tokens: int = 0
    """Tokens of a pass: on a CPU, the last bit of a sigmoid depends on the token's place in the pass. 0: unknown."""
    shared_prompts: bool = True
    """Whether a pass read each prompt once."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


def coefficients_of(stored: Stored, objective: Objective, settings: Settings) -> Replayed:
    """The coefficients that the first pass of updates over a stored step has under an objective.

    Under the objective of the run they are the stored ones, bit for bit, if the device is the run's.

    Args:
        stored: the step. Where the objective needs a log-prob that is NaN, so is the coefficient.
        objective: any objective, with the beta of the step.
        settings: those of the run.

    Raises:
        RunFolderError: the objective needs what is not stored.
        RewardError: the objective refuses the stored rewards, as scale "group_mean" refuses negative ones.
    """
    laid = laid_out(stored, objective, settings)
    batch, total = laid.batch, len(stored.known.logps_N)
    logps_N = stored.known.logps_N[laid.tokens_N].to(settings.device, stored.dtype)
    policy_N, kl_N = torch.zeros_like(logps_N), torch.zeros_like(logps_N)
    cause_N = torch.where(batch.loss_N, int(Cause.NO_ADVANTAGE), int(Cause.MASKED)).to(torch.int8)
    for minibatch in laid.minibatches:
        chosen_N = _chosen(stored, laid, minibatch, objective, settings)
        weights = term_weights(objective, batch, minibatch, chosen_N)
        active = active_part(batch, minibatch, objective)
        for one in _passes(batch, active, settings):
            at_N, of_one = one.tokens_N, weights.at(active.positions_N).at(one.positions_N)
            found = coefficients(
                objective,
                logps_N[at_N],
                batch.advantages_N[at_N],
                of_one.policy_N,
                sequence_N=one.sequence_N,
                old_logps_N=at_tokens(batch.old_logps_N, at_N),
                sampler_logps_N=batch.sampler_logps_N[at_N],
                ref_logps_N=at_tokens(batch.ref_logps_N, at_N),
                base_weights_N=of_one.base_N,
            )
            policy_N[at_N], kl_N[at_N], cause_N[at_N] = found.policy_N, found.kl_N, found.cause_N
    used_S = torch.zeros(len(stored.is_used_S), dtype=torch.bool)
    used_S[list(_rollout(stored, objective).used_S)] = True

    def on_axis(values_N: Tensor, elsewhere: float) -> Tensor:
        found_N = torch.full((total,), elsewhere, dtype=values_N.dtype)
        found_N[laid.tokens_N] = values_N.cpu()
        return found_N

    advantages_N = on_axis(batch.advantages_N, 0.0)
    return Replayed(objective, on_axis(policy_N, 0), on_axis(kl_N, 0), on_axis(cause_N, LEFT_OUT), advantages_N, used_S)


def laid_out(stored: Stored, objective: Objective, settings: Settings) -> Laid:
    """The batch of a stored step under an objective, and its minibatches."""
    rollout = _rollout(stored, objective)
    used_S = rollout.used_S
    batch = lay_out(rollout.used_groups, settings.device)
    starts_S = stored.lengths_S.cumsum(0) - stored.lengths_S
    spans = [torch.arange(count) + starts_S[s] for s, count in zip(used_S, batch.lengths_S.tolist(), strict=True)]
    tokens_N = torch.cat([torch.zeros(0, dtype=torch.long), *spans])
    known = stored.known

    def of_batch(values_N: Tensor) -> Tensor:
        return values_N[tokens_N].to(settings.device, stored.dtype)

    old_N, ref_N = of_batch(known.old_logps_N), of_batch(known.ref_logps_N)
    needs_ref = objective.beta != 0 and objective.kl.estimator == "sampled"
    if needs_ref and bool(ref_N.isnan().any()):
        raise RunFolderError(_no_reference(stored, objective, int(ref_N.isnan().sum()), len(ref_N)))
    if objective.needs_old_logps and not settings.has_old_logps:
        old_N = of_batch(known.logps_N)  # a single update: the old policy is the current one
    has_old = settings.has_old_logps or objective.needs_old_logps
    batch = replace(batch, old_logps_N=old_N if has_old else None, ref_logps_N=ref_N if needs_ref else None)
    batch = assign_advantages(batch, rollout.used_scores, objective, settings.max_completion_length)
    return Laid(batch, list(_minibatches(stored, batch, used_S, settings)), tokens_N)


def _no_reference(stored: Stored, objective: Objective, missing: int, total: int) -> str:
    """The message for tokens without log-probs of the reference."""
    cause = "the run's beta was 0"
    if stored.facts.beta:
        cause = "the run's updates did not need them (the group was left out, or the KL is over the whole vocabulary)"
    return (
        f"the KL needs log-probs of the reference (beta {objective.beta:g}), and {stored.path.name} has none for "
        f"{missing:,} of the {total:,} tokens that the updates would use: {cause}, and there is no model to compute "
        "them. Replay with --set beta=0, or with the model: without --no-model, and with the checkpoint before the "
        "step (run.save_steps)"
    )


def _rollout(stored: Stored, objective: Objective) -> Rollout:
    """The groups that an objective's updates use."""
    if objective.credit in ("given", "process") and stored.scores.token_rewards_N is None:
        raise RunFolderError(
            f"credit {objective.credit!r} needs a reward for each token, and {stored.path.name} has none: the run's "
            "reward functions score whole completions"
        )
    return Rollout.of(stored.groups, stored.scores, objective)


def _minibatches(stored: Stored, batch: TokenBatch, used_S: list[int], settings: Settings) -> Iterator[Part]:
    """The minibatches of a pass. Of a step that is stored in part, as its updates had them."""
    if not stored.groups_missing or stored.minibatch_S is None:
        yield from split_minibatches(batch, settings.minibatches)
        return
    number_S = torch.from_numpy(stored.minibatch_S[used_S])
    for number in sorted(set(number_S.tolist())):
        yield part_of(batch, (number_S == number).nonzero()[:, 0])


def _passes(batch: TokenBatch, active: Part, settings: Settings) -> Iterator[Part]:
    """The sequences of an update pass by pass, as the update cut them."""
    if not settings.microbatch_tokens:
        yield active.select(torch.arange(active.num_sequences))
        return
    for pack in packs(batch, active, settings.microbatch_tokens, shared=settings.shared_prompts):
        yield from (active.select(torch.tensor(cut)) for cut in pack.microbatches)


def _chosen(stored: Stored, laid: Laid, minibatch: Part, objective: Objective, settings: Settings) -> Tensor | None:
    """Which tokens of a minibatch ``top_entropy`` chooses: those of the run's update, if it chose the same share."""
    if objective.top_entropy == 1:
        return None
    tokens_N = laid.tokens_N[minibatch.tokens_N.cpu()]
    if stored.weight_N is not None and objective.top_entropy == settings.top_entropy:
        return (stored.weight_N[tokens_N] > 0).to(settings.device)
    loss_N = laid.batch.loss_N[minibatch.tokens_N]
    return top_entropy_tokens(stored.known.entropy_N[tokens_N].to(loss_N.device), objective.top_entropy, loss_N)
