"""The kind of device that code is chosen for.

Every choice between code for CUDA and code for other devices asks ``kind_of``, so that tests run CUDA's choices on
tensors of a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_FORCED: list[str] = []


def kind_of(device: torch.device) -> str:
    """The device's type, or the one of the innermost ``forced_kind`` block.

    >>> kind_of(torch.device("cpu"))
    'cpu'
    """
    return _FORCED[-1] if _FORCED else device.type


@contextmanager
def forced_kind(kind: str) -> Iterator[None]:
    """Choose code as on another kind of device inside the block. For tests: the tensors stay where they are."""
    _FORCED.append(kind)
    try:
        yield
    finally:
        _FORCED.pop()
