"""The sampling settings of ``cohort generate``: from flags, and from what the model's context leaves."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from cohort.config import RolloutConfig
from cohort.config.errors import explain_errors
from cohort.errors import CohortError, DataError
from cohort.generate.request import Request
from cohort.policy import context_length, end_token_ids
from cohort.rollout import Sampling
from cohort.types import Prompt

DEFAULT_TOKENS = 256
"""Maximum length of a completion without ``--max-tokens``, unless the model's context ends before."""
FLAGS = {
    "rollout.max_completion_length": "--max-tokens",
    "max_completion_length": "--max-tokens",
    "min_completion_length": "--min-tokens",
    "rollout.cache_tokens": "--cache-tokens",
    "forced_ids": "--prefix",
    "model.path": "MODEL",
    "model.device": "--device",
    "data.system_prompt": "--system",
}
"""The flags for settings that errors of other rooms name."""


@contextlib.contextmanager
def flags_in_errors() -> Iterator[None]:
    """Make errors name flags of the command line instead of settings."""
    try:
        yield
    except CohortError as error:
        names = "|".join(re.escape(name) for name in FLAGS)
        raise type(error)(re.sub(names, lambda found: FLAGS[found[0]], str(error))) from error.__cause__


def base_sampling(request: Request) -> Sampling:
    """The sampling settings without the prefix, which needs a tokenizer.

    Raises:
        ConfigError: a number is out of its range, or a schema cannot be read.
    """
    with explain_errors(RolloutConfig):
        schema = RolloutConfig(json_schema=request.json_schema).json_schema
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    given = {name: value for name in names if (value := getattr(request, name)) is not None}
    return Sampling(
        max_completion_length=request.max_tokens or max(DEFAULT_TOKENS, request.min_tokens or 0),
        min_completion_length=request.min_tokens or 0,
        stop=tuple(request.stop),
        regex=request.regex,
        json_schema=schema,
        record_support=False,
        **given,
    )


def with_prefix(request: Request, sampling: Sampling, tokenizer: Any, config: Any) -> Sampling:
    """The settings with the prefix's tokens. A grammar is compiled and checked against them.

    Raises:
        ConfigError: a grammar cannot be compiled or does not allow the prefix, or the prefix is too long.
    """
    forced = tokenizer(request.prefix, add_special_tokens=False)["input_ids"] if request.prefix else []
    limit = request.max_tokens or max(sampling.max_completion_length, len(forced))
    sampling = replace(sampling, forced_ids=tuple(forced), max_completion_length=limit)
    ends = end_token_ids(SimpleNamespace(config=config), tokenizer)
    vocabulary = getattr(config, "vocab_size", None)
    if sampling.constrained and ends and vocabulary:  # the engine checks the rest when the model has been loaded
        from cohort.rollout.grammar import Grammar

        matcher = Grammar.of(tokenizer, sampling, ends, vocabulary).matcher()
        for token in forced:
            matcher.consume(token)
    return sampling


def within_context(request: Request, prompts: Sequence[Prompt], sampling: Sampling, config: Any) -> list[Sampling]:
    """The settings of each prompt. Without ``--max-tokens`` a completion may fill the model's context.

    Raises:
        DataError: a prompt leaves no room for its completion.
    """
    if (context := context_length(config)) is None:
        return [sampling] * len(prompts)
    needed = request.max_tokens or max(1, sampling.min_completion_length, len(sampling.forced_ids))
    samplings = []
    for prompt in prompts:
        length = len(prompt.token_ids)
        if length + needed > context:
            shown = prompt.text if len(prompt.text) <= 60 else prompt.text[:57] + "..."
            reason = f"--max-tokens is {needed}" if request.max_tokens else f"its completion needs at least {needed}"
            raise DataError(
                f"{request.prompts or 'the command line'}, prompt {prompt.uid} ({shown!r}) has {length} tokens and "
                f"{reason}: together more than the model's context of {context}"
            )
        limit = min(sampling.max_completion_length, context - length)
        samplings.append(replace(sampling, max_completion_length=limit))
    return samplings
