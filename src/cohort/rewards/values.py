r"""What an answer's text says without computer algebra: that it is a number, exactly, or that it is words."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
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
    r"(?P<sign>[-+]?)\s*(?P<body>.*?[\d}.)])\s*(?P<percent>%)?(?P<unit>(?:\s+[A-Za-z]{2,}(?:\^\{?\d\}?)?\.?)*)",
    re.DOTALL,
)


def _fraction(digits: str) -> Fraction:
    return Fraction(digits.replace(",", "").replace(" ", "").rstrip("."))


def _power(digits: str) -> Fraction:
    return Fraction(10) ** int(digits)


def _repeating(whole: str, once: str, again: str) -> Fraction:
    r"""Of ``0.1\overline{6}``: 0.1 and 6/90."""
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


def number_of(text: str) -> Number | None:
    r"""The number that a text is, exactly; None if it is more than one, or something else.

    Decimals, with thousands separators, or with a bar over what repeats; fractions and mixed numbers, in LaTeX too;
    scientific notation with exponents of three digits; signs, money, percent, degrees, and words as units or scale
    after it. Units are not compared.

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
    if scale := _scale(found["unit"]):
        value, places = value * scale, None
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


_TYPED = str.maketrans(
    dict.fromkeys("·⋅∙", r"\cdot ")
    | dict.fromkeys("\u2212\u2013", "-")
    | dict.fromkeys("\u00a0\u202f\u2009", " ")
    | {"∞": r"\infty ", "\u222a": r"\cup ", "∅": r"\emptyset "}
)
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻₀₁₂₃₄₅₆₇₈₉", "0123456789+-0123456789")


def _in_latex(text: str) -> str:
    """Signs of Unicode as LaTeX: x² as ``x^{2}``, √2 as ``\\sqrt{2}``, ½ as 1/2."""
    text = re.sub("[⁰¹²³⁴-⁹⁺⁻]+", lambda found: f"^{{{found[0].translate(_RAISED)}}}", text)
    text = re.sub("[₀-₉]+", lambda found: f"_{{{found[0].translate(_RAISED)}}}", text)
    text = re.sub("[¼-¾⅐-⅞]", lambda found: " " + unicodedata.normalize("NFKC", found[0]).replace("\u2044", "/"), text)
    return re.sub(r"√\s*(\d+(?:\.\d+)?|[^\W\d_]|\([^()]*\)|\{[^{}]*\})", r"\\sqrt{\1}", text).translate(_TYPED)


_REPLACED = (
    (re.compile(r"\\[dtc]frac"), r"\\frac"),
    (re.compile(r"\\(?:left|right)(?![A-Za-z])|\\displaystyle|\\[!,;:]|\\\$|[$£€¥]"), ""),
    (re.compile(r"\{\s*,\s*\}"), ","),
    (re.compile(r"\\ |\\q?quad(?![A-Za-z])|~"), " "),
    (re.compile(r"\\%|\\text\s*\{\s*(?:%|\\%|percent)\s*\}"), "%"),
    (re.compile(r"\^\s*+(?:\{\s*+)?\\circ\s*\}?|\\degree|°"), ""),
    (re.compile(r"\\approx|≈"), "="),
    (re.compile(r"\\varnothing"), r"\\emptyset"),
)
IN_TEXT = re.compile(r"\\(?:text\w*|mathrm|mbox)\s*\{([^{}]*)\}")
"""Text in a formula, as ``\\text{cm}``."""
_WRAPPED = re.compile(r"\\(?:text\w*|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_UNIT = re.compile(r"(?<=[\d}%)\s])\\(?:text\w*|mathrm|mbox)\s*\{([^{}]*)\}(?:\^\{?\d\}?)?$")


def cleaned(text: str) -> str:
    r"""An answer without what does not change its value: money and dollar signs, spacing, degrees, a unit in ``\text``.

    >>> cleaned(r"$\left(\dfrac{1}{2}\right)$."), cleaned(r"12\,\text{cm}^2"), cleaned(r"\text{Monday}")
    ('(\\frac{1}{2})', '12', 'Monday')
    """
    text = _plain(text)
    if whole := _WRAPPED.fullmatch(text):
        return whole[1].strip()
    return _UNIT.sub(lambda unit: f" {unit[1]}" if _scale(unit[1]) else "", text).strip() or text


def _plain(text: str) -> str:
    text = text.strip().strip("*`\"'").strip()
    text = text if text.isascii() else _in_latex(text)
    for pattern, replacement in _REPLACED:
        text = pattern.sub(replacement, text)
    return text.strip().removesuffix(".").strip()


def _scale(unit: str) -> int | None:
    return _SCALES.get((unit.lower().split() or [""])[0])


_BASE_NAMES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10}
_BASE = rf"(\d{{1,2}}|{'|'.join(_BASE_NAMES)})"
_IN_BASE = re.compile(
    r"\(?([-+]?(?=[A-F]*\d)[0-9A-F][0-9A-F, ]*+(?:\.[0-9A-F]++)?)\s*+\)?\s*+"
    rf"(?:_\s*\{{?[\s(]*(?:base\s*)?{_BASE}[\s)]*\}}?|\(?(?:in\s+)?base[\s-]*\{{?{_BASE}\}}?\s*\)?)"
)
_DIRECTED = re.compile(
    r"(?:(?<=[\d\s])([ap])\.?\s?m\.?|\b(north|south|(?:north|south)?-?(?:east|west)))$", re.IGNORECASE
)


def without_mark(text: str) -> tuple[str, str | None]:
    r"""A number without its base, half of the day or direction, and that: what is no unit, since it tells two apart.

    >>> without_mark("2516_8"), without_mark(r"7\text{ p.m.}"), without_mark("5 miles north"), without_mark("x_1")
    (('2516', 'base 8'), ('7', 'pm'), ('5 miles', 'north'), ('x_1', None))
    """
    if len(text) > 1000:  # as for numbers
        return text, None
    plain = IN_TEXT.sub(r" \1 ", _plain(text)).strip()
    if found := _IN_BASE.fullmatch(plain):
        base = found[2] or found[3]
        return re.sub("[, ]", "", found[1]), f"base {_BASE_NAMES.get(base, base)}"
    if (found := _DIRECTED.search(plain)) and re.search(r"\d", plain[: found.start()]):
        mark = f"{found[1]}m" if found[1] else found[2].replace("-", "")
        return plain[: found.start()].strip(), mark.lower()
    return text, None


_SYMBOL = rf"(?!(?:{'|'.join(NOT_UNITS)})\b)(?:[A-Za-zµΩ]{{2,}}+|[mgsLlNJWVAhKC])(?:\^\{{?-?\d\}}?)?"
_SYMBOLS = re.compile(rf"(?<=[\d}}])\s++{_SYMBOL}(?:(?:\s*+(?:/|\*|\\cdot)\s*+|\s++){_SYMBOL})*$")


def without_symbols(text: str) -> str:
    """A number without the symbols of a unit after it: what they may be where a number is asked for.

    >>> without_symbols("5 m/s^2"), without_symbols("5 km/h"), without_symbols("5 x")
    ('5', '5', '5 x')
    """
    return _SYMBOLS.sub("", cleaned(text))


_CHOICE = re.compile(
    r"(?:\\(?:text\w*|mathrm|mathbf|mbox)\s*\{\s*\(?([A-J])[).:]+\s*\}|(?:\(([A-J])\)|([A-J])[).:])\s)\s*(\S.*)",
    re.DOTALL,
)


def choice_of(text: str) -> tuple[str | None, str]:
    r"""The letter of a choice and what it stands before; None where there is no letter with something after it.

    >>> choice_of(r"\textbf{(B)}\ 12"), choice_of("C. 5"), choice_of("(B)")
    (('B', '12'), ('C', '5'), (None, '(B)'))
    """
    found = _CHOICE.fullmatch(_plain(text))
    return (found[1] or found[2] or found[3], found[4]) if found else (None, text)


_IN_LIST = re.compile(r"[(\[{}\])]|[,;]|\b(?:and|or)\b|\\text\s*\{\s*(?:and|or)\s*\}")


def repeated(text: str) -> Counter[str]:
    """What a list holds more than once, and how many times more. Of a set in braces: nothing.

    >>> repeated("1, 2, 2"), repeated("(1, 1)"), repeated("1,200")
    (Counter({'2': 1}), Counter(), Counter())
    """
    parts, start, depth = [], 0, 0
    text = _THOUSANDS.sub("", text)
    for place in _IN_LIST.finditer(text):
        if place[0] in "([{}])":
            depth += 1 if place[0] in "([{" else -1
        elif depth == 0:
            parts.append(text[start : place.start()])
            start = place.end()
    counts = Counter(_same(part) for part in [*parts, text[start:]])
    return counts - Counter(set(counts))


def _same(text: str) -> str:
    number = number_of(text)
    return "".join(text.split()) if number is None else str(number.value)


def words_of(text: str) -> str | None:
    r"""An answer in words, in small letters without brackets around; None for what may be a formula.

    Letters alone are words when there are three of them or more; fewer are variables, unless they are one capital or
    "no".

    >>> words_of(r"\text{Monday}"), words_of("(B)"), words_of("No  real root"), words_of("xy"), words_of("5 apples")
    ('monday', 'b', 'no real root', None, None)
    """
    bare = cleaned(text)
    if bare.startswith("(") and bare.endswith(")"):
        bare = cleaned(bare[1:-1])
    if not re.fullmatch(r"[^\W\d_](?:[^\W\d_]|[\s'\u2019-])*", bare):
        return None
    words = " ".join(bare.casefold().split())
    if words in NOT_UNITS or (len(bare) < 3 and words != "no" and not (len(bare) == 1 and bare.isupper())):
        return None
    return words
