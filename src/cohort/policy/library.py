"""The peft library, which is not part of the core."""

from __future__ import annotations

from typing import Any

from cohort.errors import ModelError

ADAPTER_FILE = "adapter_config.json"
"""What a folder with an adapter holds."""


def peft_library() -> Any:
    """The peft package.

    Raises:
        ModelError: it is not installed.
    """
    try:
        import peft
    except ImportError:
        raise ModelError("adapters need peft, which is not installed: pip install 'cohort-rl[lora]'") from None
    return peft
