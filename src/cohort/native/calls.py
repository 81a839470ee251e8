"""Calls of native kernels with tensors."""

from __future__ import annotations

import ctypes
import functools
import re
import threading
from collections.abc import Collection
from ctypes import c_float, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from cohort.native.build import SOURCE, load

DTYPES = (torch.float32, torch.bfloat16)
"""Floating-point dtypes that the kernels read and write."""
READ = {*DTYPES, torch.int64}
"""Dtypes of the tensors that they are given."""
NUMBERS_OF_ONE_THREAD = 1 << 15
"""Up to this many numbers, one thread is faster than several."""
_LOCAL = threading.local()


@functools.cache
def source() -> str:
    """All C sources, without comments."""
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(SOURCE.parent.glob("*.c")))
    return re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)


@functools.cache
def structure(name: str) -> type[ctypes.Structure]:
    """A structure with the fields of a ``typedef struct`` of the C sources."""
    (body,) = re.findall(rf"typedef struct {{([^}}]*)}} {name};", source())
    fields: list[tuple[str, Any]] = []
    for kind, names in re.findall(r"(?:const )?(void|float|int64_t|int32_t) ([^;]+);", body):
        number = c_float if kind == "float" else c_int64
        fields += [(field.strip("* \n"), c_void_p if "*" in field else number) for field in names.split(",")]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


@functools.cache
def _kernel(name: str) -> tuple[type[ctypes.Structure], list[tuple[str, str]], Any]:
    """The structure that ``cohort_NAME`` takes, its fields ``half`` and ``..._half`` with the beginning of the names
    that each is about, and the function."""
    function = getattr(load(), f"cohort_{name}")
    function.restype = None
    (argument,) = re.findall(rf"void cohort_{name}\((\w+) ", source())
    kind = structure(argument)
    halves = [(field, field.removesuffix("half").rstrip("_")) for field, *_ in kind._fields_ if field.endswith("half")]
    return kind, halves, function


def room(numbers: int) -> Tensor:
    """Memory for at least so many float32 numbers, in which a kernel works until it returns. Each thread keeps its own:
    fresh memory would be mapped at each call."""
    held: Tensor | None = getattr(_LOCAL, "room", None)
    if held is None or len(held) < numbers:
        held = _LOCAL.room = torch.empty(numbers, dtype=torch.float32)
    return held


def call(name: str, apart: Collection[str] = (), /, **values: Tensor | float | None) -> None:
    """Call the function ``cohort_NAME``, which takes one structure. Fields that are not given are NULL or 0. Rows of
    the tensors named in ``apart`` may lie apart: the function takes their stride.

    ``half`` and ``..._half`` are filled in: whether the first tensor given, or the first whose name begins so, is in
    bfloat16. ``threads`` are those for the first tensor, unless given.

    Raises:
        Unavailable: the library cannot be built or loaded.
    """
    kind, halves, function = _kernel(name)
    tensors = {field: value for field, value in values.items() if isinstance(value, Tensor)}
    pointers = {field: data_pointer(value[:1] if field in apart else value) for field, value in tensors.items()}
    given = {**values, **pointers}
    given.setdefault("threads", threads_for(next(iter(tensors.values())).numel()))
    for field, start in halves:
        about = next((tensor for other, tensor in tensors.items() if other.startswith(start)), None)
        given[field] = about is not None and about.dtype == torch.bfloat16
    function(ctypes.byref(kind(**given)))


def whole_rows(values: Tensor) -> Tensor:
    """The tensor, or a copy: the numbers of each row are contiguous, and rows may lie apart."""
    return values if values[:1].is_contiguous() else values.contiguous()


def data_pointer(values: Tensor) -> int:
    """The address of a tensor's numbers. Rejects layouts, devices and dtypes that C would misread."""
    if not values.is_contiguous() or not values.is_cpu or values.dtype not in READ:
        raise TypeError(f"a contiguous tensor on the CPU was expected, got {values.dtype}, {values.stride()}")
    return values.data_ptr()


@functools.cache
def has_pairs() -> bool:
    """Whether the processor multiplies pairs of bfloat16 numbers. The library must be available."""
    return bool(load().cohort_has_pairs())


def require(holds: bool, what: str) -> None:
    """Check shapes and dtypes: with others, C would read or write out of bounds."""
    if not holds:
        raise ValueError(what)


def threads_for(numbers: int) -> int:
    """The number of threads for a loop over so many numbers: all of torch's, or one. Other team sizes would make the
    OpenMP runtime end threads and start them again."""
    return torch.get_num_threads() if numbers > NUMBERS_OF_ONE_THREAD else 1
