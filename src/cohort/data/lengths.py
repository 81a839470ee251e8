"""How long prompts may be, and what becomes of those that are longer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cohort.config import DataConfig
from cohort.errors import DataError


@dataclass(frozen=True, slots=True)
class LengthLimit:
    """The most tokens of a prompt."""

    tokens: int
    why: str
    """Where the number comes from."""
    rule: str = "error"
    """``data.overlong_prompts``."""

    @classmethod
    def of(
        cls,
        config: DataConfig,
        context: int | None,
        max_completion_length: int,
        setting: str = "rollout.max_completion_length",
    ) -> LengthLimit | None:
        """The smaller of ``data.max_prompt_length`` and what the context leaves beside a whole completion; None where
        there is neither.

        Args:
            config: the settings.
            context: the model's; None: it is not known.
            max_completion_length: of a completion.
            setting: which setting says so.

        Raises:
            DataError: a completion alone fills the context.
        """
        limits = []
        if config.max_prompt_length is not None:
            limits.append(cls(config.max_prompt_length, "data.max_prompt_length", config.overlong_prompts))
        if context is not None:
            if context <= max_completion_length:
                raise DataError(
                    f"{setting} ({max_completion_length:,}) leaves no room for a prompt in the "
                    f"model's context of {context:,} tokens: lower it"
                )
            why = f"the model's context of {context:,} less {setting}, {max_completion_length:,}"
            limits.append(cls(context - max_completion_length, why, config.overlong_prompts))
        return min(limits, key=lambda limit: limit.tokens, default=None)

    def check(self, count: int, total: int, longest: str, length: int, name: str) -> None:
        """Raise where the rule is "error".

        Args:
            count, total: how many of how many prompts are too long.
            longest, length: the longest one's row, and its tokens.
            name: what the data is called.

        Raises:
            DataError: some are too long.
        """
        if not count or self.rule != "error":
            return
        raiser = "raise data.max_prompt_length" if "max_prompt" in self.why else "lower rollout.max_completion_length"
        raise DataError(
            f"{name}: {count:,} of {total:,} prompts have more than {self.tokens:,} tokens ({self.why}); the longest, "
            f"{longest}, has {length:,}. Either {raiser}, or set data.overlong_prompts to 'drop', which leaves such "
            "rows out, or to 'truncate_left', which keeps the last tokens of such prompts"
        )


def spread(lengths: np.ndarray) -> tuple[int, int, int, int]:
    """The least, the median, the 99th percentile and the greatest; a percentile is the least length that so large a
    share does not exceed.

    >>> spread(np.array([3, 5, 1000]))
    (3, 5, 1000, 1000)
    """
    ordered = np.sort(lengths)
    median, most = (int(ordered[-(-len(ordered) * percent // 100) - 1]) for percent in (50, 99))
    return int(ordered[0]), median, most, int(ordered[-1])


def describe_lengths(lengths: np.ndarray) -> str:
    """The spread of lengths in words."""
    least, median, most, greatest = spread(lengths)
    return f"{least:,} to {greatest:,} tokens, median {median:,}, 99% at most {most:,}"
