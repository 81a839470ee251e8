"""Ranks in a Ray cluster. Ray places processes and notices their end; tensors travel over torch.distributed.

Each rank is a child of an actor, so that it is the same process as under torchrun: the same environment, the same
``python -m cohort.launch.rank``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cohort.errors import STOPPED, ConfigError
from cohort.launch.ends import ERROR_FILE, End, report
from cohort.launch.job import Job
from cohort.launch.rank import command

SECONDS_TO_PLACE = 60
"""Time for the cluster to have room."""
SECONDS_TO_END = 8
POLL_SECONDS = 0.2
"""How often the launcher looks whether a signal has come."""
PASSED_ON = ("COHORT_", "HF_", "NCCL_", "GLOO_", "PYTHON", "TOKENIZERS_", "WANDB_")
"""Environment variables with these beginnings reach the ranks."""


class Seat:
    """The actor that holds a rank's place in the cluster, and runs its process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def address(self) -> tuple[str, str, int]:
        """The node's id, its address and a free port on it."""
        import ray

        with socket.socket() as free:
            free.bind(("", 0))
            return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), free.getsockname()[1]

    def run(self, job: Job, cwd: str, variables: dict[str, str]) -> End | None:
        """Run a rank; returns how it failed."""
        with tempfile.TemporaryDirectory(prefix="cohort-launch-") as folder:
            left = Path(folder, "rank", "error.json")
            left.parent.mkdir()
            run, own = [sys.executable, *command(job, folder)], variables | {ERROR_FILE: str(left)}
            self._process = subprocess.Popen(run, cwd=cwd, env=os.environ | own, start_new_session=True)
            if not (code := self._process.wait()):
                return None
            return End.left_in(left) or End(int(variables["RANK"]), code, time.time())

    def stop(self, number: int) -> None:
        """Send a signal to the rank's process; its children end with it."""
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)


def start_in_ray(job: Job) -> int:
    """Start a job's ranks in a Ray cluster, and wait for their end. Returns and raises as ``launch``."""
    with _cluster() as ray, _seats(ray, job) as seats:
        variables = _variables(job, ray.get([seat.address.remote() for seat in seats]))
        running = {
            seat.run.remote(job, str(Path.cwd()), own): (int(own["RANK"]), seat)
            for seat, own in zip(seats, variables, strict=True)
        }
        asked, ends = _asked_to_stop(), list[End]()
        while running and not ends and not asked:
            ends += _ended(ray, running, POLL_SECONDS, count=1)
        if asked:
            ends += _stop(ray, running, asked[0], timeout=None)  # another signal ends the launcher, and so the ranks
            if not any(end.code == STOPPED for end in ends):
                return 128 + asked[0]  # rank 0 has reported it
        elif ends:
            ends += _ended(ray, running, 1)  # what the others say themselves
            ends += _stop(ray, running, signal.SIGTERM, SECONDS_TO_END)
    return report(job, ends) if ends else 0


def _asked_to_stop() -> list[int]:
    """The list that the first signal which asks for a stop will be in; another one ends the launcher."""
    stopping, asked = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1), list[int]()

    def stop(number: int, _: Any) -> None:
        for other in stopping:
            signal.signal(other, signal.SIG_DFL)
        asked.append(number)

    for number in stopping:
        signal.signal(number, stop)
    return asked


@contextlib.contextmanager
def _cluster() -> Iterator[Any]:
    """Ray, connected to a cluster: that of RAY_ADDRESS, one that runs on this machine, or a new one."""
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # equal lines of a run are not noise
    try:
        import ray
    except ImportError:
        raise ConfigError("--ray needs Ray: pip install 'cohort-rl[ray]'") from None
    try:
        ray.init(include_dashboard=False, log_to_driver=True, logging_level=logging.ERROR)
    except (ConnectionError, ValueError) as error:
        where = os.environ.get("RAY_ADDRESS", "this machine")
        raise ConfigError(f"cannot reach the Ray cluster at {where}: {error}") from None
    try:
        yield ray
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _seats(ray: Any, job: Job) -> Iterator[list[Any]]:
    """One actor per rank, with its share of the cluster.

    Raises:
        ConfigError: the cluster has too little, or is not free in time.
    """
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    has = ray.cluster_resources()
    wanted: dict[str, float] = {"CPU": float(os.environ.get("OMP_NUM_THREADS") or 1)}
    if job.device.startswith("cuda") or (job.device == "auto" and has.get("GPU")):
        wanted["GPU"] = 1.0
    for name, amount in wanted.items():
        if amount * job.ranks > has.get(name, 0):
            raise ConfigError(
                f"{job.ranks} ranks of {amount:g} {name} do not fit the Ray cluster, which has {has.get(name, 0):g}: "
                "start fewer --ranks, or set OMP_NUM_THREADS to fewer cores for each"
            )
    group = placement_group([wanted] * job.ranks, strategy="PACK")
    actor = ray.remote(max_restarts=0, max_concurrency=2)(Seat)
    try:
        if not group.wait(SECONDS_TO_PLACE):
            raise ConfigError(
                f"the Ray cluster has had no room for {job.ranks} ranks of {wanted} in {SECONDS_TO_PLACE} s"
            )
        yield [
            actor.options(
                num_cpus=wanted["CPU"],
                num_gpus=wanted.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
            ).remote()
            for index in range(job.ranks)
        ]
    finally:
        remove_placement_group(group)  # its actors, and with them the ranks, end too


def _variables(job: Job, addresses: list[tuple[str, str, int]]) -> list[dict[str, str]]:
    """The environment of each seat's rank, as torchrun would set it; ranks of a node are neighbours."""
    nodes = list(dict.fromkeys(node for node, _, _ in addresses))
    order = sorted(range(len(addresses)), key=lambda seat: nodes.index(addresses[seat][0]))
    _, host, port = addresses[order[0]]
    common = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}
    common |= {"MASTER_ADDR": host, "MASTER_PORT": str(port), "WORLD_SIZE": str(job.ranks)}
    common["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or "1"
    found: list[dict[str, str]] = [{} for _ in addresses]
    for rank, seat in enumerate(order):
        here = [other for other in order if addresses[other][0] == addresses[seat][0]]
        # Ray shows an actor its own GPU only, as the first.
        local = 0 if job.device != "cpu" else here.index(seat)
        found[seat] = common | {"RANK": str(rank), "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(len(here))}
    return found


def _ended(ray: Any, running: dict[Any, tuple[int, Any]], timeout: float | None, count: int | None = None) -> list[End]:
    """Wait for the end of some ranks that run, or of all, for a while. Returns the failures in order."""
    ends = []
    done, _ = ray.wait(list(running), num_returns=count or len(running), timeout=timeout) if running else ([], [])
    for one in done:
        rank, _ = running.pop(one)
        try:
            end = ray.get(one)
        except ray.exceptions.RayError as error:
            reason = str(error).strip().splitlines()[0]
            end = End(rank, 1, time.time(), f"its place in the Ray cluster is gone: {reason}")
        if end:
            ends.append(end)
    return ends


def _stop(ray: Any, running: dict[Any, tuple[int, Any]], number: int, timeout: float | None) -> list[End]:
    """Send a signal to the ranks that run, and wait for their end for a while. Returns the failures."""
    for _, seat in running.values():
        seat.stop.remote(number)
    return _ended(ray, running, timeout)
