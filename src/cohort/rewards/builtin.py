"""Built-in rewards, by the names that ``reward.functions`` takes."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

_FINAL = re.compile(r"####\s*\$?\s*([-+]?\$?[\d,]*\.?\d+)")


def final_number(text: str) -> Decimal | None:
    """The number after the last ``####`` of a text, thousands separators and a dollar sign left out; None without one.

    >>> final_number("so 1,200 in all.\\n#### $1,234.50"), final_number("#### -7"), final_number("1234")
    (Decimal('1234.50'), Decimal('-7'), None)
    """
    found = _FINAL.findall(text)
    return Decimal(found[-1].replace(",", "").replace("$", "")) if found else None


def completion_text(completion: str | list[dict[str, Any]]) -> str:
    """The text of a completion as reward functions receive it: a string, or a conversation's last message.

    >>> completion_text([{"role": "assistant", "content": "42"}])
    '42'
    """
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def gsm8k(completions: list[Any], answer: list[Any], **_: Any) -> list[float | None]:
    """1 when the number after the completion's last ``####`` equals the one after the answer's, 0 otherwise.

    Needs the column ``answer``, as GSM8K has it: worked steps that end in ``#### number``. Numbers are compared by
    value: ``#### 1,200.0`` equals ``#### 1200``. A row whose answer has no number cannot be scored: None.

    >>> gsm8k(["12*2=24\\n#### 24", "#### 25", "24"], ["24+0\\n#### 24"] * 3)
    [1.0, 0.0, 0.0]
    """
    golds = [final_number(text) if isinstance(text, str) else None for text in answer]
    found = [final_number(completion_text(completion)) for completion in completions]
    return [None if gold is None else float(number == gold) for number, gold in zip(found, golds, strict=True)]


def exact_match(completions: list[Any], answer: list[Any], **_: Any) -> list[float]:
    """1 when the completion, without surrounding space, is the row's ``answer``; 0 otherwise.

    >>> exact_match([" blue\\n", "Blue"], ["blue", "blue"])
    [1.0, 0.0]
    """
    texts = [completion_text(completion).strip() for completion in completions]
    return [float(text == str(gold).strip()) for text, gold in zip(texts, answer, strict=True)]


BUILTIN_REWARDS: dict[str, Callable[..., Any]] = {"gsm8k": gsm8k, "exact_match": exact_match}
"""Name to function."""
