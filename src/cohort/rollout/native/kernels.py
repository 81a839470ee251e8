"""The functions of decode.c, and the structures that they take: see there for what each field is."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int64, c_void_p

import torch

from cohort.rollout.native.build import load

DTYPES = (torch.float32, torch.bfloat16)
"""What the kernels read and write: outputs of the matrix products, keys and values."""
TILE = 8
"""Queries that share one reading of the keys."""
ALONE = 1 << 15
"""Numbers that one thread works through sooner than it wakes another."""


def _fields(names: str, kind: type) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class StepCall(ctypes.Structure):
    """What all layers of a decode step share."""

    threads: int
    _fields_ = (
        *_fields("kv_heads group width padded own_tokens prompt_tokens", c_int64),
        *_fields("order items", c_void_p),
        *_fields("item_count", c_int64),
        *_fields("row_slots row_prompts row_lengths prompt_lengths scratch", c_void_p),
        *_fields("scratch_size half threads", c_int64),
        *_fields("scaling cap", c_float),
    )


class LayerCall(ctypes.Structure):
    """One layer's attention."""

    _fields_ = (
        *_fields("q k v out", c_void_p),
        *_fields("q_stride k_stride v_stride out_stride", c_int64),
        *_fields("q_norm k_norm cos sin own_k own_v prompt_k prompt_v", c_void_p),
        *_fields("window", c_int64),
        *_fields("q_eps k_eps", c_float),
    )


class Residual(ctypes.Structure):
    """A residual stream, what is added to it, and the norm after it."""

    _fields_ = (
        *_fields("x update after factor out", c_void_p),
        *_fields("rows width half threads", c_int64),
        *_fields("after_eps eps", c_float),
    )


class Gated(ctypes.Structure):
    """The MLP's activation."""

    _fields_ = (
        *_fields("gate up out", c_void_p),
        *_fields("rows width gate_stride up_stride half gelu threads", c_int64),
    )


class Kernels:
    """The library's functions.

    Raises:
        Unavailable: there is none here.
    """

    def __init__(self) -> None:
        library = load()
        self.lanes: int = library.cohort_lanes()
        """Numbers in a vector."""
        self._attend, self._add_norm, self._activate = (
            library.cohort_attend,
            library.cohort_add_norm,
            library.cohort_activate,
        )
        for function in (self._attend, self._add_norm, self._activate):
            function.restype = None

    def attend(self, step: StepCall, layer: LayerCall) -> None:
        """Take in every row's newest keys and values, and attend."""
        self._attend(ctypes.byref(step), ctypes.byref(layer))

    def add_norm(self, residual: Residual) -> None:
        """Add the update to the stream, and normalise."""
        self._add_norm(ctypes.byref(residual))

    def activate(self, gated: Gated) -> None:
        """Activate the gate, times the other half."""
        self._activate(ctypes.byref(gated))


def threads_for(numbers: int) -> int:
    """How many threads work on so many numbers: all of torch's, or one. (With another team size in turn, the OpenMP
    runtime would end threads and start them again.)"""
    return torch.get_num_threads() if numbers > ALONE else 1
