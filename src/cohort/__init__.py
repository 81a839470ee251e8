"""Cohort trains causal language models with GRPO.

>>> from cohort import GRPOConfig, GRPOTrainer

Importing the package imports no torch; a name is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cohort.config import GRPOConfig
    from cohort.trainer import GRPOTrainer

__version__ = "0.1.0"
__all__ = ["GRPOConfig", "GRPOTrainer", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "GRPOConfig":
        from cohort.config import GRPOConfig

        return GRPOConfig
    if name == "GRPOTrainer":
        from cohort.trainer import GRPOTrainer

        return GRPOTrainer
    raise AttributeError(f"module 'cohort' has no attribute {name!r}")
