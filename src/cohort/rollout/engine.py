"""The engine protocol: prompts in, groups of completions out. Everything that samples stands behind it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cohort.config import RolloutConfig
from cohort.errors import ConfigError
from cohort.rollout.philox import RNGKey
from cohort.types import Completion, FinishReason, Group, Prompt


@dataclass(frozen=True, slots=True)
class Sampling:
    """What a completion is drawn with. Complete: a model's own generation defaults are never read.

    The logits go through these in this order, which is transformers': repetition penalty, what a grammar or the minimum
    length forbids, temperature, top-k, top-p, min-p. What is left is renormalised and drawn from.

    Raises:
        ConfigError: a number is out of its range, a stop string is empty, or two settings exclude each other.
    """

    max_completion_length: int
    """Tokens after which a completion is cut."""
    temperature: float = 1.0
    """Divides the logits. 0: the likeliest token is taken, and every other has probability 0."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion."""
    top_k: int = 0
    """Draw from the k likeliest tokens only (and those as likely as the k-th). 0: all."""
    top_p: float = 1.0
    """Draw from the smallest set of likeliest tokens whose probabilities reach p. 1: all."""
    min_p: float = 0.0
    """Draw from tokens at least so many times as likely as the likeliest. 0: all."""
    repetition_penalty: float = 1.0
    """Logits of tokens that stand in the prompt or the completion are divided by it where positive and multiplied where
    negative (arXiv 1909.05858). 1: off."""
    min_completion_length: int = 0
    """No end token is drawn, and no stop string is looked for, before so many tokens."""
    forced_ids: tuple[int, ...] = ()
    """Token ids that every completion begins with."""
    regex: str | None = None
    """The completion's text matches this regular expression as a whole, unless it is cut."""
    json_schema: str | None = None
    """The completion's text is JSON that this schema accepts, unless it is cut. As JSON text."""
    record_support: bool = True
    """Keep what each token was drawn from where that is not the whole vocabulary, so that an update can draw the same
    line (``Completion.support``)."""

    def __post_init__(self) -> None:
        def check(holds: bool, name: str, expected: str) -> None:
            if not holds:
                raise ConfigError(f"{name} must be {expected}, got {getattr(self, name)!r}")

        check(self.max_completion_length >= 1, "max_completion_length", "at least 1")
        check(0 <= self.temperature < math.inf, "temperature", "0 (greedy) or above")
        check(self.top_k >= 0, "top_k", "0 (off) or above")
        check(0 < self.top_p <= 1, "top_p", "above 0 and at most 1 (off)")
        check(0 <= self.min_p <= 1, "min_p", "between 0 (off) and 1")
        check(0 < self.repetition_penalty < math.inf, "repetition_penalty", "above 0; 1 is off")
        check(
            0 <= self.min_completion_length <= self.max_completion_length,
            "min_completion_length",
            f"between 0 and max_completion_length ({self.max_completion_length})",
        )
        check(isinstance(self.stop, tuple) and all(self.stop), "stop", "a tuple of strings, none of them empty")
        check(
            len(self.forced_ids) <= self.max_completion_length,
            "forced_ids",
            f"at most max_completion_length ({self.max_completion_length}) tokens",
        )
        check(all(token >= 0 for token in self.forced_ids), "forced_ids", "token ids, none below 0")
        if self.regex is not None and self.json_schema is not None:
            raise ConfigError("regex and json_schema exclude each other: set one of them")

    @classmethod
    def of(cls, config: RolloutConfig) -> Sampling:
        """What the settings say: in training and in evaluation alike."""
        return cls(
            max_completion_length=config.max_completion_length,
            temperature=config.temperature,
            stop=config.stop,
            top_k=config.top_k,
            top_p=config.top_p,
            min_p=config.min_p,
            repetition_penalty=config.repetition_penalty,
            min_completion_length=config.min_completion_length,
            regex=config.regex,
            json_schema=config.json_schema,
            record_support=config.replay_sampling,
        )

    def describe(self) -> str:
        """Every setting that a draw depends on, those that are off too.

        >>> Sampling(256, top_p=0.9).describe().split(", no grammar")[0]
        'temperature 1, top-k off, top-p 0.9, min-p off, repetition penalty off'
        """
        numbers = (
            ("top-k", self.top_k, 0),
            ("top-p", self.top_p, 1),
            ("min-p", self.min_p, 0),
            ("repetition penalty", self.repetition_penalty, 1),
        )
        grammar = "no grammar" if self.json_schema is None else f"JSON schema {self.json_schema}"
        return ", ".join(
            [
                f"temperature {self.temperature:g}" if self.temperature else "greedy",
                *(f"{name} {'off' if value == off else format(value, 'g')}" for name, value, off in numbers),
                grammar if self.regex is None else f"regex {self.regex!r}",
                f"stop strings {list(self.stop) or 'none'}",
                f"{self.min_completion_length} to {self.max_completion_length} tokens",
            ]
        )

    @property
    def reweights(self) -> bool:
        """Whether the distribution drawn from can differ from the full softmax at the same temperature."""
        return self.truncates or self.repetition_penalty != 1

    @property
    def truncates(self) -> bool:
        """Whether some tokens may be left out of a draw."""
        limits = (self.top_k > 0, self.top_p < 1, self.min_p > 0, self.min_completion_length > 0)
        return any(limits) or self.temperature == 0 or self.constrained

    @property
    def constrained(self) -> bool:
        """Whether a grammar says what may be drawn."""
        return self.regex is not None or self.json_schema is not None


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """A token that has just been drawn, for who watches."""

    prompt_index: int
    """Which of the prompts given to ``generate``."""
    sample: int
    """Which of the prompt's completions, 0..G-1."""
    position: int
    """Which token of the completion, from 0."""
    token_id: int
    logp: float
    finish_reason: FinishReason | None
    """Set on the completion's last token."""


@dataclass(frozen=True, slots=True)
class Watch:
    """What someone outside wants to know of a call of ``generate`` while it runs. Changes no draw."""

    on_token: Callable[[TokenEvent], None] | None = None
    """Called for every token."""
    on_completion: Callable[[int, int, Completion], None] | None = None
    """Called with prompt index, sample and completion as soon as a completion ends."""
    cancelled: Callable[[], bool] | None = None
    """Asked before every decode step. True: what is unfinished ends there, with finish reason ``cancelled``."""


class Engine(Protocol):
    """Draws completions from the current policy."""

    def generate(
        self,
        prompts: Sequence[Prompt],
        num_generations: int,
        sampling: Sampling | Sequence[Sampling],
        key: RNGKey,
        watch: Watch | None = None,
    ) -> list[Group]:
        """``num_generations`` completions of each prompt, in the prompts' order.

        The same prompts, settings and key under the same weights give the same completions, whatever else is decoded
        beside them (up to the rounding of a differently shaped matrix product).

        Args:
            prompts: what to complete.
            num_generations: completions per prompt.
            sampling: one for all, or one per prompt.
            key: of the random numbers.
            watch: who wants to be told while it runs.
        """
        ...
