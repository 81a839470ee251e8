"""``cohort convert``: checkpoints of earlier versions of Cohort, whose state is pickled, in the format of this one.

``state/loop.pt``, ``optimizer.pt`` and ``reference.pt`` are read with ``torch.load(weights_only=True)``, which makes
tensors, NumPy arrays and plain values, and refuses everything else.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cohort.config import GRPOConfig
from cohort.data import DataCursor
from cohort.data.loader import ReadPosition
from cohort.errors import RunFolderError
from cohort.policy import Policy, load_policy, read_config
from cohort.runs.checkpoints import LOOP, OPTIMIZER, REFERENCE, as_json_text
from cohort.runs.durable import replaced, sync_path, write_file, write_manifest
from cohort.runs.generators import random_state, set_random_state
from cohort.runs.tensors import named_weights, write_tensors
from cohort.train.optim import Optimizer

PICKLED = ("loop.pt", "optimizer.pt", "reference.pt")
RECONSTRUCT: Any = np.zeros(0).__reduce__()[0]
SAFE: list[Any] = [(RECONSTRUCT, f"numpy.{core}.multiarray._reconstruct") for core in ("_core", "core")]
SAFE += [np.ndarray, np.dtype, type(np.dtype(float)), type(np.dtype(int)), type(np.dtype("uint32"))]
SAFE += [(ReadPosition, f"cohort.data.{name}") for name in ("loader.ReadPosition", "order.Reached", "loader.Reached")]
"""What the files may hold beside tensors and plain values, each with the names that earlier versions gave it."""


def is_pickled(folder: Path) -> bool:
    """Whether a checkpoint is of the earlier format."""
    return (folder / "state" / "loop.pt").is_file()


def convert(folder: Path, config: GRPOConfig) -> None:
    """Convert a checkpoint in place. The earlier one is kept beside it as ``NAME.pickled``. The run must be locked.

    Args:
        folder: the checkpoint.
        config: the settings of its run.

    Raises:
        RunFolderError: a file is damaged, or holds something else than tensors and plain values.
    """
    state = {name: _load(folder / "state" / name) for name in PICKLED if (folder / "state" / name).is_file()}
    try:
        loop, optimizer, policy = _converted(folder, config, state)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise RunFolderError(
            f"{folder}: its state is not one that an earlier version of Cohort wrote: {error}"
        ) from None
    kept = folder.with_name(f"{folder.name}.pickled")
    with replaced(folder.with_name(f"{folder.name}.converted")) as part:
        shutil.copytree(folder, part, dirs_exist_ok=True, ignore=shutil.ignore_patterns("state", "manifest.json"))
        records = {OPTIMIZER: write_tensors(part / OPTIMIZER, optimizer["tensors"])}
        if "reference.pt" in state:
            names = named_weights(policy.model)
            weights = {name: state["reference.pt"][name] for name in names}
            records[REFERENCE] = write_tensors(part / REFERENCE, weights)
        records[LOOP] = write_file(part / LOOP, [as_json_text({**loop, "optimizer": optimizer["numbers"]})])
        write_manifest(part, {name: record for name, record in records.items() if record is not None})
    folder.rename(kept)
    folder.with_name(f"{folder.name}.converted").rename(folder)
    sync_path(folder.parent)


def _load(path: Path) -> Any:
    try:
        with torch.serialization.safe_globals(SAFE):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch's reader raises errors of many kinds for damaged files
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise RunFolderError(f"{path} is damaged, or holds more than tensors and plain values: {reason[0]}") from None


def _converted(
    folder: Path, config: GRPOConfig, state: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any], Policy]:
    """The loop's state without the optimizer, the optimizer's state, and the policy."""
    loop = state["loop.pt"]
    model = config.model.path if config.model.lora.wanted else str(folder)
    loaded = load_policy(
        model,
        config.model,
        read_config(model, trust_remote_code=config.model.trust_remote_code),
        seed=config.run.seed,
    )
    optimizer = Optimizer(loaded.model, config.optim, 1)
    for rule, saved in zip(optimizer.rules, state["optimizer.pt"]["rules"], strict=True):
        rule.load_state_dict(saved)
    for schedule, saved in zip(optimizer.schedules, state["optimizer.pt"]["schedules"], strict=True):
        schedule.load_state_dict(saved)
    cursor = loop["place"]
    position = DataCursor(cursor["taken"], cursor["reached"], cursor["rewards"], cursor["passes"])
    kept = {name: loop[name] for name in ("step", "version", "adaptive", "best", "identity")}
    return kept | {"cursor": position.state_dict(), "random": [_random(loop["random"])]}, optimizer.state_dict(), loaded


def _random(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The state of the generators in today's form."""
    before = random_state()
    try:
        torch.set_rng_state(saved["torch"])
        np.random.set_state(saved["numpy"])
        random.setstate(saved["python"])
        return random_state()
    finally:
        set_random_state(before)
