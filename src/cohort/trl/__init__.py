"""Runs scripts that are written for TRL's GRPO trainer: same names, same arguments, same meaning.

>>> from cohort.trl import GRPOConfig, GRPOTrainer  # doctest: +SKIP

docs/trl.md has the table of all arguments, and lists where a run differs from TRL's. Importing the package imports no
torch; each name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from cohort.errors import did_you_mean

if TYPE_CHECKING:
    from cohort.trl.arguments import (
        DatasetMixtureConfig,
        ModelConfig,
        ScriptArguments,
        TrlParser,
        get_dataset,
        get_peft_config,
        get_quantization_config,
    )
    from cohort.trl.config import GRPOConfig

if importlib.util.find_spec("accelerate") is None:
    raise ImportError("cohort.trl needs accelerate, which is not installed: pip install 'cohort-rl[trl]'")

_ARGUMENTS = ("TrlParser", "DatasetMixtureConfig", "ModelConfig", "ScriptArguments")
_MADE = ("get_dataset", "get_peft_config", "get_quantization_config")
_MODULES = {"GRPOConfig": "config", "GRPOTrainer": "trainer", **dict.fromkeys((*_ARGUMENTS, *_MADE), "arguments")}


HELPERS = frozenset(
    {"add_response_schema", "apply_chat_template", "clone_chat_template", "create_reference_model", "extract_prompt"}
    | {"get_training_chat_template", "is_conversational", "maybe_apply_chat_template", "maybe_convert_to_chatml"}
    | {"maybe_extract_prompt", "pack_dataset", "prepare_multimodal_messages", "supports_tool_calling"}
)
"""Functions that scripts import from TRL. Other names in small letters are what tools ask a module for."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"cohort.trl.{_MODULES[name]}"), name)
    if name not in HELPERS and not name[:1].isupper():
        raise AttributeError(f"module 'cohort.trl' has no attribute {name!r}")
    # Of an AttributeError, ``from cohort.trl import name`` would not show the message.
    raise ImportError(
        f"cohort.trl has no {name}: it has what GRPO scripts import ({', '.join(_MODULES)}); import other names "
        f"from trl{did_you_mean(name, _MODULES)}"
    )
