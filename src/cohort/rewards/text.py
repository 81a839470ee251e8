"""Rewards that compare a completion's text with the row's, or with itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from cohort.rewards.builtin import completion_text, import_extra, whole_text


def exact_match(completion: Any, answer: Any, *, strip: bool = True, ignore_case: bool = False) -> float | None:
    r"""1 when the completion is the row's ``answer``, 0 otherwise.

    An answer that is not text is compared as Python writes it. A row without one cannot be scored: None.

    Args:
        strip: leave surrounding space out of both.
        ignore_case: compare without case.

    >>> exact_match(" blue\n", "blue"), exact_match("Blue", "blue")
    (1.0, 0.0)
    >>> exact_match("Blue", "blue", ignore_case=True)
    1.0
    """
    if answer is None:
        return None
    one, other = (_plain(text, strip, ignore_case) for text in (completion_text(completion), str(answer)))
    return float(one == other)


def fuzzy_match(completion: Any, answer: Any, *, strip: bool = True, ignore_case: bool = False) -> float | None:
    r"""How much of the completion and the row's ``answer`` is the same, from 0 to 1.

    2 M / T: M the length of the longest common subsequence, T the sum of both lengths, in characters. 1 where both are
    empty. The same in both directions. A row without an answer cannot be scored: None.

    Args:
        strip: leave surrounding space out of both.
        ignore_case: compare without case.

    >>> fuzzy_match("kitten", "sitting")  # i, t, t and n: 2 * 4 / 13
    0.6153846153846154
    """
    if answer is None:
        return None
    ratio = import_extra("rapidfuzz.fuzz", "fuzzy_match").ratio
    one, other = (_plain(text, strip, ignore_case) for text in (completion_text(completion), str(answer)))
    return float(ratio(one, other)) / 100


def _plain(text: str, strip: bool, ignore_case: bool) -> str:
    text = text.strip() if strip else text
    return text.casefold() if ignore_case else text


def repetition_penalty(
    completion: Any,
    completion_ids: Sequence[int] = (),
    *,
    ngram: Annotated[int, Field(gt=0)] = 3,
    max_penalty: Annotated[float, Field(le=0)] = -1.0,
    of: Literal["words", "tokens"] = "words",
) -> float:
    """A penalty for repeating oneself: the share of n-grams that were there before, times ``max_penalty``.

    max_penalty * (1 - different / all), over the n-grams of all that the assistant said. 0 where there are fewer words
    than one n-gram has.

    Args:
        ngram: how many words or tokens in a row are compared.
        max_penalty: at most 0.
        of: "words", parted by space, whatever their case; or "tokens", for languages that do not part words.

    >>> repetition_penalty("no no no no no no")  # one of four is new
    -0.75
    """
    items: Sequence[Any] = whole_text(completion).casefold().split() if of == "words" else completion_ids
    grams = [tuple(items[start : start + ngram]) for start in range(len(items) - ngram + 1)]
    repeated = len(grams) - len(set(grams))
    return max_penalty * (repeated / len(grams)) if repeated else 0.0
