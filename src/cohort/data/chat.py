"""Conversations through the tokenizer's chat template, and what of the assistant's turn a template writes itself."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from cohort.errors import DataError
from cohort.types import Message

SENTINEL = "SENTINEL-OF-COHORT"
"""A content that no template changes and no template holds."""
PROBE = ({"role": "user", "content": "x"},)
MOST_HEADERS = 100
"""So many are kept at a time: each row may have variables of its own."""
ANSWER = {"role": "assistant", "content": SENTINEL}


class ChatTemplate:
    """Messages rendered to text, as the tokenizer's ``apply_chat_template`` does it.

    A conversation that ends with an assistant's message is continued; any other gets the template's generation prompt.

    Args:
        tokenizer: whose template it is.
        template: in place of the tokenizer's.

    Raises:
        DataError: there is no template.
    """

    def __init__(self, tokenizer: Any, template: str | None = None) -> None:
        if template is None and not getattr(tokenizer, "chat_template", None):
            raise DataError(
                "the data is in chat format, but the tokenizer has no chat template: set data.format to 'text' for "
                "string prompts, data.chat_template, or use a model that has one"
            )
        self._tokenizer = tokenizer
        self._template = template
        self._headers: dict[str, str | None] = {}
        self._checked = False
        self._read = {tools: self._variables(tools) for tools in (False, True)}

    def render(self, messages: Sequence[Message], tools: Any, variables: Mapping[str, Any], where: str) -> str:
        """The prompt's text.

        Args:
            messages: the conversation.
            tools: JSON schemas of functions, or None.
            variables: of the template.
            where: what errors call the row.

        Raises:
            DataError: the template refuses the conversation, has no use for a variable or for tools, does not show the
                messages, or writes no generation prompt although it marks where the assistant's turns begin.
        """
        self._check_read([*variables, *(["tools"] if tools else [])], tools, where)
        continues = messages[-1]["role"] == "assistant"
        try:
            text = self._apply(messages, tools, variables, generation=not continues, continues=continues)
        except Exception as error:  # templates raise jinja errors of many kinds
            raise DataError(f"{where}: the chat template refused the messages: {error}") from error
        if not self._checked:  # once for all rows: a check renders a few conversations of its own
            self._check(variables)
            self._checked = True
        return text

    def prefill(self, messages: Sequence[Message], tools: Any, variables: Mapping[str, Any], text: str) -> str:
        """What of the assistant's turn the rendered prompt ``text`` holds already.

        That is what ``text`` has more than the messages before the turn, without what it has in common with the header
        that the template puts before an assistant's content. Templates write "<think>" so, or an empty block of
        thoughts. Empty where the template cannot be rendered so far.
        """
        continues = messages[-1]["role"] == "assistant"
        own = str(messages[-1]["content"]) if continues else ""
        header = self._header(variables)
        before = list(messages[:-1] if continues else messages)
        try:
            without = self._apply(before, tools, variables) if before else ""
        except Exception:  # such a template wants more than it is given here, a first user's message perhaps
            return own
        if header is None or not text.startswith(without):
            return own
        turn = text[len(without) :]
        pairs = zip(turn, header, strict=False)
        return turn[sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)) :]

    def _header(self, variables: Mapping[str, Any]) -> str | None:
        """What the template puts between a user's message and an assistant's content that is not the last message's:
        there nothing is written into the turn that is not its content. None where that cannot be found out."""
        key = json.dumps(variables, sort_keys=True, default=repr)
        if key not in self._headers:
            if len(self._headers) == MOST_HEADERS:
                self._headers.clear()
            self._headers[key] = self._find_header(variables)
        return self._headers[key]

    def _find_header(self, variables: Mapping[str, Any]) -> str | None:
        try:
            user = self._apply(PROBE, None, variables)
            talk = self._apply([*PROBE, ANSWER, *PROBE], None, variables)
        except Exception:  # it wants something else of its conversations; it is not for us to refuse
            return None
        return _between(user, talk) if SENTINEL in talk and talk.startswith(user) else None

    def _check(self, variables: Mapping[str, Any]) -> None:
        """Whether the template shows messages, and where an answer begins; a template that refuses these probes shows
        what it is made for when it is given that."""
        try:
            shown = (SENTINEL, [{"type": "text", "text": SENTINEL}])  # some take content in parts only
            probes = [({"role": "user", "content": content},) for content in shown]
            if not any(SENTINEL in self._apply(probe, None, variables, generation=True) for probe in probes):
                raise DataError(
                    "the chat template does not show the messages: whatever they are, it writes the same. Set "
                    "data.chat_template to a template, as Jinja text or as the name of a file with it"
                )
            user = self._apply(PROBE, None, variables)
            opened = self._apply(PROBE, None, variables, generation=True)
            answered = self._apply([*PROBE, ANSWER], None, variables)
        except DataError:
            raise
        except Exception:
            return
        if opened == user and _between(user, answered).strip():
            raise DataError(
                "the chat template writes no generation prompt: it marks where the assistant's turns begin, but not "
                "when it is asked to (add_generation_prompt). Set data.chat_template to one that does, or use the "
                "model's own"
            )

    def _variables(self, with_tools: bool) -> set[str] | None:
        """The variables that the template reads, as Jinja's parser finds them; None where it cannot be parsed so."""
        import jinja2
        import jinja2.meta

        try:
            text = self._tokenizer.get_chat_template(self._template, [{}] if with_tools else None)
            syntax = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(text)
        except Exception:  # a tag of transformers' own; several templates by name and none of this
            return None
        return jinja2.meta.find_undeclared_variables(syntax)

    def _check_read(self, given: Sequence[str], tools: Any, where: str) -> None:
        read = self._read[bool(tools)]
        if read is not None and (unread := [name for name in given if name not in read]):
            raise DataError(
                f"{where}: the chat template reads no variable {unread[0]!r}; it reads: {', '.join(sorted(read))}. "
                "It would have no effect: leave it out, or rename the row's column with data.columns"
            )

    def _apply(
        self,
        messages: Sequence[Message],
        tools: Any,
        variables: Mapping[str, Any],
        *,
        generation: bool = False,
        continues: bool = False,
    ) -> str:
        text: str = self._tokenizer.apply_chat_template(
            list(messages),
            tools=tools,
            chat_template=self._template,
            tokenize=False,
            add_generation_prompt=generation,
            continue_final_message=continues,
            **variables,
        )
        return text


def _between(start: str, text: str) -> str:
    """What stands after ``start`` and before the sentinel."""
    return text[len(start) : text.index(SENTINEL)] if SENTINEL in text and text.startswith(start) else ""


def read_tools(value: Any, where: str) -> list[dict[str, Any]] | None:
    """A row's tools: a list of JSON schemas, or JSON text of one.

    Raises:
        DataError: it is neither.
    """
    tools = _read_json(value)
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) and tool for tool in tools):
        raise DataError(
            f"{where}: column 'tools' must be a list of JSON schemas of functions, or JSON text of one, got "
            f"{value!r:.80}; if it is something else, rename it with data.columns"
        )
    return [without_nulls(tool) for tool in tools]


def read_variables(value: Any, where: str) -> dict[str, Any]:
    """A row's variables of the chat template: a table, or JSON text of one.

    Raises:
        DataError: it is neither.
    """
    variables = _read_json(value)
    if variables is None:
        return {}
    if not isinstance(variables, dict):
        raise DataError(
            f"{where}: column 'chat_template_kwargs' must be a table, or JSON text of one, got {value!r:.80}"
        )
    table: dict[str, Any] = without_nulls(variables)
    return table


def without_nulls(value: Any) -> Any:
    """Without the keys whose value is None: Arrow gives every table the keys of all others in its column."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def _read_json(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json.loads(value)
    except ValueError:
        return value
