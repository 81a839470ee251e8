"""An episode under way, and the time that a rollout waits."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from cohort.environments.contract import Answer, EpisodeFailed
from cohort.types import Completion, Message, Prompt, Turn


@dataclass(slots=True, eq=False)
class RunningEpisode:
    """An episode between its begin and its end."""

    prompt_index: int
    sample: int
    started: float = 0.0
    first: Answer | EpisodeFailed | None = None
    """What the environment showed first, or why it did not; None while that is awaited."""
    prompt: Prompt | None = None
    """The prompt with what the environment showed first; None before the trajectory is submitted."""
    number: int | None = None
    """The engine's number of the trajectory; None before it is submitted."""
    completion: Completion | None = None
    """The turns so far."""
    prefix: str = ""
    """The end of the text before the present turn."""
    message: Message = field(default_factory=dict)
    """What the policy wrote in the latest turn."""
    turn_ended: float = 0.0
    turns: list[Turn] = field(default_factory=list)
    pending: Future[Any] | None = None
    """What the episode waits for: its first observation, an answer, or its end."""
    ending: bool = False


@dataclass(slots=True)
class Waiting:
    """Wall-clock seconds of one or more rollouts."""

    seconds: float = 0.0
    """While at least one answer was awaited."""
    blocked: float = 0.0
    """While nothing could be decoded because every episode awaited an answer."""
    pending: int = 0
    since: float = 0.0

    def begin(self) -> None:
        """Count one more answer that is awaited."""
        if not self.pending:
            self.since = time.perf_counter()
        self.pending += 1

    def end(self) -> None:
        """Count one answer that has arrived."""
        self.pending -= 1
        if not self.pending:
            self.seconds += time.perf_counter() - self.since
