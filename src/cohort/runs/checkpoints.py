"""Checkpoints: what they store, saving and loading.

step-N/                        weights, config and tokenizer, as ``transformers`` loads them
    state/                     what the loop needs to continue
        optimizer.safetensors  the optimizer's tensors, by the names of parameter and state: "lm_head.weight/exp_avg"
        reference.safetensors  the reference's weights, if it has weights of its own
        loop.json              everything else: numbers and text
    manifest.json              sizes and hashes of the files, written last

A checkpoint is of the moment between two steps; the rollouts of later steps are in the journal (``journal``). Every
tensor is whole, whatever layout and number of ranks wrote it; any other reads it. Nothing is pickled.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from cohort.errors import DiskError, RunFolderError, out_of_memory
from cohort.parallel import World, on_main, together
from cohort.policy import Policy, has_adapters
from cohort.rollout.backend import free_bytes
from cohort.runs.durable import FileRecord, check_whole, replaced, sync_path, write_file, write_manifest
from cohort.runs.models import (
    fill,
    is_sharded,
    named_weights,
    read_tensors,
    save_model,
    saved_weights,
    trained_weights,
    whole,
    write_tensors,
)
from cohort.runs.reading import damage_named, read_object
from cohort.runs.writer import Write, Writer

# ----------------------------------------
# The state of the global random generators, which reward functions, environments and dropout may use.
#
# Cohort's own draws are functions of keys (see ``RNGKey``) and depend on none of these.


Generators: TypeAlias = tuple[Any, Any, Tensor, list[Tensor]]
"""The states of Python's, NumPy's, torch's and CUDA's generators, as these give them."""


def generators() -> Generators:
    """The present states of the generators; CUDA's where it is used."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda


def random_state(of: Generators | None = None) -> dict[str, Any]:
    """The states of the generators in types of JSON. None: the present ones."""
    (version, numbers, gauss), (name, keys, *rest), of_torch, cuda = of or generators()
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [name, [int(key) for key in keys], *rest],
        "torch": _hex(of_torch),
        "cuda": [_hex(state) for state in cuda],
    }


def set_random_state(state: Mapping[str, Any], *, torch_too: bool = True) -> None:
    """The inverse of ``random_state``; without ``torch_too``, of Python's and NumPy's generators alone.

    Raises:
        ValueError, TypeError, LookupError: it is not a state of these generators.
    """
    try:
        if torch_too:
            torch.set_rng_state(_from_hex(state["torch"]))
        count = torch.cuda.device_count() if torch_too and torch.cuda.is_available() else 0
        if count and len(state["cuda"]) == count:
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
    python, of_numpy, of_torch, cuda = generators()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)
        torch.cuda.set_rng_state_all(cuda)  # of none, if CUDA is not used


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the generators inside the block, and restore their state afterwards."""
    with preserved():
        set_seed(seed)
        yield


def _hex(state: Tensor) -> str:
    return bytes(state.tolist()).hex()


def _from_hex(text: str) -> Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)


LOOP, OPTIMIZER, REFERENCE = "state/loop.json", "state/optimizer.safetensors", "state/reference.safetensors"
WEIGHTS = ""
"""Stands for the files of the policy's weights, which ``save_model`` writes."""
NEEDED = (
    *("step", "version", "cursor", "adaptive", "best", "nonfinite_in_a_row", "metrics", "is_evaluation_asked"),
    *("identity", "random", "microbatch_tokens", "observers", "optimizer"),
)
"""What ``loop.json`` holds at least."""


@dataclass(frozen=True, slots=True)
class Models:
    """The models of a run. Loading a checkpoint changes their weights."""

    policy: Policy
    reference: Policy | None
    tokenizer: Any

    @property
    def reference_weights(self) -> dict[str, Tensor]:
        """The weights that the reference has of its own, by name: beside a policy with adapters, a copy of what is
        trained, or none if it is the policy's model without its adapter."""
        if self.reference is None or self.reference.model is self.policy.model:
            return {}
        weights = named_weights(self.reference.model)
        fixed = _fixed_weights(self.policy) if has_adapters(self.policy.model) else set()
        return {name: tensor for name, tensor in weights.items() if name not in fixed}


@dataclass(frozen=True, slots=True)
class SavedState:
    """Everything of a run but the models."""

    step: int
    """Complete steps."""
    optimizer: Mapping[str, Any]
    """``tensors``, by the names of parameter and state, and ``numbers``."""
    loop: Mapping[str, Any]
    """The rest, in types of JSON. ``version`` is the policy's; ``random``, the state of the random generators of each
    rank; ``identity``, the facts that are not settings and that a resumed run compares (``changes``)."""


@dataclass(frozen=True, slots=True)
class Content:
    """What a checkpoint holds, ready to be written."""

    models: Models
    """For what is written beside weights: config and tokenizer."""
    tensors: Mapping[str, Mapping[str, Tensor]]
    """By file; the policy's weights as WEIGHTS. Live ones, which the next step changes, or copies."""
    step: int
    is_copy: bool = False
    files: Mapping[str, bytes] = field(default_factory=dict)


def content_of(models: Models, state: SavedState) -> Content:
    """The content of a checkpoint, with live tensors.

    Raises:
        RunFolderError: a part of the state cannot be stored.
    """
    tensors = {WEIGHTS: named_weights(models.policy.model), OPTIMIZER: state.optimizer["tensors"]}
    if own := models.reference_weights:
        tensors[REFERENCE] = own
    loop = {**state.loop, "step": state.step, "optimizer": state.optimizer["numbers"]}
    return Content(models, tensors, state.step, files={LOOP: as_json_text(loop)})


def model_of(models: Models, files: Mapping[str, bytes], *, step: int) -> Content:
    """The policy alone, with other files."""
    return Content(models, {WEIGHTS: named_weights(models.policy.model)}, step, files=files)


def num_copied_bytes(content: Content) -> int:
    """The memory that ``copied`` needs on the rank that writes."""
    fixed = _fixed_weights(content.models.policy)
    return sum(
        tensor.numel() * tensor.element_size()
        for file, tensors in content.tensors.items()
        for name, tensor in tensors.items()
        if file != WEIGHTS or name not in fixed
    )


def copied(content: Content, *, write: bool = True) -> Content:
    """The content with copies of its tensors in main memory, whole: training can go on while they are written. Weights
    that are not trained are not copied. Every rank must call.

    Args:
        content: the content.
        write: whether this rank writes. The others take part in gathering sharded tensors.
    """
    fixed = _fixed_weights(content.models.policy)
    copies: dict[str, dict[str, Tensor]] = {}
    for file, tensors in content.tensors.items():
        copies[file] = {}
        for name in sorted(tensors):
            values = whole(tensors[name])
            if write:
                live = file == WEIGHTS and name in fixed and not is_sharded(tensors[name])
                copies[file][name] = values if live else values.to("cpu", copy=True)
    return replace(content, tensors=copies, is_copy=True)


def _fixed_weights(policy: Policy) -> set[str]:
    """The names of the weights that no update changes."""
    return {name for name, parameter in policy.model.named_parameters() if not parameter.requires_grad}


def write_content(folder: Path, content: Content, *, write: bool = True) -> None:
    """Write a checkpoint, or a model, into an empty folder.

    Args:
        folder: the folder.
        content: what to write.
        write: whether this rank writes. Of live tensors, the others take part in gathering sharded ones, also after a
            failure to write, which is raised at the end.
    """
    models = content.models
    records: dict[str, FileRecord] = {}
    failed: list[BaseException] = []  # raised after the last exchange, for which the other ranks wait
    try:
        weights = content.tensors[WEIGHTS] if content.is_copy else None
        records |= save_model(models.policy, models.tokenizer, folder, write=write, copies=weights)
    except BaseException as error:
        failed.append(error)
    for name, tensors in content.tensors.items():
        if name == WEIGHTS:
            continue
        try:
            if record := write_tensors(folder / name, tensors, write=write and not failed):
                records[name] = record
        except BaseException as error:
            failed.append(error)
    if failed:
        raise failed[0]
    if not write:
        return
    for name, text in content.files.items():
        records[name] = write_file(folder / name, [text])
    write_manifest(folder, records)


def as_json_text(loop: Mapping[str, Any]) -> bytes:
    """The state of the loop as a file holds it."""
    for name, value in loop.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise RunFolderError(f"{name!r} cannot be stored in a checkpoint: {error}") from error
    return json.dumps(loop).encode()


def check_checkpoint(folder: Path) -> None:
    """Check that a checkpoint is as it was written, that its state can be read, and that it is the one that its name
    says.

    Raises:
        RunFolderError: a file is missing, differs or cannot be read, or the folder was renamed.
    """
    check_whole(folder)
    step = _saved_state(folder).step
    if folder.name.startswith("step-") and folder.name != f"step-{step}":
        raise RunFolderError(f"{folder} is the checkpoint of step {step}")


def saved_identity(folder: Path) -> Mapping[str, str]:
    """The facts about its run that a checkpoint stores besides the settings: ``SavedState.identity``.

    Raises:
        RunFolderError: it cannot be read.
    """
    with damage_named(folder / LOOP):
        return {str(name): str(fact) for name, fact in read_object(folder / LOOP)["identity"].items()}


def load_weights(policy: Policy, folder: Path) -> None:
    """Take the weights of a checkpoint, or of ``best/``. Every rank reads its part of them.

    Raises:
        RunFolderError: they cannot be read, or are of a model with other weights.
    """
    trained = trained_weights(policy)
    _fill(trained, saved_weights(policy, folder, trained), folder)


def load_checkpoint(folder: Path, models: Models, *, rank: int = 0) -> SavedState:
    """Load the weights into the models, restore the random generators, and return the rest of the state.

    The layout and the number of ranks may differ from those that wrote the checkpoint: every rank reads its part of the
    weights. A rank that had no counterpart gets the random state of another.

    Args:
        folder: the checkpoint, which ``check_checkpoint`` has passed.
        models: the models of the run.
        rank: number of this process.

    Raises:
        RunFolderError: the run that wrote it had a model with other weights.
    """
    policy, saved = models.policy, _saved_state(folder)
    load_weights(policy, folder)
    if own := models.reference_weights:
        if (folder / REFERENCE).exists():
            _fill(own, read_tensors(folder / REFERENCE), folder / "state")
        elif not has_adapters(policy.model):  # with adapters it is the policy at the start, as for a run without a KL
            raise RunFolderError(
                f"{folder} has no reference policy: the run had none so far (objective.beta). To go on with one, start "
                "a new run with this checkpoint as model.path"
            )
    policy.version, random = saved.loop["version"], saved.loop["random"]
    set_random_state(random[rank % len(random)])
    return saved


def _saved_state(folder: Path) -> SavedState:
    """The state that a checkpoint stores.

    Raises:
        RunFolderError: it cannot be read.
    """
    if (folder / "state" / "updates.json").exists():
        raise RunFolderError(
            f"{folder} is of the middle of a step, and an earlier version of Cohort wrote it: finish the step with "
            "that version, or remove the checkpoint to go on from the one before"
        )
    with damage_named(folder):
        loop = read_object(folder / LOOP)
        if missing := [name for name in NEEDED if name not in loop]:
            raise KeyError(f"{LOOP} lacks {', '.join(missing)}")
        tensors = read_tensors(folder / OPTIMIZER)
        return SavedState(loop["step"], {"tensors": tensors, "numbers": loop["optimizer"]}, loop)


def _fill(trained: Mapping[str, Tensor], saved: Mapping[str, Tensor], folder: Path) -> None:
    for name, tensor in trained.items():
        if name not in saved or saved[name].shape != tensor.shape or saved[name].dtype != tensor.dtype:
            what = f"{saved[name].dtype} {list(saved[name].shape)}" if name in saved else "missing"
            raise RunFolderError(f"{folder}: {name} is {what}; the model has {tensor.dtype} {list(tensor.shape)}")
        fill(tensor, saved[name])


# ----------------------------------------
# Saving models: in the background from a copy, or at once from live tensors, which every rank takes part in.


Replace: TypeAlias = Callable[[Content, World], None]
"""Writes a content in place of an older one. Of a copy, with a world of its own."""
COPY_SHARE = 0.5
"""Share of the free memory that a copy may take while it is written; the next step needs the rest."""


def save_in_background(writer: Writer, kind: str, content: Content, replace: Replace, world: World) -> bool:
    """Copy the content and write the copy in the background, until it is written or a newer one comes. Returns whether
    there was memory for the copy."""
    if not on_main(world, partial(_has_room, writer, kind, content)):
        return False
    try:
        copy = copied(content, write=world.is_main)
    except (RuntimeError, MemoryError) as error:
        if world.size > 1 or not out_of_memory(error):
            raise
        return False
    if world.is_main:
        writer.in_background(Write(kind, content.step, partial(replace, copy, World())))
    return True


def save_now(writer: Writer, kind: str, content: Content, replace: Replace, world: World) -> bool:
    """Write the content. Returns whether the disk took it."""
    try:
        replace(content, world)
    except DiskError as error:
        on_main(world, partial(writer.missed, kind, content.step, error))
        return False
    on_main(world, partial(writer.made_up_for, kind))
    return True


def replace_model(target: Path, content: Content, world: World, *, check: Callable[[], None], metrics: Path) -> None:
    """Write a folder in place of an older one. Every rank must call, unless the content is a copy.

    Args:
        target: the folder.
        content: what to write.
        world: the ranks.
        check: raises if the run's folder has gone.
        metrics: the run's metrics: a resumed run has the lines of its steps.
    """

    def write() -> None:
        if world.size == 1:  # other ranks wait for what the block exchanges
            check()
        with replaced(target) if world.is_main else nullcontext(target) as folder:
            write_content(folder, content, write=world.is_main)
            if world.is_main:
                check()
                with suppress(FileNotFoundError):  # there is none yet
                    sync_path(metrics)

    together(world, write)


def _has_room(writer: Writer, kind: str, content: Content) -> bool:
    """Whether there is memory for a copy, once the last one of this kind is written."""
    writer.free(kind)
    free = free_bytes(torch.device("cpu"))
    return free is not None and num_copied_bytes(content) < free * COPY_SHARE
