"""Sampling settings: what a completion is drawn with."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from cohort.config import RolloutConfig
from cohort.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Sampling:
    """Settings that a completion is drawn with. The model's own generation defaults are never read.

    They act on the logits in the order of transformers: repetition penalty, tokens forbidden by a grammar or the
    minimum length, temperature, top-k, top-p, min-p. The remaining probabilities are renormalised before the draw.

    Raises:
        ConfigError: a number is out of range, a stop string is empty, or two settings exclude each other.
    """

    max_completion_length: int
    """Maximum number of tokens after the prompt, forced tokens and tokens given by ``extend`` included."""
    temperature: float = 1.0
    """Divides the logits. 0: greedy; the likeliest token has probability 1."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion. They are searched for in drawn text only."""
    top_k: int = 0
    """Draw from the k likeliest tokens, and from tokens as likely as the k-th. 0: off."""
    top_p: float = 1.0
    """Draw from the smallest set of likeliest tokens whose probabilities reach p. 1: off."""
    min_p: float = 0.0
    """Draw from tokens whose probability is at least ``min_p`` times that of the likeliest token. 0: off."""
    repetition_penalty: float = 1.0
    """Divides positive logits and multiplies negative logits of tokens that the prompt or the completion contains
    (arXiv 1909.05858). 1: off."""
    min_completion_length: int = 0
    """Number of tokens before which no end token is drawn and no stop string ends the completion."""
    forced_ids: tuple[int, ...] = ()
    """Token ids that every completion begins with. They are given, not drawn."""
    regex: str | None = None
    """Regular expression that the whole text of a completion (of each turn, if there are several) matches, unless it is
    truncated."""
    json_schema: str | None = None
    """JSON schema, as JSON text. The completion (each turn) is JSON that it accepts, unless it is truncated."""
    record_support: bool = True
    """Record the tokens that each draw could have given (``Completion.support``), so that an update can compute
    log-probabilities over the same tokens."""
    max_turn_length: int | None = None
    """Maximum number of tokens drawn in one turn of a trajectory of several turns. None: no limit of its own."""

    def __post_init__(self) -> None:
        def check(holds: bool, name: str, expected: str) -> None:
            if not holds:
                raise ConfigError(f"{name} must be {expected}, got {getattr(self, name)!r}")

        most = self.max_completion_length
        longest = f"max_completion_length ({most})"
        check(most >= 1, "max_completion_length", "at least 1")
        check(0 <= self.temperature < math.inf, "temperature", "0 (greedy) or above")
        check(self.top_k >= 0, "top_k", "0 (off) or above")
        check(0 < self.top_p <= 1, "top_p", "above 0 and at most 1 (off)")
        check(0 <= self.min_p <= 1, "min_p", "between 0 (off) and 1")
        check(0 < self.repetition_penalty < math.inf, "repetition_penalty", "above 0; 1 is off")
        check(0 <= self.min_completion_length <= most, "min_completion_length", f"between 0 and {longest}")
        check(isinstance(self.stop, tuple) and all(self.stop), "stop", "a tuple of strings, none of them empty")
        check(len(self.forced_ids) <= most, "forced_ids", f"at most {longest} tokens")
        check(all(token >= 0 for token in self.forced_ids), "forced_ids", "token ids, none below 0")
        check(self.max_turn_length is None or self.max_turn_length >= 1, "max_turn_length", "None (off) or at least 1")
        if self.regex is not None and self.json_schema is not None:
            raise ConfigError("regex and json_schema exclude each other: set one of them")

    @classmethod
    def of(cls, config: RolloutConfig) -> Sampling:
        """The sampling settings of a run, for training and for evaluation."""
        same = {field.name: getattr(config, field.name) for field in fields(cls) if hasattr(config, field.name)}
        return cls(**same, record_support=config.replay_sampling)

    def describe(self) -> str:
        """All settings that a draw depends on, including those that are off.

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
        """Whether a draw can follow another distribution than the full softmax at the same temperature."""
        return self.truncates or self.repetition_penalty != 1

    @property
    def selects(self) -> bool:
        """Whether top-k, top-p, min-p or a grammar can leave tokens out of a draw that is not greedy."""
        limits = (self.top_k > 0, self.top_p < 1, self.min_p > 0)
        return self.temperature > 0 and (any(limits) or self.constrained)

    @property
    def truncates(self) -> bool:
        """Whether a draw can exclude tokens."""
        limits = (self.top_k > 0, self.top_p < 1, self.min_p > 0, self.min_completion_length > 0)
        return any(limits) or self.temperature == 0 or self.constrained

    @property
    def constrained(self) -> bool:
        """Whether a grammar restricts the draws."""
        return self.regex is not None or self.json_schema is not None
