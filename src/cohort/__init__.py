"""Cohort trains causal language models with GRPO.

>>> from cohort import GRPOConfig, GRPOTrainer

Importing the package imports no torch; each name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cohort.config import GRPOConfig, Source
    from cohort.rewards.contract import reward
    from cohort.trainer import GRPOTrainer

# Waiting threads must sleep early instead of spinning; otherwise a second busy process on the machine makes this one
# ten times slower or worse (docs/log.md). OpenMP reads this when torch is imported.
if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "4000")

# It warns as soon as it is imported, which peft does also for runs without quantization, that it lacks a package with
# one more kernel for CPUs.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

__version__ = "0.1.0"
__all__ = ["GRPOConfig", "GRPOTrainer", "Source", "__version__", "reward"]

_MODULES = {
    "GRPOConfig": "cohort.config",
    "Source": "cohort.config",
    "GRPOTrainer": "cohort.trainer",
    "reward": "cohort.rewards.contract",
}


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'cohort' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
