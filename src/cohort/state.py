"""What torch keeps for a thread or the whole process. User functions find it as it is and leave it so: what a call
changes is put back, and told once, since everything else computes with it."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Any

from cohort.errors import ConfigError

log = logging.getLogger("cohort.calls")

_on_loop: dict[str, Any] = {}
"""The state before the first of the calls on the event loop that have not ended, and their number as "calls"."""
_told: set[tuple[str, str]] = set()


def _of_process(torch: Any) -> dict[str, Any]:
    return {
        "set_default_dtype": torch.get_default_dtype(),
        "use_deterministic_algorithms": torch.get_deterministic_debug_mode(),  # 1: with warn_only
        "set_float32_matmul_precision": torch.get_float32_matmul_precision(),
    }


def _of_thread(torch: Any) -> dict[str, Any]:
    device = torch.get_default_device()
    return {
        "set_grad_enabled": torch.is_grad_enabled(),
        "set_num_threads": torch.get_num_threads(),
        "set_default_device": None if device.type == "cpu" else device,
        "manual_seed": torch.initial_seed(),
    }


def _put_back(torch: Any, before: dict[str, Any], now: dict[str, Any], function: Any, generator: Any = None) -> None:
    for name, value in before.items():
        if now[name] == value:
            continue
        if name == "manual_seed":
            torch.set_rng_state(generator)
        elif name == "use_deterministic_algorithms":
            torch.set_deterministic_debug_mode(value)
        else:
            getattr(torch, name)(value)
        who = getattr(function, "__qualname__", None) or type(function).__name__
        if (who, name) not in _told:
            _told.add((who, name))
            shown = value > 0 if name == "use_deterministic_algorithms" else value
            log.warning("%s has called torch.%s: %s is put back after each call", who, name, shown)


def check_state() -> None:
    """Check that a run can compute in this thread.

    Raises:
        ConfigError: tensors cannot be trained in it, or would be made on another device than they are needed on.
    """
    torch: Any = sys.modules["torch"]
    if torch.is_inference_mode_enabled():
        raise ConfigError("torch.inference_mode is on, in which nothing can be trained: leave its block before the run")
    if (device := _of_thread(torch)["set_default_device"]) is not None:
        raise ConfigError(
            f"torch's default device is {device}, and a run places each tensor itself: call "
            "torch.set_default_device(None) and set model.device instead"
        )


@contextlib.contextmanager
def kept(function: Any) -> Iterator[None]:
    """A call of a user function in this thread."""
    torch: Any = sys.modules.get("torch")
    if torch is None:  # as in a worker process; a function that imports it may do with it as it likes
        yield
        return
    before, generator = _of_process(torch) | _of_thread(torch), torch.get_rng_state()
    try:
        yield
    finally:
        _put_back(torch, before, _of_process(torch) | _of_thread(torch), function, generator)


@contextlib.contextmanager
def kept_on_loop(function: Any) -> Iterator[None]:
    """A call on the event loop. Others run meanwhile, so what belongs to its thread is left to it."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        yield
        return
    if not _on_loop.get("calls"):
        _on_loop.update(calls=0, before=_of_process(torch))
    _on_loop["calls"] += 1
    try:
        yield
    finally:
        _on_loop["calls"] -= 1
        _put_back(torch, _on_loop["before"], _of_process(torch), function)
