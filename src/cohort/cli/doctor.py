"""The command that checks a run before it starts: doctor."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from cohort.cli.app import ANY_TEXT, app
from cohort.errors import CohortError, DataError

if TYPE_CHECKING:
    from cohort.doctor import Finding


@app.command(
    sort_key=4,
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
    """Check a run before it starts: data, prompts, rewards, a first rollout, memory and time. Or check the GPU.

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
    from cohort.runs.lines import as_json

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
