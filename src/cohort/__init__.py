"""Cohort trains causal language models with GRPO.

>>> from cohort import GRPOConfig, GRPOTrainer

Importing the package imports no torch; a name is loaded when it is first used.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cohort.config import GRPOConfig, Source
    from cohort.rewards.contract import reward
    from cohort.trainer import GRPOTrainer

# Threads that wait for one another must soon sleep, not spin: else a second busy process on the machine slows this one
# tenfold and more (docs/log.md). OpenMP reads this when torch is imported; after that it is too late.
if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "4000")

__version__ = "0.1.0"
__all__ = ["GRPOConfig", "GRPOTrainer", "Source", "__version__", "reward"]


def __getattr__(name: str) -> Any:
    if name == "GRPOConfig":
        from cohort.config import GRPOConfig

        return GRPOConfig
    if name == "Source":
        from cohort.config import Source

        return Source
    if name == "GRPOTrainer":
        from cohort.trainer import GRPOTrainer

        return GRPOTrainer
    if name == "reward":
        from cohort.rewards.contract import reward

        return reward
    raise AttributeError(f"module 'cohort' has no attribute {name!r}")
