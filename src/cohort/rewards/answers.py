r"""Where a text gives its answer: in a box, after ``####``, after "the answer is", or as its last formula or number."""

from __future__ import annotations

import re
from collections.abc import Iterator

from cohort.rewards.values import DECIMAL, IN_TEXT, NOT_UNITS, number_of, without_mark, words_of

_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_BARE = re.compile(r"[^\s$.,]+")
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
    # A dollar sign may also be money: a formula's has no space inside of it, or has one at both ends.
    r"|(?<!\\)\$(?P<d>[^\s$](?:[^$\n]*[^\s$\\])?)\$(?!\d)|(?<!\\)\$(?P<e> [^$\n]+ )\$",
    re.DOTALL,
)
_AND = re.compile(r"\s*+(?:,?\s*+(?:and|or)\b|,)\s*+")
_SENTENCE = re.compile(r".*?(?=(?:\*\*)?(?:[.!?](?:\*\*)?(?=\s|$)|\n|$|[。!?]))")
_BOLD = re.compile(r"(?<!\w)\*\*|\*\*(?!\w)")
_LOOKED_AT = 300
"""Characters after "answer is" in which the answer stands, at most."""
_CHOICE = re.compile(r"\(([A-J])\)|([A-J])(?:[.):]\s|,?\s(?=(?:because|since|as|for|which|due)\b))")
_WORD = re.compile(  # not what stands at an operator: km/h, ab + 3
    rf"(?<![\w\\^{{}}*/+=<>-])(?<![-*/+=<>^]\s)(?!(?:{'|'.join(NOT_UNITS)})\b)[^\W\d_]{{2,}}+(?![(^_}}]|\s?[-*/+=<>])"
    r"|[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]"  # in Chinese, Japanese and Korean nothing parts words
)

_NUMBER_IN_TEXT = re.compile(
    rf"(?<![\\.^])(?<!(?a:\w))[-\u2212]?\s?[$£€¥]?(?:\d+\s+\d+/\d+(?!\d)|\d+(?::\d+)+|{DECIMAL}(?:[eE][-+]?\d+\b|\s*/\s*{DECIMAL})?)(?:\s*\\?%)?"
)


def final_answer(text: str, *, marked: bool = False) -> str | None:
    r"""The answer that a text ends with, as it stands there; None without one.

    It is the content of the last ``\boxed{}`` (several in a row, as in "\boxed{1} and \boxed{2}", are one list) or the
    rest of the last line after ``####``, whichever comes last; without them what follows the last "answer is" or
    "answer:", up to the first ordinary word; without any of these the whole of a text that is nothing but an answer,
    else the last formula or number, where a lone letter as formula does not count.

    Args:
        text: what to look through.
        marked: do without what is not marked.

    >>> final_answer(r"Half of 3 is \boxed{\frac{3}{2}}, I think."), final_answer("so 7.\n#### 1,200")
    ('\\frac{3}{2}', '1,200')
    >>> (
    ...     final_answer("The answer is 12 apples, of 20."),
    ...     final_answer("First 3, then 4."),
    ...     final_answer("First 3", marked=True),
    ... )
    ('12', '4', None)
    """
    found = max((*_boxed(text), *_after_hashes(text)), default=None)
    if found is not None:
        return found[1] or None  # a last box that is not closed was cut off: it says nothing
    if (said := _after_answer_is(text)) is not None or marked:
        return said
    return text.strip() if is_bare(text) else _last_in(text)


def _boxed(text: str) -> Iterator[tuple[int, str]]:
    """Where the last box begins, and its content; "" of one that is not closed."""
    boxes: list[tuple[int, int, str]] = []
    pairs = _pairs(text) if _BOX.search(text) else {}
    for opening in _BOX.finditer(text):
        start = opening.end()
        if boxes and start < boxes[-1][1]:
            continue  # a box in a box
        if text[start : start + 1] == "{":
            end = pairs.get(start)
            boxes.append((opening.start(), end + 1, text[start + 1 : end]) if end else (opening.start(), start, ""))
        elif bare := _BARE.match(text, start):  # \boxed 5
            boxes.append((opening.start(), bare.end(), bare[0]))
    if not boxes:
        return
    contents = [boxes[-1][2]]
    for (_, end, content), (start, _, _) in zip(reversed(boxes[:-1]), reversed(boxes[1:]), strict=True):
        if not contents[-1] or not _BETWEEN_BOXES.fullmatch(text, end, start):
            break
        contents.append(content)
    yield boxes[-1][0], ",".join(reversed(contents))


def _pairs(text: str) -> dict[int, int]:
    """Where each brace that is closed opens, and where it is closed."""
    opened: list[int] = []
    pairs: dict[int, int] = {}
    for place in (found.start() for found in re.finditer(r"(?<!\\)[{}]", text)):
        if text[place] == "{":
            opened.append(place)
        elif opened:
            pairs[opened.pop()] = place
    return pairs


def _after_hashes(text: str) -> Iterator[tuple[int, str]]:
    for found in _HASHES.finditer(text):
        yield found.start(), found[1]


def _after_answer_is(text: str) -> str | None:
    places = [found.end() for found in _ANSWER_IS.finditer(text)]
    return next((said for place in reversed(places) if (said := _said(text, place))), None)


def _said(text: str, start: int) -> str | None:
    """The answer in a sentence that goes on at ``start``: its formulas; a choice's letter; a few words; what stands
    before its first ordinary word, or else its first formula or number."""
    if lead_in := _LEAD_IN.match(text, start, start + _LOOKED_AT):
        start = lead_in.end()
    if formula := _FORMULA.match(text, start):
        parts = [_inside(formula)]
        while (more := _AND.match(text, formula.end())) and (following := _FORMULA.match(text, more.end())):
            parts.append(_inside(following))
            formula = following
        return ",".join(parts)
    if choice := _CHOICE.match(text, start):
        return choice[1] or choice[2]
    sentence = _SENTENCE.match(text, start, start + _LOOKED_AT)
    said = sentence[0] if sentence else text[start : start + _LOOKED_AT]
    said = _BOLD.sub("", said)
    rest, mark = without_mark(said)
    if number_of(rest) is not None or words_of(said) is not None or (mark and not _WORD.search(rest)):
        return said if len(said.split()) <= 8 else None
    word = _WORD.search(IN_TEXT.sub(lambda found: "\\" * len(found[0]), said))
    head = said[: word.start()] if word else said
    if re.search(r"[\d\\+*/^=√]" if word else r"\w", head):
        return re.sub(r"(?:[\s,;:(-]+(?:and|or)|,\s*an?)?[\s,;:(-]*\Z", "", head)
    first = min(
        (found for found in (_FORMULA.search(said), _NUMBER_IN_TEXT.search(said)) if found),
        key=lambda found: found.start(),
        default=None,
    )
    if first is None:
        return None if is_prose(said) else said
    return _inside(first).rstrip(".")


def _last_in(text: str) -> str | None:
    """The last formula or number, by where it ends."""
    found = _mentioned(text)
    return found[-1] if found else None


def only_answer(text: str) -> str | None:
    """The formula or number of a sentence that holds just one; None where it holds none or several.

    >>> only_answer("There are 5 apples left."), only_answer("It takes 2 hours and 30 minutes.")
    ('5', None)
    """
    found = _mentioned(text)
    return found[0] if len(found) == 1 else None


def _mentioned(text: str) -> list[str]:
    """All formulas and the numbers outside of them, in order; a lone letter is a name, not an answer."""
    formulas = list(_FORMULA.finditer(text))
    found = [(place.end(), _inside(place)) for place in formulas]
    found = [(end, inside) for end, inside in found if not re.fullmatch(r"\\?[A-Za-z]|\\[a-z]+", inside)]
    outside = _FORMULA.sub(lambda place: " " * len(place[0]), text)
    return [
        inside
        for _, inside in sorted(
            [*found, *((n.end(), n[0].strip().rstrip(".")) for n in _NUMBER_IN_TEXT.finditer(outside))]
        )
    ]


def _inside(found: re.Match[str]) -> str:
    return next((content for content in found.groupdict().values() if content is not None), found[0]).strip()


def is_bare(text: str) -> bool:
    """Whether a text is nothing but an answer: a line with no ordinary words in it, or of five words and nothing else.

    >>> [is_bare(text) for text in ("5x + 3", "no real root", "(B)", "so 7", "")]
    [True, True, True, False, False]
    """
    text = text.strip()
    if not text or "\n" in text or len(text) > 200:
        return False
    words = words_of(text)
    return not _ordinary_words(text) if words is None else len(words.split()) <= 5


def is_prose(text: str) -> bool:
    r"""Whether a text is a sentence around an answer, and not the answer itself: two words or more that are neither in
    ``\text{}`` nor known to mathematics, where the text is not a number with its unit, and not words alone.

    >>> [
    ...     is_prose(text)
    ...     for text in ("There are 5 apples", r"\frac{1}{2} \text{ of the apples}", "5 square meters", "no real root")
    ... ]
    [True, False, False, False]
    """
    if number_of(text) is not None or words_of(text) is not None:
        return False
    return len(_ordinary_words(text)) >= 2


def _ordinary_words(text: str) -> set[str]:
    without_commands = re.sub(rf"{IN_TEXT.pattern}|\\[A-Za-z]+", " ", text)
    return {word.casefold() for word in re.findall(r"[^\W\d_]{2,}", without_commands)} - NOT_UNITS
