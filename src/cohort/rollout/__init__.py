"""Sampling: the engine protocol, the local engine, and the random numbers that decide the draws."""

from cohort.rollout.engine import Engine, Sampling, TokenEvent, Watch
from cohort.rollout.local import LocalEngine
from cohort.rollout.philox import Purpose, RNGKey, philox4x32
from cohort.rollout.sampling import Drawn, RowSettings, draw_tokens
from cohort.rollout.setup import local_engine

__all__ = [
    "Drawn",
    "Engine",
    "LocalEngine",
    "Purpose",
    "RNGKey",
    "RowSettings",
    "Sampling",
    "TokenEvent",
    "Watch",
    "draw_tokens",
    "local_engine",
    "philox4x32",
]
