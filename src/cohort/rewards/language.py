"""A reward for the language of a completion."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from cohort.rewards.builtin import import_extra
from cohort.rewards.messages import whole_text

_NOT_LANGUAGE = re.compile(
    r"```.*?(?:```|\Z)|`[^`\n]*`|\$\$.*?\$\$|\\\[(?:(?!\\\[).)*?\\\]|\\\((?:(?!\\\().)*?\\\)|\$[^$\n]+\$|\\[A-Za-z]+|https?://\S+|<[^<>\s]+>",
    re.DOTALL,
)
_SENTENCE_END = re.compile(r"(?<=[.!?;:])\s+|(?<=[。!?;])|\n+")


@lru_cache(maxsize=1)
def _identifier() -> Any:
    module = import_extra("py3langid.langid", "language")
    return module.LanguageIdentifier.from_model_file(module.MODEL_FILE)


def _known(code: str) -> str:
    labels = _identifier().labels
    if code not in labels:
        raise ValueError(f"unknown language code; supported: {', '.join(sorted(labels))}")
    return code


def language(
    completion: Any,
    *,
    code: Annotated[str, AfterValidator(_known)] = "en",
    min_letters: Annotated[int, Field(gt=0)] = 20,
) -> float | None:
    """The share of a completion that is written in a language, from 0 to 1.

    The text of all assistant messages is split into sentences, and the most likely language of each is determined. The
    share is that of letters in sentences of the requested language. Formulas, code, tags and URLs are ignored. A text
    with fewer letters than ``min_letters`` is unscored: None.

    Args:
        code: ISO 639 code of the language, such as "en", "de" or "zh".
        min_letters: number of letters needed to determine a language. Shorter sentences are joined until they have
            that many.

    >>> language("The train leaves at noon and arrives before the shops close."), language("Ja.")
    (1.0, None)
    """
    pieces = _pieces(_NOT_LANGUAGE.sub(" ", whole_text(completion)), min_letters)
    letters = [_letters(piece) for piece in pieces]
    if sum(letters) < min_letters:
        return None
    found = [_identifier().classify(piece)[0] for piece in pieces]
    return sum(n for n, label in zip(letters, found, strict=True) if label == code) / sum(letters)


def _pieces(text: str, min_letters: int) -> list[str]:
    """The sentences of a text, joined until each piece has enough letters. The rest is added to the last piece."""
    pieces: list[str] = []
    piece, letters = [""], 0
    for sentence in _SENTENCE_END.split(text):
        piece.append(sentence)
        letters += _letters(sentence)
        if letters >= min_letters:
            pieces.append(" ".join(piece))
            piece, letters = [""], 0
    rest = " ".join(piece)
    return [*pieces[:-1], pieces[-1] + rest] if pieces else [rest]


def _letters(text: str) -> int:
    return sum(character.isalpha() for character in text)
