"""The task of ``cohort demo tool``: sums that the model can do by itself, and products that need the calculator.

An episode with a call, and one without:

    user        347*86                                                                   17+25
    assistant   <tool_call>                                                              42
                {"name": "calculator", "arguments": {"expression": "347*86"}}
                </tool_call>
    tool        29842
    assistant   29842

A hash of the two numbers decides whether a product is held out, as in ``cohort demo``. No sum is held out: there are
few, and they are what the model knows by heart.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any, Literal

from cohort.demo.task import is_held_out
from cohort.types import Turn

Kind = Literal["easy", "hard"]
Row = dict[str, str]
"""The columns ``question`` and ``answer``."""
SUMMANDS = (1, 20)
FACTORS = ((10, 99), (100, 999))
"""The ranges of a factor; each is as likely as the other."""


def numbers(kind: Kind, rng: random.Random) -> tuple[int, int]:
    """The two numbers of a random problem."""
    a, b = (rng.randint(*(SUMMANDS if kind == "easy" else rng.choice(FACTORS))) for _ in range(2))
    return a, b


def products(count: int, *, held_out: bool, seed: int) -> list[Row]:
    """``count`` hard problems of one of the two sets.

    >>> products(1, held_out=False, seed=0)
    [{'question': '876*141', 'answer': '123516'}]
    """
    rng = random.Random(seed)
    rows: list[Row] = []
    while len(rows) < count:
        a, b = numbers("hard", rng)
        if is_held_out(a, b) == held_out:
            rows.append({"question": question("hard", a, b), "answer": str(a * b)})
    return rows


def sums() -> list[Row]:
    """All easy problems: the sums that the shipped model has learnt.

    >>> len(sums()), sums()[0]
    (349, {'question': '1+1', 'answer': '2'})
    """
    low, high = SUMMANDS
    pairs = itertools.product(range(low, high + 1), repeat=2)
    return [{"question": question("easy", a, b), "answer": str(a + b)} for a, b in pairs if not is_held_out(a, b)]


def question(kind: Kind, a: int, b: int) -> str:
    """The text of a problem.

    >>> question("easy", 3, 4), question("hard", 30, 412)
    ('3+4', '30*412')
    """
    return f"{a}{'+' if kind == 'easy' else '*'}{b}"


def right(completion: str, answer: str, **_: Any) -> float:
    """1 if the last turn is the answer and nothing else, else 0.

    >>> right("29842", "29842"), right("about 29842", "29842")
    (1.0, 0.0)
    """
    return float(completion == answer)


def calls(completion: str, turns: Sequence[Turn], **_: Any) -> float:  # noqa: ARG001 - `completion`: one per call
    """The number of calls of tools, malformed ones included."""
    return float(sum(turn.calls for turn in turns))
