"""Checks of settings against each other: the sampling, the optimizer."""

from __future__ import annotations

from cohort.config import GRPOConfig
from cohort.doctor.finding import Check, Finding
from cohort.rollout import Sampling

COLD, FROZEN = 0.3, 0.02
"""Temperatures below which completions of a group are mostly, or always, the same."""
ADAPTER_RATE = 3e-6
"""Adapters need about ten times the learning rate of all weights, for which the default (1e-6) is made."""
HIGH_RATES = ((10**8, 1e-4), (10**6, 1e-3), (0, 1e-2))
"""Numbers of trained parameters, and the learning rate above which most models with at least so many are destroyed."""


def check_sampling(config: GRPOConfig) -> list[Finding]:
    """The effective sampling settings; those with which all completions of a group are the same or are cut."""
    rollout, sampling, check = config.rollout, Sampling.of(config.rollout), Check("sampling")
    if rollout.num_generations > 1:
        if rollout.top_k == 1 or rollout.temperature < FROZEN:
            what = "rollout.top_k is 1" if rollout.top_k == 1 else f"rollout.temperature is {rollout.temperature:g}"
            check.fail(
                f"{what}: all {rollout.num_generations} completions of a prompt are the same, so nothing is learned",
                "set rollout.top_k to 0 and rollout.temperature to 1",
            )
        elif rollout.temperature < COLD:
            check.warn(
                f"rollout.temperature is {rollout.temperature:g}: most completions of a prompt will be the same",
                "set rollout.temperature to between 0.7 and 1.2",
            )
    if rollout.min_completion_length == rollout.max_completion_length:
        check.warn(
            f"rollout.min_completion_length is rollout.max_completion_length ({rollout.max_completion_length}): no "
            "completion can end before it is cut",
            "lower rollout.min_completion_length",
        )
    if sampling.reweights and not rollout.replay_sampling:
        check.warn(
            "sampling is truncated or reweighted, and rollout.replay_sampling is off: the ratios of the update compare "
            "two different distributions",
            "set rollout.replay_sampling to true, or unset top_k, top_p, min_p, repetition_penalty and grammars",
        )
    return check.findings(sampling.describe())


def check_optimizer(config: GRPOConfig, updates: int, trained: int) -> list[Finding]:
    """Learning rates with which nothing, or too much, happens.

    Args:
        config: the settings.
        updates: optimizer steps of the run.
        trained: number of trained parameters.
    """
    optim, check = config.optim, Check("optimizer", {"learning_rate": config.optim.learning_rate, "trained": trained})
    if optim.learning_rate == 0:
        check.fail("optim.learning_rate is 0: the weights never change", "set optim.learning_rate; the default is 1e-6")
    elif config.model.lora.wanted and optim.learning_rate < ADAPTER_RATE:
        check.warn(
            f"optim.learning_rate is {optim.learning_rate:g}, which suits all weights; adapters need about ten times "
            "as much",
            "set optim.learning_rate to 1e-5 or more",
        )
    elif not config.model.lora.wanted and optim.learning_rate > (highest := _highest_rate(trained)):
        usual = ", and reinforcement learning of all weights uses 1e-6 to 1e-5" if highest == HIGH_RATES[0][1] else ""
        check.warn(
            f"optim.learning_rate is {optim.learning_rate:g} for {trained:,} trained parameters: more than {highest:g} "
            f"destroys most models of this size{usual}",
            "lower optim.learning_rate",
        )
    if (warmup := optim.warmup_of(updates)) >= updates:
        check.warn(
            f"optim.warmup_steps is {warmup}, and the run has {updates} updates: the learning rate reaches "
            "its peak with the last one or never",
            "lower optim.warmup_steps",
        )
    rate = f"{optim.optimizer}, learning rate {optim.learning_rate:g}"
    return check.findings(f"{rate} ({optim.lr_scheduler_type}); {trained:,} trained parameters")


def _highest_rate(trained: int) -> float:
    """The learning rate above which most models with so many trained parameters are destroyed."""
    return next(rate for count, rate in HIGH_RATES if trained >= count)
