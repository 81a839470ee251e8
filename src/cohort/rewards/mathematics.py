"""Rewards for answers to mathematical questions: GSM8K's, and any that computer algebra can compare."""

from __future__ import annotations

import logging
import math as _math
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache, partial
from typing import Any

from cohort.errors import RewardError
from cohort.rewards.answers import final_answer, is_prose, only_answer
from cohort.rewards.builtin import import_extra
from cohort.rewards.contract import reward
from cohort.rewards.messages import turn_text
from cohort.rewards.values import (
    Number,
    choice_of,
    cleaned,
    number_of,
    repeated,
    without_mark,
    without_symbols,
    words_of,
)

Log = Callable[[str, Any], None]

_FINAL = re.compile(r"####\s*+(?:\$\s*+)?([-+]?\$?[\d,]*\.?\d+)")

VERIFY_SECONDS = 20.0
"""What comparing one answer may take, the first import of computer algebra included. Most take under a millisecond."""


def final_number(text: str) -> Decimal | None:
    """The number after the last ``####`` of a text, thousands separators and a dollar sign left out; None without one.

    >>> final_number("so 1,200 in all.\\n#### $1,234.50"), final_number("#### -7"), final_number("1234")
    (Decimal('1234.50'), Decimal('-7'), None)
    """
    found = _FINAL.findall(text)
    return Decimal(found[-1].replace(",", "").replace("$", "")) if found else None


def gsm8k(completion: Any, answer: Any, prefill: str = "", log_extra: Log | None = None) -> float | None:
    """1 when the number after the last ``####`` equals the one after the answer's, 0 otherwise.

    The column ``answer`` is as GSM8K has it: worked steps that end in ``#### number``. Numbers are compared by value:
    ``#### 1,200.0`` equals ``#### 1200``. A row whose answer has no number cannot be scored: None. The completion's
    number is logged as the column ``answer``.

    >>> [gsm8k(text, "24+0\\n#### 24") for text in ("12*2=24\\n#### 24", "#### 25", "24")]
    [1.0, 0.0, 0.0]
    """
    gold = final_number(answer) if isinstance(answer, str) else None
    said = final_number(turn_text(completion, prefill))
    if log_extra:
        log_extra("answer", None if said is None else f"{said.normalize():f}")
    return None if gold is None else float(said == gold)


@reward(per="sample", isolated=True, timeout=VERIFY_SECONDS)
def math(
    completion: Any, answer: Any, prefill: str = "", log_extra: Log | None = None, *, marked: bool = False
) -> float | None:
    r"""1 when the completion's final answer equals the row's ``answer``, 0 otherwise.

    The final answer of a text is the content of its last ``\boxed{}`` or the rest of its last line after ``####``,
    whichever comes last; without them, what follows the last "answer is" or "answer:", up to the first ordinary word;
    without any of these, the whole of a text that is nothing but an answer, else the last formula or number. What the
    prompt holds of the assistant's turn is part of the text. ``answer`` is such a text, or the bare answer, or a
    number.

    Two numbers are compared exactly: decimals, fractions, mixed numbers, ``1.5 \times 10^3``, thousands separators.
    Money signs, degrees and units after a number are left out, so units are not compared. "50%" equals 1/2 and 50. A
    decimal of six places or more equals what it is the rounding of. A base (``2516_8``), "am" or "pm" and a direction
    are compared where both answers name one. Two answers in words are compared as words, in whatever case. Of a choice
    with its letter, ``\textbf{(B)} 12``, the one counts that the row's answer is. Anything else (roots, sets,
    intervals, equations, matrices) is compared by math-verify, lists with how often each of them stands there. An
    answer far longer than the row's is wrong.

    The answer, in one form for all that are written alike, is logged as the column ``answer``.

    A row whose ``answer`` cannot be read cannot be scored: None. Each call is made in a worker process, which is killed
    after 20 seconds: such a completion is unscored too. Called directly, it sets no alarm and has no time limit.

    Args:
        marked: only answers in ``\boxed{}``, after ``####`` or after "answer is" count.

    >>> (
    ...     math(r"Half of it is \boxed{\frac{3}{4}}.", "0.75"),
    ...     math("So 3 + 4 = 7.", 7),
    ...     math("So 3 + 4 = 7.", 7, marked=True),
    ... )
    (1.0, 1.0, 0.0)
    """
    return _scored(turn_text(completion, prefill), answer, log_extra, marked=marked)


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
    """As ``math``, for what follows the reasoning alone; 0 where the reasoning never ended.

    Args:
        end: what ends the reasoning; the last one counts. It may stand in the prompt, where that begins the turn.
        marked: as in ``math``.

    >>> texts = "It is 7.</think>So 8.", "It is 8.</think>So 7.", "So 7."
    >>> [reasoning_answer(text, 7) for text in texts]
    [0.0, 1.0, 0.0]
    """
    _, ended, after = turn_text(completion, prefill).rpartition(end)
    return _scored(after if ended else "", answer, log_extra, marked=marked)


def _scored(text: str, answer: Any, log_extra: Log | None, *, marked: bool) -> float | None:
    gold = read_gold(answer)
    said = final_answer(text, marked=marked)
    if gold is not None and not marked and _form(text) == (gold.text, gold.mark):
        said = text  # "July 4" is the answer, and not 4
    if gold is None or said is None:
        if log_extra:
            log_extra("answer", None if said is None else cleaned(said))
        return None if gold is None else 0.0
    found = read_answer(said, gold)
    if log_extra:
        log_extra("answer", None if found is None else found.canonical())
    return float(found is not None and _equal(gold, found))


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer that was read: a number, words, or what math-verify made of it."""

    text: str
    number: Number | None = None
    words: str | None = None
    parsed: Any = None
    mark: str | None = None
    """What tells it from others and is no unit: a base, "am" or "pm", a direction."""
    choice: str | None = None
    """Of a row's answer: the letter that stands before it."""

    def canonical(self) -> str:
        """The same text for answers that are equal by simple arithmetic."""
        simple = self.words if self.number is None else str(self.number.value)
        if simple is not None:
            return f"{simple} {self.mark or ''}".strip()
        try:
            return str(self.parsed.doit())
        except Exception:  # whatever algebra cannot do, the text is still an answer
            return self.text


def read_gold(answer: Any) -> Answer | None:
    r"""A row's answer: of a text with a mark, as ``####`` is one, what is marked; of a sentence, its only formula or
    number; else the whole of it. None where it cannot be read, as in a sentence with several numbers.

    Raises:
        RewardError: it is neither text nor a number.

    >>> read_gold("7+1=8\n#### 8").text, read_gold(0.5).text, read_gold(None)
    ('8', '0.5', None)
    """
    if answer is None or (isinstance(answer, float) and not _math.isfinite(answer)):
        return None
    if isinstance(answer, bool) or not isinstance(answer, str | int | float | Decimal):
        raise RewardError(f"the column 'answer' must hold text or numbers, got {answer!r:.60}")
    return _read_gold(str(answer))


@lru_cache(maxsize=1024)  # the completions of a group have one
def _read_gold(answer: str) -> Answer | None:
    said = final_answer(answer, marked=True) or (only_answer(answer) if is_prose(answer) else answer)
    if said is None:
        return None
    choice, said = choice_of(said)
    return _read(said, choice)


def read_answer(said: str, gold: Answer) -> Answer | None:
    """A completion's answer, read as the gold is written: where that is no equation, its right side counts."""
    if len(said) > 500 + 10 * len(gold.text):
        return None
    choice, rest = choice_of(said)
    said = choice if choice and (gold.choice or _is_letter(gold)) else rest
    if _equation(said) and not _equation(gold.text):
        said = said.replace("\\approx", "=").replace("≈", "=").rpartition("=")[2]
    form, mark = _form(said)
    asked_for_a_number = gold.number is not None and number_of(form) is None and not mark
    return _read(without_symbols(said) if asked_for_a_number else said)


def _is_letter(answer: Answer) -> bool:
    return answer.words is not None and len(answer.words) == 1


def _equation(text: str) -> bool:
    """Whether it is one equation, as in "x = 5" or "3 + 4 = 7", and not a list or an inequality."""
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", cleaned(text))
    return "=" in text and not re.search(r"[,;<>!]|\\[lg]e|\\neq|\b(?:and|or)\b", text)


def _form(said: str) -> tuple[str, str | None]:
    """A text without what does not change its value, and its mark."""
    rest, mark = without_mark(said)
    return cleaned(rest), mark


def _read(said: str, choice: str | None = None) -> Answer | None:
    text, mark = _form(said)
    if not text:
        return None
    read = partial(Answer, text, mark=mark, choice=choice)
    if (number := number_of(text)) is not None:
        return read(number=number)
    digits = text if mark and re.fullmatch(r"[\w:.]+", text) else None  # 1A3 in base 16 is no product, 2:30 pm no ratio
    if (words := digits or words_of(said)) is not None:
        return read(words=words)
    parsed = _parsed(text)
    return None if parsed is None else read(parsed=parsed)


def _equal(gold: Answer, found: Answer) -> bool:
    if gold.choice is not None and _is_letter(found):
        return gold.choice.casefold() == found.words
    if gold.mark and found.mark and gold.mark != found.mark:
        return False
    if gold.text == found.text:
        return True
    if gold.number is not None and found.number is not None:
        return gold.number.equals(found.number)
    if gold.words is not None and found.words is not None:
        return gold.words == found.words
    right_side = gold.text.rpartition("=")[2] if _equation(gold.text) and not _equation(found.text) else None
    if right_side is not None and found.number is not None and (number := number_of(right_side)) is not None:
        return number.equals(found.number)
    if repeated(gold.text) != repeated(found.text):  # math-verify reads a list as a set
        return False
    verify = _math_verify().verify
    return bool(verify(_algebra(gold), _algebra(found), allow_set_relation_comp=True, timeout_seconds=None))


def _algebra(answer: Answer) -> Any:
    return answer.parsed if answer.parsed is not None else _parsed(answer.text)


def _parsed(text: str) -> Any:
    """What math-verify reads in an answer's text; None if nothing."""
    library = _math_verify()
    results = library.parse(
        f"\\boxed{{{text}}}",
        extraction_config=[library.LatexExtractionConfig(boxed_match_priority=0)],
        fallback_mode="no_fallback",
        parsing_timeout=None,  # its alarm can only be set in a main thread; the worker that this runs in has a limit
    )
    return results[0] if results else None


def _math_verify() -> Any:
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no timeout, which is on purpose
    return import_extra("math_verify", "math")
