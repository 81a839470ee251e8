"""Models in files: weights, config and tokenizer as ``transformers`` loads them; reading them back, and comparing."""

from __future__ import annotations

import json
import shutil
import struct
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from cohort.errors import ModelError, RunFolderError
from cohort.parallel import World, on_main, together
from cohort.parallel.full import class_before_sharding
from cohort.policy import Policy, adapter_weights, has_adapters, merged, trained_adapter, without_progress_bars
from cohort.policy.load import processor_files
from cohort.policy.policy import check_finite_weights, own
from cohort.runs.durable import replaced
from cohort.runs.reading import damage_named

# ----------------------------------------
# Tensors between memory and safetensors files, whatever layout they have in memory: a file holds each tensor whole.
#
# A sharded tensor (a ``DTensor``) is gathered when its turn comes to be written, so no rank ever holds more than one
# whole tensor beyond its own share.


DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
DTYPES |= {torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.uint8: "U8", torch.bool: "BOOL"}
DTYPES |= {torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"}
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


@torch.no_grad()
def fill(tensor: Tensor, values: Tensor) -> Tensor:
    """Overwrite a tensor, or this rank's part of it, with a whole tensor's values of the same shape; returns it."""
    own(tensor).copy_(share(values, tensor))
    return tensor


def named_weights(model: Any) -> dict[str, Tensor]:
    """The tensors of a model that are saved, by name, tied ones once, under the first of their names."""
    state = model.state_dict()  # of a sharded model, this also gives back gathered weights
    once = {name for name, _ in model.named_parameters()}
    omitted = {name for name, _ in model.named_parameters(remove_duplicate=False)} - once
    omitted |= set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    return {name: tensor for name, tensor in state.items() if name not in omitted}


class Stream:
    """Tensors, and the whole values of each, once, in the order of a file. Of sharded ones, every rank takes each.

    Args:
        tensors: by name; sharded or not, of any device.
        check: whether a file may hold finite numbers only.
    """

    def __init__(self, tensors: Mapping[str, Tensor], *, check: bool = True) -> None:
        # Wider types first, as safetensors orders them: so every tensor is aligned. Every rank has the same order.
        self.tensors = dict(sorted(tensors.items(), key=lambda one: (-one[1].element_size(), one[0])))
        self.check = check
        self._values = ((name, whole(tensor)) for name, tensor in self.tensors.items())

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, one.cpu() if is_sharded(self.tensors[name]) else one) for name, one in self._values)

    def finish(self) -> None:
        """Take what is left: the other ranks wait for this one in every gather, also when the disk is full."""
        deque(self._values, maxlen=0)


def write_tensors(path: Path, stream: Stream) -> None:
    """Write tensors as a safetensors file, each whole, one at a time.

    Raises:
        NonFiniteError: a tensor holds NaN or infinity, and the stream is to be checked. The file is incomplete.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in stream.tensors.items():
        if tensor.dtype not in DTYPES:
            raise RunFolderError(f"{name} cannot be stored in a checkpoint: it is of type {tensor.dtype}")
        begin, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)

    path.parent.mkdir(exist_ok=True)
    with path.open("xb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for name, tensor in stream:
            if stream.check:
                check_finite_weights({name: tensor}, "what was to be saved")
            file.write(memoryview(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by name, mapped into memory: only what is used is read. Copy what is to be kept."""
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = load_file(path)
    return tensors


_SAVING = threading.Lock()
"""Held while a generation config is written in place of its own way: a checkpoint may be written in the background."""


def save_model(
    policy: Policy, tokenizer: Any, path: Path, *, merge: bool = False, weights: Stream | None = None
) -> None:
    """Write weights in the master dtype, config and tokenizer, as ``transformers`` loads them.

    Args:
        policy, tokenizer: what to write.
        path: a folder.
        merge: of a model with adapters, write the model with the adapter merged, and not the adapter alone.
        weights: in place of the model's weights, by the same names.
    """
    is_adapter = has_adapters(policy.model) and not merge
    model: Any = merged(policy.model) if has_adapters(policy.model) and merge else policy.model
    weights = weights or Stream(named_weights(model), check=False)
    more: dict[str, Any] = {"state_dict": {}}
    if is_adapter:
        more = {"state_dict": dict(weights), "selected_adapters": [trained_adapter(model)]}
    with without_progress_bars(), _generation_config_as_it_is(model):
        model.save_pretrained(path, **more)
    if not is_adapter:  # by us: safetensors holds the interpreter while it writes, so that training would wait
        unchanged: dict[str, Tensor] = {}
        if revert_weight_conversion(model, unchanged) is not unchanged:  # other names or shapes than those of the model
            weights = Stream(revert_weight_conversion(model, dict(weights)), check=weights.check)
        (path / "model.safetensors").unlink(missing_ok=True)
        write_tensors(path / "model.safetensors", weights)
    elif (inner := path / trained_adapter(model)).is_dir():  # where peft writes those of other names than "default"
        for file in inner.iterdir():
            file.replace(path / file.name)
        inner.rmdir()
    tokenizer.save_pretrained(path)
    for file in () if has_adapters(policy.model) else processor_files(model):
        with suppress(shutil.SameFileError):  # a model that is saved over the one that was loaded
            shutil.copyfile(file, path / file.name)


def save_gathered(policy: Policy, tokenizer: Any, path: Path, world: World, *, merge: bool = False) -> None:
    """``save_model`` of a model that may be sharded: every rank must call, and rank 0 writes."""
    weights = None if merge else Stream(named_weights(policy.model), check=False)

    def write() -> None:
        try:
            if world.is_main:
                save_model(policy, tokenizer, path, merge=merge, weights=weights)
        finally:
            if weights:
                weights.finish()

    together(world, write)


def save_merged(target: Path, policy: Policy, tokenizer: Any, world: World) -> None:
    """Write a model with its adapters merged, in place of an older one. Every rank must call.

    Raises:
        DiskError: it cannot be written.
    """

    def write() -> None:
        with replaced(target) as folder:
            save_model(policy, tokenizer, folder, merge=True)

    on_main(world, write)


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
