"""Tensors between memory and safetensors files, whatever layout they have in memory: a file holds each tensor whole.

A sharded tensor (a ``DTensor``) is gathered when its turn comes to be written, so no rank ever holds more than one
whole tensor beyond its own share. The file is written as it is hashed, in one pass.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cohort.errors import RunFolderError
from cohort.policy.policy import check_finite_weights
from cohort.runs.lines import FileRecord, write_file

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The names of types in safetensors files."""


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a ``DTensor``."""
    return hasattr(tensor, "device_mesh")


def whole(tensor: Tensor) -> Tensor:
    """The values of a tensor. Of a sharded one they are gathered, which every rank must take part in."""
    values: Any = tensor.detach()
    gathered: Tensor = values.full_tensor() if is_sharded(values) else values
    return gathered


def share(values: Tensor, like: Tensor) -> Tensor:
    """The part of a whole tensor's values that this rank holds of a sharded tensor; all, if ``like`` is not sharded."""
    if not is_sharded(like):
        return values
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    shape, offset = compute_local_shape_and_global_offset(like.shape, mesh, placements)
    return values[tuple(slice(first, first + count) for first, count in zip(offset, shape, strict=True))]


def own(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, in the same memory."""
    values: Any = tensor.detach()
    local: Tensor = values.to_local() if is_sharded(values) else values
    return local


@torch.no_grad()
def fill(tensor: Tensor, values: Tensor) -> Tensor:
    """Overwrite a tensor, or this rank's part of it, with a whole tensor's values of the same shape; returns it."""
    own(tensor).copy_(share(values, tensor))
    return tensor


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a model's state by name, tied ones once, under the first of their names."""
    state = model.state_dict()  # of a sharded model, this also gives back gathered weights
    once = {name for name, _ in model.named_parameters()}
    aliases = {name for name, _ in model.named_parameters(remove_duplicate=False)} - once
    return {name: tensor for name, tensor in state.items() if name not in aliases}


def write_tensors(path: Path, tensors: Mapping[str, Tensor], *, write: bool = True) -> FileRecord | None:
    """Write tensors as a safetensors file, each whole, one at a time, after a check that its numbers are finite.

    Args:
        path: the file.
        tensors: by name; sharded or not, of any device.
        write: whether this rank writes. The others only take part in gathering sharded tensors.

    Raises:
        NonFiniteError: a tensor holds NaN or infinity. The file is incomplete.
    """
    # Wider types first, as safetensors orders them: so every tensor is aligned. The order is the same on every rank.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    gathered = ((name, whole(tensors[name])) for name in names)
    try:
        return write_file(path, _chunks(_header(tensors, names), gathered)) if write else None
    finally:
        for _ in gathered:  # the other ranks wait for this one in every gather, also when the disk is full
            pass


def _header(tensors: Mapping[str, Tensor], names: Iterable[str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in DTYPES:
            raise RunFolderError(f"{name} cannot be stored in a checkpoint: it is of type {tensor.dtype}")
        begin, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _chunks(header: bytes, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[bytes | memoryview]:
    yield header
    for name, tensor in tensors:
        check_finite_weights({name: tensor}, "what was to be saved")
        yield memoryview(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by name, mapped into memory: only what is used is read. Copy what is to be kept."""
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = load_file(path)
    return tensors
