"""Checkpoints: what they store, saving, loading, and checking what was saved.

step-N/                        weights, config and tokenizer, as ``transformers`` loads them
    state/                     what the loop needs to continue
        optimizer.safetensors  the optimizer's tensors, by the names of parameter and state: "lm_head.weight/exp_avg"
        reference.safetensors  the reference's weights, if it has weights of its own
        rollout-T.safetensors  a rollout that no step has trained on yet (``rollout.lag``), with rollout-T.json
        loop.json              everything else: numbers and text
    manifest.json              sizes and hashes of the files, written last

Every tensor is whole, whatever layout and number of ranks wrote it; any other reads it. Nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cohort.errors import RunFolderError
from cohort.parallel.full import class_before_sharding
from cohort.policy import Policy, adapter_weights, has_adapters, merged, without_progress_bars
from cohort.runs.durable import FileRecord, check_whole, write_file, write_manifest
from cohort.runs.generators import set_random_state
from cohort.runs.reading import damage_named, read_object
from cohort.runs.rollouts import StoredRollout, load_rollout, save_rollout
from cohort.runs.tensors import fill, is_sharded, named_weights, own, read_tensors, share, whole, write_tensors

LOOP = "state/loop.json"
ROLLOUT = "rollout-"


@dataclass(frozen=True, slots=True)
class Models:
    """The models of a run. Loading a checkpoint changes their weights."""

    policy: Policy
    reference: Policy | None
    tokenizer: Any

    @property
    def stored_reference(self) -> Policy | None:
        """The reference, if it has weights of its own: not the policy's model without its adapter."""
        return None if self.reference is None or self.reference.model is self.policy.model else self.reference


@dataclass(frozen=True, slots=True)
class SavedState:
    """The state of everything but the models, as ``state_dict`` of each part gives it. All but the optimizer's tensors
    is in types of JSON."""

    step: int
    optimizer: Mapping[str, Any]
    """``tensors``, by the names of parameter and state, and ``numbers``."""
    cursor: Mapping[str, Any]
    adaptive: Mapping[str, Any]
    best: Mapping[str, Any]
    identity: Mapping[str, str]
    """Facts that are not settings and that a resumed run compares: see ``changes``."""
    random: Sequence[Mapping[str, Any]]
    """The state of the random generators of each rank."""
    rollouts: Mapping[int, StoredRollout] = field(default_factory=dict)
    """Rollouts that no step has trained on yet, by step."""


def save_checkpoint(folder: Path, models: Models, state: SavedState, *, write: bool = True) -> None:
    """Write models and state into an empty folder.

    Args:
        folder: the folder.
        models, state: what to write.
        write: whether this rank writes. The others take part in gathering sharded tensors, also after a failure to
            write, which is raised at the end.

    Raises:
        RunFolderError: a part of the state cannot be stored.
    """
    files = {"state/optimizer.safetensors": state.optimizer["tensors"]}
    if models.stored_reference is not None:
        files["state/reference.safetensors"] = named_weights(models.stored_reference.model)
    records: dict[str, FileRecord] = {}
    failed: list[BaseException] = []  # raised after the last exchange, for which the other ranks wait
    try:
        save_model(models.policy, models.tokenizer, folder, write=write)
    except BaseException as error:
        failed.append(error)
    for name, tensors in files.items():
        try:
            if record := write_tensors(folder / name, tensors, write=write and not failed):
                records[name] = record
        except BaseException as error:
            failed.append(error)
    if failed:
        raise failed[0]
    if not write:
        return
    loop = {
        "step": state.step,
        "version": models.policy.version,
        "cursor": state.cursor,
        "adaptive": state.adaptive,
        "best": state.best,
        "identity": state.identity,
        "optimizer": state.optimizer["numbers"],
        "random": state.random,
    }
    for step, rollout in state.rollouts.items():
        save_rollout(folder / "state" / f"{ROLLOUT}{step}", rollout)
    records[LOOP] = write_file(folder / LOOP, [_as_json(loop)])
    write_manifest(folder, records)


def _as_json(loop: Mapping[str, Any]) -> bytes:
    for name, value in loop.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise RunFolderError(f"{name!r} cannot be stored in a checkpoint: {error}") from error
    return json.dumps(loop).encode()


def check_checkpoint(folder: Path) -> None:
    """Check that a checkpoint is as it was written.

    Raises:
        RunFolderError: a file is missing or differs, or an earlier version of Cohort wrote it.
    """
    _refuse_earlier(folder)
    check_whole(folder)


def _refuse_earlier(folder: Path) -> None:
    if (folder / "state" / "loop.pt").exists():
        raise RunFolderError(
            f"{folder} was written by an earlier version of Cohort, whose state (loop.pt) this version does not read. "
            "Its weights load as any model's: set model.path to it to start a new run with them"
        )


def saved_identity(folder: Path) -> Mapping[str, str]:
    """The facts about its run that a checkpoint stores besides the settings: ``SavedState.identity``.

    Raises:
        RunFolderError: it cannot be read, or an earlier version of Cohort wrote it.
    """
    _refuse_earlier(folder)
    with damage_named(folder / LOOP):
        return {str(name): str(fact) for name, fact in _read_loop(folder)["identity"].items()}


def _read_loop(folder: Path) -> dict[str, Any]:
    return read_object(folder / LOOP)


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
    policy, loop = models.policy, _read_loop(folder)
    trained = _trained_weights(policy)
    _fill(trained, _saved_weights(policy, folder, trained), folder)
    if models.stored_reference is not None:
        reference = named_weights(models.stored_reference.model)
        _fill(reference, read_tensors(folder / "state" / "reference.safetensors"), folder / "state")
    policy.version = loop["version"]
    set_random_state(loop["random"][rank % len(loop["random"])])
    return SavedState(
        step=loop["step"],
        optimizer={"tensors": read_tensors(folder / "state" / "optimizer.safetensors"), "numbers": loop["optimizer"]},
        cursor=loop["cursor"],
        adaptive=loop["adaptive"],
        best=loop["best"],
        identity=loop["identity"],
        random=loop["random"],
        rollouts=_loaded_rollouts(folder / "state"),
    )


def _loaded_rollouts(folder: Path) -> dict[int, StoredRollout]:
    paths = (path.with_suffix("") for path in folder.glob(f"{ROLLOUT}*.json"))
    return {int(path.name.removeprefix(ROLLOUT)): load_rollout(path) for path in paths}


def _fill(trained: Mapping[str, Tensor], saved: Mapping[str, Tensor], folder: Path) -> None:
    for name, tensor in trained.items():
        if name not in saved or saved[name].shape != tensor.shape or saved[name].dtype != tensor.dtype:
            what = f"{saved[name].dtype} {list(saved[name].shape)}" if name in saved else "missing"
            raise RunFolderError(f"{folder}: {name} is {what}; the model has {tensor.dtype} {list(tensor.shape)}")
        fill(tensor, saved[name])


def save_model(policy: Policy, tokenizer: Any, path: str | Path, *, merge: bool = False, write: bool = True) -> None:
    """Write weights in the master dtype, config and tokenizer, as ``transformers`` loads them.

    Of a model with adapters, the adapter alone is written or, with ``merge``, the model with the adapter merged. The
    weights of a sharded model are gathered in the main memory of the rank that writes: every rank must call.
    """
    model = policy.model
    weights = named_weights(model)
    more: dict[str, Any] = {}
    if any(is_sharded(tensor) for tensor in weights.values()):
        more["state_dict"] = _gathered(model, weights, keep=write)
    if not write:
        return
    if has_adapters(model):
        adapters = {"selected_adapters": list(model.active_adapters)}
        model, more = (merged(model), {}) if merge else (model, more | adapters)
    generation_config = getattr(model, "generation_config", None)
    if generation_config is not None and generation_config.do_sample is not True:
        # transformers refuses to write a temperature beside do_sample=False, and would do so after all the training.
        sampling = ("temperature", "top_p", "top_k", "min_p", "typical_p")
        if any(getattr(generation_config, name, None) is not None for name in sampling):
            generation_config.do_sample = True
    with without_progress_bars():
        model.save_pretrained(path, **more)
    tokenizer.save_pretrained(path)


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
        RunFolderError: a tensor differs or is missing.
    """
    trained = _trained_weights(policy)
    saved = _saved_weights(policy, folder, trained)
    for name, tensor in trained.items():
        if name in saved and not _bit_equal(share(saved[name], tensor), own(tensor)):
            raise RunFolderError(
                f"the weights saved in {folder} are not the trained ones: {name} differs. Is the disk full or failing? "
                "report.check_saved = false saves without checking"
            )
    if missing := [name for name in trained if name not in saved]:
        raise RunFolderError(f"{folder} lacks {missing[0]}, which the trained model has: {len(missing)} in all")


def _trained_weights(policy: Policy) -> Mapping[str, Tensor]:
    """What is saved of a policy: its weights; of a model with adapters, the adapter's. In the model's memory."""
    return adapter_weights(policy.model) if has_adapters(policy.model) else named_weights(policy.model)


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """The tensors in a model's files."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in read_tensors(file).items()}


def _saved_weights(policy: Policy, folder: Path, trained: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """A saved model's weights under the names that the model has them: as they are in its files or, if transformers
    writes the architecture's weights in another form, through transformers."""
    saved = _read_weights(folder)
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
