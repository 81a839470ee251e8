"""Uploading a trained model to the Hugging Face hub, and its card."""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cohort.errors import ConfigError
from cohort.runs.anew import WRITTEN
from cohort.trl.checkpoints import PREFIX_CHECKPOINT_DIR

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
