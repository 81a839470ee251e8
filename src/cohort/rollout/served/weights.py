"""How weights get to servers: as files in a folder that all see, or by broadcasts in a process group.

An adapter that a server can load by name goes alone, as files, and the base weights go once.
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
from threading import Thread
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, distributed

from cohort.config import ServerConfig
from cohort.errors import ConfigError, EngineError
from cohort.rollout.served.adapters import Adapter
from cohort.rollout.served.http import Client
from cohort.rollout.served.protocol import Description, Server, ServerError, Update

FILE_BYTES = 2**30
"""Weights per file: what is in memory beside the policy while files are written."""
SHARED_MEMORY = Path("/dev/shm")
POLL_SECONDS = 2e-4

Failures = dict[Server, EngineError]


class Sender(Protocol):
    """Moves the trainer's weights to servers."""

    def check(self, server: Server, found: Description) -> None:
        """Check that a server has what the way needs. Raises ``ConfigError``: it lacks it; says how to start it."""

    def send(self, servers: Sequence[Server], weights: Iterable[tuple[str, Tensor]], version: str) -> Failures:
        """Load weights into servers.

        Args:
            servers: those to load. A server that was left out is loaded alone later.
            weights: names as in the model's ``state_dict``, with whole tensors. Read once, by any number of servers.
            version: the label of the weights.

        Returns:
            the servers that failed, with the reason; the caller leaves them out.

        Raises:
            EngineError: the weights cannot be sent to any server.
        """

    def close(self) -> None:
        """Free everything. Idempotent."""
        return


def sender_of(settings: ServerConfig, device: torch.device, *, sends: bool = True) -> Sender:
    """The way of the settings.

    Args:
        settings: which one, and its time limit.
        device: of the policy's weights.
        sends: whether this rank sends the weights: only its machine needs a folder that the servers see.
    """
    if settings.transport == "group":
        return GroupSender(settings.update_timeout, device)
    return FolderSender(settings.update_timeout, settings.folder, sends=sends)


class FolderSender(Sender):
    """Writes weights to safetensors files that the servers read.

    Args:
        timeout: seconds for the servers to load them.
        folder: a folder that the servers see under the same name. Empty: shared memory of this machine.
        sends: see ``sender_of``.
    """

    def __init__(self, timeout: float, folder: str = "", *, sends: bool = True) -> None:
        self.timeout, self._sends = timeout, sends
        self._parent = Path(folder).expanduser().absolute() if folder else SHARED_MEMORY
        self._shared = bool(folder)
        self._dtypes: dict[Server, torch.dtype] = {}
        self._adapter = contextlib.ExitStack()

    def check(self, server: Server, found: Description) -> None:
        """See ``Sender``."""
        self._dtypes[server] = getattr(torch, found.dtype)
        if not self._sends:
            return
        if isinstance(server, Client) and not self._shared and not _is_here(server.host):
            raise ConfigError(
                f"{server.url} is on another machine and cannot read this machine's shared memory: set server.folder "
                "to a folder that all machines share, or server.transport to 'group'"
            )
        try:
            self._parent.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self._parent).close()
        except OSError as error:
            raise ConfigError(f"server.folder: cannot write to {self._parent}: {error.strerror}") from None

    def send(self, servers: Sequence[Server], weights: Iterable[tuple[str, Tensor]], version: str) -> Failures:
        """See ``Sender``."""
        dtypes = {server: self._dtypes[server] for server in servers}
        dtype = dtypes[servers[0]]
        if len(set(dtypes.values())) > 1:
            found = ", ".join(f"{server.url} {str(one).removeprefix('torch.')}" for server, one in dtypes.items())
            raise EngineError(f"the servers have weights of different dtypes ({found}): start all with one --dtype")
        converted = ((name, _converted(tensor, dtype, torch.device("cpu"))) for name, tensor in weights)
        with self._folder() as folder:
            for number, part in enumerate(_parts(converted)):
                save_file(part, folder / f"part-{number:05d}.safetensors")
            return _to_each(servers, lambda server: server.load(Update(self.timeout, str(folder)), version))

    def send_adapter(self, servers: Sequence[Server], adapter: Adapter, version: str) -> Failures:
        """Load an adapter into servers that have the base weights; see ``send``. Its files stay until those of the next
        one are there: a server may read them again."""
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(self._folder())
            adapter.save(folder)
            update = Update(self.timeout, str(folder), version)
            failed = _to_each(servers, lambda server: server.load(update, version))
            self._adapter.close()
            self._adapter = stack.pop_all()
        return failed

    def close(self) -> None:
        """See ``Sender``."""
        self._adapter.close()

    @contextlib.contextmanager
    def _folder(self) -> Iterator[Path]:
        """A folder that the servers see, while the block runs. Raises ``EngineError`` if it cannot be written."""
        folder = Path(tempfile.mkdtemp(prefix="cohort-weights-", dir=self._parent))
        try:
            yield folder
        except (OSError, SafetensorError) as error:
            free = shutil.disk_usage(self._parent).free / 2**30
            raise EngineError(
                f"cannot write the weights to {self._parent} ({error}; {free:.1f} GiB are free): set server.folder to "
                "a folder with more room, or server.transport to 'group'"
            ) from None
        finally:
            shutil.rmtree(folder, ignore_errors=True)


class GroupSender(Sender):
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
        self._found: dict[Server, Description] = {}
        self._groups: dict[Server, Any] = {}

    def check(self, server: Server, found: Description) -> None:
        """See ``Sender``."""
        self._found[server] = found
        if not found.can_broadcast:
            raise ConfigError(f"{server.url} cannot join the group of server.transport 'group': {server.joining()}")

    def send(self, servers: Sequence[Server], weights: Iterable[tuple[str, Tensor]], version: str) -> Failures:
        """See ``Sender``."""
        named = list(weights)
        return _to_each(servers, lambda server: self._update(server, named, version))

    def _update(self, server: Server, weights: Sequence[tuple[str, Tensor]], version: str) -> None:
        """Send weights to one server, in a thread of its own: a slow server delays no other."""
        known = server in self._groups
        try:
            self._broadcast(server, weights, version)
        except ServerError:
            if not known:
                raise
            self._broadcast(server, weights, version)  # it was started again, so it was in no group

    def _broadcast(self, server: Server, weights: Sequence[tuple[str, Tensor]], version: str) -> None:
        found = self._found[server]
        dtype: torch.dtype = getattr(torch, found.dtype)
        dtypes = [dtype if tensor.is_floating_point() else tensor.dtype for _, tensor in weights]
        tensors: dict[str, list[Any]] = {
            "names": [name for name, _ in weights],
            "dtypes": [str(one).removeprefix("torch.") for one in dtypes],
            "shapes": [list(tensor.shape) for _, tensor in weights],
        }
        update = Update(self.timeout, tensors=tensors)
        if server not in self._groups:
            self._groups[server] = self._join(server)
        where = torch.device("cpu") if found.device == "cpu" else self.device
        try:
            with ThreadPoolExecutor(1) as threads:
                loading = threads.submit(server.load, update, version)
                while not update.begun.wait(POLL_SECONDS) and not loading.done():
                    pass
                for _, tensor in weights if update.begun.is_set() else ():
                    kept = _converted(tensor, dtype, where)
                    _wait(self._groups[server].broadcast(kept, 0), loading)
                loading.result()
        except BaseException:
            self._leave(server)
            raise

    def _join(self, server: Server) -> Any:
        """Make a group with a server's workers."""
        found = self._found[server]
        backend = "gloo" if found.device == "cpu" else "nccl"
        if backend == "nccl" and self.device.type != "cuda":
            raise EngineError(f"{server.url} is on a GPU and the policy is not: set server.transport to 'folder'")
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
        if server.joins_as_torch:
            # Two groups of one name cannot be in a server's process, and an earlier one may be left there.
            name = f"cohort-{port}"
            return _meet(
                lambda: _group_as_torch(store, size, backend, timeout, name),
                lambda: server.join(meeting | {"name": name}),
            )
        ready = [f"ready{rank}" for rank in range(1, size)]
        with ThreadPoolExecutor(1) as threads:
            joining = threads.submit(server.join, meeting)
            while not store.check(ready):  # making a group would wait for a server that cannot join
                if joining.done():
                    joining.result()
                    raise EngineError(
                        f"{server.url} says that it has joined a group, and is not in it: {server.joining()}"
                    )
                time.sleep(POLL_SECONDS)
            group = _group(store, size, backend, timeout, self.device)
            joining.result()
        return group

    def _leave(self, server: Server) -> None:
        """Use the group with a server no more. It is never freed: gloo's destructor waits for what is under way, and
        aborts the process if that ends meanwhile."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._groups.pop(server, None)))

    def close(self) -> None:
        """See ``Sender``."""
        for server in list(self._groups):
            with contextlib.suppress(ServerError):
                server.leave()
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
    group = _nccl(store, size, timeout)
    # The connection is made at the first collective.
    group.broadcast(torch.zeros(1, dtype=torch.float32, device=device), 0).wait()
    torch.cuda.synchronize(device)
    return group


def _group_as_torch(store: Any, size: int, backend: str, timeout: timedelta, name: str) -> Any:
    """The trainer's end of a group that the others join by ``_new_process_group_helper`` on a ``PrefixStore``.

    Its keys begin with the name twice, once from each, and with the first device of the backend. It makes NCCL's
    connection at the first weight.
    """
    for prefix in (name, f"{name}/", "cpu/" if backend == "gloo" else "cuda/"):
        store = distributed.PrefixStore(prefix, store)
    if backend == "gloo":
        return distributed.ProcessGroupGloo(store, 0, size, timeout)
    return _nccl(store, size, timeout)


def _nccl(store: Any, size: int, timeout: timedelta) -> Any:
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return distributed.ProcessGroupNCCL(store, 0, size, options)


def _meet(make: Callable[[], Any], join: Callable[[], None]) -> Any:
    """Make the trainer's end of a group while the others join. If they cannot, nobody waits for the thread that makes
    it, which ends at the group's time limit."""
    made: Future[Any] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except Exception as error:  # raised by ``result``
            made.set_exception(error)

    Thread(target=run, daemon=True).start()
    join()
    return made.result()


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


def _address_towards(server: Any) -> str:
    """The address of this machine on the way to a server."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((server.host, server.port))  # sends nothing
        return str(probe.getsockname()[0])
