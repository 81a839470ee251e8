"""Numbers, times, phases and foreign text as the terminal shows them. Imports nothing of Cohort."""

from __future__ import annotations

import math
import re
import unicodedata

PHASES = {
    "generate": "sampling",
    "rollout_wait": "waiting for the rollout",
    "reward": "rewards",
    "logps": "log-probs",
    "update": "update",
    "measure": "measuring",
}
"""Phases of a step by their names in ``seconds/...``."""
DIRECTIONS = frozenset("\u200e\u200f\u061c\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Characters that reorder the text around them."""


def number(value: float | None, form: str = ".3f") -> str:
    """A number, or "none" for None and NaN."""
    return "none" if value is None or math.isnan(value) else format(value, form)


def share(value: float | None) -> str:
    """A share as a percentage, or "none"."""
    return number(value, ".0%")


def fine_share(value: float | None) -> str:
    """A share as a percentage with two significant digits.

    >>> fine_share(0.123), fine_share(0.00042), fine_share(1e-9), fine_share(0.0), fine_share(1.0), fine_share(None)
    ('12%', '0.042%', '< 0.01%', '0%', '100%', '-')
    """
    if value is None or math.isnan(value):
        return "-"
    return "< 0.01%" if 0 < value < 1e-4 else f"{float(f'{100 * value:.2g}'):g}%"


def cause_words(cause: str) -> str:
    """Why a token has no gradient, or how its coefficient changes, in words; "held" clamps the ratio only."""
    return "has a gradient" if cause in ("active", "held") else cause.replace("_", " ")


def duration(seconds: float) -> str:
    """A time in the two largest units that it has, or in seconds with two digits.

    >>> duration(0.34), duration(7.4), duration(87), duration(3 * 3600 + 120), duration(200_000)
    ('0.34 s', '7.4 s', '1:27 min', '3:02 h', '2 d 7 h')
    """
    if seconds < 9.95:
        return f"{seconds:.2g} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    if whole < 86_400:
        return f"{whole // 3600}:{whole % 3600 // 60:02d} h"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


def clean(text: str) -> str:
    """Text of a completion or a run folder with what a terminal would obey written out: control characters, marks that
    change the direction of text, and lone surrogates. Line breaks stay, tabs become spaces.

    >>> print(clean("a\\x1b[2Jb\\u202ec\\r\\n\\td"))
    a\\x1b[2Jb\\u202ec
        d
    """
    text = text.replace("\r\n", "\n").expandtabs(4)
    if text.isprintable():
        return text
    return re.sub(r"[^\n\x20-\x7e]", lambda found: _shown(found[0]), text)


def one_line(text: str, line_break: str = " ") -> str:
    """Cleaned text, with something else for its line breaks."""
    return clean(text).replace("\n", line_break)


def _shown(character: str) -> str:
    hidden = character in DIRECTIONS or unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp")
    return character.encode("unicode_escape").decode() if hidden else character
