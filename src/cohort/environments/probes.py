"""Conversations with a sentinel that show what a chat template does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cohort.data.chat import ANSWER, SENTINEL, USER, render
from cohort.data.encoding import Encoder
from cohort.environments.skeleton import Hole, Pieces, attempt, find_placeholders, learn, placeholder, surrounded
from cohort.errors import ConfigError
from cohort.types import Message

THOUGHT = "THOUGHT-OF-COHORT"
REMEDY = "Set data.chat_template to a template"

Roles = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Continuation:
    """What a template writes after a turn of the assistant: the end of the turn, messages, the generation prompt."""

    pieces: Pieces
    closing: str | None
    """The control token that it begins with, whitespace aside."""
    always_closes: bool
    """Whether the template also closes a turn that nothing follows. If not, the closing is the beginning of the next
    message, as in GLM's templates."""

    def __str__(self) -> str:
        names = ("{text}", "{name}", "{id}")
        return "".join(names[one.number % 3] if isinstance(one, Hole) else repr(one)[1:-1] for one in self.pieces)


@dataclass(frozen=True, slots=True)
class TemplateProbe:
    """Finds what a chat template writes after a turn."""

    tokenizer: Any
    encoder: Encoder
    ends: Collection[str]
    """End tokens as text."""
    tools: Sequence[Mapping[str, Any]] | None
    """JSON schemas of the run's tools."""
    variables: Mapping[str, Any]
    """Of the template."""

    def continuation(self, roles: Roles) -> Continuation:
        """What follows a turn when messages of these roles answer it, with the ``placeholders`` of the messages.

        Raises:
            ConfigError: the template does not show each message once and in order, or writes something else after
                another conversation, or does something unknown to the texts.
        """
        control = self.encoder.control_token
        for turn in _turns(roles):
            tail = self._tail([USER, turn], roles)
            if not tail:
                continue
            for history in _histories(turn, roles):
                other = self._tail(history, roles)
                if other not in ("", tail):
                    raise ConfigError(
                        f"what the chat template writes around messages of {_named(roles)} depends on the conversation "
                        f"before them: {tail!r:.300} or {other!r:.300}. So it cannot be appended to a turn. {REMEDY} "
                        "that writes them in the same way everywhere"
                    )
            pieces = learn(tail, self._tail([USER, turn], roles, surrounded), contents(roles))
            closed = self._tail([USER, turn], (), add_generation_prompt=False)
            return Continuation(pieces, control(str(pieces[0])), control(closed) is not None)
        raise ConfigError(
            f"the chat template does not show messages of {_named(roles)} after a turn of the assistant: "
            f"{self._refusal(roles)}. {REMEDY} that does, or use a model whose template does"
        )

    def check_tools(self) -> None:
        """Raises ``ConfigError`` if the template does not show the tools."""
        named = [{**tool, "function": {**tool["function"], "name": SENTINEL}} for tool in self.tools or ()]
        try:
            shown = render(self.tokenizer, [USER], add_generation_prompt=True, **{**self.variables, "tools": named})
            problem = "" if SENTINEL in shown or not named else "it does not read the variable `tools`"
        except Exception as error:  # templates raise Jinja errors of many kinds
            problem = f"it refuses them ({error!s:.200})"
        if problem:
            raise ConfigError(
                f"the chat template does not show the tools to the policy: {problem}. {REMEDY} that writes `tools`, or "
                "use a model whose template does"
            )

    def drops_thoughts(self, role: str) -> bool:
        """Whether the template leaves the thoughts of a turn out when a message of this role follows."""
        for turn in _turns((role,)):
            for thinking in (_thinking_aloud(turn), {**turn, "reasoning_content": THOUGHT, "thinking": THOUGHT}):
                answered = self._attempt([USER, thinking, *placeholders((role,))])
                shown = self._attempt([USER, thinking], add_generation_prompt=False)
                if answered and THOUGHT in shown and THOUGHT not in answered:
                    return True
        return False

    def changed_prompt(self, role: str) -> tuple[str, str] | None:
        """A prompt, and what the template writes instead when turns and messages of this role follow, with thoughts or
        without. None if it writes the prompt.
        """
        start, text = self._attempt([USER]), ""
        for turn in _turns((role,)):
            for said in (turn, _thinking_aloud(turn)):
                text = self._attempt([USER, said, *placeholders((role,))]) or text
                if text.startswith(start):
                    return None
        return start, text

    def _attempt(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        arguments = {"tools": self.tools, **self.variables, "add_generation_prompt": add_generation_prompt}
        return attempt(self.tokenizer, messages, **arguments)

    def _tail(
        self, conversation: Sequence[Message], roles: Roles, wrap: Callable[[str], str] = str, **options: bool
    ) -> str:
        """The text after the last turn of a conversation. Empty if the template refuses the messages or does not show
        them, or if the end of the turn is not found.
        """
        text = self._attempt([*conversation, *placeholders(roles, wrap)], **options)
        tail = text.rpartition(SENTINEL)[2] if SENTINEL in text else ""
        if conversation[-1].get("tool_calls"):  # the template's format of calls comes before the end of the turn
            ends = [tail.index(end) for end in self._closings() if end in tail]
            tail = tail[min(ends) :] if ends else ""
        expected = contents(roles)
        return tail if [one for one in find_placeholders(tail) if one in expected] == expected else ""

    def _closings(self) -> list[str]:
        """Texts that end a turn: end tokens, and the control token that the template writes after an answer."""
        tail = self._tail([USER, ANSWER], ("user",)) or self._tail([USER, ANSWER], ())
        control = self.encoder.control_token
        return [*(end for end in self.ends if control(end) == end), *filter(None, [control(tail)])]

    def _refusal(self, roles: Roles) -> str:
        """Why the template shows no messages of these roles."""
        reason, arguments = "", {"tools": self.tools, **self.variables}
        for turn in _turns(roles):
            try:
                render(self.tokenizer, [USER, turn, *placeholders(roles)], add_generation_prompt=True, **arguments)
            except Exception as error:
                reason = f"it refuses them ({error!s:.200})"
            else:
                return "it leaves them out, or writes them somewhere else"
        return reason


@functools.cache
def fields(index: int) -> tuple[str, str, str]:
    """The placeholders of a message: its text, a tool's name, the id of its call."""
    return placeholder(3 * index), placeholder(3 * index + 1), placeholder(3 * index + 2)


def contents(roles: Roles) -> list[str]:
    """The placeholders of the texts."""
    return [fields(index)[0] for index in range(len(roles))]


def placeholders(roles: Roles, wrap: Callable[[str], str] = str) -> list[Message]:
    """Messages of placeholders."""
    messages: list[Message] = []
    for index, role in enumerate(roles):
        text, name, call_id = fields(index)
        of_tool = {"name": name, "tool_call_id": call_id} if role == "tool" else {}
        messages.append({"role": role, "content": wrap(text), **of_tool})
    return messages


def _turns(roles: Roles) -> Iterator[Message]:
    """Turns of the assistant that messages of these roles may follow. Before tools' messages, most templates want the
    calls; some take one only, some their arguments as JSON text, and some no text beside them.
    """
    for count in dict.fromkeys((roles.count("tool"), min(roles.count("tool"), 1))):
        for arguments in ({"x": SENTINEL}, f'{{"x": "{SENTINEL}"}}') if count else ():
            calls = [
                {"type": "function", "id": call_id, "function": {"name": name, "arguments": arguments}}
                for _, name, call_id in map(fields, range(count))
            ]
            yield {**ANSWER, "tool_calls": calls}
            yield {**ANSWER, "content": "", "tool_calls": calls}
    yield ANSWER


def _histories(turn: Message, roles: Roles) -> list[list[Message]]:
    """Conversations that end with a turn."""
    return [
        [{"role": "system", "content": "x"}, USER, turn],
        [USER, {"role": "assistant", "content": "x"}, USER, turn],
        [USER, turn, *placeholders(roles), turn],
        [USER, _thinking_aloud(turn) if turn["content"] else turn],
    ]


def _thinking_aloud(turn: Message) -> Message:
    return {**turn, "content": f"<think>\n{THOUGHT}\n</think>\n\n{turn['content']}"}


def _named(roles: Roles) -> str:
    return f"the role {roles[0]!r}" if len(roles) == 1 else f"the roles {', '.join(map(repr, roles))}"
