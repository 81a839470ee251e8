"""Checks of requests that every engine makes, and what every engine says of itself."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from cohort.errors import ConfigError, DataError
from cohort.policy import Policy, reads_images
from cohort.rollout.engine import Request


def check_requests(
    requests: Sequence[Request], vocabulary: int, context: int | None, refused: Collection[int] = ()
) -> None:
    """Check the prompts and lengths of requests.

    Args:
        requests: what was submitted.
        vocabulary: tokens of the model.
        context: maximum number of tokens of prompt and completion together; None: no limit.
        refused: ids of tokens that stand for images, from ``placeholder_ids``.

    Raises:
        DataError, ConfigError: see ``Engine.submit``.
    """
    pairs = {(id(request.prompt), request.sampling): request for request in requests}
    for prompt, sampling in ((request.prompt, request.sampling) for request in pairs.values()):
        length, limit = len(prompt.token_ids), sampling.max_completion_length
        if not length:
            raise DataError(f"prompt {prompt.uid} has no tokens")
        if not 0 <= min(prompt.token_ids) <= max(prompt.token_ids) < vocabulary:
            raise DataError(
                f"prompt {prompt.uid} ({prompt.text[:60]!r}) has token ids from {min(prompt.token_ids)} to "
                f"{max(prompt.token_ids)}, and the model has {vocabulary} tokens: were tokens added to the "
                "tokenizer without resizing the model's embeddings?"
            )
        if found := set(refused).intersection(prompt.token_ids):
            raise DataError(
                f"prompt {prompt.uid} ({prompt.text[:60]!r}) holds token {min(found)}, which stands for an image, a "
                "video or sound: Cohort trains on text alone. Remove it from the prompt"
            )
        if sampling.forced_ids and max(sampling.forced_ids) >= vocabulary:
            raise ConfigError(f"forced_ids holds {max(sampling.forced_ids)}, and the model has {vocabulary} tokens")
        if context is not None and length + limit > context:
            raise DataError(
                f"prompt {prompt.uid} ({prompt.text[:60]!r}) has {length} tokens, and a completion may have "
                f"{limit} more: the model's context holds {context}. Shorten it, or lower max_completion_length"
            )


def check_finished(unfinished: int, what: str) -> None:
    """Refuse what is only possible between rollouts. Raises ``ConfigError`` if trajectories are unfinished."""
    if unfinished:
        raise ConfigError(
            f"this engine cannot {what}: {unfinished} trajectories are unfinished. Finish, release or reset them"
        )


def describe_policy(policy: Policy) -> str:
    """Model and numerics, in a line."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in policy.model.parameters()]
    total, trained = sum(size for size, _ in sizes), sum(size for size, learns in sizes if learns)
    size = f"{total:,} parameters" + ("" if trained == total else f" ({trained:,} of them trained)")
    line = f"model: {type(policy.model).__name__}, {size}, {policy.precision}, on {policy.device}"
    if reads_images(getattr(policy.model, "config", None)):
        line += "; on text alone: what reads images is kept as it is"
    return line


def describe_end_tokens(tokenizer: Any, end_token_ids: Collection[int]) -> str:
    """The tokens that end a completion, in a line."""
    ends = [f"{tokenizer.convert_ids_to_tokens(end)!r} ({end})" for end in sorted(end_token_ids)]
    return f"end tokens: {', '.join(ends) or 'none: every completion runs to its limit'}"
