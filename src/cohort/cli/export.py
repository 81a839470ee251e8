"""``cohort export``: a trained model as a folder that other programs load, and on the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from cohort.cli.app import app
from cohort.errors import ConfigError

CARD = """---
library_name: transformers
tags: [cohort, grpo]
---

# {name}

Trained with [GRPO](https://huggingface.co/papers/2402.03300) by Cohort.

    from transformers import pipeline
    pipe = pipeline("text-generation", model="{name}")
"""


@app.command(
    sort_key=22,
    usage="Usage: cohort export MODEL FOLDER [--dtype DTYPE] [--checkpoint STEP] [--push-to-hub NAME]",
    help_epilogue="The folder has config, tokenizer and safetensors, as transformers, vLLM and llama.cpp load them. "
    "'cohort docs recipes/ship' shows the commands.",
)
def export(
    model: str,
    folder: str,
    /,
    *,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    checkpoint: Annotated[str | None, Parameter(metavar="STEP")] = None,
    push_to_hub: Annotated[str | None, Parameter(metavar="NAME")] = None,
    private: bool = False,
    trust_remote_code: bool = False,
) -> None:
    """Write a trained model for other programs: adapters merged, nothing of the run.

    Args:
        model: A run (its best/ model, else its newest checkpoint), a checkpoint, an adapter's folder, or a model.
        folder: The folder to write. Must not exist, or be empty.
        dtype: Type of the saved weights. [default: float32, in which they were trained]
        checkpoint: Which model of a run: a step, best or newest.
        push_to_hub: Also upload the folder to this repository of the Hugging Face hub, "USER/NAME".
        private: Make the repository private, if it does not exist.
        trust_remote_code: Run code that comes with the model.
    """
    target = Path(folder).expanduser()
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ConfigError(f"{folder} exists and is not an empty folder: give another one")
    if private and push_to_hub is None:
        raise ConfigError("--private is for a repository on the hub: add --push-to-hub USER/NAME")
    import torch

    from cohort.policy import Policy, Precision, load_model, load_tokenizer
    from cohort.runs.chosen import model_of, run_of
    from cohort.runs.durable import replaced
    from cohort.runs.models import save_model

    path, note = model_of(model, checkpoint)
    if within := next((one for one in target.absolute().parents if run_of(one) == one), None):
        raise ConfigError(f"{folder} is inside the run {within}, where only the run writes: give another folder")
    tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
    repository = _repository(push_to_hub, private=private) if push_to_hub else None  # before anything takes long
    kept = Precision(torch.float32, torch.float32)
    loaded = load_model(path, kept, torch.device("cpu"), trust_remote_code=trust_remote_code)
    policy = Policy(loaded.to(getattr(torch, dtype)), kept)
    with replaced(target) as part:
        save_model(policy, tokenizer, part)
        if repository:
            (part / "README.md").write_text(CARD.format(name=repository), encoding="utf-8")
    size = sum(file.stat().st_size for file in target.iterdir())
    print(f"{note or model} is written to {target}: {dtype}, {size / 2**20:,.1f} MiB")
    if repository:
        print(f"uploaded to {_upload(repository, target)}")


def _repository(name: str, *, private: bool) -> str:
    """The id of a repository of the hub, which is made unless it exists.

    Raises:
        ConfigError: the hub cannot be reached, or refuses.
    """
    from huggingface_hub import HfApi

    try:
        return str(HfApi().create_repo(name, private=private, exist_ok=True).repo_id)
    except Exception as error:  # of the network, of permissions, of the name
        raise ConfigError(
            f"--push-to-hub {name}: cannot make the repository: {_first_line(error)}. Log in with `hf auth login`; or "
            "leave it out, and upload the folder later with `hf upload`"
        ) from error


def _upload(repository: str, folder: Path) -> Any:
    from huggingface_hub import HfApi

    try:
        return HfApi().upload_folder(repo_id=repository, folder_path=folder, commit_message="Upload the model")
    except Exception as error:
        raise ConfigError(
            f"{folder} is written, and uploading it failed: {_first_line(error)}. Repeat with `hf upload {repository} "
            f"{folder}`"
        ) from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")
