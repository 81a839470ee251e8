"""What a chat template renders for turns of the assistant with calls that are known."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cohort.data.chat import ANSWER, SENTINEL, USER
from cohort.environments.bodies import Rendering, common_start
from cohort.environments.contract import ToolCall

THOUGHTS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|channel>thought", "<channel|>"))
"""What surrounds thoughts."""
_LEARNED = (
    ToolCall("sentinel_add", {"alpha_key": "first-alpha-value", "beta_key": "first-beta-value"}),
    ToolCall("sentinel_find", {"alpha_key": "second-alpha-value", "beta_key": "second-beta-value"}),
)


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a template takes the calls of a message."""

    as_text: bool = False
    """Whether arguments must be JSON text; otherwise they are objects."""
    with_ids: bool = False
    """Whether calls need an id."""

    def tables(self, calls: Sequence[ToolCall]) -> list[Mapping[str, Any]]:
        """The value of ``tool_calls``."""
        tables: list[Mapping[str, Any]] = []
        for index, call in enumerate(calls):
            arguments = json.dumps(call.arguments, ensure_ascii=False) if self.as_text else dict(call.arguments)
            table: dict[str, Any] = {"type": "function", "function": {"name": call.name, "arguments": arguments}}
            if self.with_ids:
                table["id"] = f"call{index:05d}"  # Mistral's template wants 9 letters and digits
            tables.append(table)
        return tables


class CallRenderings:
    """Renders turns of the assistant.

    Args:
        tokenizer: the tokenizer.
        template: a chat template that replaces the tokenizer's.
        schemas: the JSON schemas of the tools, which the template may show.
    """

    def __init__(self, tokenizer: Any, template: str | None, schemas: Sequence[Mapping[str, Any]]) -> None:
        self._tokenizer, self._template, self._schemas = tokenizer, template, list(schemas)
        self.prompt = self._apply([USER], add_generation_prompt=True) or ""
        """A prompt with the generation prompt. Empty if the template refuses one message of a user."""
        plain = self._apply([USER, ANSWER]) or ""
        self._end = plain.rpartition(SENTINEL)[2]
        forms = [CallForm(*flags) for flags in itertools.product((False, True), repeat=2)]
        self.learned = [(form, rendering) for form in forms if (rendering := self._learned(form)) is not None]
        """The forms in which the template takes calls, and turns to learn the format from. Empty: it shows no calls."""

    def turn(self, form: CallForm, calls: Sequence[ToolCall], content: str = "") -> tuple[str, str] | None:
        """What the template renders before a turn with calls, and the turn without its end. None: the template refuses
        the turn, or does not show the calls or the content.
        """
        message = {"role": "assistant", "content": content, "tool_calls": form.tables(calls)}
        text = self._apply([USER, message])
        if text is None:
            return None
        before = common_start(self.prompt, text)
        turn = text.removeprefix(before).removesuffix(self._end)
        shown, position = (content, *(call.name for call in calls)), 0
        for part in shown:
            position = turn.find(part, position) + len(part)
            if position < len(part):
                return None
        return before, turn

    def _learned(self, form: CallForm) -> Rendering | None:
        for calls in (_LEARNED, _LEARNED[:1]):  # some templates take one call per turn
            rendered = self.turn(form, calls)
            if rendered is not None:
                text = rendered[1][thoughts_end(rendered[1], rendered[0]) :]
                values = [value for call in calls for value in call.arguments.values()]
                if all(value in text for value in values):
                    return Rendering(text, tuple((call.name, dict(call.arguments)) for call in calls))
        return None

    def _apply(self, messages: Sequence[Mapping[str, Any]], **options: bool) -> str | None:
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages),
                tools=self._schemas or None,
                chat_template=self._template,
                tokenize=False,
                **options,
            )
        except Exception:  # templates raise errors of many kinds
            return None
        return text


def thoughts_end(text: str, prefix: str) -> int:
    """Where the thoughts at the start of a turn end. Its whole length if they do not end, 0 if there are none.

    Args:
        text: the turn.
        prefix: what is before the turn; it may have opened the thoughts.
    """
    for opening, closing in THOUGHTS:
        if text.lstrip().startswith(opening) or prefix.rstrip().endswith(opening):
            end = text.find(closing)
            return len(text) if end < 0 else end + len(closing)
    return 0
