r"""What an answer's text says without computer algebra: that it is a number, exactly, or that it is words."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

_DIGITS = r"(?:\d{1,3}(?:[, ]\d{3})+(?!\d)|\d+)"
DECIMAL = rf"(?:{_DIGITS}(?:\.\d*)?|\.\d+)"
"""A decimal without its sign, thousands separators allowed."""

NOT_UNITS = frozenset(
    """pi sqrt infinity inf and or mod sin cos tan log ln exp min max alpha beta gamma delta theta phi omega lambda
    mu""".split()  # noqa: SIM905
)
"""Words that mean something in a formula."""


@dataclass(frozen=True, slots=True)
class Number:
    """A number as it was written."""

    value: Fraction
    """Of "50%" it is 1/2."""
    percent: bool = False
    places: int | None = None
    """Digits after the decimal point; None for what was not written as a decimal."""

    def equals(self, other: Number) -> bool:
        """Whether both mean the same number. Exact, but for two liberties: "50%" is 1/2 and also 50; and a decimal of
        six places and six significant digits or more is any number that it is the rounding of, as 0.333333 is 1/3.

        >>> Number(Fraction(1, 2), percent=True).equals(Number(Fraction(50)))
        True
        """
        if self.value == other.value:
            return True
        if self.percent != other.percent:
            mine, theirs = (100 if number.percent else 1 for number in (self, other))
            return self.value * mine == other.value * theirs
        return self._rounds(other) or other._rounds(self)

    def _rounds(self, exact: Number) -> bool:
        if self.places is None or self.places < 6 or abs(self.value) * 10**self.places < 10**5:
            return False
        return round(exact.value, self.places) == self.value


_SCALES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_WITH_UNIT = re.compile(
    r"(?P<sign>[-+]?)\s*(?P<body>.*?[\d}.)])\s*(?P<percent>%)?(?P<unit>(?:\s+[A-Za-z]{2,}(?:\^\{?\d\}?|[²³])?\.?)*)",
    re.DOTALL,
)


def _fraction(digits: str) -> Fraction:
    return Fraction(digits.replace(",", "").replace(" ", "").rstrip("."))


def _power(digits: str) -> Fraction:
    return Fraction(10) ** int(digits)


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
    )
)


def number_of(text: str) -> Number | None:
    r"""The number that a text is, exactly; None if it is more than one, or something else.

    Decimals, with thousands separators; fractions and mixed numbers, in LaTeX too; scientific notation with exponents
    of three digits; signs, money, percent, degrees, and words as units or scale after it. Units are not compared.

    >>> texts = ["$1,234.50", r"1\frac{1}{2}", "-3/4", "50%", r"1.5 \times 10^3", "2 million cars"]
    >>> [str(number_of(text).value) for text in texts]
    ['2469/2', '3/2', '-3/4', '1/2', '1500', '2000000']
    >>> number_of("2 pi"), number_of("5 or 6"), number_of("2x")
    (None, None, None)
    """
    found = _WITH_UNIT.fullmatch(cleaned(text)) if len(text) <= 1000 else None  # of longer ones no exact value is made
    if found is None:
        return None
    words = [word.strip(".").lower() for word in found["unit"].split()]
    value = None if NOT_UNITS.intersection(words) else _value(found["body"])
    if value is None:
        return None
    whole, point, after = found["body"].partition(".")
    places = len(after) if point and (whole + after).replace(",", "").isdigit() else None
    if words and words[0] in _SCALES:
        value, places = value * _SCALES[words[0]], None
    percent = found["percent"] is not None or words[:1] in (["percent"], ["pct"])
    if found["sign"] == "-":
        value = -value
    return Number(value / 100 if percent else value, percent, None if percent else places)


def _value(body: str) -> Fraction | None:
    for pattern, value in _FORMS:
        if found := pattern.fullmatch(body):
            try:
                return value(*(group for group in found.groups() if group is not None))
            except (ZeroDivisionError, ValueError):  # 1/0; more digits than Python reads
                return None
    return None


_REPLACED = (
    (re.compile(r"\\[dtc]frac"), r"\\frac"),
    (re.compile(r"\\(?:left|right)(?![A-Za-z])|\\displaystyle|\\[!,;:]|\\\$|[$£€¥]"), ""),
    (re.compile(r"\{\s*,\s*\}"), ","),
    (re.compile(r"\\ |~|[\u00a0\u202f\u2009]"), " "),
    (re.compile(r"[\u2212\u2013]"), "-"),
    (re.compile(r"\\%|\\text\s*\{\s*(?:%|\\%|percent)\s*\}"), "%"),
    (re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degree|°"), ""),
    (re.compile(r"\\approx|≈"), "="),
)
_WRAPPED = re.compile(r"\\(?:text\w*|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_UNIT = re.compile(r"(?<=[\d}%)\s])\s*\\(?:text\w*|mathrm|mbox)\s*\{[^{}]*\}(?:\^\{?\d\}?)?$")


def cleaned(text: str) -> str:
    r"""An answer without what does not change its value: money and dollar signs, spacing, degrees, a unit in ``\text``.

    >>> cleaned(r"$\left(\dfrac{1}{2}\right)$."), cleaned(r"12\,\text{cm}^2"), cleaned(r"\text{Monday}")
    ('(\\frac{1}{2})', '12', 'Monday')
    """
    text = text.strip().strip("*`\"'").strip()
    for pattern, replacement in _REPLACED:
        text = pattern.sub(replacement, text)
    text = text.strip().removesuffix(".").strip()
    if whole := _WRAPPED.fullmatch(text):
        return whole[1].strip()
    return _UNIT.sub("", text).strip() or text


def words_of(text: str) -> str | None:
    r"""An answer in words, in small letters without brackets around; None for what may be a formula.

    Letters alone are words when there are three of them or more; fewer are variables, unless they are one capital or
    "no".

    >>> words_of(r"\text{Monday}"), words_of("(B)"), words_of("No  real root"), words_of("xy"), words_of("5 apples")
    ('monday', 'b', 'no real root', None, None)
    """
    bare = cleaned(text)
    if bracketed := re.fullmatch(r"\(\s*(.*?)\s*\)", bare):
        bare = cleaned(bracketed[1])
    if not re.fullmatch(r"[^\W\d_](?:[^\W\d_]|[\s'\u2019-])*", bare):
        return None
    words = " ".join(bare.casefold().split())
    if words in NOT_UNITS or (len(bare) < 3 and words != "no" and not (len(bare) == 1 and bare.isupper())):
        return None
    return words
