"""Conversations with sentinels that show what a chat template does."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cohort.environments.encoding import Encoder
from cohort.environments.skeleton import Hole, Pieces, find_placeholders, learn, placeholder, surrounded
from cohort.errors import ConfigError
from cohort.types import Message

ANSWER, ARGUMENT, THOUGHT = "ANSWER-OF-COHORT", "ARGUMENT-OF-COHORT", "THOUGHT-OF-COHORT"
"""Texts that no template changes or contains."""
USER: Message = {"role": "user", "content": "x"}
SPOKEN: Message = {"role": "assistant", "content": ANSWER}
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


class TemplateProbe:
    """Finds what a chat template writes after a turn.

    Args:
        tokenizer: the tokenizer.
        template: a chat template that replaces the tokenizer's.
        tools: JSON schemas of the run's tools.
        encoder: knows the control tokens.
        ends: end tokens as text.
    """

    def __init__(
        self,
        tokenizer: Any,
        template: str | None,
        tools: Sequence[Mapping[str, Any]] | None,
        encoder: Encoder,
        ends: Collection[str],
    ) -> None:
        self._tokenizer, self._template = tokenizer, template
        self._tools, self._control_token = tools or None, encoder.control_token
        self._ends = [end for end in ends if encoder.control_token(end) == end]

    def render(self, messages: Sequence[Message], arguments: Mapping[str, Any], **options: bool) -> str:
        """What the template writes; raises what it raises.

        Args:
            messages: the conversation.
            arguments: variables of the template, and ``tools``.
            options: of ``apply_chat_template``.
        """
        text: str = self._tokenizer.apply_chat_template(
            list(messages), chat_template=self._template, tokenize=False, **arguments, **options
        )
        return text

    def continuation(self, roles: Roles, variables: Mapping[str, Any]) -> Continuation:
        """What follows a turn when messages of these roles answer it, with the ``placeholders`` of the messages.

        Raises:
            ConfigError: the template does not show each message once and in order, or writes something else after
                another conversation, or does something unknown to the texts.
        """
        for turn in _turns(roles):
            tail = self._tail([USER, turn], roles, variables)
            if tail is None:
                continue
            for history in _histories(turn, roles):
                other = self._tail(history, roles, variables)
                if other not in (None, tail):
                    raise ConfigError(
                        f"what the chat template writes around messages of {_named(roles)} depends on the conversation "
                        f"before them: {tail!r:.300} or {other!r:.300}. So it cannot be appended to a turn. {REMEDY} "
                        "that writes them in the same way everywhere"
                    )
            marked = self._tail([USER, turn], roles, variables, surrounded)
            pieces = learn(tail, marked or "", contents(roles))
            closed = self._tail([USER, turn], (), variables, generate=False)
            control = self._control_token
            return Continuation(pieces, control(str(pieces[0])), control(closed or "") is not None)
        raise ConfigError(
            f"the chat template does not show messages of {_named(roles)} after a turn of the assistant: "
            f"{self._refusal(roles, variables)}. {REMEDY} that does, or use a model whose template does"
        )

    def check_tools(self, variables: Mapping[str, Any]) -> None:
        """Raises ``ConfigError`` if the template does not show the tools."""
        if not self._tools:
            return
        named = [{**tool, "function": {**tool["function"], "name": ANSWER}} for tool in self._tools]
        try:
            shows = ANSWER in self._render([USER], {**variables, "tools": named})
            reason = "it does not read the variable `tools`"
        except Exception as error:  # templates raise Jinja errors of many kinds
            shows, reason = False, f"it refuses them ({error!s:.200})"
        if not shows:
            raise ConfigError(
                f"the chat template does not show the tools to the policy: {reason}. {REMEDY} that writes `tools`, or "
                "use a model whose template does"
            )

    def drops_thoughts(self, role: str, variables: Mapping[str, Any]) -> bool:
        """Whether the template leaves the thoughts of a turn out when a message of this role follows."""
        for turn in _turns((role,)):
            for thinking in (_thinking_aloud(turn), {**turn, "reasoning_content": THOUGHT, "thinking": THOUGHT}):
                try:
                    shown = THOUGHT in self._render([USER, thinking], variables, generate=False)
                    if shown and THOUGHT not in self._render([USER, thinking, *placeholders((role,))], variables):
                        return True
                except Exception:  # the template takes turns of another form
                    continue
        return False

    def changed_prompt(self, role: str, variables: Mapping[str, Any]) -> tuple[str, str] | None:
        """A prompt, and what the template writes instead when turns and messages of this role follow, with thoughts or
        without. None if it writes the prompt.
        """
        start, text = self._render([USER], variables), ""
        for turn in _turns((role,)):
            for said in (turn, _thinking_aloud(turn)):
                try:
                    text = self._render([USER, said, *placeholders((role,))], variables)
                except Exception:  # the template takes turns of another form
                    continue
                if text.startswith(start):
                    return None
        return start, text

    def _render(self, messages: Sequence[Message], variables: Mapping[str, Any], *, generate: bool = True) -> str:
        return self.render(messages, {"tools": self._tools, **variables}, add_generation_prompt=generate)

    def _tail(
        self,
        conversation: Sequence[Message],
        roles: Roles,
        variables: Mapping[str, Any],
        wrap: Callable[[str], str] = str,
        *,
        generate: bool = True,
    ) -> str | None:
        """The text after the last turn of a conversation. None if the template refuses the messages or does not show
        them, or if the end of the turn is not found.
        """
        messages = [*conversation, *placeholders(roles, wrap)]
        try:
            text = self._render(messages, variables, generate=generate)
        except Exception:  # templates raise Jinja errors of many kinds
            return None
        found = (text.rfind(sentinel) + len(sentinel) for sentinel in (ANSWER, ARGUMENT) if sentinel in text)
        position = max(found, default=-1)
        if position < 0:
            return None
        tail = text[position:]
        if conversation[-1].get("tool_calls"):  # the template's format of calls comes before the end of the turn
            ends = [tail.index(end) for end in self._closings(variables) if end in tail]
            if not ends:
                return None
            tail = tail[min(ends) :]
        expected = contents(roles)
        return tail if [one for one in find_placeholders(tail) if one in expected] == expected else None

    def _closings(self, variables: Mapping[str, Any]) -> list[str]:
        """Texts that end a turn: end tokens, and the control token that the template writes after an answer."""
        tail = self._tail([USER, SPOKEN], ("user",), variables) or self._tail([USER, SPOKEN], (), variables)
        after_answer = self._control_token(tail or "")
        return [*self._ends, after_answer] if after_answer else self._ends

    def _refusal(self, roles: Roles, variables: Mapping[str, Any]) -> str:
        """Why the template shows no messages of these roles."""
        for turn in _turns(roles):
            try:
                self._render([USER, turn, *placeholders(roles)], variables)
            except Exception as error:
                reason = f"it refuses them ({error!s:.200})"
            else:
                return "it leaves them out, or writes them somewhere else"
        return reason


def fields(index: int) -> list[str]:
    """The placeholders of a message: its text, a tool's name, the id of its call."""
    return [placeholder(3 * index + field) for field in range(3)]


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
        for arguments in ({"x": ARGUMENT}, f'{{"x": "{ARGUMENT}"}}') if count else ():
            calls = [
                {"type": "function", "id": call_id, "function": {"name": name, "arguments": arguments}}
                for _, name, call_id in map(fields, range(count))
            ]
            yield {**SPOKEN, "tool_calls": calls}
            yield {**SPOKEN, "content": "", "tool_calls": calls}
    yield SPOKEN


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
