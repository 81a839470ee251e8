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
from cohort.environments.skeleton import attempt

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
            call_id = {"id": f"call{index:05d}"} if self.with_ids else {}  # Mistral's wants 9 letters and digits
            tables.append({"type": "function", "function": {"name": call.name, "arguments": arguments}, **call_id})
        return tables


class CallRenderings:
    """Renders turns of the assistant.

    Args:
        tokenizer: the tokenizer, with the chat template in use.
        schemas: the JSON schemas of the tools, which the template may show.
    """

    def __init__(self, tokenizer: Any, schemas: Sequence[Mapping[str, Any]]) -> None:
        self._tokenizer, self._schemas = tokenizer, list(schemas)
        self._prompt = attempt(tokenizer, [USER], tools=self._schemas, add_generation_prompt=True)
        self._end = attempt(tokenizer, [USER, ANSWER], tools=self._schemas).rpartition(SENTINEL)[2]
        forms = [CallForm(*flags) for flags in itertools.product((False, True), repeat=2)]
        self.learned = [(form, rendering) for form in forms if (rendering := self._learned(form)) is not None]
        """The forms in which the template takes calls, and turns to learn the format from. Empty: it shows no calls."""

    def turn(self, form: CallForm, calls: Sequence[ToolCall], content: str = "") -> tuple[str, str] | None:
        """What the template renders before a turn with calls, and the turn without its end. None: the template refuses
        the turn, or does not show the calls or the content.
        """
        message = {"role": "assistant", "content": content, "tool_calls": form.tables(calls)}
        text = attempt(self._tokenizer, [USER, message], tools=self._schemas)
        before = common_start(self._prompt, text)
        turn, position = text.removeprefix(before).removesuffix(self._end), 0
        for part in (content, *(call.name for call in calls)):
            position = turn.find(part, position) + len(part)
            if position < len(part):
                return None
        return before, turn

    def _learned(self, form: CallForm) -> Rendering | None:
        for calls in (_LEARNED, _LEARNED[:1]):  # some templates take one call per turn
            if rendered := self.turn(form, calls):
                before, turn = rendered
                text = turn[thoughts_end(turn, before) :]
                if all(value in text for call in calls for value in call.arguments.values()):
                    return Rendering(text, calls)
        return None


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
