"""What ``cohort launch`` starts, and what can be known to be wrong before anything starts."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

from cohort.config import GRPOConfig, load_config
from cohort.errors import ConfigError
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
    flags: LaunchFlags = field(default_factory=LaunchFlags)
    """Of ``cohort launch``: where machines meet, how often ranks are restarted, whether only to describe the job."""
    device: str = "auto"
    """``model.device``."""
    module: str = "cohort"
    """What the ranks run, as ``python -m`` does. Tests run others."""

    @property
    def threads(self) -> int:
        """Threads of a rank: OMP_NUM_THREADS, or the cores of this machine divided by its ranks."""
        given = os.environ.get("OMP_NUM_THREADS", "")
        return int(given) if given.isdecimal() else max(1, usable_cores() // self.ranks)

    def log(self, rank: int | str) -> Path:
        """Where a rank prints; of rank 0, only the traceback of an unexpected error."""
        return self.folder / "logs" / f"rank-{rank}.log"

    def describe(self) -> str:
        """What would be started, in words."""
        where = "in a Ray cluster" if self.flags.ray else f"on this machine, threads of each: {self.threads}"
        lines = [f"ranks: {self.ranks} {where}"]
        flags, total = self.flags, self.ranks * self.flags.nnodes
        if place := flags.rdzv_endpoint:
            lines.append(f"machines: {flags.nnodes}, {total} ranks in all; they meet at {place} as {flags.rdzv_id!r}")
        if flags.max_restarts:
            lines.append(f"restarts after a failure: {flags.max_restarts}")
        lines += [
            f"run folder: {self.folder}",
            f"logs of ranks other than 0: {self.log('N')}",
            f"each rank runs: cohort {shlex.join(self.arguments)}",
        ]
        return "\n".join(lines)


def job_of(
    command: Sequence[str],
    flags: LaunchFlags,
    settings: GRPOConfig | None,
    *,
    output_dir: str | None,
    resume: bool | Literal["auto"] = False,
) -> Job:
    """The job of a command.

    Args:
        command: arguments of ``cohort``: ``demo`` or ``train`` with its own arguments.
        flags: of ``cohort launch``.
        settings: ``settings_of`` the command; None: of the demo, which trains on the CPU.
        output_dir: the run folder that the command names; None: it names none.
        resume: of ``cohort train``.

    Raises:
        ConfigError: flags and command do not fit each other; or what the settings ask for cannot be done on several
            ranks, as far as that is known without a model and a server.
    """
    arguments, device = list(command), settings.model.device if settings else "cpu"
    if flags.layout is not None:
        if settings is None:
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
    if settings:
        _check_settings(settings, ranks * flags.nnodes)
    numbered = output_dir is None
    if output_dir is None:
        from cohort.runs.folder import RunFolder

        output_dir = str(RunFolder.next_free("run" if settings else "demo").path)
        arguments += ["--run.output_dir" if settings else "--output-dir", output_dir]
    folder = Path(output_dir).expanduser().absolute()
    return Job(tuple(arguments), folder, ranks, numbered, flags, device)


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
    own = {f"--{one.name.replace('_', '-')}" for one in fields(LaunchFlags)}
    for text, after in zip(overrides, [*overrides[1:], ""], strict=False):
        name, given, value = text.partition("=")
        if name in own:
            raise ConfigError(f"{name} is an option of cohort launch: put it before 'train'")
        value = value if given else after
        if name == "--parallel.layout" and flags.layout not in (None, value):
            raise ConfigError(f"--layout is {flags.layout!r} and --parallel.layout {value!r}: leave one of them out")
    layout = ["--parallel.layout", flags.layout] if flags.layout else []
    return load_config(path, [*overrides, *layout], of_run=of_run)


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


def _check_settings(config: GRPOConfig, ranks: int) -> None:
    from cohort.parallel import World, layout_of

    layout, prompts, device = config.parallel.layout, config.rollout.prompts_per_step, config.model.device
    # In the layout "full", a rank without prompts still holds its part of the weights.
    if ranks > prompts and layout != "full":
        raise ConfigError(
            f"{ranks} ranks would share the {prompts} prompts of a step, and some would have none: set "
            f"rollout.prompts_per_step to a multiple of {ranks}, start fewer ranks, or take the layout 'full' if the "
            "model needs the memory of all"
        )
    if ranks > 1 and ":" in device:
        raise ConfigError(f"model.device {device!r} is one GPU, and there are {ranks} ranks: set it to 'cuda'")
    world = World(size=ranks)
    layout_of(layout, world)
    from cohort.rollout.setup import EngineSetup, with_engine

    EngineSetup(with_engine(config, world)[0], world)


def _gpus(device: str) -> int:
    """GPUs of this machine that a run on ``device`` would use."""
    if device != "auto" and not device.startswith("cuda"):
        return 0
    import torch

    return torch.cuda.device_count()
