"""Whether what was saved is what was trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cohort.errors import RunFolderError
from cohort.policy import Policy, adapter_weights, has_adapters, without_progress_bars


def check_saved(policy: Policy, folder: Path) -> None:
    """Read a saved model's weights back and compare each with the policy's, bit for bit.

    One tensor is held at a time. Of a model with adapters it is the adapter that was saved. Where transformers writes
    an architecture's weights under other names or shapes than the model has them (as it does for mixtures of experts),
    the model is loaded through transformers instead, a second time in memory.

    Args:
        policy: as it was when the folder was written.
        folder: a checkpoint, or ``best/``.

    Raises:
        RunFolderError: a tensor differs or is missing.
    """
    adapters = has_adapters(policy.model)
    ours: Mapping[str, Tensor] = adapter_weights(policy.model) if adapters else policy.model.state_dict()
    found: set[str] = set()
    for name, tensor in _tensors(folder):
        if name not in ours and not adapters:
            _check_loaded(policy, folder)
            return
        if name not in ours or not _same(tensor, ours[name]):
            raise _differs(folder, name)
        found.add(name)
    # Tied weights are written once: what has no name of its own in the files is a tensor that has.
    written = {ours[name].data_ptr() for name in found}
    if missing := [name for name in ours if name not in found and ours[name].data_ptr() not in written]:
        raise RunFolderError(f"{folder} lacks {missing[0]}, which the trained model has: {len(missing)} in all")


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                yield name, tensors.get_tensor(name)


def _check_loaded(policy: Policy, folder: Path) -> None:
    model: Any = type(policy.model)
    with without_progress_bars():
        theirs = model.from_pretrained(folder, dtype=policy.precision.master).state_dict()
    for name, tensor in policy.model.state_dict().items():
        if name not in theirs or not _same(theirs[name], tensor):
            raise _differs(folder, name)


def _same(saved: Tensor, trained: Tensor) -> bool:
    """Also where both are NaN: what a broken model was is what is saved."""
    if saved.dtype != trained.dtype or saved.shape != trained.shape:
        return False
    bits = (one.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for one in (saved, trained))
    return torch.equal(*bits)


def _differs(folder: Path, name: str) -> RunFolderError:
    return RunFolderError(
        f"what was saved in {folder} is not what was trained: {name} differs. Is the disk full or failing? "
        "report.check_saved = false saves without looking"
    )
