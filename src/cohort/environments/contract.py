"""What tools and environments are to users, and the records that the files of this room exchange.

**A tool** is a typed function with a docstring, plain or ``async``. What it returns is what the policy reads. Its JSON
schema, which the chat template shows to the policy, is made from type hints and docstring:

    def double(number: int) -> int:
        '''Doubles a number. (A section "Args:" describes the arguments, in Google's style.)'''
        return 2 * number

**An environment** is one object per completion, made by a factory that takes no arguments. Its methods may be plain or
``async``. Two shapes are known:

- Public methods are tools. ``reset(**row)`` begins the episode, with the columns of the data's row; it may return text,
  which is appended to the prompt's last message. ``get_reward()``, if there is one, returns a number at the end.
- ``reset(**row)`` returns the first observation, also as ``(observation, info)`` or a ``Step`` without a reward, and
  ``step(text)`` answers the policy's text: with a ``Step``, a tuple ``(observation, reward, terminated, truncated,
  info)`` as in Gymnasium, ``(observation, reward, done, info)``, or a dict with the keys ``observations`` (messages),
  ``reward`` and ``done``. The observation is the user's next message.

``reset`` gets a ``seed`` if it has a parameter of that name: the same for all completions of a group. ``close()`` is
called at the end of every episode if there is such a method. An environment with an ``async`` method lives on the event
loop: its plain methods run there too, so they must not block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cohort.types import Message


@dataclass(frozen=True, slots=True)
class Step:
    """What an environment answers to a turn."""

    observation: str | Sequence[Message] | None = None
    """The user's next message, or several messages. None or an empty one: nothing to read."""
    reward: float | None = None
    """For this turn; None: none."""
    done: bool = False
    """Whether the episode has ended."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the policy wrote."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    """Why it is no valid call, such as invalid JSON; the policy reads this. Empty: the call is well-formed."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a tool or environment answers to a turn, or an environment to ``reset``."""

    messages: tuple[Message, ...] = ()
    """What the policy reads next. Empty: nothing, which ends the episode."""
    reward: float | None = None
    done: bool = False
    calls: int = 0
    failed_calls: int = 0


@dataclass(frozen=True, slots=True)
class Ended:
    """What an environment leaves behind at the end of its episode."""

    reward: float | None = None
    """What ``get_reward`` returned. Without that method: 0 if there is ``step``, else None."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """Copies of its public attributes, without those that cannot be pickled."""


class ToolError(Exception):
    """An error that a tool raises for the policy to read: the message, without the name of this class."""


class EpisodeFailed(Exception):  # noqa: N818 - an episode failed, which is not an error of the room
    """An environment could not go on, so its episode is unusable.

    Args:
        message: the reason, in one line.
        details: the traceback from where it ran, if there is one.
    """

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details or message
