"""What vLLM servers load to receive weights, and what they say of themselves through it.

vLLM's own ``reload_weights`` keeps the previous weights of a layer for which none arrive, and reports success.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cohort.errors import ConfigError
from cohort.rollout.vllm.server import Server, ServerError

PLUGIN = Path(__file__).parent / "vllm_plugin"
"""The folder of what servers load."""
PLUGIN_ARGUMENTS = (
    "--worker-extension-cls",
    "cohort_vllm.CohortWorker",
    "--weight-transfer-config",
    '{"backend": "cohort"}',
)


@dataclass(frozen=True, slots=True)
class ServerDescription:
    """What a server says of itself, through the plugin."""

    dtype: torch.dtype
    """Of its weights. They are sent in it."""
    device: str
    """"cpu" or "cuda"."""
    workers: int
    """Processes that hold weights."""
    transfer: str | None
    """The way of its weight transfers; "cohort": through the plugin."""
    can_sleep: bool
    has_tokenizer: bool
    sizes: Mapping[str, int]
    """Every size in the model's config: ``hidden_size``, ``vocab_size``, ..."""
    quantization: str | None


def describe_server(server: Server) -> ServerDescription:
    """Ask a server what it is.

    Raises:
        ConfigError: it does not have the plugin, or its weights are quantized.
        ServerError: it does not answer.
    """
    try:
        found = {**server.post("/collective_rpc", {"method": "cohort_describe"})["results"][0]}
        dtype, workers = getattr(torch, found.pop("dtype")), int(server.get("/get_world_size")["world_size"])
        description = ServerDescription(dtype=dtype, workers=workers, **found)
    except ServerError as error:
        if error.status is None:
            raise
        raise ConfigError(f"{server.url} cannot receive weights ({error.reason}). {how_to_start()}") from None
    except (TypeError, KeyError, IndexError, AttributeError) as error:
        raise ConfigError(f"{server.url} describes itself in an unknown way ({error!r}). {how_to_start()}") from None
    if description.quantization is not None:
        raise ConfigError(
            f"{server.url} quantizes the weights ({description.quantization}): start it without, they are sent in full"
        )
    return description


def start_command() -> str:
    """The command that starts a server for a run."""
    arguments = " ".join(f"'{one}'" if " " in one else one for one in PLUGIN_ARGUMENTS)
    return (
        f"VLLM_SERVER_DEV_MODE=1 PYTHONPATH={PLUGIN} vllm serve MODEL --enable-scale-out --logprobs-mode "
        f"processed_logprobs {arguments}"
    )


def how_to_start() -> str:
    """How to start a server with the plugin."""
    return f"Start it with {start_command()}; on another machine, with a copy of the folder in PYTHONPATH"


def check_sizes(server: Server, sizes: Mapping[str, int], expected: Mapping[str, Any]) -> None:
    """Check that a server serves the policy's architecture.

    Args:
        server: is named in the error.
        sizes: of its model.
        expected: the config of the policy's model.

    Raises:
        ConfigError: a size differs.
    """
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    other = [
        f"{name} {sizes[name]}, the policy {expected[name]}"
        for name in names
        if name in sizes and type(expected.get(name)) is int and sizes[name] != expected[name]
    ]
    if other:
        raise ConfigError(f"{server.url} serves another model ({'; '.join(other)}): start it with the policy's model")
