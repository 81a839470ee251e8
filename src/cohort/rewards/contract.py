"""The contract of reward functions: what a function receives, what it returns, and how it asks to be called.

A reward function takes keyword arguments and returns a number per completion:

    def reward(prompts, completions, completion_ids, **columns) -> list[float | None]

What one call sees depends on the function:

- **batch** (the default): all completions of a rollout in one call, group after group, after sampling. ``prompts`` and
  ``completions`` are strings; for conversations both are lists of messages, and a completion is
  ``[{"role": "assistant", "content": ...}]``. ``completion_ids``, ``finish_reasons``, ``prefills`` and every column of
  the data are lists with one entry per completion. Returns a list with one number per completion.
- **group**, with ``@reward(per="group")``: the completions of one prompt, as soon as all of them have ended.
  ``completions`` (texts), ``completion_ids`` and ``finish_reasons`` are lists; ``prompt``, ``prefill`` and the columns
  are the values of the row. Returns a list with one number per completion.
- **sample**, for a function with a parameter named ``completion``: one completion, as soon as it has ended.
  ``completion`` (its text), ``completion_ids`` and ``finish_reason`` belong to that completion. Returns one number.

With tools or an environment, a text is the answer of the last turn, and the completion of a conversation is its
transcript. There are four more arguments: per batch and per group, lists with one entry per completion; per sample, the
entry itself under the second name:

- ``transcripts``, ``transcript``: all messages after the prompt, those of tools and of the environment included.
- ``environments``, ``environment_state``: the public attributes of the environment at its end, as an object
  (``environments[0].score``); per sample as a dict.
- ``environment_rewards``, ``environment_reward``: a number, or ``None`` if the environment gives none.
- ``turns``: a list of ``cohort.types.Turn``. A column of the data that is named ``turns`` replaces it.

The remaining arguments are the same in all calls:

- ``trainer_state``: the progress of the run (``TrainerState``).
- ``log_extra(column, values)`` stores values beside the completions; ``log_metric(name, value)`` adds a number to the
  metrics of the step.

``completion_ids`` include the end token. A finish reason is "eos", "stop" or "length". A prefill is the part of the
assistant turn that is already in the prompt, such as "<think>", or "". A function declares only the arguments it uses.
Lists, dicts, sets and arrays are copied for every call: a function may change them.
It may be a plain function, ``async def``, an object with ``__call__``, or a ``functools.partial`` of any of them.

In place of a number a function may return:

- ``None``: the function cannot score this completion. With several functions, its term is left out of the completion's
  sum, so return ``None`` for whole groups only (for example, for rows of another task).
- an exception: scoring this completion failed.
- a list with a number or ``None`` per token, if ``objective.credit`` is "process" (a number at the last token of each
  step) or "given" (an advantage for each token).

A completion is unscored if every function returned ``None`` for it or any function failed on it. Unscored completions
are left out of the statistics of their group.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal, TypeVar, overload

from cohort.calls import is_async, partial_layers
from cohort.errors import RewardError
from cohort.types import Completion, Episode, Group, Message
from cohort.workers import shown

RewardFunction = Callable[..., Any]
Per = Literal["sample", "group", "batch"]
F = TypeVar("F", bound=RewardFunction)
_OPTIONS = "__cohort_reward__"
_PER_SAMPLE = {
    "transcripts": "transcript",
    "environments": "environment_state",
    "environment_rewards": "environment_reward",
}


@dataclass(frozen=True, slots=True)
class TrainerState:
    """The progress of a run, for reward functions that change with it."""

    global_step: int = 0
    """Number of completed steps."""
    max_steps: int = 0
    """Number of steps of the whole run."""
    epoch: float = 0.0
    """Completed epochs over the data; NaN for streamed data, whose length is unknown."""
    evaluating: bool = False
    """Whether the completions belong to an evaluation."""


def call_arguments(per: Per, groups: Sequence[Group], state: TrainerState) -> dict[str, Any]:
    """The keyword arguments of one call, except ``log_extra`` and ``log_metric``. Those that are not copied here share
    their containers with the rows of the data.

    This is the only place where completions are turned into what reward functions receive.

    Args:
        per: what the call sees.
        groups: the completions of the call. "group" and "sample" take one group, "sample" with one completion.
        state: the progress of the run.
    """
    pairs = [(group.prompt, completion) for group in groups for completion in group.completions]
    completions = [completion for _, completion in pairs]
    read = [(completion.episode and completion.episode.prompt) or prompt.prompt for prompt, completion in pairs]
    prompts = [one if isinstance(one, str) else [dict(message) for message in one] for one in read]
    texts = [_answer(completion) for completion in completions]
    ids = [completion.token_ids.tolist() for completion in completions]
    reasons = [str(completion.finish_reason) for completion in completions]
    episodes = _of_episodes(completions)
    if per == "batch":
        columns = dict.fromkeys(name for group in groups for name in group.prompt.columns)
        return {
            **episodes,
            **{column: [prompt.columns.get(column) for prompt, _ in pairs] for column in columns},
            "prompts": prompts,
            "completions": [
                _transcript(completion) if prompt.is_conversation else text
                for (prompt, completion), text in zip(pairs, texts, strict=True)
            ],
            "completion_ids": ids,
            "finish_reasons": reasons,
            "prefills": [prompt.prefill for prompt, _ in pairs],
            "trainer_state": state,
        }
    prompt = groups[0].prompt
    shared = {**prompt.columns, "prompt": prompts[0], "prefill": prompt.prefill, "trainer_state": state}
    if per == "group":
        return {**episodes, **shared, "completions": texts, "completion_ids": ids, "finish_reasons": reasons}
    episode = {_PER_SAMPLE.get(name, name): entries[0] for name, entries in episodes.items()}
    if episode:
        episode["environment_state"] = vars(episode["environment_state"])
    return {**episode, **shared, "completion": texts[0], "completion_ids": ids[0], "finish_reason": reasons[0]}


def _of_episodes(completions: Sequence[Completion]) -> dict[str, list[Any]]:
    """The arguments that only completions with tools or an environment have; none where no completion does."""
    if not any(completion.episode for completion in completions):
        return {}
    episodes = [completion.episode or Episode(()) for completion in completions]
    return {
        "transcripts": [_transcript(completion) for completion in completions],
        "environments": [SimpleNamespace(**episode.state) for episode in episodes],
        "environment_rewards": [episode.reward for episode in episodes],
        "turns": [
            [replace(turn, messages=tuple(map(dict, turn.messages))) for turn in episode.turns] for episode in episodes
        ],
    }


def _transcript(completion: Completion) -> list[Message]:
    """The messages after the prompt."""
    if completion.episode:
        return [dict(message) for message in completion.episode.messages]
    return [{"role": "assistant", "content": completion.text}]


def _answer(completion: Completion) -> str:
    """The text of the last assistant turn, without its calls of tools."""
    if completion.episode and completion.episode.turns:
        return completion.episode.turns[-1].messages[0].get("content") or ""
    return completion.text


@dataclass(frozen=True, slots=True)
class CallOptions:
    """How a reward function is called."""

    per: Per
    isolated: bool | None = None
    """Whether the function runs in a worker process; None: decided by the settings."""
    timeout: float | None = None
    """Seconds per call; None: ``reward.timeout`` of the settings."""


@overload
def reward(function: F) -> F: ...
@overload
def reward(
    function: None = None, *, per: Per | None = None, isolated: bool | None = None, timeout: float | None = None
) -> Callable[[F], F]: ...
def reward(
    function: F | None = None, *, per: Per | None = None, isolated: bool | None = None, timeout: float | None = None
) -> F | Callable[[F], F]:
    """Decorator: set how a reward function, or a class whose instances are reward functions, is called.

    Args:
        function: the function, if the decorator is used without parentheses.
        per: what one call sees: "sample", "group" or "batch". None: "sample" for a function with a parameter
            ``completion`` and none named ``completions``, otherwise "batch".
        isolated: True: always run in a worker process, which can be killed; False: never. None: decided by the
            settings.
        timeout: seconds per call. None: ``reward.timeout`` of the settings.

    Raises:
        RewardError: ``per`` is unknown; ``timeout`` is not positive, or the function could not be stopped; or an async
            function is to run in a worker process.

    >>> @reward(per="group")
    ... def longest(completions, **_):
    ...     return [float(len(text) == max(map(len, completions))) for text in completions]
    >>> call_options(longest).per
    'group'
    """
    if per not in (None, "sample", "group", "batch"):
        raise RewardError(f"per must be 'sample', 'group' or 'batch', got {per!r}")
    if timeout is not None and not timeout > 0:
        raise RewardError(f"timeout must be above 0 seconds, got {timeout!r}")

    def decorate(target: F) -> F:
        if isolated and is_async(target):
            raise RewardError("isolated=True is for plain functions: async functions share an event loop")
        if timeout is not None and isolated is False and not is_async(target):
            raise RewardError("a plain function with isolated=False cannot be stopped: remove its timeout")
        try:
            setattr(target, _OPTIONS, {"per": per, "isolated": isolated, "timeout": timeout})
        except AttributeError:
            raise RewardError(
                f"cannot attach options to {shown(target)}: decorate the function itself, or wrap it in another"
            ) from None
        return target

    return decorate if function is None else decorate(function)


def call_options(function: RewardFunction) -> CallOptions:
    """The options set by ``@reward``, with defaults derived from the function's parameters.

    >>> call_options(lambda completion, **_: 1.0).per, call_options(lambda completions, **_: [1.0]).per
    ('sample', 'batch')
    """
    decorated = (getattr(layer, _OPTIONS, None) for layer in partial_layers(function))
    options = next(filter(None, decorated), {"per": None})
    names = {parameter.name for parameter in parameters_of(function)}
    default: Per = "sample" if "completion" in names and "completions" not in names else "batch"
    return CallOptions(**options | {"per": options["per"] or default})


def parameters_of(function: RewardFunction) -> list[inspect.Parameter]:
    """The parameters of a function; ``**columns`` for builtins implemented in C, which have no signature."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return [inspect.Parameter("columns", inspect.Parameter.VAR_KEYWORD)]
