"""What the diagnosis says of a run: the check, how bad it is, since when, the number, and the next thing to try."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from textwrap import wrap
from typing import Any

from cohort.report.diagnosis.case import number

Numbers = Mapping[str, float | int | str | None]
NAME_WIDTH, TEXT_WIDTH = 19, 80
NARROWEST = 36
"""Columns of text below which it stands under the name of its check, not beside it."""


class Level(StrEnum):
    """How bad a finding is."""

    NOTE = "note"
    """Worth knowing; nothing is wrong. Said once a run."""
    WARNING = "warning"
    """The run goes on, and something in it is rarely intended."""
    ALARM = "alarm"
    """The run learns nothing, or is about to be lost."""

    @property
    def rank(self) -> int:
        """0, 1 or 2."""
        return list(Level).index(self)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a check says of the metrics up to a step."""

    level: Level
    found: str
    advice: str
    numbers: Numbers = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding, from the step at which it begins to the one at which it ceases."""

    check: str
    """The check's name, as ``report.skip_checks`` takes it."""
    level: Level
    step: int
    """The step at which it reached this level."""
    found: str
    """What was found, with its number and the cause; of the last step that the check spoke at."""
    advice: str = ""
    """The next thing to try."""
    numbers: Numbers = field(default_factory=dict)
    """The numbers behind the words, by name."""
    begin: int = 0
    """The step at which it began, perhaps at another level."""
    worst: Finding | None = None
    """As it was when it was worse than now. None: it was not."""
    metrics: tuple[str, ...] = ()
    """The metrics that it is about, as patterns (``fnmatch``) of their keys."""
    end: int | None = None
    """The first step at which it was gone. None: it stands."""

    @property
    def stands(self) -> bool:
        """Whether it has not ceased."""
        return self.end is None

    def show(self, width: int = 2 + 18 + NAME_WIDTH + TEXT_WIDTH) -> str:
        """The finding for a terminal of a width: when it begins or changes, or that it has ceased."""
        if self.end is not None:
            return (
                f"  {f'step {self.end}':<10}{'ended':<8}{self.check:<{NAME_WIDTH}}after {_steps(self.end - self.begin)}"
            )
        level = self.level.upper() if self.level is Level.ALARM else str(self.level)
        narrow = width < 20 + NAME_WIDTH + NARROWEST
        indent = " " * (4 if narrow else 20 + NAME_WIDTH)
        room = max(NARROWEST, min(width - len(indent), TEXT_WIDTH))
        words = wrap(self.found, room)
        if self.worst is not None:
            words += wrap(f"(worst: {self.worst.level} at step {self.worst.step})", room)
        words += wrap(self.advice, room, initial_indent="-> ", subsequent_indent="   ")
        first = f"  {f'step {self.step}':<10}{level:<8}{self.check:<{NAME_WIDTH}}"
        lines = [indent + one for one in words]
        return "\n".join([first.rstrip(), *lines] if narrow else [first + words[0], *lines[1:]])

    def as_json(self) -> dict[str, Any]:
        """The finding in types of JSON."""
        return {
            "check": self.check,
            "level": str(self.level),
            "step": self.step,
            "begin": self.begin,
            "end": self.end,
            "found": self.found,
            "advice": self.advice,
            "numbers": dict(self.numbers),
            "metrics": list(self.metrics),
            "worst": self.worst
            and {"level": str(self.worst.level), "step": self.worst.step, "found": self.worst.found},
        }


def _steps(count: int) -> str:
    return f"{count} step{'s' * (count != 1)}"


# ----------------------------------------
# A run's health in one line.


WORDS = {Level.ALARM: "unhealthy", Level.WARNING: "warning"}


FIRST = 5
"""The step before which most checks have nothing to say."""


def health_line(metrics: Mapping[str, Any], findings: Sequence[Finding] = (), *, groups_compared: bool = True) -> str:
    """A step in one line: the verdict, the names of the warnings and alarms that stand, and the main numbers. It has no
    loss, whose value means nothing in GRPO.

    >>> metrics = {"groups/dead_share": 0.29, "entropy": 0.83, "updates": 2, "kl/k3": 0.004}
    >>> metrics |= {"tokens/active_share": 0.49, "tokens/clipped_low_share": 0.01, "tokens/clipped_high_share": 0.0}
    >>> health_line(metrics)
    'healthy: 71% of groups teach, entropy 0.83, clip 2%, KL 0.004'
    >>> health_line({"step": 1} | metrics, groups_compared=False)
    'no verdict before step 5: entropy 0.83, clip 2%, KL 0.004'
    >>> health_line(metrics, [Finding("truncation", Level.ALARM, 3, "...")])
    'unhealthy (truncation): 71% of groups teach, entropy 0.83, clip 2%, KL 0.004'

    Args:
        metrics: of the step.
        findings: of the run; those that have ceased, and notes, do not count.
        groups_compared: whether a group of equal rewards teaches nothing (``Diagnosis.groups_compared``).
    """
    ill = [one for one in findings if one.stands and one.level is not Level.NOTE]
    ill.sort(key=lambda one: -one.level.rank)
    step = number(metrics, "step")
    verdict = f"no verdict before step {FIRST}" if step is not None and step < FIRST else "healthy"
    if ill:
        verdict = f"{WORDS[ill[0].level]} ({', '.join(one.check for one in ill)})"
    parts = []
    if groups_compared and (dead := number(metrics, "groups/dead_share")) is not None:
        parts.append(f"{1 - dead:.0%} of groups teach")
    if (entropy := number(metrics, "entropy")) is not None:
        parts.append(f"entropy {entropy:.2g}")
    if (number(metrics, "updates") or 0) > 1 and (clipped := clipped_share(metrics)) is not None:
        parts.append(f"clip {clipped:.0%}")
    if (kl := number(metrics, "kl/k3")) is not None:
        parts.append(f"KL {kl:.2g}")
    return f"{verdict}: {', '.join(parts)}" if parts else verdict


def clipped_share(metrics: Mapping[str, Any]) -> float | None:
    """The share of tokens that the trust region has silenced, among those that could have a gradient."""
    low, high, active = (number(metrics, f"tokens/{name}_share") for name in ("clipped_low", "clipped_high", "active"))
    if low is None or high is None or active is None or low + high + active <= 0:
        return None
    return (low + high) / (low + high + active)
