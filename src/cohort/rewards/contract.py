"""What a reward function is: how it is named, found, called and checked.

A reward function takes keyword arguments and returns one number per completion:

    def reward(prompts, completions, completion_ids, **columns) -> list[float | None]

- ``prompts``, ``completions``: strings; or, when prompts are conversations, lists of messages (a completion is then
  ``[{"role": "assistant", "content": ...}]``).
- ``completion_ids``: token ids, the end token included.
- ``finish_reasons``: "eos", "stop" or "length".
- ``prefills``: what of the assistant's turn stands in the prompt already ("<think>"), "" where nothing does.
- every column of the data, as a list: one value per completion.
- ``trainer_state``: how far the run is (``TrainerState``).
- ``log_extra(column, values)``: values to keep beside the completions; ``log_metric(name, value)``: a number for the
  step's metrics.

It may leave out arguments it does not use. All completions of a rollout come in one call, group after group, when the
rollout has ended. A function with a parameter ``completion`` is called for each completion alone, as soon as it has
ended, and returns one number; it gets ``prompt, completion, completion_ids, finish_reason, prefill`` and the row's
columns as they are. One that is marked ``@reward(per="group")`` is called for each prompt with lists of its completions
(``completions, completion_ids, finish_reasons``) and the rest as above. To both a completion is its text, of
conversations too. Any of them may be async.

``None`` means that a completion cannot be scored by this function. An exception in place of a number means that scoring
this completion failed. In place of a number it may give a list with a number or ``None`` for each of
the completion's tokens, for objectives whose credit is "process" (a number at the last token of each step) or "given"
(an advantage for each token). With several functions, a ``None`` leaves that function's term out of the
completion's sum (so return it for whole groups, as for rows of another task); a completion that no function scores, or
that a function failed on, has no part in its group's statistics.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

from cohort.errors import RewardError
from cohort.rewards.calls import LOGS, call_recorded
from cohort.rewards.kinds import Kind, Per, function_name, kind_of
from cohort.rewards.model import RewardModel, is_reward_model
from cohort.rewards.specs import resolve_reward
from cohort.types import Completion, Group, Message, Prompt
from cohort.workers import said_of

RewardFunction = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class TrainerState:
    """How far a run is, for reward functions that change with it."""

    global_step: int = 0
    """Steps that are done."""
    max_steps: int = 0
    """Steps of the whole run."""
    epoch: float = 0.0
    """Passes over the data that are done; NaN where it is a stream, whose length is not known."""
    evaluating: bool = False
    """Whether what is scored is an evaluation's."""


def as_reward_function(given: Any) -> RewardFunction:
    """A reward function as users give it: a callable, a name as ``resolve_reward`` takes it, or a reward model.

    Raises:
        RewardError: there is none of that name.
    """
    if isinstance(given, str):
        return resolve_reward(given)
    return RewardModel(given) if is_reward_model(given) else given


@dataclass(frozen=True, slots=True)
class Failed:
    """In place of a reward: scoring this completion failed."""

    message: str
    """In one line."""
    details: str
    """The traceback, if there is one."""


Value = list[float] | Failed
"""A completion's reward by one function: one number, or one per token; NaN where it gave ``None``."""


class Function:
    """A reward function with its name, and what it takes.

    Args:
        call: the function.
        name: what messages call it.

    Raises:
        RewardError: it takes an argument by position.
    """

    def __init__(self, call: RewardFunction, name: str) -> None:
        self.call, self.name = call, name
        self.kind: Kind = kind_of(call)
        try:
            parameters: Sequence[inspect.Parameter] = list(inspect.signature(call).parameters.values())
        except (TypeError, ValueError):  # built into C: cannot be asked
            parameters = [inspect.Parameter("columns", inspect.Parameter.VAR_KEYWORD)]
        for parameter in parameters:
            if parameter.kind is parameter.POSITIONAL_ONLY:
                raise RewardError(f"reward function {name} takes {parameter.name!r} by position: it is called by name")
        self._bound = frozenset(call.keywords) if isinstance(call, partial) else frozenset()
        """Parameters that have their values: no column of the data takes their place."""
        named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and p.name not in self._bound]
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._names = frozenset(p.name for p in named)
        self._required = [p.name for p in named if p.default is p.empty]
        self.logs = frozenset(LOGS) if self._takes_all else self._names & frozenset(LOGS)
        self.watches_run = "trainer_state" in self._names
        self.names_log_extra = "log_extra" in self._names
        self.recorded = partial(call_recorded, call, logs=self.logs)
        """Called with arguments, it gives what the function returned and logged."""

    def accepted(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Those of the arguments that it takes.

        Raises:
            RewardError: it needs one that there is not.
        """
        for name in self._required:
            if name not in arguments and name not in LOGS:
                raise RewardError(
                    f"reward function {self.name} needs the argument {name!r}; it can have: "
                    f"{', '.join([*arguments, *LOGS])}"
                )
        if self._takes_all:
            return {key: value for key, value in arguments.items() if key not in self._bound}
        return {key: value for key, value in arguments.items() if key in self._names}

    def values(self, result: Any, completions: Sequence[Completion], *, per_token: bool) -> list[Value]:
        """What one call gave for its completions.

        Raises:
            RewardError: that is not one number or ``None`` per completion (or, ``per_token``, per token).
        """
        results = [result] if self.kind.per == "sample" else _sequence(result)
        if results is None:
            raise RewardError(f"reward function {self.name} must return a list of numbers, got {_type(result)}")
        if len(results) != len(completions):
            raise RewardError(
                f"reward function {self.name} must return one reward per completion: {len(completions)}, "
                f"got {len(results)}"
            )
        return [
            self._value(value, index, len(completion.token_ids) if per_token else None)
            for index, (value, completion) in enumerate(zip(results, completions, strict=True))
        ]

    def _value(self, value: Any, index: int, tokens: int | None) -> Value:
        if isinstance(value, BaseException):
            text = said_of(value).replace("raised", "gave", 1)
            return Failed(text, text)
        if tokens is None:
            number = self._number(value, index)
            return number if isinstance(number, Failed) else [number]
        if value is None:
            return [math.nan] * tokens
        items = _sequence(value)
        if items is None:
            raise RewardError(
                f"objective.credit takes rewards per token: reward function {self.name} must return a list of {tokens} "
                f"numbers or None as result {index} (one per token of completion_ids), got {value!r:.60}"
            )
        if len(items) != tokens:
            raise RewardError(
                f"reward function {self.name} must return one number or None per token as result {index}: {tokens}, "
                f"got {len(items)}"
            )
        numbers: list[float] = []
        for item in items:
            number = self._number(item, index)
            if isinstance(number, Failed):
                return number
            numbers.append(number)
        return numbers

    def _number(self, value: Any, index: int) -> float | Failed:
        if value is None:
            return math.nan
        if isinstance(value, list | tuple):
            raise RewardError(
                f"reward function {self.name} returned a list as result {index}: expected a number; rewards per token "
                "need objective.credit 'process' or 'given'"
            )
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = None
        if number is None or isinstance(value, str):
            raise RewardError(
                f"reward function {self.name} must return numbers or None; result {index} is {value!r:.60}"
            )
        if not math.isfinite(number):
            text = f"returned {value!r:.60}: expected a finite number, or None for a completion that cannot be scored"
            return Failed(text, text)
        return number


def named(functions: Sequence[RewardFunction]) -> tuple[Function, ...]:
    """Functions with a name each: its own, numbered where two share one.

    >>> [function.name for function in named([max, min, max])]
    ['max', 'min', 'max_2']
    """
    names: list[str] = []
    for function in functions:
        name = function_name(function)
        taken, number = name, 2
        while taken in names:
            taken, number = f"{name}_{number}", number + 1
        names.append(taken)
    return tuple(Function(function, name) for function, name in zip(functions, names, strict=True))


def arguments(per: Per, groups: Sequence[Group], state: TrainerState) -> dict[str, Any]:
    """The keyword arguments of one call, but for the logs.

    Args:
        per: what the call sees.
        groups: whose completions. For a group or a sample only one group, for a sample only one completion.
        state: how far the run is.
    """
    if per == "batch":
        return _batch_arguments(groups) | {"trainer_state": state}
    prompt, completions = groups[0].prompt, groups[0].completions
    given: dict[str, Any] = {
        **prompt.columns,
        "prompt": _asked(prompt),
        "prefill": prompt.prefill,
        "trainer_state": state,
    }
    texts = [completion.text for completion in completions]
    ids = [list(completion.token_ids) for completion in completions]
    reasons = [str(completion.finish_reason) for completion in completions]
    if per == "group":
        return {**given, "completions": texts, "completion_ids": ids, "finish_reasons": reasons}
    return {**given, "completion": texts[0], "completion_ids": ids[0], "finish_reason": reasons[0]}


def _batch_arguments(groups: Sequence[Group]) -> dict[str, list[Any]]:
    """One list entry per completion, group after group."""
    pairs = [(group.prompt, completion) for group in groups for completion in group.completions]
    columns = dict.fromkeys(name for group in groups for name in group.prompt.columns)
    return {
        **{column: [prompt.columns.get(column) for prompt, _ in pairs] for column in columns},
        "prompts": [_asked(prompt) for prompt, _ in pairs],
        "completions": [_shown(prompt, completion) for prompt, completion in pairs],
        "completion_ids": [list(completion.token_ids) for _, completion in pairs],
        "finish_reasons": [str(completion.finish_reason) for _, completion in pairs],
        "prefills": [prompt.prefill for prompt, _ in pairs],
    }


def _asked(prompt: Prompt) -> str | list[Message]:
    """A prompt as functions receive it: a list of their own, which they may change."""
    return prompt.prompt if isinstance(prompt.prompt, str) else [dict(message) for message in prompt.prompt]


def _shown(prompt: Prompt, completion: Completion) -> Any:
    """A completion as functions receive it."""
    return [{"role": "assistant", "content": completion.text}] if prompt.is_conversation else completion.text


def _sequence(value: Any) -> Sequence[Any] | None:
    """A list, or what is as good as one: a tuple, an array, a range. None for anything else."""
    if isinstance(value, str | bytes | bytearray | Mapping | Set) or not hasattr(value, "__getitem__"):
        return None
    try:
        len(value)
    except TypeError:  # an array without axes
        return None
    sequence: Sequence[Any] = value
    return sequence


def _type(value: Any) -> str:
    return type(value).__name__
