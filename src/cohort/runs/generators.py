"""The state of the global random generators, which reward functions, environments and dropout may use.

Cohort's own draws are functions of keys (see ``RNGKey``) and depend on none of these.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor


def random_state() -> dict[str, Any]:
    """The state of Python's, NumPy's and torch's generators, in types of JSON."""
    version, numbers, gauss = random.getstate()
    name, keys, *rest = np.random.get_state(legacy=True)
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [name, [int(key) for key in keys], *rest],
        "torch": _hex(torch.get_rng_state()),
        "cuda": [_hex(state) for state in cuda],
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """The inverse of ``random_state``.

    Raises:
        ValueError, TypeError, LookupError: it is not a state of these generators.
    """
    try:
        torch.set_rng_state(_from_hex(state["torch"]))
        if state["cuda"] and torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all([_from_hex(one) for one in state["cuda"]])
    except RuntimeError as error:
        raise ValueError(error) from None
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))


def set_seed(seed: int) -> None:
    """Seed all generators."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


@contextmanager
def preserved() -> Iterator[None]:
    """Restore the state of all generators after the block."""
    python, of_numpy, of_torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the generators inside the block, and restore their state afterwards."""
    before = random_state()
    set_seed(seed)
    try:
        yield
    finally:
        set_random_state(before)


def _hex(state: Tensor) -> str:
    return bytes(state.tolist()).hex()


def _from_hex(text: str) -> Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)
