"""The functions of decode.c and their structures, whose fields are documented there."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int64, c_void_p

from cohort.native import fields, load

TILE = 8
"""Queries for which keys are read once."""


class StepCall(ctypes.Structure):
    """Arguments that all layers of a decode step share."""

    threads: int
    _fields_ = (
        *fields("kv_heads group width padded own_tokens prompt_tokens", c_int64),
        *fields("order items", c_void_p),
        *fields("item_count", c_int64),
        *fields("row_slots row_prompts row_lengths prompt_lengths scratch", c_void_p),
        *fields("scratch_size half threads", c_int64),
        *fields("scaling cap", c_float),
    )


class LayerCall(ctypes.Structure):
    """One layer's attention."""

    _fields_ = (
        *fields("q k v out", c_void_p),
        *fields("q_stride k_stride v_stride out_stride", c_int64),
        *fields("q_norm k_norm cos sin own_k own_v prompt_k prompt_v", c_void_p),
        *fields("window", c_int64),
        *fields("q_eps k_eps", c_float),
    )


class Residual(ctypes.Structure):
    """A residual stream, its update, and the norm after it."""

    _fields_ = (
        *fields("x update after factor out", c_void_p),
        *fields("rows width half threads", c_int64),
        *fields("after_eps eps", c_float),
    )


class Gated(ctypes.Structure):
    """The MLP's activation."""

    _fields_ = (
        *fields("gate up out", c_void_p),
        *fields("rows width gate_stride up_stride half gelu threads", c_int64),
    )


class Kernels:
    """The library's functions.

    Raises:
        Unavailable: the library cannot be used here.
    """

    def __init__(self) -> None:
        library = load()
        self.lanes: int = library.cohort_lanes()
        """Numbers per vector."""
        self._attend, self._add_norm, self._activate = (
            library.cohort_attend,
            library.cohort_add_norm,
            library.cohort_activate,
        )
        for function in (self._attend, self._add_norm, self._activate):
            function.restype = None

    def attend(self, step: StepCall, layer: LayerCall) -> None:
        """Store the newest keys and values of all rows, and attend."""
        self._attend(ctypes.byref(step), ctypes.byref(layer))

    def add_norm(self, residual: Residual) -> None:
        """Add the update to the stream, then normalise."""
        self._add_norm(ctypes.byref(residual))

    def activate(self, gated: Gated) -> None:
        """Multiply the activated gate by the other half."""
        self._activate(ctypes.byref(gated))
