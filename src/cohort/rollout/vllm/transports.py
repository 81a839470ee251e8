"""How weights get to vLLM servers: as files, or by broadcasts in a process group.

Both need the plugin in the servers; see ``plugin``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, distributed

from cohort.config import VLLMConfig
from cohort.errors import ConfigError, EngineError
from cohort.rollout.vllm.plugin import PLUGIN, ServerDescription, describe_server, how_to_start
from cohort.rollout.vllm.server import Server, ServerError, WeightTransport

FILE_BYTES = 2**30
"""Weights per file: what is in memory beside the policy while files are written."""
SHARED_MEMORY = Path("/dev/shm")
POLL_SECONDS = 2e-4

Failures = dict[Server, EngineError]


def transport_of(settings: VLLMConfig, device: torch.device, *, sends: bool = True) -> WeightTransport:
    """The transport of the settings.

    Args:
        settings: which one, and its time limit.
        device: of the policy's weights.
        sends: whether this rank sends the weights: only its machine needs a folder that the servers see.
    """
    if settings.transport == "group":
        return GroupTransport(settings.update_timeout, device)
    return FileTransport(settings.update_timeout, settings.folder, sends=sends)


class FileTransport(WeightTransport):
    """Writes weights to safetensors files that the servers read.

    Args:
        timeout: seconds for the servers to load them.
        folder: a folder that the servers see under the same name. Empty: shared memory of this machine.
        sends: see ``transport_of``.
    """

    def __init__(self, timeout: float, folder: str = "", *, sends: bool = True) -> None:
        self.timeout, self._sends = timeout, sends
        self._parent = Path(folder).expanduser().absolute() if folder else SHARED_MEMORY
        self._shared = bool(folder)
        self._descriptions: dict[Server, ServerDescription] = {}

    def check(self, servers: Sequence[Server]) -> dict[Server, ServerDescription]:
        """See ``WeightTransport``."""
        self._descriptions |= {server: describe_server(server) for server in servers}
        if not self._sends:
            return self._descriptions
        for server in servers:
            if not self._shared and not _is_here(server.host):
                raise ConfigError(
                    f"{server.url} is on another machine and cannot read this machine's shared memory: set vllm.folder "
                    "to a folder that all machines share, or vllm.transport to 'group'"
                )
        try:
            self._parent.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self._parent).close()
        except OSError as error:
            raise ConfigError(f"vllm.folder: cannot write to {self._parent}: {error.strerror}") from None
        return self._descriptions

    def send(self, servers: Sequence[Server], weights: Iterable[tuple[str, Tensor]], version: str) -> Failures:  # noqa: ARG002
        """See ``WeightTransport``."""
        dtypes = {server: self._descriptions[server].dtype for server in servers}
        dtype = dtypes[servers[0]]
        if len(set(dtypes.values())) > 1:
            found = ", ".join(f"{server.url} {str(one).removeprefix('torch.')}" for server, one in dtypes.items())
            raise EngineError(
                f"the vLLM servers have weights of different dtypes ({found}): start all with one --dtype"
            )
        converted = ((name, _converted(tensor, dtype, torch.device("cpu"))) for name, tensor in weights)
        folder = Path(tempfile.mkdtemp(prefix="cohort-weights-", dir=self._parent))
        try:
            for number, part in enumerate(_parts(converted)):
                save_file(part, folder / f"part-{number:05d}.safetensors")
            body = {"method": "cohort_load", "kwargs": {"folder": str(folder)}}
            return _to_each(servers, lambda server: server.post("/collective_rpc", body, timeout=self.timeout))
        except (OSError, SafetensorError) as error:
            free = shutil.disk_usage(self._parent).free / 2**30
            raise EngineError(
                f"cannot write the weights to {self._parent} ({error}; {free:.1f} GiB are free): set vllm.folder to a "
                "folder with more room, or vllm.transport to 'group'"
            ) from None
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """See ``WeightTransport``. Nothing is kept between updates."""


class GroupTransport(WeightTransport):
    """Broadcasts weights to each server in a process group of its own, so that a server that fails takes down no other.

    The trainer is rank 0 of each group and a server's workers are the others. gloo connects CPUs and NCCL GPUs. NCCL
    needs a GPU for each rank: a server on the trainer's own GPU takes files.

    Args:
        timeout: seconds for an update.
        device: of the policy's weights.
    """

    def __init__(self, timeout: float, device: torch.device) -> None:
        self.timeout = timeout
        self.device = device
        self._descriptions: dict[Server, ServerDescription] = {}
        self._groups: dict[Server, Any] = {}

    def check(self, servers: Sequence[Server]) -> dict[Server, ServerDescription]:
        """See ``WeightTransport``."""
        for server in servers:
            found = self._descriptions[server] = describe_server(server)
            if found.transfer != "cohort":
                raise ConfigError(
                    f"{server.url} lacks the weight transfer that vllm.transport 'group' needs. {how_to_start()}"
                )
        return self._descriptions

    def send(self, servers: Sequence[Server], weights: Iterable[tuple[str, Tensor]], version: str) -> Failures:
        """See ``WeightTransport``."""
        named = list(weights)
        return _to_each(servers, lambda server: self._update(server, named, version))

    def _update(self, server: Server, weights: Sequence[tuple[str, Tensor]], version: str) -> None:
        """Send weights to one server, in a thread of its own: a slow server delays no other."""
        found = self._descriptions[server]
        dtypes = [found.dtype if tensor.is_floating_point() else tensor.dtype for _, tensor in weights]
        info = {
            "names": [name for name, _ in weights],
            "dtypes": [str(dtype).removeprefix("torch.") for dtype in dtypes],
            "shapes": [list(tensor.shape) for _, tensor in weights],
        }
        self._begin(server)
        where = torch.device("cpu") if found.device == "cpu" else self.device
        try:
            with ThreadPoolExecutor(1) as threads:
                loading = threads.submit(server.post, "/update_weights", {"update_info": info}, timeout=self.timeout)
                for _, tensor in weights:
                    kept = _converted(tensor, found.dtype, where)
                    _wait(self._groups[server].broadcast(kept, 0), loading)
                loading.result()
        except BaseException:
            self._leave(server)
            raise
        server.post("/finish_weight_update", {"weight_version": version}, timeout=self.timeout)

    def _begin(self, server: Server) -> None:
        """Begin an update of a server, in a group with it."""
        if server in self._groups:
            try:
                server.post("/start_weight_update", timeout=self.timeout)
            except ServerError:  # it was started again, so it is in no group
                self._leave(server)
            else:
                return
        self._groups[server] = self._join(server)
        server.post("/start_weight_update", timeout=self.timeout)

    def _join(self, server: Server) -> Any:
        """Make a group with a server's workers."""
        found = self._descriptions[server]
        backend = "gloo" if found.device == "cpu" else "nccl"
        if backend == "nccl" and self.device.type != "cuda":
            raise EngineError(f"{server.url} is on a GPU and the policy is not: set vllm.transport to 'files'")
        size, timeout = 1 + found.workers, timedelta(seconds=self.timeout)
        with socket.socket() as listener:
            listener.bind((_address_towards(server), 0))
            listener.listen(size)
            host, port = listener.getsockname()
            handle = os.dup(listener.fileno())  # the store closes it
        store = distributed.TCPStore(
            host, port, size, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=handle
        )
        meeting = {"host": host, "port": port, "size": size, "backend": backend, "timeout": self.timeout}
        ready = [f"ready{rank}" for rank in range(1, size)]
        with ThreadPoolExecutor(1) as threads:
            joining = threads.submit(
                server.post, "/init_weight_transfer_engine", {"init_info": meeting}, timeout=self.timeout
            )
            while not store.check(ready):  # making a group would wait for a server that cannot join
                if joining.done():
                    joining.result()
                    raise EngineError(f"{server.url}: its plugin is of another version: copy {PLUGIN} to it")
                time.sleep(POLL_SECONDS)
            group = _group(store, size, backend, timeout, self.device)
            joining.result()
        return group

    def _leave(self, server: Server) -> None:
        """Use the group with a server no more. It is never freed: gloo's destructor waits for what is under way, and
        aborts the process if that ends meanwhile."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._groups.pop(server, None)))

    def close(self) -> None:
        """See ``WeightTransport``."""
        for server in list(self._groups):
            with contextlib.suppress(ServerError):
                server.post("/shutdown_weight_transfer_engine", timeout=5.0)
        self._groups.clear()


def _wait(work: Any, loading: Future[Any]) -> None:
    """Wait for a broadcast, unless the server reports that it will not receive it."""
    while not work.is_completed():
        if loading.done():
            loading.result()
            break  # it has received them
        time.sleep(POLL_SECONDS)
    work.wait()


def _group(store: Any, size: int, backend: str, timeout: timedelta, device: torch.device) -> Any:
    """The trainer's end of a process group beside the default one."""
    if backend == "gloo":
        return distributed.ProcessGroupGloo(store, 0, size, timeout)
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = timeout
    group: Any = distributed.ProcessGroupNCCL(store, 0, size, options)
    # The connection is made at the first collective.
    group.broadcast(torch.zeros(1, dtype=torch.float32, device=device), 0).wait()
    torch.cuda.synchronize(device)
    return group


def _converted(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A weight on a device, in a dtype if it is a floating-point one."""
    return tensor.detach().to(device, dtype if tensor.is_floating_point() else tensor.dtype).contiguous()


def _parts(weights: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Weights in dicts of about ``FILE_BYTES``."""
    part: dict[str, Tensor] = {}
    for name, tensor in weights:
        part[name] = tensor
        if sum(one.nbytes for one in part.values()) >= FILE_BYTES:
            yield part
            part = {}
    if part:
        yield part


def _to_each(servers: Sequence[Server], act: Callable[[Server], object]) -> Failures:
    """Do something with all servers at the same time; returns the errors."""
    failed: Failures = {}
    with ThreadPoolExecutor(len(servers) or 1) as threads:
        running = {server: threads.submit(act, server) for server in servers}
        for server, future in running.items():
            try:
                future.result()
            except EngineError as error:
                failed[server] = error
            except (RuntimeError, TimeoutError) as error:  # of a process group
                first_line = next(iter(str(error).splitlines()), type(error).__name__)
                failed[server] = EngineError(f"{server.url}: the weights did not get there ({first_line})")
    return failed


def _is_here(host: str) -> bool:
    """Whether an address is one of this machine."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, number) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def _address_towards(server: Server) -> str:
    """The address of this machine on the way to a server."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((server.host, server.port))  # sends nothing
        return str(probe.getsockname()[0])
