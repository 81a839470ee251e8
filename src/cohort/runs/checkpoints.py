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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cohort.errors import RunFolderError
from cohort.policy import Policy, has_adapters
from cohort.policy.device import Generators, generators, preserved
from cohort.rollout.local.backend import free_bytes
from cohort.runs.durable import check_whole, replaced, sync_path
from cohort.runs.models import (
    Stream,
    fill,
    named_weights,
    read_tensors,
    save_model,
    saved_weights,
    trained_weights,
    write_tensors,
)
from cohort.runs.reading import damage_named, read_object

# ----------------------------------------
# The state of the global random generators, as checkpoints hold it.


def random_state(of: Generators | None = None) -> dict[str, Any]:
    """The states of the generators in types of JSON. None: the present ones."""
    (version, numbers, gauss), (name, keys, *rest), of_torch, cuda = of or generators()
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [name, [int(key) for key in keys], *rest],
        "torch": of_torch.numpy().tobytes().hex(),
        "cuda": [state.numpy().tobytes().hex() for state in cuda],
    }


def set_random_state(state: Mapping[str, Any], *, torch_too: bool = True) -> None:
    """The inverse of ``random_state``; without ``torch_too``, of Python's and NumPy's generators alone.

    Raises:
        ValueError, TypeError, LookupError: it is not a state of these generators.
    """
    if torch_too:
        found, *cuda = (
            torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8) for text in (state["torch"], *state["cuda"])
        )
        try:
            torch.set_rng_state(found)
            if cuda and torch.cuda.is_available() and len(cuda) == torch.cuda.device_count():
                torch.cuda.set_rng_state_all(cuda)
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
def seeded(seed: int) -> Iterator[None]:
    """Seed the generators inside the block, and restore their state afterwards."""
    with preserved():
        set_seed(seed)
        yield


LOOP, OPTIMIZER, REFERENCE = "state/loop.json", "state/optimizer.safetensors", "state/reference.safetensors"
COPY_SHARE = 0.5
"""Share of the free memory that a copy may take while it is written; the next step needs the rest."""
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
    """What a checkpoint, or a folder with the policy alone, holds, ready to be written."""

    models: Models
    """For what is written beside weights: config and tokenizer."""
    tensors: Mapping[str, Mapping[str, Tensor]]
    """By file; the policy's weights as WEIGHTS. Live ones, which the next step changes, or copies."""
    step: int
    files: Mapping[str, bytes]
    """The other files."""


def content_of(models: Models, state: SavedState) -> Content:
    """The content of a checkpoint, with live tensors.

    Raises:
        RunFolderError: a part of the state cannot be stored.
    """
    loop = {**state.loop, "step": state.step, "optimizer": state.optimizer["numbers"]}
    for name, value in loop.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise RunFolderError(f"{name!r} cannot be stored in a checkpoint: {error}") from error
    tensors = {WEIGHTS: named_weights(models.policy.model), OPTIMIZER: state.optimizer["tensors"]}
    if own := models.reference_weights:
        tensors[REFERENCE] = own
    return Content(models, tensors, state.step, {LOOP: json.dumps(loop).encode()})


def has_room(content: Content) -> bool:
    """Whether there is memory for a copy, on the rank that writes."""
    fixed, free = _fixed_weights(content.models.policy), free_bytes(torch.device("cpu"))
    num_bytes = sum(
        tensor.numel() * tensor.element_size()
        for file, tensors in content.tensors.items()
        for name, tensor in tensors.items()
        if file != WEIGHTS or name not in fixed
    )
    return free is not None and num_bytes < free * COPY_SHARE


def copied(content: Content, *, write: bool = True) -> Content:
    """The content with copies of its tensors in main memory, whole: training can go on while they are written. Weights
    that are not trained are not copied. Every rank must call.

    Args:
        content: the content.
        write: whether this rank writes. The others take part in gathering sharded tensors.
    """
    fixed = _fixed_weights(content.models.policy)
    streams = {file: Stream(tensors) for file, tensors in content.tensors.items()}
    copies: dict[str, dict[str, Tensor]] = {file: {} for file in streams}
    for file, stream in streams.items():
        for name, values in stream if write else ():
            copies[file][name] = values if file == WEIGHTS and name in fixed else values.to("cpu", copy=True)
        stream.finish()
    return replace(content, tensors=copies)


def _fixed_weights(policy: Policy) -> set[str]:
    """The names of the weights that no update changes."""
    return {name for name, parameter in policy.model.named_parameters() if not parameter.requires_grad}


def write_content(target: Path, content: Content, *, write: bool = True, synced: Path | None = None) -> None:
    """Write a checkpoint, or a model, in place of an older one. Of live tensors that are sharded, every rank must call.

    Args:
        target: the folder.
        content: what to write.
        write: whether this rank writes.
        synced: a file that is brought to the disk before the folder has its name: the run's metrics, since a resumed
            run has the lines of its steps.

    Raises:
        DiskError: it cannot be written.
    """
    streams = {file: Stream(tensors) for file, tensors in content.tensors.items()}
    try:
        if not write:
            return
        with replaced(target, manifest=True) as folder:
            save_model(content.models.policy, content.models.tokenizer, folder, weights=streams[WEIGHTS])
            for file in (one for one in streams if one != WEIGHTS):
                write_tensors(folder / file, streams[file])
            for file, data in content.files.items():
                (folder / file).write_bytes(data)
            if synced and synced.exists():
                sync_path(synced)
    finally:
        for stream in streams.values():
            stream.finish()


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
