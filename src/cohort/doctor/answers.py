"""Whether reward functions tell right answers from wrong ones: tried on made completions of rows whose answer is known.

Only the function knows how a completion must write its answer, so a right answer is tried in several forms. A wrong
answer is that of another row in the same form, or a refusal.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from cohort.doctor.finding import Check, Finding
from cohort.errors import RewardError
from cohort.rewards import RewardRunner
from cohort.rewards.contract import parameters_of
from cohort.rewards.functions import Function
from cohort.types import Completion, FinishReason, Group, Prompt

ANSWER_COLUMNS = frozenset(
    """answer answers final_answer solution solutions ground_truth gold gold_answer label labels target expected
    expected_answer reference reference_answer reference_solution response canonical_solution""".split()  # noqa: SIM905
)
"""Usual names of the column with a row's right answer."""
ROWS, LOOKED_AT = 4, 64
"""Rows that are tried, chosen with different answers from the first ones."""
REFUSAL = "I do not know."
FORMS: Mapping[str, Callable[[str, str], str]] = {
    "ANSWER": lambda whole, _: whole,
    "#### ANSWER": lambda _, final: f"#### {final}",
    r"\boxed{ANSWER}": lambda _, final: rf"\boxed{{{final}}}",
    "The answer is ANSWER.": lambda _, final: f"The answer is {final}.",
    "<answer>ANSWER</answer>": lambda _, final: f"<answer>{final}</answer>",
    "<think>...</think><answer>ANSWER</answer>": lambda _, final: f"<think>\nx\n</think>\n<answer>\n{final}\n</answer>",
    r"<think>...</think> \boxed{ANSWER}": lambda _, final: f"<think>\nx\n</think>\n\n\\boxed{{{final}}}",
    "a block of code": lambda whole, _: f"```python\n{whole}\n```",
}
"""What a completion with a right answer may look like. ANSWER is the text after the last "####" of the column."""


@dataclass(frozen=True, slots=True)
class Told:
    """How a function scored right and wrong answers, in the form in which it told most of them apart."""

    function: str
    column: str
    """The column that right answers are from."""
    form: str
    rows: int
    told: int
    """Rows whose right answer got more than each wrong one."""
    below: int
    """Rows whose right answer got less than each wrong one."""
    right: float
    """Mean reward of right answers; NaN if none was scored."""
    wrong: float
    named: bool
    """Whether the function names the column, and its name says that it holds answers."""


def check_answers(told: Sequence[Told], untried: Mapping[str, str]) -> list[Finding]:
    """Name the functions that do not tell right from wrong.

    Args:
        told: what was tried, by function.
        untried: functions that were not tried, and why.
    """
    check = Check("answers", {f"{one.function}/told_share": one.told / one.rows for one in told})
    for one in told:
        scores = f"right {_shown(one.right)}, wrong {_shown(one.wrong)}"
        if one.below * 2 >= one.rows and one.named:
            check.fail(
                f"reward function {one.function} rewards wrong answers more than right ones ({scores}; right ones are "
                f"column {one.column!r})",
                f"look for an inverted sign in {one.function}, or a negative weight",
            )
        elif one.told * 2 < one.rows and one.named:
            check.warn(
                f"reward function {one.function} gives a right answer (column {one.column!r}) more than wrong ones on "
                f"only {one.told} of {one.rows} rows ({scores}), in whichever of {len(FORMS)} forms it is written",
                f"call {one.function} with an answer that must get the full reward, written as the function expects "
                f"it, and look at column {one.column!r}",
            )
    words = [
        f"{one.function} gives right answers {_shown(one.right)} and wrong ones {_shown(one.wrong)}, written as "
        f"{one.form!r}"
        if one.told * 2 >= one.rows
        else f"{one.function} scores the values of column {one.column!r} like others; whether they are its answers is "
        "not known"
        for one in told
    ]
    words += [f"{name} was not tried: {why}" for name, why in untried.items()]
    return check.findings("; ".join(words) or "no function was tried")


def _shown(reward: float) -> str:
    return "unscored" if math.isnan(reward) else f"{reward:.2f}"


def try_answers(
    runner: RewardRunner, prompts: Sequence[Prompt], reads: Mapping[str, Sequence[str]], tokenizer: Any
) -> tuple[list[Told], dict[str, str]]:
    """Score right and wrong answers with each function.

    Args:
        runner: the reward functions.
        prompts: prompts whose rows may have answers.
        reads: the columns that each function names.
        tokenizer: the model's.

    Returns:
        Outcomes, and the functions that were not tried with the reason.
    """
    told, untried = [], {}
    for function in runner.functions:
        columns = _answer_columns(prompts, function, reads[function.name])
        found = [one for column in columns for one in _try_column(runner, function, prompts, column, tokenizer)]
        if found:
            best = max(found, key=lambda one: max(one.told, one.below) / one.rows)  # the first of the best
            # Of an object, the function may compare one value, so that its JSON text is no answer.
            is_object = any(isinstance(prompt.columns.get(best.column), Mapping) for prompt in prompts)
            named = best.column in reads[function.name] and best.column in ANSWER_COLUMNS and not is_object
            told.append(replace(best, named=named))
        else:
            untried[function.name] = "it reads no column with answers as text, numbers or objects"
    return told, untried


def answer_text(value: Any) -> str | None:
    """A right answer as text, that of an object as JSON; None if the cell holds none.

    >>> answer_text(3), answer_text(["4", "four"]), answer_text({"city": "Turku"}), answer_text([{}])
    ('3', '4', '{"city": "Turku"}', None)
    """
    if isinstance(value, Mapping) and value:
        return json.dumps(value, default=str)
    if isinstance(value, list | tuple) and value:
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    return str(value).strip() or None


def _answer_columns(prompts: Sequence[Prompt], function: Function, read: Sequence[str]) -> list[str]:
    """Columns that may hold the right answers that a function knows, at most two: those that it names, or all if it
    takes every column."""
    cells = [cell for prompt in prompts for cell in prompt.columns.items()]
    cells = [(c, value) for c, value in cells if c in ANSWER_COLUMNS or not isinstance(value, Mapping)]  # no {inputs}
    holds = {c for c, value in cells if answer_text(value) is not None}
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters_of(function.call))
    by_name = [column for column in read if column in holds & ANSWER_COLUMNS]
    others = sorted(holds & ANSWER_COLUMNS) if takes_all else []
    return (by_name or others or [column for column in read if column in holds])[:2]


def _try_column(
    runner: RewardRunner, function: Function, prompts: Sequence[Prompt], column: str, tokenizer: Any
) -> Iterator[Told]:
    """How the function tells the answers of a column apart, form by form. Ends with the first form that suffices."""
    chosen: dict[str, tuple[str, Prompt]] = {}
    for prompt in prompts:
        if (text := answer_text(prompt.columns.get(column))) is not None and len(chosen) < ROWS:
            chosen.setdefault(text.rpartition("####")[2].strip(), (text, prompt))
    for form, write in FORMS.items() if chosen else ():
        right = [write(text, final) for final, (text, _) in chosen.items()]
        wrong = [*right[1:], right[0]] if len(right) > 1 else [REFUSAL]
        some = [prompt for _, prompt in chosen.values()]
        scores = _score(runner, function, some, [*zip(right, wrong, strict=True)], tokenizer)
        if scores is None:
            continue
        told = sum(good > max(bad, refused) for good, bad, refused in scores)
        below = sum(good < min(bad, refused) for good, bad, refused in scores)
        means = _mean([row[0] for row in scores]), _mean([reward for row in scores for reward in row[1:]])
        yield Told(function.name, column, form, len(scores), told, below, *means, False)
        if told * 2 >= len(scores):
            return


def _score(
    runner: RewardRunner,
    function: Function,
    prompts: Sequence[Prompt],
    texts: Sequence[tuple[str, str]],
    tokenizer: Any,
) -> list[tuple[float, float, float]] | None:
    """Rewards of the right answer, the wrong one and a refusal, for each prompt, with the sign of the function's
    weight; None if the function failed on all. An unscored completion is NaN, which is not more than anything."""

    def completion(text: str) -> Completion:
        token_ids = tokenizer(text, add_special_tokens=False)["input_ids"] or [0]
        return Completion.of_tokens(token_ids, [0.0] * len(token_ids), FinishReason.EOS, text)

    alone = copy(runner)
    alone.functions = (function,)
    pairs = zip(prompts, texts, strict=True)
    groups = [Group(prompt, tuple(map(completion, (*pair, REFUSAL)))) for prompt, pair in pairs]
    try:
        unsigned = alone.score(groups).by_function_SK[:, 0].tolist()
    except RewardError:
        return None
    sign = -1.0 if function.weight < 0 else 1.0
    rewards = [sign * reward + 0.0 for reward in unsigned]  # no -0.0
    return [(rewards[at], rewards[at + 1], rewards[at + 2]) for at in range(0, len(rewards), 3)]


def _mean(numbers: Sequence[float]) -> float:
    known = [number for number in numbers if not math.isnan(number)]
    return fmean(known) if known else math.nan
