"""What calls of the kernels have in common."""

from __future__ import annotations

from ctypes import c_int64

import torch

ALONE = 1 << 15
"""Numbers that one thread works through sooner than it wakes another."""


def fields(names: str, kind: type = c_int64) -> list[tuple[str, type]]:
    """Fields of a structure, of one kind."""
    return [(name, kind) for name in names.split()]


def threads_for(numbers: int) -> int:
    """How many threads work on so many numbers: all of torch's, or one. (With another team size in turn, the OpenMP
    runtime would end threads and start them again.)"""
    return torch.get_num_threads() if numbers > ALONE else 1
