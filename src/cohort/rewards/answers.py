r"""Find the answer in a text: in a box, after ``####``, after "the answer is", or the last formula or number."""

from __future__ import annotations

import re
from collections.abc import Iterator

from cohort.rewards.values import DECIMAL, IN_TEXT, MATH_WORDS, number_of, split_qualifier, words_of

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
_CHOICE = re.compile(r"\(([A-J])\)|([A-J])(?:[.):]\s|,?\s(?=(?:because|since|as|for|which|due)\b))")
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
    if choice := _CHOICE.match(text, start):
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
