"""Models in files: weights, config and tokenizer as ``transformers`` loads them; reading them back, and comparing."""

from __future__ import annotations

import json
import shutil
import struct
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from cohort.errors import ModelError, RunFolderError
from cohort.parallel import World, together
from cohort.parallel.full import class_before_sharding
from cohort.policy import Policy, adapter_weights, has_adapters, merged, trained_adapter, without_progress_bars
from cohort.policy.load import processor_files
from cohort.policy.policy import check_finite_weights
from cohort.runs.durable import FileRecord, replaced, sync_path, write_file
from cohort.runs.reading import damage_named

# ----------------------------------------
# Tensors between memory and safetensors files, whatever layout they have in memory: a file holds each tensor whole.
#
# A sharded tensor (a ``DTensor``) is gathered when its turn comes to be written, so no rank ever holds more than one
# whole tensor beyond its own share. The file is written as it is hashed, in one pass.


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


_SAVING = threading.Lock()
"""Held while a generation config is written in place of its own way: a checkpoint may be written in the background."""


def save_model(
    policy: Policy,
    tokenizer: Any,
    path: str | Path,
    *,
    merge: bool = False,
    write: bool = True,
    copies: Mapping[str, Tensor] | None = None,
) -> dict[str, FileRecord]:
    """Write weights in the master dtype, config and tokenizer, as ``transformers`` loads them.

    Of a model with adapters, the adapter alone is written or, with ``merge``, the model with the adapter merged. The
    weights of a sharded model are gathered in the main memory of the rank that writes: every rank must call, unless
    ``copies`` are given, which are written in place of the model's weights. Returns what is known of the files.
    """
    model = policy.model
    weights = named_weights(model) if copies is None else copies
    more: dict[str, Any] = {} if copies is None else {"state_dict": dict(copies)}
    if any(is_sharded(tensor) for tensor in weights.values()):
        more["state_dict"] = _gathered(model, weights, keep=write)
    if not write:
        return {}
    adapters = has_adapters(model)
    if adapters:
        name = trained_adapter(model)
        model, more = (merged(model), {}) if merge else (model, more | {"selected_adapters": [name]})
    # safetensors holds the interpreter while it writes, so that training would wait: it is not asked to write copies.
    ours = {} if copies is None or adapters else copies
    with without_progress_bars(), _generation_config_as_it_is(model):
        model.save_pretrained(path, **({"state_dict": {}} if ours else more))
    records = _write_weights(Path(path), model, ours) if ours else {}
    if adapters and not merge and name != "default":  # peft writes those of other names to a folder in it
        for file in (Path(path) / name).iterdir():
            file.replace(Path(path) / file.name)
        (Path(path) / name).rmdir()
    tokenizer.save_pretrained(path)
    for file in () if has_adapters(model) else processor_files(model):
        with suppress(shutil.SameFileError):  # a model that is saved over the one that was loaded
            shutil.copyfile(file, Path(path) / file.name)
    return records


@contextmanager
def _generation_config_as_it_is(model: Any) -> Iterator[None]:
    """While the block runs, the model's generation config is written as it is. transformers refuses one that has a
    temperature beside ``do_sample=False``, for example, and would do so after all the training."""
    config = getattr(model, "generation_config", None)
    if config is None:
        yield
        return
    text = config.to_json_string(keys_to_pop=["compile_config"])

    def write(folder: str | Path, **_: Any) -> None:
        (Path(folder) / "generation_config.json").write_text(text, encoding="utf-8")

    with _SAVING, mock.patch.object(config, "save_pretrained", write):
        yield


def check_writable(policy: Policy, tokenizer: Any) -> None:
    """Write everything of a model but its weights once, to a folder that is deleted: an object that has no JSON would
    end the run at its first checkpoint.

    Raises:
        ModelError: something cannot be written.
    """
    model: Any = policy.model
    adapters = has_adapters(model)
    processor_files(model, download=not adapters)
    writes: dict[str, Callable[[str], Any]] = {
        type(one).__name__: one.save_pretrained
        for one in (*(model.peft_config.values() if adapters else [model.config]), tokenizer)
    }
    if (generation := getattr(model, "generation_config", None)) is not None:
        writes[type(generation).__name__] = lambda _: generation.to_json_string()
    with tempfile.TemporaryDirectory() as folder:
        for what, write in writes.items():
            try:
                write(folder)
            except Exception as error:  # of any kind: whoever made the object may have put anything into it
                raise ModelError(
                    f"{what} cannot be written, so no checkpoint could be: {type(error).__name__}: {error}. Remove "
                    "from it what JSON lacks"
                ) from error


def save_merged(target: Path, policy: Policy, tokenizer: Any, world: World) -> None:
    """Write a model with its adapters merged, in place of an older one. Every rank must call.

    Raises:
        DiskError: it cannot be written.
    """

    def write() -> None:
        with replaced(target) if world.is_main else nullcontext(target) as folder:
            save_model(policy, tokenizer, folder, merge=True, write=world.is_main)
            for path in folder.rglob("*") if world.is_main else ():
                sync_path(path)

    together(world, write)


def _write_weights(folder: Path, model: Any, weights: Mapping[str, Tensor]) -> dict[str, FileRecord]:
    """Write weights under the names and in the shapes that ``save_pretrained`` gives them."""
    omitted = model._keys_to_ignore_on_save or ()
    kept = {name: tensor for name, tensor in weights.items() if name not in omitted}
    record = write_tensors(folder / "model.safetensors", revert_weight_conversion(model, kept))
    return {"model.safetensors": record} if record else {}


def _gathered(model: nn.Module, weights: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """The whole tensors of a sharded model's state on the CPU, tied ones as one tensor under each of their names, as
    transformers needs them to choose the name to save; nothing unless ``keep``."""
    found: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        values = whole(tensor)
        if keep:
            found[name] = values.cpu()
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    names = {name: first[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False)}
    return found | {name: found[names[name]] for name in names if keep}


def check_saved(policy: Policy, folder: Path) -> None:
    """Read a saved model's weights back and compare each with the policy's, bit for bit.

    One tensor is in memory at a time. Of a model with adapters, the adapter is compared. When transformers writes an
    architecture's weights under other names or shapes than the model has them, as for mixtures of experts, the model is
    loaded through transformers instead, a second time in memory.

    Args:
        policy: the policy as it was saved.
        folder: a checkpoint, or ``best/``.

    Raises:
        RunFolderError: a tensor differs or is missing, or a file cannot be read.
    """
    trained = trained_weights(policy)
    saved = saved_weights(policy, folder, trained)
    for name, tensor in trained.items():
        if name in saved and not _bit_equal(share(saved[name], tensor), own(tensor)):
            raise RunFolderError(
                f"the weights saved in {folder} are not the trained ones: {name} differs. Is the disk full or failing? "
                "report.check_saved = false saves without checking"
            )
    if missing := [name for name in trained if name not in saved]:
        raise RunFolderError(f"{folder} lacks {missing[0]}, which the trained model has: {len(missing)} in all")


def trained_weights(policy: Policy) -> Mapping[str, Tensor]:
    """What is saved of a policy: its weights; of a model with adapters, the adapter's. In the model's memory."""
    return adapter_weights(policy.model) if has_adapters(policy.model) else named_weights(policy.model)


def saved_weights(policy: Policy, folder: Path, trained: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """A saved model's weights under the names that the model has them: as they are in its files or, if transformers
    writes the architecture's weights in another form, through transformers.

    Raises:
        RunFolderError: a file cannot be read.
    """
    files = sorted(folder.glob("*.safetensors"))
    with damage_named(folder):
        saved = {name: tensor for file in files for name, tensor in read_tensors(file).items()}
        as_they_are = all(name in trained and trained[name].shape == saved[name].shape for name in saved)
        return saved if as_they_are or has_adapters(policy.model) else _loaded_weights(policy, folder)


def _loaded_weights(policy: Policy, folder: Path) -> dict[str, Tensor]:
    """A saved model's weights, through transformers, which knows how it wrote each architecture's weights."""
    model: Any = class_before_sharding(policy.model)
    with without_progress_bars():
        weights: dict[str, Tensor] = model.from_pretrained(
            folder, dtype=policy.precision.master, use_safetensors=True
        ).state_dict()
    return weights


def _bit_equal(saved: Tensor, trained: Tensor) -> bool:
    """Bitwise, so that NaN equals NaN: a broken model must be saved as it is."""
    if saved.dtype != trained.dtype or saved.shape != trained.shape:
        return False
    bits = (one.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for one in (saved, trained))
    return torch.equal(*bits)
