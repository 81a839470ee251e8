"""The demo's task: adding two four-digit numbers, written out column by column with the carries.

A solution of 3478+5869:

    8+9=17, write 7, carry 1
    7+6+1=14, write 4, carry 1
    4+8+1=13, write 3, carry 1
    3+5+1=9, write 9
    #### 9347

There are 81 million problems. A hash of the two numbers decides whether a problem is held out, so the training set and
the held-out set never share a problem.
"""

from __future__ import annotations

import random
import zlib
from typing import Any

DIGITS = 4
_HELD_OUT_SHARE = 0.1


def is_held_out(a: int, b: int) -> bool:
    """Whether a problem belongs to the held-out 10%. ``a+b`` and ``b+a`` are always in the same set."""
    low, high = sorted((a, b))
    return zlib.crc32(f"{low}+{high}".encode()) < _HELD_OUT_SHARE * 2**32


def problems(count: int, *, held_out: bool, seed: int) -> list[dict[str, str]]:
    """``count`` distinct problems of one of the two sets, as rows with the columns ``question`` and ``answer``.

    >>> problems(1, held_out=False, seed=0)
    [{'question': '7311+7890', 'answer': '15201'}]
    """
    rng = random.Random(seed)
    low, high = 10 ** (DIGITS - 1), 10**DIGITS - 1
    chosen: dict[tuple[int, int], None] = {}
    while len(chosen) < count:
        a, b = rng.randint(low, high), rng.randint(low, high)
        if is_held_out(a, b) == held_out:
            chosen[a, b] = None
    return [{"question": f"{a}+{b}", "answer": str(a + b)} for a, b in chosen]


def solution(a: int, b: int, *, forget_carry: float = 0.0, rng: random.Random | None = None) -> str:
    """The solution of ``a + b``, in which each carry is forgotten with probability ``forget_carry``.

    The steps after a forgotten carry follow correctly from what was written, so the answer is wrong by exactly the
    missing carries.

    >>> print(solution(1478, 1005))
    8+5=13, write 3, carry 1
    7+0+1=8, write 8
    4+0=4, write 4
    1+1=2, write 2
    #### 2483
    """
    rng = rng or random.Random(0)
    lines, written, carry = [], "", 0
    for column in range(DIGITS):
        x, y = a // 10**column % 10, b // 10**column % 10
        total = x + y + carry
        line = f"{x}+{y}" + ("+1" if carry else "") + f"={total}"
        if column == DIGITS - 1:
            lines.append(f"{line}, write {total}")
            written = f"{total}{written}"
        else:
            carry = int(total >= 10 and rng.random() >= forget_carry)
            lines.append(f"{line}, write {total % 10}" + (", carry 1" if carry else ""))
            written = f"{total % 10}{written}"
    return "\n".join([*lines, f"#### {written}"])


def accuracy(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """1 for a completion whose last line is ``#### `` and the correct sum, else 0.

    >>> accuracy(["7+6=13, write 3\\n#### 13", "13"], ["13", "13"])
    [1.0, 0.0]
    """
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [float(text.splitlines()[-1:] == [f"#### {gold}"]) for text, gold in zip(texts, answer, strict=True)]
