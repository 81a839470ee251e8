"""A face for scripts written for TRL 1.16.0: ``from cohort.trl import GRPOConfig, GRPOTrainer``.

Arguments have TRL's names, defaults and meaning; they become Cohort's settings, and Cohort's trainer trains.
docs/trl.md says what becomes of each field, and what differs. TRL itself is never imported. Each name is loaded when it
is first used; accelerate, which transformers' ``TrainingArguments`` need, is in the extra "trl".
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cohort.trl.config import GRPOConfig

if find_spec("accelerate") is None:
    raise ImportError("cohort.trl needs accelerate, which is not installed: pip install 'cohort-rl[trl]'")

_MODULES = {
    "GRPOConfig": "cohort.trl.config",
}
__all__ = ["GRPOConfig"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'cohort.trl' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
