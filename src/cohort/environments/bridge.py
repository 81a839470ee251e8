"""From one turn of an episode to the next, as token ids.

A chat template renders whole conversations. If a conversation were rendered and tokenized again after every turn, what
the policy drew could become other tokens. So the tokens so far stay as they are, and Cohort appends the ids of what the
template writes after a turn. To find that text, the template renders a conversation with placeholders:

    user "x", assistant "ANSWER", tool "qzh000000", generation prompt
    ... ANSWER<|im_end|>\n<|im_start|>tool\nqzh000000<|im_end|>\n<|im_start|>assistant\n

What follows ANSWER is found once for each shape (the roles of the messages) and checked: the template shows every
message once, in order, and writes the same after other conversations.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cohort.data.encoding import Encoder, Given
from cohort.data.render import ANSWER, SENTINEL, USER, TurnTokens, render
from cohort.errors import ConfigError, DataError
from cohort.rollout.trajectory import decode
from cohort.types import Message, Prompt

# ----------------------------------------
# Renderings of a chat template: its own text, and the holes that texts of messages fill.
#
# A chat template renders placeholders instead of the texts of tools and environments:
#
#     <|im_start|>tool\nhole00000<|im_end|>\n  ->  "<|im_start|>tool\n", Hole("hole00000", identity), "<|im_end|>\n"
#
# so it is known which characters are whose, and real texts never go through the template. How it writes a text (as it
# is, stripped, as JSON) is learned from a second rendering, with characters around each placeholder that show the
# difference.


LEFT, RIGHT = '\n "\\é<&', '&>é\\" \n'
_HOLE = re.compile(r"(qzh\d{6})")
_CHANGES: tuple[Callable[[str], str], ...] = (
    lambda text: text,
    str.strip,
    str.rstrip,
    str.lstrip,
    lambda text: text.strip("\n"),
    lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    lambda text: json.dumps(text)[1:-1],
    lambda text: json.dumps(text.strip(), ensure_ascii=False)[1:-1],
)
"""What templates do to the text of a message."""


def attempt(tokenizer: Any, messages: Sequence[Any], /, **arguments: Any) -> str:
    """What a chat template renders; empty if it refuses the messages."""
    try:
        return render(tokenizer, messages, **arguments)
    except Exception:  # templates raise errors of many kinds
        return ""


def placeholder(number: int) -> str:
    """A text of nine letters and digits, which suits as the id of a call too.

    >>> placeholder(7)
    'qzh000007'
    """
    return f"qzh{number:06}"


def find_placeholders(text: str) -> list[str]:
    """The placeholders in a text, in order."""
    return _HOLE.findall(text)


def free_placeholders(text: str) -> Iterator[str]:
    """Placeholders that do not occur in a text."""
    taken = set(find_placeholders(text))
    return (one for one in map(placeholder, itertools.count()) if one not in taken)


def surrounded(text: str) -> str:
    """A text for the second rendering."""
    return LEFT + text + RIGHT


@dataclass(frozen=True, slots=True)
class Hole:
    """Where a template writes a text."""

    placeholder: str
    change: Callable[[str], str]

    @property
    def number(self) -> int:
        """The placeholder's."""
        return int(self.placeholder[3:])


Pieces = Sequence[str | Hole]


def learn(rendered: str, rendered_surrounded: str, contents: Collection[str]) -> list[str | Hole]:
    """The pieces of a rendering, the template's own text and holes in turn.

    Args:
        rendered: text with placeholders.
        rendered_surrounded: the same, where the placeholders in ``contents`` were ``surrounded``.
        contents: placeholders. Others, as of names, are written as they are.

    Raises:
        ConfigError: the template does something unknown to a text.

    >>> pieces = learn("<tool>qzh000001</tool>", "<tool>" + surrounded("qzh000001").strip() + "</tool>", {"qzh000001"})
    >>> fill(pieces, {"qzh000001": " 42\\n"})
    ['<tool>', '42', '</tool>']
    """
    first, *others = _HOLE.split(rendered)
    pieces: list[str | Hole] = [first]
    position = len(first) if rendered_surrounded.startswith(first) else -1
    for hole, text in zip(others[::2], others[1::2], strict=True):
        given = surrounded(hole) if hole in contents else hole
        found = (one for one in _CHANGES if rendered_surrounded.startswith(one(given) + text, position))
        change = next(found, None)
        if change is None or position < 0:
            shown = rendered_surrounded[max(position, 0) :]
            raise ConfigError(
                f"the chat template changes the text of messages in an unknown way: for {given + text!r:.200}, it "
                f"writes {shown!r:.200}. Set data.chat_template to a template that writes 'content' as it is, without "
                "whitespace around it, or as JSON"
            )
        position += len(change(given) + text)
        pieces += [Hole(hole, change), text]
    return pieces


def fill(pieces: Pieces, texts: Mapping[str, str]) -> list[str]:
    """The pieces with texts in their holes. A placeholder that has no text stands for itself."""
    return [
        Given(one.change(texts.get(one.placeholder, one.placeholder))) if isinstance(one, Hole) else one
        for one in pieces
    ]


# ----------------------------------------
# Conversations with a sentinel that show what a chat template does.


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
            return self._encoder.encode([pieces[0].lstrip(), *pieces[1:]])[1:]
        return self._encoder.encode(pieces, inner=True)

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
        parts = self._encoder.special.split(value)
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
