"""Sampling: the engine protocol, the local engine, and the random numbers of the draws.

Importing the room imports no torch; names that need it are loaded when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cohort.rollout.divided import DividedSampler
from cohort.rollout.engine import Capabilities, EndedTurn, Engine, Request, Sampler, TokenEvent, Watch
from cohort.rollout.philox import Purpose, RNGKey
from cohort.rollout.settings import Sampling

if TYPE_CHECKING:
    from cohort.rollout.local.engine import LocalEngine
    from cohort.rollout.served.engine import ServedEngine
    from cohort.rollout.setup import EngineSetup, local_engine

_MODULES = {
    "EngineSetup": "setup",
    "LocalEngine": "local.engine",
    "ServedEngine": "served.engine",
    "local_engine": "setup",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
