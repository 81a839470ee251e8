"""The functions of decode.c and their structures."""

from __future__ import annotations

import ctypes

from cohort.native.build import load
from cohort.native.calls import structure

TILE = 8
"""Queries for which keys are read once."""


StepCall, LayerCall, Residual, Gated = map(structure, ("step", "layer", "residual", "gated"))
"""Arguments that all layers of a decode step share; of one layer's attention; a residual stream, its update and the
norm after it; the MLP's activation."""


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

    def attend(self, step: ctypes.Structure, layer: ctypes.Structure) -> None:
        """Store the newest keys and values of all rows, and attend."""
        self._attend(ctypes.byref(step), ctypes.byref(layer))

    def add_norm(self, residual: ctypes.Structure) -> None:
        """Add the update to the stream, then normalise."""
        self._add_norm(ctypes.byref(residual))

    def activate(self, gated: ctypes.Structure) -> None:
        """Multiply the activated gate by the other half."""
        self._activate(ctypes.byref(gated))
