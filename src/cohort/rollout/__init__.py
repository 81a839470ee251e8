"""Sampling: the engine protocol, the local engine, and the random numbers that decide the draws."""

from cohort.rollout.engine import Engine, Sampling
from cohort.rollout.local import LocalEngine, draw_tokens
from cohort.rollout.philox import Draws, Purpose, philox4x32

__all__ = ["Draws", "Engine", "LocalEngine", "Purpose", "Sampling", "draw_tokens", "philox4x32"]
