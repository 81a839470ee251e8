"""Commands that use a model: generate, eval, export, doctor."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from cohort.cli.app import ANY_TEXT, FIRST_HOUR, app
from cohort.errors import CohortError, ConfigError, DataError
from cohort.flags import EvalFlags, GenerateFlags

if TYPE_CHECKING:
    from cohort.doctor import Finding


@app.command(
    group=FIRST_HOUR,
    sort_key=7,
    usage="Usage: cohort generate MODEL [PROMPT ...] [--prompts FILE] [--output FILE.jsonl] [options]",
    help_epilogue="If the model is in a run folder, the run's settings for prompts and sampling are the defaults. "
    "The seed and the position of a prompt determine its completions; other prompts do not change them. "
    "A prompt that begins with a dash goes after '--'.",
)
def generate(model: str, /, *prompt: Annotated[str, ANY_TEXT], flags: GenerateFlags | None = None) -> int:
    """Sample from a model, for one prompt or a file of prompts.

    Args:
        model: A folder, a hub id, a GGUF file, or a run (its best/ model, else its newest checkpoint).
        prompt: Prompts; '-' is all of stdin, which is also the default in a pipe.
    """
    from cohort.generate.request import Request
    from cohort.generate.run import generate as run

    return run(Request(model=model, prompt=prompt, **vars(flags or GenerateFlags())))


@app.command(
    name="eval",
    group=FIRST_HOUR,
    sort_key=6,
    usage="Usage: cohort eval MODEL [--data FILE] [--reward NAME] [--against MODEL] [options] [--section.key value]",
    help_epilogue="If the model is in a run folder, the run's settings are the defaults. Every setting of "
    "'cohort config' can be given as --section.key value. 'cohort docs evaluation' explains the metrics.",
)
def evaluate(
    model: str, /, *overrides: Annotated[str, ANY_TEXT, Parameter(show=False)], flags: EvalFlags | None = None
) -> int:
    """Evaluate a model with confidence intervals, or compare two.

    Args:
        model: A folder, a hub id, a GGUF file, or a run (its best/ model, else its newest checkpoint).
    """
    from cohort.evaluation import command

    return command.evaluate(command.Request(model=model, overrides=overrides, **vars(flags or EvalFlags())))


# ----------------------------------------
# ``cohort export``: a trained model as a folder that other programs load, and on the hub.


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
    group=FIRST_HOUR,
    sort_key=8,
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
    """Write a trained model for other programs, adapters merged.

    The folder holds nothing of the run.

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
    repository = ""
    if push_to_hub:  # before anything takes long
        instead = "Log in with `hf auth login`; or leave it out, and upload the folder later with `hf upload`"
        with _hub(f"--push-to-hub {push_to_hub}: cannot make the repository", instead) as hub:
            repository = hub.create_repo(push_to_hub, private=private, exist_ok=True).repo_id
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
        again = f"Repeat with `hf upload {repository} {target}`"
        with _hub(f"{target} is written, and uploading it failed", again) as hub:
            where = hub.upload_folder(repo_id=repository, folder_path=target, commit_message="Upload the model")
        print(f"uploaded to {where}")


@contextmanager
def _hub(problem: str, instead: str) -> Iterator[Any]:
    """The hub, in whose block an error is a ``ConfigError``: the problem, the reason, and what to do instead."""
    from huggingface_hub import HfApi

    try:
        yield HfApi()
    except Exception as error:  # of the network, of permissions, of the name
        reason = next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")
        raise ConfigError(f"{problem}: {reason}. {instead}") from error


# ----------------------------------------
# The command that checks a run before it starts: doctor.


@app.command(
    group=FIRST_HOUR,
    sort_key=9,
    usage="Usage: cohort doctor [CONFIG.toml] [--gpu] [--skip NAME ...] [--json] [--section.key value ...]",
    help_epilogue="Exit code: 1 if a check fails. 'cohort docs doctor' explains the checks.",
)
def doctor(
    *arguments: Annotated[str, ANY_TEXT, Parameter(name="CONFIG")],
    skip: Annotated[Sequence[str], Parameter(consume_multiple=True, metavar="NAME...")] = (),
    json_output: Annotated[bool, Parameter("--json")] = False,
    gpu: bool = False,
    device: Annotated[str, Parameter(show=False)] = "cuda",
) -> int:
    """Check a run before it starts, or check the GPU.

    It looks at data, prompts and rewards, makes a first rollout, and predicts memory and time.

    Args:
        arguments: The settings, as for 'cohort train'.
        skip: Checks to leave out, by name.
        json_output: Print one JSON object instead of text.
        gpu: Check the GPU instead, in a minute: kernels, a rollout, an update, times, memory. It needs no settings; of
            those given, vLLM's are used.
        device: What to check with --gpu.
    """
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    found = []
    for finding in _of_gpu(arguments, skip, device) if gpu else _findings(arguments, skip, quiet=json_output):
        found.append(finding)
        if not json_output:
            print(finding.show(), flush=True)
    from cohort.doctor import Status, summary
    from cohort.runs.durable import as_json

    failed = any(finding.status is Status.FAIL for finding in found)
    if json_output:
        print(as_json({"ok": not failed, "findings": [asdict(one) for one in found]}, indent=1), end="")
    else:
        print(f"\n{summary(found)}")
    return int(failed)


def _of_gpu(arguments: Sequence[str], skip: Sequence[str], device: str) -> Iterator[Finding]:
    """What the checks of a GPU find."""
    import torch

    from cohort.config import file_and_overrides, load_config
    from cohort.doctor.gpu import examine_gpu

    vllm = load_config(*file_and_overrides(arguments)).vllm if arguments else None
    return examine_gpu(torch.device(device), vllm, skip)


def _findings(arguments: Sequence[str], skip: Sequence[str], *, quiet: bool) -> Iterator[Finding]:
    """What the checks find, or why the run would not start."""
    from cohort.config import file_and_overrides, load_config
    from cohort.doctor import check_names, examine, refused, without_data

    check_names(skip)
    try:
        config, overrides = file_and_overrides(arguments)
        settings = load_config(config, [*overrides, *(("--report.progress", "false") if quiet else ())])
        from cohort.trainer import GRPOTrainer

        trainer = GRPOTrainer(args=settings)
    except CohortError as error:
        yield refused(error)
        if isinstance(error, DataError):
            yield from without_data(settings)
        return
    yield from examine(trainer, skip)
