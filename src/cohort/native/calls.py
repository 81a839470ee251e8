"""Calls of native kernels with tensors."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int64, c_void_p

import torch
from torch import Tensor

from cohort.native.build import load

DTYPES = (torch.float32, torch.bfloat16)
"""Floating-point dtypes that the kernels read and write."""
NUMBERS_OF_ONE_THREAD = 1 << 15
"""Up to this many numbers, one thread is faster than several."""


class Kernel:
    """A function of the library that takes one structure: pointers, then integers, then floats.

    Args:
        name: of the function, without ``cohort_``.
        pointers, integers, floats: names of the structure's fields, separated by spaces.

    Raises:
        Unavailable: the library cannot be built or loaded.
    """

    def __init__(self, name: str, pointers: str, integers: str, floats: str = "") -> None:
        kinds = ((pointers, c_void_p), (integers, c_int64), (floats, c_float))
        fields = [(field, kind) for names, kind in kinds for field in names.split()]
        self._structure = type(name, (ctypes.Structure,), {"_fields_": fields})
        self._function = getattr(load(), f"cohort_{name}")
        self._function.restype = None

    def __call__(self, **values: Tensor | float | None) -> None:
        """Call the function. Fields that are not given are NULL or 0."""
        plain = {name: data_pointer(value) if isinstance(value, Tensor) else value for name, value in values.items()}
        self._function(ctypes.byref(self._structure(**plain)))


def data_pointer(values: Tensor) -> int:
    """The address of a tensor's numbers. Rejects layouts, devices and dtypes that C would misread."""
    if not values.is_contiguous() or values.device.type != "cpu" or values.dtype not in (*DTYPES, torch.int64):
        raise TypeError(f"a contiguous tensor on the CPU was expected, got {values.dtype}, {values.stride()}")
    return values.data_ptr()


def is_half(values: Tensor | None) -> bool:
    """Whether a kernel reads or writes bfloat16 here."""
    return values is not None and values.dtype == torch.bfloat16


def fields(names: str, kind: type = c_int64) -> list[tuple[str, type]]:
    """Fields of a structure, of one kind."""
    return [(name, kind) for name in names.split()]


def threads_for(numbers: int) -> int:
    """The number of threads for a loop over so many numbers: all of torch's, or one. Other team sizes would make the
    OpenMP runtime end threads and start them again."""
    return torch.get_num_threads() if numbers > NUMBERS_OF_ONE_THREAD else 1
