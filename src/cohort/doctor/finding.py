"""What a check says: its name, pass, warn or fail, what was found with the number, and the next thing to try."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from textwrap import wrap

Numbers = Mapping[str, float | int | None]
NAME_WIDTH, TEXT_WIDTH = 12, 98


class Status(StrEnum):
    """The outcome of a check."""

    PASS = "pass"
    WARN = "warn"
    """The run can work, and something in it is rarely intended."""
    FAIL = "fail"
    """The run would stop, or would learn nothing."""
    SKIP = "skip"
    """The check was not made."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One outcome of one check. A check that finds several problems has one for each."""

    check: str
    """The check's name, as ``--skip`` takes it."""
    status: Status
    found: str
    """What was found, with its number."""
    advice: str = ""
    """The next thing to try. Empty when the check passes."""
    numbers: Numbers = field(default_factory=dict)
    """The numbers behind the words, by name."""

    def show(self) -> str:
        """The finding for a terminal."""
        indent = " " * (8 + NAME_WIDTH)
        words = [*_wrapped(self.found), *_wrapped(self.advice, "-> ")]
        status = self.status.upper() if self.status is Status.FAIL else str(self.status)
        return "\n".join([f"  {status:<5} {self.check:<{NAME_WIDTH}}{words[0]}", *(indent + one for one in words[1:])])


class Check:
    """Collects the findings of one check.

    >>> check = Check("sampling")
    >>> check.warn("temperature 0.1", "raise rollout.temperature")
    >>> [str(finding.status) for finding in check.findings("temperature 1")]
    ['warn']
    """

    def __init__(self, name: str, numbers: Numbers | None = None) -> None:
        self.name, self.numbers = name, numbers or {}
        self._problems: list[Finding] = []

    def warn(self, found: str, advice: str) -> None:
        """Add a problem that the run can work with."""
        self._problems.append(Finding(self.name, Status.WARN, found, advice, self.numbers))

    def fail(self, found: str, advice: str) -> None:
        """Add a problem that stops the run, or with which it learns nothing."""
        self._problems.append(Finding(self.name, Status.FAIL, found, advice, self.numbers))

    @property
    def has_problems(self) -> bool:
        """Whether a problem was added."""
        return bool(self._problems)

    def findings(self, passed: str) -> list[Finding]:
        """The problems, or that there are none in the words ``passed``."""
        return self._problems or [Finding(self.name, Status.PASS, passed, numbers=self.numbers)]


def skipped(check: str, why: str) -> list[Finding]:
    """The outcome of a check that was not made."""
    return [Finding(check, Status.SKIP, why)]


def summary(findings: Sequence[Finding]) -> str:
    """How many findings there are of each status.

    >>> summary([Finding("a", Status.PASS, ""), Finding("b", Status.FAIL, "", "")])
    '1 pass, 1 fail'
    """
    counts = ((sum(finding.status is status for finding in findings), status) for status in Status)
    return ", ".join(f"{count} {status}" for count, status in counts if count)


def size(count: float) -> str:
    """Bytes in words with two significant digits.

    >>> size(900), size(3 * 2**20), size(84.2 * 2**30)
    ('900 bytes', '3 MiB', '84 GiB')
    """
    for power, name in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count >= 1024**power:
            number = count / 1024**power
            return f"{number:,.0f} {name}" if number >= 10 else f"{f'{number:.1f}'.removesuffix('.0')} {name}"
    return f"{count:.0f} bytes"


def _wrapped(text: str, mark: str = "") -> list[str]:
    """Lines of at most ``TEXT_WIDTH``; line breaks and indents stay. The first line begins with ``mark``."""
    lines = []
    for part in text.splitlines():
        indent = " " * (len(mark) + len(part) - len(part.lstrip()))
        lines += wrap(mark + part, TEXT_WIDTH, subsequent_indent=indent) or [""]
    return lines
