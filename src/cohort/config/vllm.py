"""``[vllm]``: the servers that sample with ``rollout.engine = "vllm"``."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator

from cohort.config.section import PositiveFloat, Section, Strings

Addresses = Annotated[Strings, BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)]
"""One address or several."""


class VLLMConfig(Section):
    """vLLM servers, used with `rollout.engine = "vllm"`. They receive the weights after every update."""

    url: Addresses = ()
    """Address of a server, or a list of addresses, as in "http://127.0.0.1:8000": loopback or a private network."""
    request_timeout: PositiveFloat = 600.0
    """Time limit of a completion in seconds. A server that exceeds it is left out; the completion is repeated on
    another."""
    startup_timeout: PositiveFloat = 600.0
    """How long to wait for servers to answer when a run starts, in seconds."""
