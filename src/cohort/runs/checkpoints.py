"""Checkpoints: what they store, saving, loading, and checking what was saved; the state of the random generators.

step-N/            weights, config and tokenizer, as ``transformers`` loads them
    state/         what the loop needs to continue: optimizer.pt, loop.pt and, if the reference has weights of its own,
                   reference.pt; rollout-N.json and .safetensors of the rollouts that ``rollout.lag`` has ready
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cohort.errors import RunFolderError
from cohort.policy import Policy, adapter_weights, has_adapters, load_adapter_weights, merged, without_progress_bars
from cohort.runs.rollouts import StoredRollout, load_rollout, save_rollout

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
    """The state of everything but the models, as ``state_dict`` of each part gives it."""

    step: int
    optimizer: Mapping[str, Any]
    cursor: Mapping[str, Any]
    adaptive: Mapping[str, Any]
    best: Mapping[str, Any]
    identity: Mapping[str, str]
    """Facts that are not settings and must be the same in a resumed run."""
    rollouts: Mapping[int, StoredRollout] = field(default_factory=dict)
    """The rollouts that are complete and not trained on, by step."""


def save_checkpoint(folder: Path, models: Models, state: SavedState) -> None:
    """Write models and state, with the state of the random generators, into an empty folder."""
    (folder / "state").mkdir(parents=True)
    save_model(models.policy, models.tokenizer, folder)
    if models.stored_reference is not None:
        torch.save(models.stored_reference.model.state_dict(), folder / "state" / "reference.pt")
    torch.save(state.optimizer, folder / "state" / "optimizer.pt")
    loop = {
        "step": state.step,
        "version": models.policy.version,
        "place": state.cursor,
        "adaptive": state.adaptive,
        "best": state.best,
        "identity": state.identity,
        "random": random_state(),
    }
    torch.save(loop, folder / "state" / "loop.pt")
    for step, rollout in state.rollouts.items():
        save_rollout(folder / "state" / f"{ROLLOUT}{step}", rollout)


def saved_identity(folder: Path) -> Mapping[str, str]:
    """The facts about its run that a checkpoint stores besides the settings: ``SavedState.identity``."""
    identity: Mapping[str, str] = torch.load(folder / "state" / "loop.pt", weights_only=False)["identity"]
    return identity


def load_checkpoint(folder: Path, models: Models, identity: Mapping[str, str]) -> SavedState:
    """Load the weights into the models, restore the random generators, and return the rest of the state.

    Args:
        folder: the checkpoint.
        models: the models of the run.
        identity: the facts that must be the same as in the run that wrote the checkpoint.

    Raises:
        RunFolderError: the run that wrote it had other prompts or rewards.
    """
    policy = models.policy
    loop = torch.load(folder / "state" / "loop.pt", weights_only=False)
    saved = loop["identity"]
    for what in {**saved, **identity}:
        before, now = saved.get(what, "none"), identity.get(what, "none")
        if before != now:
            raise RunFolderError(f"cannot resume from {folder}: its {what} were {before}, now {now}")
    if has_adapters(policy.model):
        load_adapter_weights(policy.model, folder)
    else:
        policy.model.load_state_dict(_loaded_weights(policy, folder))
    if models.stored_reference is not None:
        weights = torch.load(folder / "state" / "reference.pt", map_location=policy.device)
        models.stored_reference.model.load_state_dict(weights)
    optimizer = torch.load(folder / "state" / "optimizer.pt", map_location=policy.device)
    policy.version = loop["version"]
    set_random_state(loop["random"])
    return SavedState(
        loop["step"],
        optimizer,
        loop["place"],
        loop["adaptive"],
        loop["best"],
        loop["identity"],
        _loaded_rollouts(folder / "state"),
    )


def _loaded_rollouts(folder: Path) -> dict[int, StoredRollout]:
    paths = (path.with_suffix("") for path in folder.glob(f"{ROLLOUT}*.json"))
    return {int(path.name.removeprefix(ROLLOUT)): load_rollout(path) for path in paths}


def save_model(policy: Policy, tokenizer: Any, path: str | Path, *, merge: bool = False) -> None:
    """Write weights in the master dtype, config and tokenizer, as ``transformers`` loads them.

    Of a model with adapters, the adapter alone is written or, with ``merge``, the model with the adapter merged.
    """
    model = policy.model
    more: dict[str, Any] = {}
    if has_adapters(model):
        model, more = (merged(model), {}) if merge else (model, {"selected_adapters": list(model.active_adapters)})
    generation_config = getattr(model, "generation_config", None)
    if generation_config is not None and generation_config.do_sample is not True:
        # transformers refuses to write a temperature beside do_sample=False, and would do so after all the training.
        sampling = ("temperature", "top_p", "top_k", "min_p", "typical_p")
        if any(getattr(generation_config, name, None) is not None for name in sampling):
            generation_config.do_sample = True
    with without_progress_bars():
        model.save_pretrained(path, **more)
    tokenizer.save_pretrained(path)


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
    adapters = has_adapters(policy.model)
    trained: Mapping[str, Tensor] = adapter_weights(policy.model) if adapters else policy.model.state_dict()
    saved = _saved_tensors(folder)
    if not adapters and not {name for name, _ in _saved_tensors(folder)} <= trained.keys():
        weights = _loaded_weights(policy, folder)
        saved = ((name, partial(weights.__getitem__, name)) for name in weights)
    found: set[str] = set()
    for name, read in saved:
        if name not in trained or not _bit_equal(read(), trained[name]):
            raise RunFolderError(
                f"the weights saved in {folder} are not the trained ones: {name} differs. Is the disk full or failing? "
                "report.check_saved = false saves without checking"
            )
        found.add(name)
    # Tied weights are written once, under one of their names.
    written = {trained[name].data_ptr() for name in found}
    if missing := [name for name in trained if name not in found and trained[name].data_ptr() not in written]:
        raise RunFolderError(f"{folder} lacks {missing[0]}, which the trained model has: {len(missing)} in all")


def _saved_tensors(folder: Path) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """The names of the tensors in a folder's files, each with a function that reads the tensor."""
    from safetensors import safe_open

    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                yield name, partial(tensors.get_tensor, name)


def _loaded_weights(policy: Policy, folder: Path) -> dict[str, Tensor]:
    """A saved model's weights, through transformers, which knows how it wrote each architecture's weights."""
    model: Any = type(policy.model)
    with without_progress_bars():
        weights: dict[str, Tensor] = model.from_pretrained(folder, dtype=policy.precision.master).state_dict()
    return weights


def _bit_equal(saved: Tensor, trained: Tensor) -> bool:
    """Bitwise, so that NaN equals NaN: a broken model must be saved as it is."""
    if saved.dtype != trained.dtype or saved.shape != trained.shape:
        return False
    bits = (one.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for one in (saved, trained))
    return torch.equal(*bits)


# The global random generators, which reward functions and dropout may use. Cohort's own draws are functions of keys.


def random_state() -> dict[str, Any]:
    """The state of Python's, NumPy's and torch's generators."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"torch": torch.get_rng_state(), "cuda": cuda, "numpy": np.random.get_state(), "python": random.getstate()}


def set_random_state(state: dict[str, Any]) -> None:
    """The inverse of ``random_state``."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])


def set_seed(seed: int) -> None:
    """Seed all generators."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the generators inside the block, and restore their state afterwards."""
    before = random_state()
    set_seed(seed)
    try:
        yield
    finally:
        set_random_state(before)
