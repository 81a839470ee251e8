"""Checkpoints as transformers names them: ``checkpoint-N`` is a link to Cohort's ``checkpoints/step-K`` after N
updates, with a ``trainer_state.json``.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from cohort.errors import ConfigError, RunFolderError
from cohort.parallel import on_main
from cohort.runs.durable import write_atomically
from cohort.runs.folder import RunFolder, find_folder
from cohort.runs.reader import Run
from cohort.runs.starts import WRITTEN

log = logging.getLogger("cohort.trl")
SAVED = ("config.json", "adapter_config.json", "*.safetensors", f"{PREFIX_CHECKPOINT_DIR}-*")
"""What a run saves beside its own files: the model and the links to checkpoints."""


def link(folder: Path, checkpoint: Path, state: Mapping[str, Any]) -> Path:
    """Name a checkpoint of Cohort as transformers does, and write the trainer's state into it. Links to checkpoints
    that were removed (``save_total_limit``) go.

    Args:
        folder: the run folder.
        checkpoint: ``checkpoints/step-K`` in it.
        state: the trainer's state.
    """
    write_atomically(checkpoint / TRAINER_STATE_NAME, json.dumps(state, indent=2, sort_keys=True) + "\n")
    for other in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        if other.is_symlink() and not other.exists():
            other.unlink()
    named = folder / f"{PREFIX_CHECKPOINT_DIR}-{state['global_step']}"
    with suppress(FileNotFoundError):
        named.unlink()
    try:
        named.symlink_to(checkpoint.relative_to(folder))
    except OSError as error:
        log.warning("cannot make the link %s: %s; the checkpoint is %s", named, error, checkpoint)
        return checkpoint
    return named


def note_best(args: Any, state: Any, metrics: Mapping[str, Any]) -> bool:
    """Whether an evaluation is the best by ``metric_for_best_model``; then the state of the run says so.

    Args:
        args: TRL's arguments.
        state: transformers' ``TrainerState``.
        metrics: of the evaluation, by TRL's names; empty if there was none.
    """
    if args.metric_for_best_model is None or not metrics:
        return False
    name = f"eval_{args.metric_for_best_model.removeprefix('eval_')}"
    value, best = metrics.get(name), state.best_metric
    if value is None or not math.isfinite(value):
        return False
    if best is not None and (value <= best if args.greater_is_better else value >= best):
        return False
    state.best_metric, state.best_global_step = value, state.global_step
    return True


def best_checkpoint(folder: Path, state: Any) -> str | None:
    """The checkpoint of the best evaluation, if there is one: it may be the one that is written."""
    best = folder / f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}"
    is_there = state.best_global_step is not None and (best.exists() or state.best_global_step == state.global_step)
    return str(best) if is_there else None


def begin(core: Any, begun_by: str, *, resume: bool, allowed: Collection[str]) -> None:
    """Give Cohort's trainer the run folder, in which a new run may find files of others.

    Args:
        core: Cohort's trainer.
        begun_by: a key of ``cohort.runs.CONTINUED_BY``.
        resume, allowed: as ``find_run``.

    Raises:
        RunFolderError: as ``find_run``, or a new run would write over a model.
    """
    if core.folder is not None:  # it has begun, which it says itself
        return
    folder = RunFolder(core.args.run.output_dir, core.args.run, shared=True)
    if not resume and not folder.is_run:
        on_main(core.world, lambda: _check_no_model(folder.path))
    folder, beginning = find_folder(core.recorded, core.world, resume, allowed, folder)
    core.began_as(replace(core.started_by, begun_by=begun_by), core.recorded, folder, beginning)


def _check_no_model(folder: Path) -> None:
    found = sorted(path.name for name in SAVED for path in folder.glob(name))
    if found:
        raise RunFolderError(
            f"output_dir {folder} has {', '.join(found[:4])}, which the run would write over: set another output_dir"
        )


def check_resumable(output_dir: str, resume_from: str | bool | os.PathLike[str] | None) -> bool:
    """Whether a run is to be resumed; a run continues from its newest checkpoint.

    Args:
        output_dir: ``args.output_dir``.
        resume_from: the argument of ``train``.

    Raises:
        RunFolderError: there is no checkpoint, or the one that is named is not the newest of the run.
    """
    if isinstance(resume_from, str) and resume_from.lower() in ("true", "false"):  # a flag has only text
        resume_from = resume_from.lower() == "true"
    if not resume_from:
        return False
    folder = Path(output_dir).expanduser()
    newest = max(Run(folder).checkpoints, default=None)
    if resume_from is True:
        if newest is None:
            raise RunFolderError(f"no checkpoint to resume from in output_dir {output_dir}")
        return True
    given, found = Path(resume_from).expanduser(), folder / "checkpoints" / f"step-{newest}"
    if not given.is_dir():
        raise RunFolderError(f"resume_from_checkpoint: there is no checkpoint {given}")
    if not given.resolve().is_relative_to(folder.resolve()):
        raise RunFolderError(
            f"resume_from_checkpoint: {given} belongs to another run than output_dir {output_dir}: set output_dir to "
            "its run to continue that, or pass the checkpoint as model to start a new run with its weights"
        )
    if given.resolve() != found.resolve():
        raise RunFolderError(
            f"resume_from_checkpoint: {given} is not the newest checkpoint of the run, which is {found}: pass True to "
            "continue from that, or move the newer ones away"
        )
    return True


# ----------------------------------------
# Uploading a trained model to the Hugging Face hub, and its card.


NOT_UPLOADED = (
    *("_*", f"{PREFIX_CHECKPOINT_DIR}-*", "config.toml", "logs/*", "*.part", ".*"),
    *(f"{name}/*" if "." not in name else name for name in WRITTEN),
)
"""What the run keeps beside the model: it may hold data and paths of this machine."""


def create_repo(args: Any) -> str:
    """Make the repository of ``hub_model_id``, or of the name of ``output_dir``, unless it exists; return its id.

    Raises:
        ConfigError: the hub cannot be reached, or refuses.
    """
    from huggingface_hub import HfApi

    name = args.hub_model_id or Path(args.output_dir).absolute().name
    try:
        repo = HfApi().create_repo(name, token=args.hub_token, private=args.hub_private_repo, exist_ok=True)
    except Exception as error:  # of the network, of permissions, of the name
        detail = next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")
        raise ConfigError(
            f"push_to_hub: cannot make the repository {name!r} on the hub: {detail}. Log in with `hf auth login` or "
            "set hub_token; or leave push_to_hub unset"
        ) from error
    return str(repo.repo_id)


def upload(args: Any, repo: str, message: str | None, wait: bool, token: str | None, revision: str | None) -> Any:
    """Upload the model in ``output_dir`` without what the run keeps beside it; as ``HfApi.upload_folder``."""
    from huggingface_hub import HfApi

    api: Any = HfApi()
    return api.upload_folder(
        repo_id=repo,
        folder_path=args.output_dir,
        commit_message=message,
        token=token or args.hub_token,
        run_as_future=not wait,
        ignore_patterns=list(NOT_UPLOADED),
        revision=revision or args.hub_revision,
    )


def write_card(
    folder: Path, model: Any, *, name: str | None, dataset: str | None, tags: Iterable[str], hub_id: str | None
) -> None:
    """Write ``README.md``.

    Args:
        folder: where to.
        model: the trained model, whose config may name the model that it was made from.
        name: of the model. None: the folder's.
        dataset: id of the data set.
        tags: beside those of the trainer.
        hub_id: of the model.
    """
    from huggingface_hub import ModelCard, ModelCardData

    base = getattr(model.config, "_name_or_path", None)
    base = base if base and not os.path.isdir(base) else None  # noqa: PTH112 - a hub id is no path
    name = name or folder.absolute().name
    data = ModelCardData(
        base_model=base,
        datasets=dataset,
        library_name="transformers",
        model_name=name,
        tags=sorted({"generated_from_trainer", "cohort", "grpo", *tags}),
    )
    source = f"is a fine-tuned version of [{base}](https://huggingface.co/{base}) and " if base else ""
    if dataset:
        source += f"learned from [{dataset}](https://huggingface.co/datasets/{dataset}) and "
    libraries = {"Cohort": "cohort-rl", "Transformers": "transformers", "PyTorch": "torch", "Datasets": "datasets"}
    card = (Path(__file__).parent / "card.md").read_text(encoding="utf-8")
    text = card.format(
        name=name,
        what=source,
        hub_id=hub_id or name,
        versions="\n".join(f"- {library}: {_version(package)}" for library, package in libraries.items()),
    )
    folder.mkdir(parents=True, exist_ok=True)
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}").save(folder / "README.md")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from its source
        return "unknown"
