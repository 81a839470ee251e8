r"""The value of an answer without computer algebra: an exact number, or words."""

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
