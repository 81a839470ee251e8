"""Rewards for answers to mathematical questions: GSM8K's, and any that computer algebra can compare."""

from __future__ import annotations

import logging
import math as _math
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Any

from cohort.errors import RewardError
from cohort.rewards.answers import final_answer, is_prose, only_answer
from cohort.rewards.contract import reward
from cohort.rewards.messages import turn_text
from cohort.rewards.names import import_extra
from cohort.rewards.values import (
    Number,
    cleaned,
    number_of,
    repeated_items,
    split_choice,
    split_qualifier,
    without_unit_symbols,
    words_of,
)

Log = Callable[[str, Any], None]
_FINAL_NUMBER = re.compile(r"####\s*+(?:\$\s*+)?([-+]?\$?[\d,]*\.?\d+)")
VERIFY_SECONDS = 20.0
"""Time limit for comparing one answer, including the first import of computer algebra. Most take less than 1 ms."""


def final_number(text: str) -> Decimal | None:
    """The number after the last ``####`` of a text, without thousands separators and dollar sign; None without one.

    >>> final_number("so 1,200 in all.\\n#### $1,234.50"), final_number("#### -7"), final_number("1234")
    (Decimal('1234.50'), Decimal('-7'), None)
    """
    found = _FINAL_NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "").replace("$", "")) if found else None


def gsm8k(completion: Any, answer: Any, prefill: str = "", log_extra: Log | None = None) -> float | None:
    """1 if the number after the last ``####`` equals that of the row's ``answer``, 0 otherwise.

    The column ``answer`` is as in GSM8K: a worked solution that ends in ``#### number``. Numbers are compared by value:
    ``#### 1,200.0`` equals ``#### 1200``. If ``answer`` has no number, the completion is unscored: None. The number of
    the completion is logged as the column ``answer``.

    >>> [gsm8k(text, "24+0\\n#### 24") for text in ("12*2=24\\n#### 24", "#### 25", "24")]
    [1.0, 0.0, 0.0]
    """
    gold = final_number(answer) if isinstance(answer, str) else None
    found = final_number(turn_text(completion, prefill))
    if log_extra:
        log_extra("answer", None if found is None else f"{found.normalize():f}")
    return None if gold is None else float(found == gold)


@reward(per="sample", isolated=True, timeout=VERIFY_SECONDS)
def math(
    completion: Any, answer: Any, prefill: str = "", log_extra: Log | None = None, *, marked: bool = False
) -> float | None:
    r"""1 if the final answer of the completion equals the row's ``answer``, 0 otherwise.

    The final answer is the content of the last ``\boxed{}`` or the rest of the last line after ``####``, whichever
    comes last; without them, the text after the last "answer is" or "answer:", up to the first ordinary word; otherwise
    the whole text, if it is nothing but an answer, or its last formula or number. The prefill from the prompt is part
    of the text. ``answer`` is such a text, a bare answer, or a number.

    Two numbers are compared exactly: decimals, fractions, mixed numbers, ``1.5 \times 10^3``, thousands separators.
    Currency, degrees and units after a number are ignored. "50%" equals 1/2 and 50. A decimal with at least six places
    equals any number that rounds to it. A base (``2516_8``), "am" or "pm", and a direction are compared if both answers
    have one. Two answers in words are compared as words, ignoring case. For multiple choice with the text of the
    option, as in ``\textbf{(B)} 12``, the letter or the text counts, depending on the row's answer. All other answers
    (roots, sets, intervals, equations, matrices) are compared by math-verify; lists must also repeat the same items. An
    answer that is far longer than the row's is wrong.

    The answer is logged as the column ``answer``, in the same form for all ways of writing it.

    If ``answer`` cannot be read, the completion is unscored: None. Each call runs in a worker process that is killed
    after 20 seconds; the completion is then unscored. A direct call has no time limit.

    Args:
        marked: only accept answers in ``\boxed{}``, after ``####`` or after "answer is".

    >>> (
    ...     math(r"Half of it is \boxed{\frac{3}{4}}.", "0.75"),
    ...     math("So 3 + 4 = 7.", 7),
    ...     math("So 3 + 4 = 7.", 7, marked=True),
    ... )
    (1.0, 1.0, 0.0)
    """
    return _score(turn_text(completion, prefill), answer, log_extra, marked=marked)


@reward(per="sample", isolated=True, timeout=VERIFY_SECONDS)
def reasoning_answer(
    completion: Any,
    answer: Any,
    prefill: str = "",
    log_extra: Log | None = None,
    *,
    end: str = "</think>",
    marked: bool = False,
) -> float | None:
    """Like ``math``, for the text after the reasoning; 0 if the reasoning has no end.

    Args:
        end: the end of the reasoning; its last occurrence counts. It may be part of the prefill from the prompt.
        marked: as in ``math``.

    >>> texts = "It is 7.</think>So 8.", "It is 8.</think>So 7.", "So 7."
    >>> [reasoning_answer(text, 7) for text in texts]
    [0.0, 1.0, 0.0]
    """
    _, ended, after = turn_text(completion, prefill).rpartition(end)
    return _score(after if ended else "", answer, log_extra, marked=marked)


def _score(text: str, answer: Any, log_extra: Log | None, *, marked: bool) -> float | None:
    gold = read_gold(answer)
    found = final_answer(text, marked=marked)
    if gold is not None and not marked and _split(text) == (gold.text, gold.qualifier):
        found = text  # the answer is "July 4", not 4
    parsed = read_answer(found, gold) if gold is not None and found is not None else None
    if log_extra:
        as_text = cleaned(found) if gold is None and found is not None else None
        log_extra("answer", as_text if parsed is None else parsed.canonical())
    return None if gold is None else float(parsed is not None and _equal(gold, parsed))


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer as a number, as words, or as parsed by math-verify."""

    text: str
    number: Number | None = None
    words: str | None = None
    algebra: Any = None
    """The expression that math-verify parsed."""
    qualifier: str | None = None
    """A base, "am" or "pm", or a direction."""
    choice: str | None = None
    """The letter before the text of an option, of a row's answer."""

    @property
    def is_letter(self) -> bool:
        """Whether the answer is a letter alone."""
        return self.words is not None and len(self.words) == 1

    def canonical(self) -> str:
        """The same text for all answers that simple arithmetic shows to be equal."""
        simple = self.words if self.number is None else str(self.number.value)
        if simple is not None:
            return f"{simple} {self.qualifier or ''}".strip()
        try:
            return str(self.algebra.doit())
        except Exception:  # algebra may fail in many ways
            return self.text


def read_gold(answer: Any) -> Answer | None:
    r"""Read a row's answer: the marked part of a text with a mark such as ``####``; the only formula or number of a
    sentence; otherwise the whole text. None if it cannot be read, such as a sentence with several numbers.

    Raises:
        RewardError: the answer is neither text nor a number.

    >>> read_gold("7+1=8\n#### 8").text, read_gold(0.5).text, read_gold(None)
    ('8', '0.5', None)
    """
    if answer is None or (isinstance(answer, float) and not _math.isfinite(answer)):
        return None
    if isinstance(answer, bool) or not isinstance(answer, str | int | float | Decimal):
        raise RewardError(f"the column 'answer' must hold text or numbers, got {answer!r:.60}")
    return _read_gold(str(answer))


@lru_cache(maxsize=1024)  # all completions of a group have the same row
def _read_gold(answer: str) -> Answer | None:
    found = final_answer(answer, marked=True) or (only_answer(answer) if is_prose(answer) else answer)
    if found is None:
        return None
    choice, text = split_choice(found)
    return _read(text, choice)


def read_answer(text: str, gold: Answer) -> Answer | None:
    """Read a completion's answer in the form of the row's: of an equation, the right side if the row's has none."""
    if len(text) > 500 + 10 * len(gold.text):
        return None
    choice, rest = split_choice(text)
    text = choice if choice and (gold.choice or gold.is_letter) else rest
    if _is_equation(text) and not _is_equation(gold.text):
        text = text.replace("\\approx", "=").replace("≈", "=").rpartition("=")[2]
    plain, qualifier = _split(text)
    number_expected = gold.number is not None and number_of(plain) is None and not qualifier
    return _read(without_unit_symbols(text) if number_expected else text)


def _is_equation(text: str) -> bool:
    """Whether a text is one equation, such as "x = 5" or "3 + 4 = 7", not a list or an inequality."""
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", cleaned(text))
    return "=" in text and not re.search(r"[,;<>!]|\\[lg]e|\\neq|\b(?:and|or)\b", text)


def _split(text: str) -> tuple[str, str | None]:
    """A cleaned answer without its qualifier, and the qualifier."""
    rest, qualifier = split_qualifier(text)
    return cleaned(rest), qualifier


def _read(written: str, choice: str | None = None) -> Answer | None:
    text, qualifier = _split(written)
    number = number_of(text)
    words = algebra = None
    if number is None:
        # With a qualifier, digits are no formula: 1A3 in base 16 is no product, and 2:30 pm is no ratio.
        words = text if qualifier and re.fullmatch(r"[\w:.]+", text) else words_of(written)
        algebra = _parse(text) if text and words is None else None
        if not text or (words is None and algebra is None):
            return None
    return Answer(text, number, words, algebra, qualifier, choice)


def _equal(gold: Answer, found: Answer) -> bool:
    if gold.choice is not None and found.is_letter:
        return gold.choice.casefold() == found.words
    if gold.qualifier and found.qualifier and gold.qualifier != found.qualifier:
        return False
    if gold.text == found.text:
        return True
    if gold.number is not None and found.number is not None:
        return gold.number.equals(found.number)
    if gold.words is not None and found.words is not None:
        return gold.words == found.words
    right_side = number_of(gold.text.rpartition("=")[2])
    if found.number and right_side and _is_equation(gold.text) and not _is_equation(found.text):
        return right_side.equals(found.number)
    if repeated_items(gold.text) != repeated_items(found.text):  # math-verify reads a list as a set
        return False
    gold_algebra, found_algebra = (_parse(a.text) if a.algebra is None else a.algebra for a in (gold, found))
    verify = _math_verify().verify
    return bool(verify(gold_algebra, found_algebra, allow_set_relation_comp=True, timeout_seconds=None))


def _parse(text: str) -> Any:
    """The expression that math-verify reads in the text of an answer; None if it reads nothing."""
    library = _math_verify()
    results = library.parse(
        f"\\boxed{{{text}}}",
        extraction_config=[library.LatexExtractionConfig(boxed_match_priority=0)],
        fallback_mode="no_fallback",
        parsing_timeout=None,  # its alarm works in a main thread only; the worker process has a time limit
    )
    return results[0] if results else None


def _math_verify() -> Any:
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns about the missing timeout
    return import_extra("math_verify", "math")
