"""Detection of stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\ufffd"
"""What tokenizers decode an incomplete character to."""


class StopStrings:
    """Looks for stop strings in the newest text of a completion.

    Args:
        tokenizer: decodes. Special tokens are decoded to their text, so they can be stop strings.
        stops: the strings, none of them empty.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        # A token has at least one byte, so a stop string of n bytes is in the last n tokens. A few more are decoded,
        # because the first tokens of a text may lose a space or be part of a character.
        self.tail = max((len(stop.encode()) for stop in stops), default=0) + 4
        """Number of newest tokens that are decoded."""
        self._may_end: dict[int, bool] = {}

    def found(self, token_ids: Sequence[int]) -> bool:
        """Whether the newest token completed a stop string."""
        if not self._stops or not self._can_complete(token_ids[-1]):
            return False
        before, text = self._decode(token_ids[-self.tail : -1]), self._decode(token_ids[-self.tail :])
        same = next((n for n, pair in enumerate(zip(before, text, strict=False)) if pair[0] != pair[1]), len(before))
        # A stop string in the text before was ignored then, because the completion was too short to end.
        return any(text.find(stop, max(0, same - len(stop) + 1)) >= 0 for stop in self._stops)

    def _can_complete(self, token: int) -> bool:
        """Whether the token may contain the last character of a stop string. Most cannot, which saves decoding."""
        if token not in self._may_end:
            text = self._decode([token])
            # A token decoded alone can lose a leading space, and may be an incomplete character.
            last = {stop[-1] for stop in self._stops}
            unclear = not text or REPLACEMENT in text or any(character.isspace() for character in last)
            self._may_end[token] = unclear or any(character in text for character in last)
        return self._may_end[token]

    def _decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text
