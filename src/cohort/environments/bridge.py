"""From one turn of an episode to the next, as token ids.

A chat template renders whole conversations. If a conversation were rendered and tokenized again after every turn, what
the policy drew could become other tokens. So the tokens so far stay as they are, and Cohort appends the ids of what the
template writes after a turn. To find that text, the template renders a conversation with placeholders:

    user "x", assistant "ANSWER", tool "qzh000000", generation prompt
    ... ANSWER<|im_end|>\\n<|im_start|>tool\\nqzh000000<|im_end|>\\n<|im_start|>assistant\\n

What follows ANSWER is found once for each shape (the roles of the messages) and checked: the template shows every
message once, in order, and writes the same after other conversations.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from cohort.data.chat import render
from cohort.data.encoding import Encoder
from cohort.data.guard import TurnTokens
from cohort.environments.probes import Continuation, Roles, TemplateProbe, fields
from cohort.environments.skeleton import fill, free_placeholders, learn, surrounded
from cohort.errors import ConfigError, DataError
from cohort.rollout.trajectory import decode
from cohort.types import Message, Prompt

MAX_CONTINUATIONS = 1000
"""Maximum number of continuations that are kept: every row may have its own template variables."""


class Bridge:
    """What a chat template writes between the turns of an episode.

    No text of a message becomes a control token, wherever it comes from; see ``Encoder``.

    Args:
        tokenizer: the tokenizer, with the chat template in use.
        end_token_ids: tokens that end a turn.
        variables: of the template.
        tools: JSON schemas of the run's tools.
        roles: of the messages that will follow turns: "tool", "user" or both. None: "tool" if there are tools, else
            "user".
        history: ``environment.history``.

    Raises:
        ConfigError: there is no template; it shows no tools, or no messages of a role; what it writes after a turn
            depends on the conversation before; or ``history`` is not "append", and it writes the prompt differently
            when turns follow.
    """

    def __init__(
        self,
        tokenizer: Any,
        end_token_ids: Collection[int],
        *,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        roles: Collection[str] | None = None,
        history: str = "append",
    ) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                "tools and environments need a chat template, and the tokenizer has none: set data.chat_template, or "
                "use a model that has one"
            )
        self._tokenizer, self._encoder, self._turns = tokenizer, Encoder(tokenizer), TurnTokens(tokenizer)
        self._ends: dict[int, str] = {number: tokenizer.convert_ids_to_tokens(number) for number in end_token_ids}
        self._probe = TemplateProbe(tokenizer, self._encoder, self._ends.values(), tools or None, variables or {})
        self._continuations: dict[tuple[str, Roles], Continuation] = {}
        self._probe.check_tools()
        roles = sorted(roles or ({"tool"} if tools else {"user"}))
        for several in [*((role,) for role in roles), *([("tool", "tool")] if "tool" in roles else [])]:
            self._continuation(several, self._probe.variables)
        self._drops_thoughts = [role for role in roles if self._probe.drops_thoughts(role)]
        for role in roles if history != "append" else ():
            if changed := self._probe.changed_prompt(role):
                start, text = changed
                raise ConfigError(
                    "the chat template writes the prompt differently when turns follow it: instead of "
                    f"{start[-60:]!r}, it writes {text[max(0, len(start) - 60) : len(start) + 20]!r}. Segments follow "
                    'the prompt as it is, so environment.history must be "append" with this template, or '
                    "data.chat_template another one"
                )

    def after(self, messages: Sequence[Message], *, last_token: int, prompt: Prompt | None = None) -> list[int]:
        """The ids that follow a turn: the end of the turn if it is missing, the messages, and the generation prompt.

        Args:
            messages: at least one. The role and the text of each are used, and a tool's ``name`` and ``tool_call_id``.
            last_token: the last token that the policy drew. If it is no end token, the turn was ended by a limit or a
                stop string, and the ids begin with the end that the template writes.
            prompt: the prompt of the episode, if rows have template variables of their own.

        Raises:
            DataError: the content of a message is not text.
            ConfigError: the template refuses or hides messages of these roles.
        """
        arguments = self._probe.variables if prompt is None else prompt.template_arguments
        variables = {name: value for name, value in arguments.items() if name != "tools"}
        found = self._continuation(tuple(message["role"] for message in messages), variables)
        texts: dict[str, str] = {}
        for index, message in enumerate(messages):
            name, call_id = message.get("name") or "tool", message.get("tool_call_id") or f"call{index:05}"
            texts.update(zip(fields(index), (_text(message), str(name), str(call_id)), strict=True))
        pieces = fill(found.pieces, texts)
        end = self._ends.get(last_token)
        if end and found.closing and (found.always_closes or end == found.closing):
            return self._encoder.encode_framed([pieces[0].lstrip(), *pieces[1:]])[1:]
        return self._encoder.encode_framed(pieces, inner=True)

    def opening(self, prompt: Prompt, shown: Sequence[Message]) -> Prompt:
        """The prompt with what an environment shows first.

        A first message of the user is appended to the prompt's last message if that is a user's. Others follow.

        Raises:
            DataError: the template refuses the messages, or the content of one is not text.
            ConfigError: the template does something unknown to the texts.
        """
        free = free_placeholders(repr(prompt.prompt))
        texts = dict(zip(free, map(_text, shown), strict=False))
        conversation = _conversation(prompt)
        guarded, spelt = self._turns.with_holes(conversation, free) if prompt.escaped else (conversation, {})

        def messages(texts: Iterable[str], conversation: Sequence[Message] = guarded) -> list[Message]:
            found = list(conversation)
            for message, text in zip(shown, texts, strict=True):
                if message is shown[0] and message["role"] == found[-1]["role"] == "user":
                    found[-1] = {**found[-1], "content": _text(found[-1]) + text}
                else:
                    found.append({**message, "content": text})
            return found

        marked = self._render(messages(map(surrounded, texts)), prompt)
        ids = self._encoder.encode(fill(learn(self._render(messages(texts), prompt), marked, texts), texts | spelt))
        return replace(
            prompt,
            token_ids=tuple(ids),
            text=decode(self._tokenizer, ids, special=True),
            prompt=messages(texts.values(), conversation),
        )

    def rewritten(self, prompt: Prompt, messages: Sequence[Message], tokens: Sequence[int]) -> list[int]:
        """The ids after the prompt when the template renders the whole conversation again.

        Args:
            prompt: the prompt of the episode.
            messages: all messages after it. The first one is the assistant's and includes the prompt's prefill.
            tokens: the ids after the prompt so far, those of ``after`` included. They are returned if they spell what
                the template writes, and if it refuses the conversation or writes the prompt itself differently: what
                the policy wrote, such as a malformed call, must not end the run.

        Raises:
            ConfigError: the template does something unknown to the texts.
        """
        guard = Guard(self._encoder, messages)
        before = _conversation(prompt)
        if before[-1]["role"] == "assistant":  # begun in the prompt; the first message is all of it
            before = before[:-1]
        plain = [guard.message(message) for message in messages]
        marked = [
            one if one["role"] == "assistant" else {**one, "content": surrounded(one["content"])} for one in plain
        ]
        start = self._render(_conversation(prompt), prompt)
        try:
            text, marked_text = (self._render([*before, *after], prompt) for after in (plain, marked))
        except DataError:
            return list(tokens)
        if not text.startswith(start):
            return list(tokens)
        pieces = fill(learn(text[len(start) :], marked_text[len(start) :], guard.contents), guard.texts)
        if decode(self._tokenizer, [*prompt.token_ids, *tokens], special=True) == prompt.text + "".join(pieces):
            return list(tokens)
        return self._encoder.encode(pieces, inner=True)

    def describe(self) -> str:
        """What the template writes after a turn, and where it drops thoughts, for the start of the run."""
        lines = [
            f"between turns (role {roles[0]!r}): {found}"
            for (_, roles), found in self._continuations.items()
            if len(roles) == 1
        ]
        if self._drops_thoughts:
            roles = " or ".join(self._drops_thoughts)
            lines.append(
                f"the chat template drops the thoughts of earlier turns when a {roles}'s message follows: "
                'environment.history = "append" keeps them, "template" goes on in a new segment without them'
            )
        return "\n".join(lines)

    def _continuation(self, roles: Roles, variables: Mapping[str, Any]) -> Continuation:
        key = (json.dumps(variables, sort_keys=True, default=repr) if variables else "", roles)
        if key not in self._continuations:
            if len(self._continuations) == MAX_CONTINUATIONS:
                self._continuations.clear()
            self._continuations[key] = replace(self._probe, variables=variables).continuation(roles)
        return self._continuations[key]

    def _render(self, messages: Sequence[Message], prompt: Prompt) -> str:
        """A conversation with the template's arguments of a prompt."""
        option = "continue_final_message" if messages[-1]["role"] == "assistant" else "add_generation_prompt"
        try:
            return render(self._tokenizer, messages, **prompt.template_arguments, **{option: True})
        except Exception as error:  # templates raise Jinja errors of many kinds
            raise DataError(f"row {prompt.row_index}: the chat template refused the messages: {error}") from error


class Guard:
    """Puts placeholders into messages, where a text could become a control token: for all text of tools, users and
    others, and for what the policy spells of special tokens. Its tags that are not special, such as ``<think>``, stay,
    because templates look for them.
    """

    def __init__(self, encoder: Encoder, messages: Sequence[Message]) -> None:
        self._encoder, self._free = encoder, free_placeholders(repr(messages))
        self.texts: dict[str, str] = {}
        """The text of each placeholder."""
        self.contents: set[str] = set()
        """The placeholders that are the content of a message."""
        self._holes: dict[str, str] = {}

    def message(self, message: Message) -> Message:
        """The message with placeholders."""
        guarded: dict[str, Any] = {**self._guarded(message)}
        if message["role"] != "assistant":
            guarded["content"] = hole = next(self._free)
            self.texts[hole] = _text(message)
            self.contents.add(hole)
        return guarded

    def _guarded(self, value: Any, key: str = "") -> Any:
        if isinstance(value, Mapping):
            return {self._guarded(name): self._guarded(item, name) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._guarded(item, key) for item in value]
        if not isinstance(value, str) or key in ("role", "type"):
            return value
        if key in ("name", "id", "tool_call_id") and not re.fullmatch(r"[\w.-]*", value):
            return self._hole(value)
        parts = self._encoder.split_special(value)
        return "".join(self._hole(part) if index % 2 else part for index, part in enumerate(parts))

    def _hole(self, text: str) -> str:
        """The placeholder of a text: always the same, as templates look for the call of an answer by its id."""
        if text not in self._holes:
            self._holes[text] = hole = next(self._free)
            self.texts[hole] = text
        return self._holes[text]


def _conversation(prompt: Prompt) -> Sequence[Message]:
    assert not isinstance(prompt.prompt, str)  # refused when the data is read
    return prompt.prompt


def _text(message: Message) -> str:
    """The text of a message's content: a string, or parts of type "text"."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list | tuple) else [{"type": "text", "text": content or ""}]
    texts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise DataError(f"a message's content must be text, got {content!r:.100}")
    return "".join(map(str, texts))
