"""The kind of device that code is chosen for, and what devices do: run out of memory, round differently.

Every choice between code for CUDA and code for other devices asks ``kind_of``, so that tests run CUDA's choices on
tensors of a CPU.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from cohort.errors import RankError

_FORCED: list[str] = []
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
KEPT_BYTES, OWN_BYTES = 2**30, 2**25


def kind_of(device: torch.device) -> str:
    """The device's type, or the one of the innermost ``forced_kind`` block.

    >>> kind_of(torch.device("cpu"))
    'cpu'
    """
    return _FORCED[-1] if _FORCED else device.type


def out_of_memory(error: Exception) -> bool:
    """Whether an error of any device means that memory ran out."""
    if isinstance(error, RankError):  # it may quote the error of a pass that cannot be repeated
        return False
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def keep_freed_memory(device: torch.device) -> None:
    """On a CPU, let glibc keep up to ``KEPT_BYTES`` that are freed. By default it returns the memory of each pass to
    the system and gets it back page by page in the next pass, 6% of an update of a small model. Blocks of at least
    ``OWN_BYTES`` are returned at once, as they are by default. Other C libraries are left alone."""
    if device.type != "cpu" or sys.platform != "linux":
        return
    if set_option := getattr(ctypes.CDLL(None), "mallopt", None):
        set_option(M_MMAP_THRESHOLD, OWN_BYTES)
        set_option(M_TRIM_THRESHOLD, KEPT_BYTES)


def release_memory() -> None:
    """Free what is no longer used, so that the next attempt finds it. To be called after the ``except`` block: until
    then, the error's traceback holds the tensors of what failed."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def use_deterministic_algorithms(device: torch.device) -> None:
    """Let CUDA give the same bytes each time, in this process from now on. To be called before anything is computed on
    it. On other devices, nothing."""
    if kind_of(device) != "cuda":
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as torch's documentation asks; read by cuBLAS
    # A warning and no error: torch marks kernels that are deterministic for the shapes here, as a sum along rows.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined] # everything that is read has been written


@contextmanager
def forced_kind(kind: str) -> Iterator[None]:
    """Choose code as on another kind of device inside the block. For tests: the tensors stay where they are."""
    _FORCED.append(kind)
    try:
        yield
    finally:
        _FORCED.pop()
