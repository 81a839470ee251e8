"""What ``cohort launch`` starts, and what can be known to be wrong before anything starts."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

from cohort.config import GRPOConfig, load_config
from cohort.errors import STOPPED, ConfigError
from cohort.flags import LaunchFlags
from cohort.workers import usable_cores


@dataclass(frozen=True, slots=True)
class Job:
    """The same command on every rank."""

    arguments: tuple[str, ...]
    """Arguments of ``cohort``."""
    folder: Path
    """The run folder. Ranks other than 0 print to ``logs/rank-N.log`` in it."""
    ranks: int
    """Ranks on each machine; in a Ray cluster, of the job."""
    numbered: bool = False
    """Whether the command names no run folder, and ``folder`` is the next free one."""
    nodes: int = 1
    endpoint: str | None = None
    """HOST:PORT where several machines meet."""
    name: str = "cohort"
    """Name of the job at the endpoint."""
    max_restarts: int = 0
    device: str = "auto"
    """``model.device``."""
    module: str = "cohort"
    """What the ranks run, as ``python -m`` does. Tests run others."""

    @property
    def threads(self) -> int:
        """Threads of a rank: OMP_NUM_THREADS, or the cores of this machine divided by its ranks."""
        given = os.environ.get("OMP_NUM_THREADS", "")
        return int(given) if given.isdecimal() else max(1, usable_cores() // self.ranks)

    def log(self, rank: int) -> Path:
        """Where a rank prints; of rank 0, only the traceback of an unexpected error."""
        return self.folder / "logs" / f"rank-{rank}.log"

    def describe(self, *, ray: bool) -> str:
        """What would be started, in words."""
        where = "in a Ray cluster" if ray else f"on this machine, threads of each: {self.threads}"
        lines = [f"ranks: {self.ranks} {where}"]
        if self.endpoint:
            lines.append(
                f"machines: {self.nodes}, {self.ranks * self.nodes} ranks in all; they meet at {self.endpoint} as "
                f"{self.name!r}"
            )
        if self.max_restarts:
            lines.append(f"restarts after a failure: {self.max_restarts}")
        lines += [
            f"run folder: {self.folder}",
            f"logs of ranks other than 0: {self.log(1).with_name('rank-N.log')}",
            f"each rank runs: cohort {shlex.join(self.arguments)}",
        ]
        return "\n".join(lines)


def job_of(
    command: Sequence[str],
    flags: LaunchFlags,
    *,
    output_dir: str | None,
    device: str = "auto",
    layout: str | None = None,
    prompts: int | None = None,
    resume: bool | Literal["auto"] = False,
) -> Job:
    """The job of a command.

    Args:
        command: arguments of ``cohort``: ``demo`` or ``train`` with its own arguments.
        flags: of ``cohort launch``.
        output_dir: the run folder that the command names; None: it names none.
        device: ``model.device`` of the run.
        layout: ``parallel.layout`` of the command, unless ``flags`` change it.
        prompts: prompts of a step; None: not known.
        resume: of ``cohort train``.

    Raises:
        ConfigError: flags and command do not fit each other.
    """
    arguments, training = list(command), command[0] != "demo"
    if flags.layout is not None:
        if not training:
            raise ConfigError("--layout sets parallel.layout of 'cohort train': leave it out here")
        arguments += ["--parallel.layout", flags.layout]
    if flags.ray and (flags.nnodes > 1 or flags.rdzv_endpoint or flags.max_restarts):
        raise ConfigError("--ray chooses the machines itself: leave out --nnodes, --rdzv-endpoint and --max-restarts")
    _check_machines(flags, output_dir)
    if flags.max_restarts and resume != "auto":
        raise ConfigError(
            "--max-restarts runs the same command again, which must continue the run: add --resume auto to 'cohort "
            "train', and name run.output_dir"
        )
    if resume and output_dir is None:
        raise ConfigError("to resume a run, set run.output_dir to its folder")
    ranks = flags.ranks or _gpus(device) or 1
    _check_total(ranks * flags.nnodes, flags.layout or layout, prompts, device)
    numbered = output_dir is None
    if output_dir is None:
        from cohort.runs.folder import RunFolder

        output_dir = str(RunFolder.next_free("run" if training else "demo").path)
        arguments += ["--run.output_dir" if training else "--output-dir", output_dir]
    return Job(
        arguments=tuple(arguments),
        folder=Path(output_dir).expanduser().absolute(),
        ranks=ranks,
        numbered=numbered,
        nodes=flags.nnodes,
        endpoint=flags.rdzv_endpoint,
        name=flags.rdzv_id,
        max_restarts=flags.max_restarts,
        device=device,
    )


def settings_of(path: str | None, overrides: Sequence[str], flags: LaunchFlags, *, of_run: bool = False) -> GRPOConfig:
    """The settings that every rank will have.

    Args:
        path: the config file of ``cohort train``.
        overrides: its other arguments.
        flags: of ``cohort launch``.
        of_run: as ``load_config``.

    Raises:
        ConfigError: as ``load_config``; or flags and arguments contradict each other.
    """
    own = {f"--{field.name.replace('_', '-')}" for field in fields(LaunchFlags)}
    for text, after in zip(overrides, [*overrides[1:], ""], strict=False):
        name, given, value = text.partition("=")
        if name in own:
            raise ConfigError(f"{name} is an option of cohort launch: put it before 'train'")
        value = value if given else after
        if name == "--parallel.layout" and flags.layout not in (None, value):
            raise ConfigError(f"--layout is {flags.layout!r} and --parallel.layout {value!r}: leave one of them out")
    layout = ["--parallel.layout", flags.layout] if flags.layout else []
    return load_config(path, [*overrides, *layout], of_run=of_run)


def check_settings(config: GRPOConfig, ranks: int) -> None:
    """Check what several ranks and servers can do with the settings, as far as it needs no model and no server.

    Raises:
        ConfigError: what they cannot do, as a rank would report it.
    """
    from cohort.parallel import World, layout_of

    world = World(size=ranks)
    layout_of(config.parallel.layout, world)
    if config.rollout.engine == "vllm":
        from cohort.rollout.setup import EngineSetup

        EngineSetup(config, world)


def check_not_nested() -> None:
    """Check that this process is not a rank itself.

    Raises:
        ConfigError: it is.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        raise ConfigError(
            "this process is a rank already (RANK and WORLD_SIZE are set): under torchrun, start 'cohort train', not "
            "'cohort launch'; otherwise unset both variables"
        )


def check_gpus(job: Job) -> None:
    """Check that each rank of this machine has a GPU, if the run uses GPUs.

    Raises:
        ConfigError: there are too few.
    """
    found = _gpus(job.device)
    if job.device.startswith("cuda") and not found:
        raise ConfigError(f"model.device is {job.device!r}, and no GPU is visible: set model.device to 'cpu'")
    if found and job.ranks > found:
        raise ConfigError(
            f"--ranks {job.ranks} needs {job.ranks} GPUs on this machine, {found} are visible: start --ranks {found}, "
            "or set model.device to 'cpu'"
        )


def _check_machines(flags: LaunchFlags, output_dir: str | None) -> None:
    endpoint = flags.rdzv_endpoint
    if endpoint is None:
        if flags.nnodes > 1:
            raise ConfigError(
                f"--nnodes {flags.nnodes} needs a place where the machines meet: --rdzv-endpoint HOST:PORT, the name "
                "of one of them and a free port on it, the same on all"
            )
        return
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ConfigError(f"--rdzv-endpoint must be HOST:PORT, as in node1:29400, got {endpoint!r}")
    if flags.nnodes > 1 and output_dir is None:
        raise ConfigError(
            "several machines write one run folder, on storage that they share: set run.output_dir (demo: --output-dir)"
        )


def _check_total(ranks: int, layout: str | None, prompts: int | None, device: str) -> None:
    # In the layout "full", a rank without prompts still holds its part of the weights.
    if prompts is not None and ranks > prompts and layout != "full":
        raise ConfigError(
            f"{ranks} ranks would share the {prompts} prompts of a step, and some would have none: set "
            f"rollout.prompts_per_step to a multiple of {ranks}, start fewer ranks, or take the layout 'full' if the "
            "model needs the memory of all"
        )
    if ranks > 1 and ":" in device:
        raise ConfigError(f"model.device {device!r} is one GPU, and there are {ranks} ranks: set it to 'cuda'")


def _gpus(device: str) -> int:
    """GPUs of this machine that a run on ``device`` would use."""
    if device != "auto" and not device.startswith("cuda"):
        return 0
    import torch

    return torch.cuda.device_count()


# ----------------------------------------
# How ranks end: which one failed first, and what to tell the user.


USER_ERROR = 2
SECONDS_TO_NOTICE = 5.0
"""Within this time, the launcher has noticed that a signal ended a rank."""
LOG_HEADER = "--- rank "
"""A rank's log begins with this at each start."""


@dataclass(frozen=True, slots=True)
class End:
    """The end of a rank that failed."""

    rank: int
    code: int
    """The exit code; minus the number of the signal that ended the process."""
    time: float
    """When it failed, in seconds since the epoch."""
    error: str | None = None
    """An exception that nothing caught: its type and text."""
    noted: bool = True
    """Whether the rank wrote this itself. A rank that a signal or ``os._exit`` ends cannot."""


def note_path(notes: Path, rank: int) -> Path:
    """Where a rank leaves how it failed."""
    return notes / f"rank-{rank}.json"


def write_note(notes: Path, end: End) -> None:
    """Leave how a rank failed, for ``read_end``."""
    note_path(notes, end.rank).write_text(json.dumps(asdict(end)), encoding="utf-8")


def read_end(notes: Path, rank: int, code: int, noticed: float) -> End:
    """The end of a rank: as it noted it, or, if it could not, as it was noticed."""
    with contextlib.suppress(OSError, ValueError):
        return End(**json.loads(note_path(notes, rank).read_text(encoding="utf-8")))
    return End(rank, code, noticed, noted=False)


def first_end(ends: Sequence[End]) -> End:
    """The failure that caused the others. The launcher ends the other ranks by SIGTERM, so such an end is a cause only
    if it was noticed first. A rank that noted nothing, as one that a signal ended, was noticed after its end."""
    if ends[0].code == -signal.SIGTERM:
        return ends[0]
    own = [end for end in ends if end.code != -signal.SIGTERM]
    return min(own, key=lambda end: end.time - SECONDS_TO_NOTICE * (end.code < 0 or not end.noted))


def report(job: Job, ends: Sequence[End]) -> int:
    """Print why a job has failed, unless rank 0 has; returns its exit code. A folder that the launcher has numbered is
    removed if all ranks have refused the start, and it has nothing but their logs."""
    code, text = explain_failure(job, ends)
    if text:
        print(f"cohort: error: {text}", file=sys.stderr)
    elif code == USER_ERROR and job.numbered and [path.name for path in job.folder.glob("*")] == ["logs"]:
        shutil.rmtree(job.folder)
    return code


def explain_failure(job: Job, ends: Sequence[End]) -> tuple[int, str | None]:
    """The exit code of a failed job, and what to print; None: rank 0 has printed it.

    Args:
        job: the job.
        ends: failed ranks, in the order in which they were noticed.
    """
    if any(end.code == STOPPED for end in ends):
        return STOPPED, None
    first = first_end(ends)
    log = job.log(first.rank)
    if first.code < 0:
        name = _signal_name(-first.code)
        text = f"rank {first.rank} was ended by {name}, so all ranks were ended"
        if first.code == -signal.SIGKILL:
            text += "; without a known sender, SIGKILL usually means that the machine ran out of memory"
        return 1, f"{text}; {_log_and_checkpoint(job, log)}"
    if first.error is not None:
        return 1, f"rank {first.rank} failed: {first.error}; the traceback is in {log}"
    if first.noted and any(end.rank == 0 and end.code == first.code for end in ends):
        return first.code, None  # rank 0 failed with all others, and has said why
    if first.noted and (line := _last_line(log)):
        return first.code, f"rank {first.rank}: {line}; its log is {log}"
    text = f"rank {first.rank} ended with exit code {first.code}, without a message"
    return first.code, f"{text}; {_log_and_checkpoint(job, log)}"


def _log_and_checkpoint(job: Job, log: Path) -> str:
    parts = [f"its log is {log}"] if log.exists() else []
    names = (path.name.removeprefix("step-") for path in (job.folder / "checkpoints").glob("step-*"))
    if steps := [int(name) for name in names if name.isdigit()]:
        parts.append(f"{job.folder} has a checkpoint of step {max(steps)}: continue with 'resume {job.folder}'")
    else:
        parts.append(f"{job.folder} has no checkpoint yet")
    return "; ".join(parts)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    last = next((line for line in reversed(lines) if line.strip()), "")
    return "" if last.startswith(LOG_HEADER) else last.removeprefix("cohort: error: ")
