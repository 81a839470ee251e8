"""Rewards for answers to mathematical questions: GSM8K's, and any that computer algebra can compare."""

from __future__ import annotations

import logging
import math as _math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any

from cohort.errors import RewardError
from cohort.rewards.contract import reward
from cohort.rewards.messages import turn_text
from cohort.rewards.names import import_extra

# ----------------------------------------
# The value of an answer without computer algebra: an exact number, or words.


_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_DIGITS = r"(?:\d{1,3}(?:[, ]\d{3})+(?!\d)|\d+)"
DECIMAL = rf"(?:{_DIGITS}(?:\.\d*)?|\.\d+)"
"""Pattern of a decimal without sign, thousands separators allowed."""

MATH_WORDS = frozenset(
    """pi sqrt infinity inf and or mod sin cos tan log ln exp min max alpha beta gamma delta theta phi omega lambda
    mu""".split()  # noqa: SIM905
)
"""Words that have a meaning in formulas, and so are not units."""


@dataclass(frozen=True, slots=True)
class Number:
    """A number as it was written."""

    value: Fraction
    """1/2 for "50%"."""
    percent: bool = False
    places: int | None = None
    """Digits after the decimal point; None if it was not written as a decimal."""

    def equals(self, other: Number) -> bool:
        """Whether both numbers have the same value.

        Exact, with two exceptions: "50%" equals 1/2 and also 50; and a decimal with at least six places and six
        significant digits equals every number that rounds to it, as 0.333333 equals 1/3.

        >>> Number(Fraction(1, 2), percent=True).equals(Number(Fraction(50)))
        True
        """
        if self.value == other.value:
            return True
        if self.percent != other.percent:
            return self.value * (100 if self.percent else 1) == other.value * (100 if other.percent else 1)
        return self._rounds(other) or other._rounds(self)

    def _rounds(self, exact: Number) -> bool:
        """Whether this is a decimal with enough digits, and the rounding of another number."""
        if self.places is None or self.places < 6 or abs(self.value) * 10**self.places < 10**5:
            return False
        return round(exact.value, self.places) == self.value


_SCALES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_WITH_UNIT = re.compile(
    r"(?P<sign>[-+]?)\s*(?P<body>.*?[\d}.)])\s*(?P<percent>%)?(?P<unit>(?:\s+[A-Za-z]{2,}(?:\^\{?\d\}?)?\.?)*)",
    re.DOTALL,
)


def _fraction(digits: str) -> Fraction:
    return Fraction(digits.replace(",", "").replace(" ", "").rstrip("."))


def _power(exponent: str) -> Fraction:
    return Fraction(10) ** int(exponent)


def _repeating(whole: str, once: str, again: str) -> Fraction:
    r"""``0.1\overline{6}`` is 0.1 + 6/90."""
    return Fraction(f"{whole or 0}.{once or 0}") + Fraction(int(again), (10 ** len(again) - 1) * 10 ** len(once))


_ARGUMENT = r"\s*(?:\{{\s*([-+]?{0})\s*\}}|(\d))"  # of \frac: in braces, or one digit
_EXPONENT = r"10\s*\^\s*(?:\{\s*([-+]?\d{1,3})\s*\}|([-+]?\d{1,3}))"
_FORMS: tuple[tuple[re.Pattern[str], Callable[..., Fraction]], ...] = tuple(
    (re.compile(pattern), value)
    for pattern, value in (
        (rf"({DECIMAL})", _fraction),
        (r"(\d+)\s+(\d+)\s*/\s*(\d+)", lambda a, b, c: _fraction(a) + _fraction(b) / _fraction(c)),  # not 2 113 over 7
        (rf"({DECIMAL})\s*/\s*({DECIMAL})", lambda a, b: _fraction(a) / _fraction(b)),
        (r"\\frac" + 2 * _ARGUMENT.format(DECIMAL), lambda a, b: _fraction(a) / _fraction(b)),
        (r"(\d+)\s*\\frac" + 2 * _ARGUMENT.format(r"\d+"), lambda a, b, c: _fraction(a) + _fraction(b) / _fraction(c)),
        (rf"({DECIMAL})[eE]([-+]?\d{{1,3}})", lambda a, b: _fraction(a) * _power(b)),
        (rf"({DECIMAL})\s*(?:\\times|\\cdot|\u00d7|\*)\s*{_EXPONENT}", lambda a, b: _fraction(a) * _power(b)),
        (_EXPONENT, _power),
        (r"(\d*)\.(\d*)\\(?:overline|bar)\s*\{(\d+)\}", _repeating),
    )
)
"""Every way of writing an unsigned number, with the function that computes its value."""


def number_of(text: str) -> Number | None:
    r"""The exact value of a text that is one number; None for anything else.

    Reads decimals with thousands separators or repeating digits; fractions and mixed numbers, also in LaTeX; scientific
    notation with exponents of up to three digits; signs, currency, percent and degrees; and words for a unit or scale
    after the number. Units are ignored.

    >>> texts = ["$1,234.50", r"1\frac{1}{2}", "-3/4", "50%", r"1.5 \times 10^3", "2 million cars"]
    >>> [str(number_of(text).value) for text in texts]
    ['2469/2', '3/2', '-3/4', '1/2', '1500', '2000000']
    >>> number_of("2 pi"), number_of("5 or 6"), number_of("2x")
    (None, None, None)
    """
    found = _WITH_UNIT.fullmatch(cleaned(text)) if len(text) <= 1000 else None
    if found is None:
        return None
    words = [word.strip(".").lower() for word in found["unit"].split()]
    value = None if MATH_WORDS.intersection(words) else _unsigned(found["body"])
    if value is None:
        return None
    value *= -_scale(found["unit"]) if found["sign"] == "-" else _scale(found["unit"])
    if found["percent"] or words[:1] in (["percent"], ["pct"]):
        return Number(value / 100, percent=True)
    whole, point, digits = found["body"].partition(".")
    is_decimal = point and (whole + digits).replace(",", "").isdigit() and _scale(found["unit"]) == 1
    return Number(value, places=len(digits) if is_decimal else None)


def _unsigned(body: str) -> Fraction | None:
    for pattern, value in _FORMS:
        if found := pattern.fullmatch(body):
            try:
                return value(*(group for group in found.groups() if group is not None))
            except (ZeroDivisionError, ValueError):  # 1/0, or more digits than Python converts
                return None
    return None


def _scale(unit: str) -> int:
    return _SCALES.get((unit.lower().split() or [""])[0], 1)


_SYMBOLS = str.maketrans(
    dict.fromkeys("·⋅∙", r"\cdot ")
    | dict.fromkeys("\u2212\u2013", "-")
    | dict.fromkeys("\u00a0\u202f\u2009", " ")
    | {"∞": r"\infty ", "\u222a": r"\cup ", "∅": r"\emptyset "}
)
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻₀₁₂₃₄₅₆₇₈₉", "0123456789+-0123456789")
_REPLACED = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\[dtc]frac", r"\\frac"),
        (r"\\(?:left|right)(?![A-Za-z])|\\displaystyle|\\[!,;:]|\\\$|[$£€¥]", ""),
        (r"\{\s*,\s*\}", ","),
        (r"\\ |\\q?quad(?![A-Za-z])|~", " "),
        (r"\\%|\\text\s*\{\s*(?:%|\\%|percent)\s*\}", "%"),
        (r"\^\s*+(?:\{\s*+)?\\circ\s*\}?|\\degree|°", ""),
        (r"\\approx|≈", "="),
        (r"\\varnothing", r"\\emptyset"),
    )
)
IN_TEXT = re.compile(r"\\(?:text\w*|mathrm|mbox)\s*\{([^{}]*)\}")
r"""Text within a formula, such as ``\text{cm}``."""
_WRAPPED = re.compile(r"\\(?:text\w*|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_UNIT = re.compile(rf"(?<=[\d}}%)\s]){IN_TEXT.pattern}(?:\^\{{?\d\}}?)?$")


def cleaned(text: str) -> str:
    r"""An answer without the parts that do not affect its value: currency, spacing, degrees, units in ``\text``.

    >>> cleaned(r"$\left(\dfrac{1}{2}\right)$."), cleaned(r"12\,\text{cm}^2"), cleaned(r"\text{Monday}")
    ('(\\frac{1}{2})', '12', 'Monday')
    """
    text = _normalized(text)
    if whole := _WRAPPED.fullmatch(text):
        return whole[1].strip()
    return _UNIT.sub(lambda unit: f" {unit[1]}" if _scale(unit[1]) > 1 else "", text).strip() or text


def _normalized(text: str) -> str:
    text = text.strip().strip("*`\"'").strip()
    text = text if text.isascii() else _unicode_to_latex(text)
    for pattern, replacement in _REPLACED:
        text = pattern.sub(replacement, text)
    return text.strip().removesuffix(".").strip()


def _unicode_to_latex(text: str) -> str:
    """x² becomes ``x^{2}``, √2 becomes ``\\sqrt{2}``, and ½ becomes 1/2."""
    text = re.sub("[⁰¹²³⁴-⁹⁺⁻]+", lambda found: f"^{{{found[0].translate(_RAISED)}}}", text)
    text = re.sub("[₀-₉]+", lambda found: f"_{{{found[0].translate(_RAISED)}}}", text)
    text = re.sub("[¼-¾⅐-⅞]", lambda found: " " + unicodedata.normalize("NFKC", found[0]).replace("\u2044", "/"), text)
    return re.sub(r"√\s*(\d+(?:\.\d+)?|[^\W\d_]|\([^()]*\)|\{[^{}]*\})", r"\\sqrt{\1}", text).translate(_SYMBOLS)


_BASE_NAMES = ("", "", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_BASE = rf"(\d{{1,2}}|{'|'.join(_BASE_NAMES[2:])})"
_IN_BASE = re.compile(
    r"\(?([-+]?(?=[A-F]*\d)[0-9A-F][0-9A-F, ]*+(?:\.[0-9A-F]++)?)\s*+\)?\s*+"
    rf"(?:_\s*\{{?[\s(]*(?:base\s*)?{_BASE}[\s)]*\}}?|\(?(?:in\s+)?base[\s-]*\{{?{_BASE}\}}?\s*\)?)"
)
_DIRECTED = re.compile(
    r"(?:(?<=[\d\s])([ap])\.?\s?m\.?|\b(north|south|(?:north|south)?-?(?:east|west)))$", re.IGNORECASE
)


def split_qualifier(text: str) -> tuple[str, str | None]:
    r"""Split a number from its qualifier: a base, "am" or "pm", or a direction. Unlike a unit, it is compared.

    >>> split_qualifier("2516_8"), split_qualifier(r"7\text{ p.m.}"), split_qualifier("5 miles north")
    (('2516', 'base 8'), ('7', 'pm'), ('5 miles', 'north'))
    >>> split_qualifier("x_1")
    ('x_1', None)
    """
    if len(text) > 1000:  # as for numbers
        return text, None
    plain = IN_TEXT.sub(r" \1 ", _normalized(text)).strip()
    if found := _IN_BASE.fullmatch(plain):
        base = found[2] or found[3]
        return re.sub("[, ]", "", found[1]), f"base {base if base.isdigit() else _BASE_NAMES.index(base)}"
    if (found := _DIRECTED.search(plain)) and re.search(r"\d", plain[: found.start()]):
        qualifier = f"{found[1]}m" if found[1] else found[2].replace("-", "")
        return plain[: found.start()].strip(), qualifier.lower()
    return text, None


_SYMBOL = rf"(?!(?:{'|'.join(MATH_WORDS)})\b)(?:[A-Za-zµΩ]{{2,}}+|[mgsLlNJWVAhKC])(?:\^\{{?-?\d\}}?)?"
_UNIT_SYMBOLS = re.compile(rf"(?<=[\d}}])\s++{_SYMBOL}(?:(?:\s*+(?:/|\*|\\cdot)\s*+|\s++){_SYMBOL})*$")


def without_unit_symbols(text: str) -> str:
    """Remove the symbols of a unit after a number. For answers that are expected to be a number.

    >>> without_unit_symbols("5 m/s^2"), without_unit_symbols("5 km/h"), without_unit_symbols("5 x")
    ('5', '5', '5 x')
    """
    return _UNIT_SYMBOLS.sub("", cleaned(text))


_CHOICE = re.compile(
    r"(?:\\(?:text\w*|mathrm|mathbf|mbox)\s*\{\s*\(?([A-J])[).:]+\s*\}|(?:\(([A-J])\)|([A-J])[).:])\s)\s*(\S.*)",
    re.DOTALL,
)


def split_choice(text: str) -> tuple[str | None, str]:
    r"""Split the letter of a multiple-choice option from the text after it. None if there is no such letter.

    >>> split_choice(r"\textbf{(B)}\ 12"), split_choice("C. 5"), split_choice("(B)")
    (('B', '12'), ('C', '5'), (None, '(B)'))
    """
    found = _CHOICE.fullmatch(_normalized(text))
    return (found[1] or found[2] or found[3], found[4]) if found else (None, text)


_LIST_TOKEN = re.compile(r"[(\[{}\])]|[,;]|\b(?:and|or)\b|\\text\s*\{\s*(?:and|or)\s*\}")


def repeated_items(text: str) -> Counter[str]:
    """The items that a list holds more than once, with the number of repetitions. Empty for a set in braces.

    >>> repeated_items("1, 2, 2"), repeated_items("(1, 1)"), repeated_items("1,200")
    (Counter({'2': 1}), Counter(), Counter())
    """
    items, start, depth = [], 0, 0
    text = _THOUSANDS.sub("", text)
    for token in _LIST_TOKEN.finditer(text):
        if token[0] in "([{}])":
            depth += 1 if token[0] in "([{" else -1
        elif depth == 0:
            items.append(text[start : token.start()])
            start = token.end()
    items.append(text[start:])
    counts = Counter(str(number.value) if (number := number_of(i)) else "".join(i.split()) for i in items)
    return counts - Counter(set(counts))


def words_of(text: str) -> str | None:
    r"""An answer in words, in lower case and without parentheses around it; None for a possible formula.

    A lone word of one or two letters is a variable, except a single capital letter and "no".

    >>> words_of(r"\text{Monday}"), words_of("(B)"), words_of("No  real root"), words_of("xy"), words_of("5 apples")
    ('monday', 'b', 'no real root', None, None)
    """
    bare = cleaned(text)
    if bare.startswith("(") and bare.endswith(")"):
        bare = cleaned(bare[1:-1])
    words = " ".join(bare.casefold().split())
    if not re.fullmatch(r"[^\W\d_](?:[^\W\d_]|[\s'\u2019-])*", bare) or words in MATH_WORDS:
        return None
    return words if len(bare) > 2 or words == "no" or (len(bare) == 1 and bare.isupper()) else None


# ----------------------------------------
# Find the answer in a text: in a box, after ``####``, after "the answer is", or the last formula or number.


_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_UNBRACED = re.compile(r"[^\s$.,]+")
_BETWEEN_BOXES = re.compile(r"[\s$]*+(?:;|,?\s*+(?:(?:and|or)\b|\\text\s*\{\s*(?:and|or)\s*\})|,)[\s$]*+")
_HASHES = re.compile(r"####[^\S\n]*(?=[-+\u2212$£€¥\d.\\(\[{]|[A-Za-z]\b)([^\n]+)")
_ANSWER_IS = re.compile(
    r"\b(?:answers?|correct\s(?:option|choice))\b(?:[^.:=\n]{0,60}?\b(?:is|are)\b|[^.:=\n]{0,20}?[:=])"
    r"[\s:*]*+(?=.)|答案\s*(?:是|为|為|:|:)[\s:*]*+(?=.)",
    re.IGNORECASE,
)
_LEAD_IN = re.compile(
    r"(?:(?:about|around|approximately|roughly|exactly|simply|option|choice|(?-i:an?)(?=\s\w)|not\b[^.\n]{1,40}?\bbut)\b[\s:*]*+)+",
    re.IGNORECASE,
)
_FORMULA = re.compile(
    r"\$\$(?P<a>.+?)\$\$|\\\[(?P<b>(?:(?!\\\[).)+?)\\\]|\\\((?P<c>(?:(?!\\\().)+?)\\\)"
    # A dollar sign may be currency: inside a formula there is no space next to it, or one at both ends.
    r"|(?<!\\)\$(?P<d>[^\s$](?:[^$\n]*[^\s$\\])?)\$(?!\d)|(?<!\\)\$(?P<e> [^$\n]+ )\$",
    re.DOTALL,
)
_AND = re.compile(r"\s*+(?:,?\s*+(?:and|or)\b|,)\s*+")
_SENTENCE = re.compile(r".*?(?=(?:\*\*)?(?:[.!?](?:\*\*)?(?=\s|$)|\n|$|[。!?]))")
_BOLD = re.compile(r"(?<!\w)\*\*|\*\*(?!\w)")
_MAX_SENTENCE = 300
"""Characters after "answer is" that are searched for the answer."""
_CHOSEN = re.compile(r"\(([A-J])\)|([A-J])(?:[.):]\s|,?\s(?=(?:because|since|as|for|which|due)\b))")
_WORD = re.compile(  # but not letters next to an operator: km/h, ab + 3
    rf"(?<![\w\\^{{}}*/+=<>-])(?<![-*/+=<>^]\s)(?!(?:{'|'.join(MATH_WORDS)})\b)[^\W\d_]{{2,}}+(?![(^_}}]|\s?[-*/+=<>])"
    r"|[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]"  # Chinese, Japanese and Korean do not separate words
)
_NUMBER_IN_TEXT = re.compile(
    rf"(?<![\\.^])(?<!(?a:\w))[-\u2212]?\s?[$£€¥]?(?:\d+\s+\d+/\d+(?!\d)|\d+(?::\d+)+|{DECIMAL}(?:[eE][-+]?\d+\b|\s*/\s*{DECIMAL})?)(?:\s*\\?%)?"
)


def final_answer(text: str, *, marked: bool = False) -> str | None:
    r"""The final answer of a text, as written; None if there is none.

    The first of these that the text has:

    1. the content of the last ``\boxed{}``, or the rest of the last line after ``####``, whichever comes last. Several
       boxes in a row, as in "\boxed{1} and \boxed{2}", are one list.
    2. the text after the last "answer is" or "answer:", up to the first ordinary word.
    3. the whole text, if it is nothing but an answer.
    4. the last formula or number. A lone letter is not a formula.

    Args:
        text: the text to search.
        marked: search for 1 and 2 only.

    >>> final_answer(r"Half of 3 is \boxed{\frac{3}{2}}, I think."), final_answer("so 7.\n#### 1,200")
    ('\\frac{3}{2}', '1,200')
    >>> (
    ...     final_answer("The answer is 12 apples, of 20."),
    ...     final_answer("First 3, then 4."),
    ...     final_answer("First 3", marked=True),
    ... )
    ('12', '4', None)
    """
    hashes = ((found.start(), found[1]) for found in _HASHES.finditer(text))
    if (last := max((*_boxed(text), *hashes), default=None)) is not None:
        return last[1] or None  # a box without its closing brace was cut off: there is no answer
    for found in reversed(list(_ANSWER_IS.finditer(text))):
        if answer := _answer_at(text, found.end()):
            return answer
    if marked:
        return None
    if is_bare(text):
        return text.strip()
    mentioned = _mentioned(text)
    return mentioned[-1] if mentioned else None


def _boxed(text: str) -> Iterator[tuple[int, str]]:
    """The position and content of the last box; content "" if the box is not closed."""
    boxes: list[tuple[int, int, str]] = []  # start, end, content
    closing = _closing_braces(text) if _BOX.search(text) else {}
    for opening in _BOX.finditer(text):
        start = opening.end()
        if boxes and start < boxes[-1][1]:
            continue  # a box within a box
        if text[start : start + 1] == "{":
            end = closing.get(start)
            boxes.append((opening.start(), end + 1, text[start + 1 : end]) if end else (opening.start(), start, ""))
        elif unbraced := _UNBRACED.match(text, start):  # \boxed 5
            boxes.append((opening.start(), unbraced.end(), unbraced[0]))
    contents: list[str] = []
    following = len(text)
    for start, end, content in reversed(boxes):
        if contents and not (contents[-1] and _BETWEEN_BOXES.fullmatch(text, end, following)):
            break
        contents.append(content)
        following = start
    if boxes:
        yield boxes[-1][0], ",".join(reversed(contents))


def _closing_braces(text: str) -> dict[int, int]:
    """The position of each opening brace that is closed, with that of its closing brace."""
    opened: list[int] = []
    pairs: dict[int, int] = {}
    for brace in re.finditer(r"(?<!\\)[{}]", text):
        if brace[0] == "{":
            opened.append(brace.start())
        elif opened:
            pairs[opened.pop()] = brace.start()
    return pairs


def _answer_at(text: str, start: int) -> str | None:
    """The answer in the rest of a sentence: its formulas; the letter of a choice; a few words; the text before the
    first ordinary word; or the first formula or number."""
    if lead_in := _LEAD_IN.match(text, start, start + _MAX_SENTENCE):
        start = lead_in.end()
    if formula := _FORMULA.match(text, start):
        formulas = [_content(formula)]
        while (more := _AND.match(text, formula.end())) and (following := _FORMULA.match(text, more.end())):
            formulas.append(_content(following))
            formula = following
        return ",".join(formulas)
    if choice := _CHOSEN.match(text, start):
        return choice[1] or choice[2]
    found = _SENTENCE.match(text, start, start + _MAX_SENTENCE)
    sentence = _BOLD.sub("", found[0] if found else text[start : start + _MAX_SENTENCE])
    rest, qualifier = split_qualifier(sentence)
    if number_of(rest) is not None or words_of(sentence) is not None or (qualifier and not _WORD.search(rest)):
        return sentence if len(sentence.split()) <= 8 else None
    word = _WORD.search(IN_TEXT.sub(lambda found: "\\" * len(found[0]), sentence))
    head = sentence[: word.start()] if word else sentence
    if re.search(r"[\d\\+*/^=√]" if word else r"\w", head):
        return re.sub(r"(?:[\s,;:(-]+(?:and|or)|,\s*an?)?[\s,;:(-]*\Z", "", head)
    candidates = [found for found in (_FORMULA.search(sentence), _NUMBER_IN_TEXT.search(sentence)) if found]
    if not candidates:
        return None if is_prose(sentence) else sentence
    return _content(min(candidates, key=lambda found: found.start())).rstrip(".")


def only_answer(text: str) -> str | None:
    """The formula or number of a sentence that has exactly one; None otherwise.

    >>> only_answer("There are 5 apples left."), only_answer("It takes 2 hours and 30 minutes.")
    ('5', None)
    """
    mentioned = _mentioned(text)
    return mentioned[0] if len(mentioned) == 1 else None


def _mentioned(text: str) -> list[str]:
    """All formulas, and the numbers outside of them, in order. A lone letter is the name of a variable."""
    formulas = [(found.end(), _content(found)) for found in _FORMULA.finditer(text)]
    outside = _FORMULA.sub(lambda found: " " * len(found[0]), text)
    found = [(end, formula) for end, formula in formulas if not re.fullmatch(r"\\?[A-Za-z]|\\[a-z]+", formula)]
    found += [(number.end(), number[0].strip().rstrip(".")) for number in _NUMBER_IN_TEXT.finditer(outside)]
    return [content for _, content in sorted(found)]


def _content(found: re.Match[str]) -> str:
    """A formula without its delimiters, or a number."""
    return next((content for content in found.groupdict().values() if content is not None), found[0]).strip()


def is_bare(text: str) -> bool:
    """Whether a text is nothing but an answer: one line without ordinary words, or of at most five words.

    >>> [is_bare(text) for text in ("5x + 3", "no real root", "(B)", "so 7", "")]
    [True, True, True, False, False]
    """
    text = text.strip()
    if not text or "\n" in text or len(text) > 200:
        return False
    words = words_of(text)
    return not _ordinary_words(text) if words is None else len(words.split()) <= 5


def is_prose(text: str) -> bool:
    r"""Whether a text is a sentence around an answer, not the answer itself.

    A sentence has at least two words that are neither in ``\text{}`` nor mathematical, and is neither a number with its
    unit nor words alone.

    >>> [
    ...     is_prose(text)
    ...     for text in ("There are 5 apples", r"\frac{1}{2} \text{ of the apples}", "5 square meters", "no real root")
    ... ]
    [True, False, False, False]
    """
    return number_of(text) is None and words_of(text) is None and len(_ordinary_words(text)) > 1


def _ordinary_words(text: str) -> set[str]:
    without_commands = re.sub(rf"{IN_TEXT.pattern}|\\[A-Za-z]+", " ", text)
    return {word.casefold() for word in re.findall(r"[^\W\d_]{2,}", without_commands)} - MATH_WORDS


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
    text = _THOUSANDS.sub("", cleaned(text))
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
