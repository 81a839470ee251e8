"""What a run will cost: memory and time, predicted from measured pieces. Every number is an estimate.

memory  free now, with the optimizer's state allocated, against the larger of two peaks: the longest pass of the update
        (tried before the run, gradients included), and the keys and values of a full rollout
time    phases of a step measured on the first prompts, times the steps; evaluations by their completions
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cohort.doctor.finding import Check, Finding, size
from cohort.report.words import duration

NEAR_MEMORY = 0.8
"""The share of the free memory that is close to all of it: predictions were off by up to 15%."""
SLOW_REWARDS = 0.5
LONG_RUN = 7 * 86400


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on the device that trains."""

    free: int | None
    """Free now, with the model and the optimizer's state in memory; None: unknown."""
    passes: int
    """The largest pass of the update, with the gradients."""
    cache: int
    """Keys and values of a full rollout at the maximum length."""
    gradients: int = 0
    """Gradients beside a rollout, with ``rollout.lag``."""
    copy: int = 0
    """The copy from which a checkpoint is written in the background, if it is on this device and fits."""

    @property
    def needed(self) -> int:
        """What the run adds to what is used now, at its peak, without the copy of a checkpoint."""
        return max(self.passes, self.gradients + self.cache)


def check_memory(memory: Memory) -> list[Finding]:
    """The predicted peak against the free memory."""
    needed = memory.needed
    numbers = {"needed": needed, "free": memory.free, "copy": memory.copy}
    check = Check("memory", numbers)
    parts = (
        f"the longest update pass with gradients {size(memory.passes)}, keys and values of a rollout "
        f"{size(memory.cache)}"
    )
    if memory.copy:
        parts += f"; {size(memory.copy)} on top while a checkpoint is written"
    free = "unknown" if memory.free is None else size(memory.free)
    found = f"estimate: the run needs {size(needed)} more; {free} free ({parts})"
    advice = (
        "lower rollout.cache_tokens"
        if memory.gradients + memory.cache > memory.passes
        else "set model.gradient_checkpointing, lower rollout.max_completion_length"
    ) + ", train adapters (model.lora.rank), or use a smaller model"
    if memory.free is not None and needed > memory.free:
        check.fail(found, advice)
    elif memory.free is not None and needed > NEAR_MEMORY * memory.free:
        check.warn(found, advice)
    return check.findings(found)


@dataclass(frozen=True, slots=True)
class Time:
    """Seconds."""

    phases: Mapping[str, float]
    """Of a step: generate, reward, logps, update, measure."""
    steps: int
    evaluation: float
    """Of one evaluation."""
    evaluations: int
    lag: int = 0
    """``rollout.lag``: sampling and scoring run beside the training."""

    @property
    def step(self) -> float:
        """Of one step."""
        sampling = sum(self.phases.get(name, 0.0) for name in ("generate", "reward"))
        training = sum(self.phases.values()) - sampling
        return max(sampling, training) if self.lag else sampling + training

    @property
    def run(self) -> float:
        """Of the whole run, without its start and its checkpoints."""
        return self.step * self.steps + self.evaluation * self.evaluations


def check_time(time: Time, prompts: int) -> list[Finding]:
    """The predicted time of a step and of the run.

    Args:
        time: the pieces.
        prompts: number of prompts that they were measured on.
    """
    phases = {name: seconds for name, seconds in time.phases.items() if seconds > 0}
    check = Check("time", {"step": time.step, "run": time.run, **{f"step/{name}": s for name, s in phases.items()}})
    words = ", ".join(f"{name} {duration(seconds)}" for name, seconds in phases.items())
    found = f"estimate from {prompts} prompts: {duration(time.step)} a step ({words}); {_count(time.steps, 'step')}"
    if time.evaluations:
        found += f", {_count(time.evaluations, 'evaluation')} of {duration(time.evaluation)}"
    found += f": {duration(time.run)} in all. Longer completions take longer"
    total = sum(phases.values())
    if total and phases.get("reward", 0.0) > SLOW_REWARDS * total and not time.lag:
        check.warn(
            f"rewards take {phases['reward'] / total:.0%} of a step. {found}",
            "set reward.workers, make the functions async, or set rollout.lag to score beside the training",
        )
    if time.run > LONG_RUN:
        check.warn(found, "set run.max_steps, shorter completions, or more devices (see 'cohort docs scale')")
    return check.findings(found)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def rounds_expected(live_share: float, most: int) -> float:
    """Rounds of sampling until all groups have different rewards, if ``live_share`` of them do: 1 / share, at most
    ``most``.

    >>> rounds_expected(0.25, 10), rounds_expected(0.0, 10)
    (4.0, 10.0)
    """
    return float(min(most, 1 / live_share)) if live_share > 0 else float(most)
