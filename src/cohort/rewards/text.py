"""Rewards that compare the text of a completion with the answer of the row, or with itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from cohort.rewards.builtin import import_extra
from cohort.rewards.messages import completion_text, whole_text


def exact_match(completion: Any, answer: Any, *, strip: bool = True, ignore_case: bool = False) -> float | None:
    r"""1 if the completion equals the row's ``answer``, 0 otherwise.

    An answer that is not text is converted by ``str``. Without an answer the completion is unscored: None.

    Args:
        strip: remove surrounding whitespace from both texts.
        ignore_case: compare without case.

    >>> exact_match(" blue\n", "blue"), exact_match("Blue", "blue")
    (1.0, 0.0)
    >>> exact_match("Blue", "blue", ignore_case=True)
    1.0
    """
    if answer is None:
        return None
    return float(
        _normalized(completion_text(completion), strip, ignore_case) == _normalized(str(answer), strip, ignore_case)
    )


def fuzzy_match(completion: Any, answer: Any, *, strip: bool = True, ignore_case: bool = False) -> float | None:
    r"""The similarity of the completion and the row's ``answer``, from 0 to 1.

    2 M / T, where M is the length of the longest common subsequence and T the sum of both lengths, in characters. 1 if
    both are empty. Symmetric. Without an answer the completion is unscored: None.

    Args:
        strip: remove surrounding whitespace from both texts.
        ignore_case: compare without case.

    >>> fuzzy_match("kitten", "sitting")  # i, t, t and n: 2 * 4 / 13
    0.6153846153846154
    """
    if answer is None:
        return None
    ratio = import_extra("rapidfuzz.fuzz", "fuzzy_match").ratio
    texts = (_normalized(text, strip, ignore_case) for text in (completion_text(completion), str(answer)))
    return float(ratio(*texts)) / 100


def _normalized(text: str, strip: bool, ignore_case: bool) -> str:
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
    """A penalty for repetition: the share of repeated n-grams, times ``max_penalty``.

    max_penalty * (1 - distinct / all), over the n-grams of all assistant messages. 0 if the text is shorter than one
    n-gram.

    Args:
        ngram: number of consecutive words or tokens that are compared.
        max_penalty: at most 0.
        of: "words", separated by whitespace and compared without case; or "tokens", for languages that do not separate
            words.

    >>> repetition_penalty("no no no no no no")  # 4 trigrams, 1 of them distinct
    -0.75
    """
    items: Sequence[Any] = whole_text(completion).casefold().split() if of == "words" else completion_ids
    grams = [tuple(items[start : start + ngram]) for start in range(len(items) - ngram + 1)]
    repeated = len(grams) - len(set(grams))
    return max_penalty * (repeated / len(grams)) if repeated else 0.0
