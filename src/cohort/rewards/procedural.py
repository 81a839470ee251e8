"""The scorers of the package reasoning-gym, for rows of ``data.train = "reasoning_gym:NAME"``."""

from __future__ import annotations

import ast
import re
from copy import deepcopy
from functools import lru_cache
from typing import Any

from cohort.errors import RewardError
from cohort.rewards.messages import turn_text
from cohort.rewards.names import import_extra

READ_AS_LITERALS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""Data sets whose scorers call ``eval`` on the answer."""
READ_AS_SUMS = frozenset({"countdown", "puzzle24"})
"""Data sets whose scorers call sympy's ``parse_expr`` on the answer, which evaluates it as Python, and expect sums."""
EVALUATED = frozenset({"simple_integration", "intermediate_integration", "polynomial_multiplication"})
"""Those whose answers are any expressions. They cannot be told from harmful ones."""


def reasoning_gym(
    completion: Any,
    reasoning_gym: str | None,
    reasoning_gym_index: int,
    prompt: Any = "",
    prefill: str = "",
    *,
    tag: str = "answer",
) -> float | None:
    """The score of reasoning-gym, from 0 to 1, for rows of ``data.train = "reasoning_gym:NAME"``.

    The item is made again from its settings and index. An answer that the scorer fails on has 0, and so has one that
    it would run as a program. A row of other data is unscored: None.

    Args:
        tag: the answer is the text between the last <answer> and </answer>; another name of the tag, or "" for the
            whole text. Without the tag there is no answer.
    """
    if reasoning_gym is None:
        return None
    name, dataset, item = _item(reasoning_gym, int(reasoning_gym_index))
    asked = [prompt] if isinstance(prompt, str) else [str(message["content"]) for message in prompt]
    if not any(item["question"] in text for text in asked):
        raise RewardError(
            f"reasoning_gym: item {reasoning_gym_index} of {reasoning_gym} has another question than the row: the data "
            "was made by another version of reasoning-gym, or its items differ between processes"
        )
    answer = _answer(turn_text(completion, prefill), tag)
    if answer is not None and not _is_data(answer, name):
        return 0.0
    try:
        return float(dataset.score_answer(answer, deepcopy(item)))
    except Exception:  # scorers assume a form of the answer
        return 0.0


@lru_cache(maxsize=4096)
def _item(settings: str, index: int) -> tuple[str, Any, dict[str, Any]]:
    """The name of the data set, the data set, and one of its items."""
    name, dataset = _dataset(settings)
    return name, dataset, dataset[index]


@lru_cache(maxsize=64)
def _dataset(settings: str) -> tuple[str, Any]:
    arguments = ast.literal_eval(settings)
    if arguments["name"] == "composite":  # its scorer would be that of another data set, unseen by _is_data
        raise RewardError("reasoning_gym: the data set 'composite' cannot be scored: list its parts as sources")
    if arguments["name"] in EVALUATED:
        raise RewardError(
            f"reasoning_gym: the scorer of {arguments['name']} evaluates the answer as Python, so the policy could run "
            "programs: use another reward with the column answer, such as math"
        )
    package = import_extra("reasoning_gym", "reasoning_gym", "reasoning-gym")
    return arguments["name"], package.create_dataset(**arguments)


def _answer(text: str, tag: str) -> str | None:
    """The text between the last tags, or the whole text without a tag; None if there are no tags."""
    if not tag:
        return text.strip()
    before, closed, _ = text.rpartition(f"</{tag}>")
    _, opened, inside = before.rpartition(f"<{tag}>")
    return inside.strip() if closed and opened else None


def _is_data(answer: str, name: str) -> bool:
    """Whether a scorer that evaluates the answer would run no program."""
    if name in READ_AS_SUMS:
        return re.fullmatch(r"[-+*/() .0-9]{0,1000}", answer) is not None and "**" not in answer
    if name not in READ_AS_LITERALS:
        return True
    try:
        ast.literal_eval(answer)
    except SyntaxError:
        return True  # eval fails as well
    except Exception:
        return False
    return True
