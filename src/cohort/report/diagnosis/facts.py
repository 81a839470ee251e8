"""What the checks need to know of a run's settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cohort.config.objective import ObjectiveConfig
from cohort.config.report import ThresholdsConfig
from cohort.config.section import Section
from cohort.errors import ConfigError
from cohort.presets import Objective
from cohort.presets.parts import DynamicSampling
from cohort.report.diagnosis.numbers import LARGEST, number


@dataclass(frozen=True, slots=True)
class Facts:
    """A run's settings as the checks use them. What is absent or unreadable has its default, so that a run folder of
    another version can be looked at."""

    objective: Objective
    updates: int = 1
    """Updates of a rollout."""
    prompts: int = 8
    """Prompts of a step."""
    generations: int = 8
    """Completions of a prompt."""
    max_length: int = 256
    """``rollout.max_completion_length``."""
    fixed_length: bool = False
    """Whether every completion is to reach that length."""
    learning_rate: float = 0.0
    """Its highest value."""
    weights: tuple[float, ...] | None = None
    """Of the reward functions. None: all 1."""
    truncates: bool = False
    """Whether sampling leaves tokens out that the update does not: ``rollout.replay_sampling`` is off."""
    confidence: float = 0.95
    """Of the intervals of evaluations."""
    skip: frozenset[str] = frozenset()
    """Checks that are left out."""

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Facts:
        """The facts of settings as a file has them: nothing in it is trusted, and no file that it names is read."""
        names = ("rollout", "objective", "reward", "optim", "report")
        rollout, objective, reward, optim, report = (_table(settings, name) for name in names)
        skip = report.get("skip_checks")
        confidence = _number(_table(settings, "eval"), "confidence", 0.95)
        return cls(
            objective=(resolved := _objective(objective)),
            updates=_positive(objective, "num_iterations", 1)
            * _positive(objective, "minibatches", resolved.minibatches),
            prompts=_positive(rollout, "prompts_per_step", 8),
            generations=_positive(rollout, "num_generations", 8),
            max_length=(longest := _positive(rollout, "max_completion_length", 256)),
            fixed_length=_positive(rollout, "min_completion_length", 0) >= longest,
            learning_rate=_number(optim, "learning_rate", 0.0),
            weights=_numbers(reward.get("weights")),
            truncates=_truncates(rollout) and rollout.get("replay_sampling") is False,
            confidence=confidence if 0 < confidence < 1 else 0.95,
            skip=frozenset(str(name) for name in skip) if isinstance(skip, list | tuple) else frozenset(),
        )

    @property
    def groups_compared(self) -> bool:
        """Whether a group of equal rewards teaches nothing."""
        return self.objective.group_relative and self.objective.credit in ("outcome", "return_to_go")

    @property
    def resamples(self) -> bool:
        """Whether groups of equal rewards are sampled anew."""
        return isinstance(self.objective.group_filter, DynamicSampling)


def _truncates(rollout: Mapping[str, Any]) -> bool:
    """Whether tokens are drawn from less than the full softmax (docs/metrics.md, "Sampler and trainer")."""
    numbers = any(_number(rollout, key, 0.0) > 0 for key in ("top_k", "min_p", "min_completion_length"))
    grammar = any(rollout.get(key) for key in ("regex", "json_schema"))
    return numbers or bool(grammar) or any(_number(rollout, key, 1.0) != 1 for key in ("top_p", "repetition_penalty"))


def thresholds_of(settings: Mapping[str, Any]) -> ThresholdsConfig:
    """``[report.thresholds]`` as a file has it; a number that is invalid has its default."""
    table = _table(_table(settings, "report"), "thresholds")
    return ThresholdsConfig(**_readable(ThresholdsConfig, table))


def _objective(table: Mapping[str, Any]) -> Objective:
    """The objective; the default one if this version does not know it."""
    try:
        return ObjectiveConfig(**_readable(ObjectiveConfig, table)).resolve()
    except (ConfigError, ValueError, TypeError):
        return ObjectiveConfig().resolve()


def _readable(section: type[Section], table: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a table that a section of settings accepts."""
    found: dict[str, Any] = {}
    for key in set(table) & set(section.model_fields):
        try:
            section(**{key: table[key]})
        except (ConfigError, ValueError, TypeError):
            continue
        found[key] = table[key]
    return found


def _table(settings: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = settings.get(key)
    return value if isinstance(value, Mapping) else {}


def _number(table: Mapping[str, Any], key: str, default: float) -> float:
    value = number(table, key)
    return default if value is None else value


def _positive(table: Mapping[str, Any], key: str, default: int) -> int:
    """An integer setting of at least 1."""
    value = table.get(key)
    return value if type(value) is int and 0 < value < LARGEST else default


def _numbers(values: Any) -> tuple[float, ...] | None:
    """A list of numbers; None for anything else."""
    if not isinstance(values, list | tuple):
        return None
    found = [number({"value": value}, "value") for value in values]
    return None if None in found else tuple(value for value in found if value is not None)
