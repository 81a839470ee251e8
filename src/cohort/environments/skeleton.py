"""Renderings of a chat template: its own text, and the holes that texts of messages fill.

A chat template renders placeholders instead of the texts of tools and environments:

    <|im_start|>tool\\nhole00000<|im_end|>\\n  ->  "<|im_start|>tool\\n", Hole("hole00000", identity), "<|im_end|>\\n"

so it is known which characters are whose, and real texts never go through the template. How it writes a text (as it is,
stripped, as JSON) is learned from a second rendering, with characters around each placeholder that show the difference.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cohort.data.chat import render
from cohort.data.encoding import Given
from cohort.errors import ConfigError

LEFT, RIGHT = '\n "\\é<&', '&>é\\" \n'
_HOLE = re.compile(r"(qzh\d{6})")
_CHANGES: tuple[Callable[[str], str], ...] = (
    lambda text: text,
    str.strip,
    str.rstrip,
    str.lstrip,
    lambda text: text.strip("\n"),
    lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    lambda text: json.dumps(text)[1:-1],
    lambda text: json.dumps(text.strip(), ensure_ascii=False)[1:-1],
)
"""What templates do to the text of a message."""


def attempt(tokenizer: Any, messages: Sequence[Any], /, **arguments: Any) -> str:
    """What a chat template renders; empty if it refuses the messages."""
    try:
        return render(tokenizer, messages, **arguments)
    except Exception:  # templates raise errors of many kinds
        return ""


def placeholder(number: int) -> str:
    """A text of nine letters and digits, which suits as the id of a call too.

    >>> placeholder(7)
    'qzh000007'
    """
    return f"qzh{number:06}"


def find_placeholders(text: str) -> list[str]:
    """The placeholders in a text, in order."""
    return _HOLE.findall(text)


def free_placeholders(text: str) -> Iterator[str]:
    """Placeholders that do not occur in a text."""
    taken = set(find_placeholders(text))
    return (one for one in map(placeholder, itertools.count()) if one not in taken)


def surrounded(text: str) -> str:
    """A text for the second rendering."""
    return LEFT + text + RIGHT


@dataclass(frozen=True, slots=True)
class Hole:
    """Where a template writes a text."""

    placeholder: str
    change: Callable[[str], str]

    @property
    def number(self) -> int:
        """The placeholder's."""
        return int(self.placeholder[3:])


Pieces = Sequence[str | Hole]


def learn(rendered: str, rendered_surrounded: str, contents: Collection[str]) -> list[str | Hole]:
    """The pieces of a rendering, the template's own text and holes in turn.

    Args:
        rendered: text with placeholders.
        rendered_surrounded: the same, where the placeholders in ``contents`` were ``surrounded``.
        contents: placeholders. Others, as of names, are written as they are.

    Raises:
        ConfigError: the template does something unknown to a text.

    >>> pieces = learn("<tool>qzh000001</tool>", "<tool>" + surrounded("qzh000001").strip() + "</tool>", {"qzh000001"})
    >>> fill(pieces, {"qzh000001": " 42\\n"})
    ['<tool>', '42', '</tool>']
    """
    first, *others = _HOLE.split(rendered)
    pieces: list[str | Hole] = [first]
    position = len(first) if rendered_surrounded.startswith(first) else -1
    for hole, text in zip(others[::2], others[1::2], strict=True):
        given = surrounded(hole) if hole in contents else hole
        found = (one for one in _CHANGES if rendered_surrounded.startswith(one(given) + text, position))
        change = next(found, None)
        if change is None or position < 0:
            shown = rendered_surrounded[max(position, 0) :]
            raise ConfigError(
                f"the chat template changes the text of messages in an unknown way: for {given + text!r:.200}, it "
                f"writes {shown!r:.200}. Set data.chat_template to a template that writes 'content' as it is, without "
                "whitespace around it, or as JSON"
            )
        position += len(change(given) + text)
        pieces += [Hole(hole, change), text]
    return pieces


def fill(pieces: Pieces, texts: Mapping[str, str]) -> list[str]:
    """The pieces with texts in their holes. A placeholder that has no text stands for itself."""
    return [
        Given(one.change(texts.get(one.placeholder, one.placeholder))) if isinstance(one, Hole) else one
        for one in pieces
    ]
