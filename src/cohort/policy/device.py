"""The kind of device that code is chosen for, and what devices keep: memory, the state of random generators.

Every choice between code for CUDA and code for other devices asks ``kind_of``, so that tests run CUDA's choices on
tensors of a CPU.
"""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

_FORCED: list[str] = []
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
KEPT_BYTES, OWN_BYTES = 2**30, 2**25


def kind_of(device: torch.device) -> str:
    """The device's type, or the one of the innermost ``forced_kind`` block.

    >>> kind_of(torch.device("cpu"))
    'cpu'
    """
    return _FORCED[-1] if _FORCED else device.type


def keep_freed_memory(device: torch.device) -> None:
    """On Linux, let a device keep freed memory in a form that serves the next pass.

    On a CPU, glibc keeps up to ``KEPT_BYTES``. By default it returns the memory of each pass to the system and gets it
    back page by page in the next pass, 6% of an update of a small model. Blocks of at least ``OWN_BYTES`` are returned
    at once, as they are by default. Other C libraries are left alone.

    On CUDA, torch's allocator keeps pages of one growing range instead of blocks of past sizes: what an update has
    freed holds the keys and values of the next rollout. Not where an environment variable has set the allocator up, and
    not under WSL, whose driver fails with it. vLLM in this process switches it off for what it frees to sleep."""
    if sys.platform != "linux":
        return
    if device.type == "cpu" and (set_option := getattr(ctypes.CDLL(None), "mallopt", None)):
        set_option(M_MMAP_THRESHOLD, OWN_BYTES)
        set_option(M_TRIM_THRESHOLD, KEPT_BYTES)
    given = any(f"PYTORCH_{name}ALLOC_CONF" in os.environ for name in ("", "CUDA_", "HIP_"))
    if device.type == "cuda" and not given and "microsoft" not in platform.release().lower():
        newest: Any = getattr(torch._C, "_accelerator_setAllocatorSettings", None)  # of which torch's other one warns
        (newest or torch.cuda.memory._set_allocator_settings)("expandable_segments:True")


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


# ----------------------------------------
# The state of the global random generators. Cohort's own draws depend on none of these (see ``RNGKey``); functions of
# users and dropout do, and libraries seed them.


Generators: TypeAlias = tuple[Any, Any, Tensor, list[Tensor]]
"""The states of Python's, NumPy's, torch's and CUDA's generators, as these give them."""


def generators() -> Generators:
    """The present states of the generators; CUDA's where it is used."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda


@contextmanager
def preserved() -> Iterator[None]:
    """Restore the state of all generators after the block."""
    python, of_numpy, of_torch, cuda = generators()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)
        torch.cuda.set_rng_state_all(cuda)  # of none, if CUDA is not used
