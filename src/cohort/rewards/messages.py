"""The text that the assistant wrote in a completion, which is a string or a list of messages."""

from __future__ import annotations

from typing import Any


def completion_text(completion: str | list[dict[str, Any]]) -> str:
    """The text of the last assistant message, or "" without one. Parts that are not text are left out.

    >>> completion_text([{"role": "assistant", "content": "6*7"}, {"role": "assistant", "content": "42"}])
    '42'
    """
    return (_assistant_texts(completion) or [""])[-1]


def whole_text(completion: str | list[dict[str, Any]]) -> str:
    """The texts of all assistant messages, joined by line breaks.

    >>> whole_text([{"role": "assistant", "content": "6*7"}, {"role": "tool", "content": "42"}, {"role": "assistant"}])
    '6*7'
    """
    return "\n".join(filter(None, _assistant_texts(completion)))


def turn_text(completion: str | list[dict[str, Any]], prefill: str) -> str:
    """The text of the last assistant turn. If it is the first turn, it begins with the prefill from the prompt.

    >>> turn_text([{"role": "assistant", "content": "5}"}], prefill="The answer is \\\\boxed{")
    'The answer is \\\\boxed{5}'
    """
    texts = _assistant_texts(completion)
    return texts[-1] if len(texts) > 1 else prefill + "".join(texts)


def _assistant_texts(completion: str | list[dict[str, Any]]) -> list[str]:
    if isinstance(completion, str):
        return [completion]
    return [content_text(message.get("content")) for message in completion if message.get("role") == "assistant"]


def content_text(content: str | list[dict[str, Any]] | None) -> str:
    """The text of a message's content. Parts that are not text are left out.

    >>> content_text([{"type": "text", "text": "6*"}, {"type": "text", "text": "7"}])
    '6*7'
    """
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content or () if part.get("type") == "text")
