"""Sampling: the engine protocol, the local engine, and the random numbers of the draws.

Importing the room imports no torch; names that need it are loaded when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cohort.rollout.divided import DividedSampler
from cohort.rollout.engine import (
    Capabilities,
    EndedTurn,
    Engine,
    Request,
    Sampler,
    TokenEvent,
    Watch,
    check_capabilities,
    required_capabilities,
)
from cohort.rollout.philox import Purpose, RNGKey, philox4x32
from cohort.rollout.settings import Sampling
from cohort.rollout.vllm.server import Server

if TYPE_CHECKING:
    from cohort.rollout.local import LocalEngine
    from cohort.rollout.sampling import Drawn, RowSettings, draw_tokens
    from cohort.rollout.setup import EngineSetup, local_engine
    from cohort.rollout.vllm.engine import VLLMEngine

__all__ = [
    "Capabilities",
    "DividedSampler",
    "Drawn",
    "EndedTurn",
    "Engine",
    "EngineSetup",
    "LocalEngine",
    "Purpose",
    "RNGKey",
    "Request",
    "RowSettings",
    "Sampler",
    "Sampling",
    "Server",
    "TokenEvent",
    "VLLMEngine",
    "Watch",
    "check_capabilities",
    "draw_tokens",
    "local_engine",
    "philox4x32",
    "required_capabilities",
]

_WITH_TORCH = {
    "Drawn": "sampling",
    "EngineSetup": "setup",
    "LocalEngine": "local",
    "RowSettings": "sampling",
    "VLLMEngine": "vllm.engine",
    "draw_tokens": "sampling",
    "local_engine": "setup",
}


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WITH_TORCH[name]}"), name)
