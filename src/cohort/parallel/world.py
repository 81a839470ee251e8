"""The ranks of a run: who they are, and how they exchange values.

A rank is a process. ``torchrun`` and ``cohort launch`` start one for each GPU and tell it its number by environment
variables. Python values travel over a control group on gloo, tensors over the default group (NCCL where there is CUDA).
Every exchange, of one value or of many tensors, begins with a meeting of the control group: so the time that a rank
waits for slower ones is known apart from the time of the exchange, and a rank that has died is noticed before a
collective of NCCL could hang.
"""

from __future__ import annotations

import heapq
import io
import logging
import os
import pickle
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, TypeVar

from cohort.errors import ConfigError, RankError, out_of_memory
from cohort.types import Prompt
from cohort.watchdog import RANKS, other_ranks, share, waiting

if TYPE_CHECKING:
    import torch
    from torch import Tensor


log = logging.getLogger("cohort.parallel")
T = TypeVar("T")
TIMEOUT = 3600.0
"""Seconds that ranks wait for each other before they give up. A rank that dies is noticed at once."""


FIRST_BYTES = 4096
"""What the first message of a gather has room for; a longer value takes a second message."""
IN_FLIGHT = 3
"""Tensors that travel at once: one that arrives, one on its way, and one that is being written. Each takes memory."""


@dataclass(slots=True)
class Exchanged:
    """What exchanges between ranks have cost since the last ``World.costs``."""

    waiting: float = 0.0
    """Seconds of waiting for slower ranks."""
    seconds: float = 0.0
    """Seconds of the exchanges themselves, as far as nothing else was done meanwhile."""


@dataclass(frozen=True, slots=True)
class World:
    """The place of this process among the ranks of a run. ``World()`` is a single process, in which every method is
    the identity.

    Methods that exchange are to be called on every rank, in the same order.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Number among the ranks of this machine: the index of its GPU."""
    control: Any = field(default=None, repr=False, compare=False)
    """The process group of Python values; None for a single process."""
    exchanged: Exchanged = field(default_factory=Exchanged, repr=False, compare=False)
    timeout: float = field(default=TIMEOUT, repr=False, compare=False)
    """Seconds after which ranks that wait for each other give up."""

    @classmethod
    def of_environment(cls, variables: Mapping[str, str] = os.environ, timeout: float = TIMEOUT) -> World:
        """The world that ``torchrun`` describes by RANK, WORLD_SIZE and LOCAL_RANK. Without these variables, or with a
        size of 1, nothing is initialised.

        Args:
            variables: the environment variables.
            timeout: seconds after which ranks that wait for each other give up.

        Raises:
            ConfigError: the variables are incomplete or contradict each other.
            RankError: the other ranks cannot be reached.
        """
        size = _number(variables, "WORLD_SIZE", 1)
        if size == 1:
            return cls()
        import torch

        for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
            if name not in variables:
                raise ConfigError(f"WORLD_SIZE is {size}, but {name} is not set: start with torchrun or cohort launch")
        rank, local_rank = _number(variables, "RANK", 0), _number(variables, "LOCAL_RANK", 0)
        if not 0 <= rank < size:
            raise ConfigError(f"RANK is {rank} and WORLD_SIZE {size}: ranks count from 0")
        if torch.cuda.is_available():
            if local_rank >= torch.cuda.device_count():
                raise ConfigError(
                    f"LOCAL_RANK is {local_rank}, and this machine has {torch.cuda.device_count()} CUDA devices: start "
                    "one rank for each device"
                )
            torch.cuda.set_device(local_rank)
        return cls(rank, size, local_rank, _control_group(timeout), timeout=timeout)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which alone prints and writes the run folder."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Every rank's value, by rank. Values are pickled; tensors in them arrive on the CPU.

        Raises:
            RankError: a rank has ended or does not answer.
        """
        return [value] if self.size == 1 else self.gather_pickled(pickled(value))

    def gather_pickled(self, data: bytes) -> list[Any]:
        """Every rank's value, by rank, from its ``pickled``. Raises as ``gather``."""
        import torch
        import torch.distributed as dist

        def all_gather(own: bytes, length: int) -> list[Any]:
            sent = torch.frombuffer(bytearray(own.ljust(length, b"\0")), dtype=torch.uint8)
            each = [torch.empty_like(sent) for _ in range(self.size)]
            dist.all_gather(each, sent, group=self.control)
            return [one.numpy() for one in each]

        # The first message has the length and what is short, and is where the ranks meet.
        head = len(data).to_bytes(8, "little") + data[:FIRST_BYTES]
        each: list[Any] = []
        with self._exchange(lambda: each.extend(all_gather(head, 8 + FIRST_BYTES))):
            lengths = [int.from_bytes(one[:8].tobytes(), "little") for one in each]
            found = [one[8:] for one in each]
            if max(lengths) > FIRST_BYTES:
                found = all_gather(data, max(lengths))
        return [pickle.loads(one[:length].data) for one, length in zip(found, lengths, strict=True)]

    def barrier(self) -> None:
        """Wait until every rank is here.

        Raises:
            RankError: as ``gather``.
        """
        if self.size > 1:
            with self._exchange():
                pass

    def sum_(self, tensor: Tensor) -> Tensor:
        """Add up a tensor over the ranks, in place; returns it. Every rank gets the same bits.

        Raises:
            RankError: as ``gather``.
        """
        if self.size == 1:
            return tensor
        import torch.distributed as dist

        with self._exchange():
            dist.all_reduce(tensor, group=None if tensor.is_cuda else self.control)
        return tensor

    def sums(self, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
        """Add up each of some tensors over the ranks, in place. Every rank gets the same bits.

        The tensors travel while the next ones are computed and the last ones used; use up the iterator.

        Args:
            tensors: as many, of the same shapes and dtypes, on every rank.

        Raises:
            RankError: as ``gather``.
        """
        return self._in_turn(tensors, None, "all_reduce")

    def scatter_sums(self, parts: Iterable[Tensor]) -> Iterator[Tensor]:
        """As ``sums``, of ``[size, n]`` tensors: of each sum the row of this rank, ``[1, n]``."""
        return self._in_turn(parts, 1, "reduce_scatter_single", "reduce_scatter_tensor")

    def joins(self, parts: Iterable[Tensor]) -> Iterator[Tensor]:
        """For each of some ``[1, n]`` tensors, those of every rank, ``[size, n]``. See ``sums``."""
        return self._in_turn(parts, self.size, "all_gather_single", "all_gather_into_tensor")

    def _in_turn(self, tensors: Iterable[Tensor], rows: int | None, *names: str) -> Iterator[Tensor]:
        """The results of one exchange of each tensor: the tensor itself, or ``rows`` rows. The ranks meet once, before
        the first. ``names``: torch's function, and its name before torch 2.13, which warns of it."""
        if self.size == 1:
            yield from tensors
            return
        import torch
        import torch.distributed as dist

        # A GPU's work before and in the exchange is timed by waiting for it twice, and not for each tensor.
        settle: Callable[[], None] = torch.cuda.synchronize if torch.cuda.is_initialized() else _met
        settle()
        self.barrier()
        begin = next(getattr(dist, name) for name in names if hasattr(dist, name))
        flying: deque[tuple[Any, Tensor]] = deque()
        for tensor in chain(tensors, repeat(None)):
            if tensor is not None:
                out = () if rows is None else (tensor.new_empty(rows, tensor.shape[1]),)
                with self._exchange(_met):
                    flying.append((begin(*out, tensor, async_op=True), (*out, tensor)[0]))
            if not flying:
                break
            if tensor is None or len(flying) == IN_FLIGHT:
                work, landed = flying.popleft()
                with self._exchange(_met):
                    work.wait()  # on a GPU its stream waits, and not this thread
                yield landed
        with self._exchange(_met):
            settle()

    def tell(self, name: str, text: str) -> None:
        """Tell a text to all ranks at once, without an exchange: ``told`` gives it, on any rank that asks."""
        if self.size > 1:
            _store().set(name, text)

    def told(self, name: str) -> str | None:
        """What a rank has told; None: nothing."""
        if self.size == 1 or not _store().check([name]):
            return None
        return str(_store().get(name), "utf-8")

    def beside(self) -> World:
        """The same ranks with a control group of their own, for exchanges of Python values in another thread."""
        if self.size == 1:
            return self
        import torch.distributed as dist

        control = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout))
        return replace(self, control=control, exchanged=Exchanged())

    def costs(self) -> Exchanged:
        """What the exchanges since the last call have cost this rank."""
        found = Exchanged(self.exchanged.waiting, self.exchanged.seconds)
        self.exchanged.waiting = self.exchanged.seconds = 0.0
        return found

    def close(self) -> None:
        """Leave the process groups. Idempotent."""
        if self.size > 1:
            import torch.distributed as dist

            if dist.is_initialized():
                dist.destroy_process_group()

    @contextmanager
    def _exchange(self, meet: Callable[[], None] | None = None) -> Iterator[None]:
        """Wait for the other ranks, by ``meet`` or a barrier, then run the block, which exchanges something; count the
        seconds of both."""
        import torch.distributed as dist

        start = time.perf_counter()
        try:
            with waiting(RANKS, other_ranks):
                meet() if meet else dist.barrier(group=self.control)
            met = time.perf_counter()
            yield
        except RuntimeError as error:  # of gloo or NCCL
            if out_of_memory(error):
                raise
            if not self.is_main:  # the console is rank 0's
                log.error("an exchange between ranks has failed", exc_info=error)
            raise RankError(
                f"rank {self.rank} of {self.size} lost the others: another rank has ended, or has not answered for "
                f"{self.timeout:g} s (parallel.rank_timeout). Its log says why (logs/ in the run folder). Continue "
                "from the last checkpoint with 'resume RUN'"
            ) from error
        self.exchanged.waiting += met - start
        self.exchanged.seconds += time.perf_counter() - met


def _met() -> None:
    """The meeting of an exchange whose ranks have met before."""


def pickled(value: Any) -> bytes:
    """A value as ``World.gather`` sends it: a tensor becomes an array, without the unused part of its storage and
    without its device."""
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if (type(value).__module__, type(value).__name__) != ("torch", "Tensor"):
            return NotImplemented
        import torch

        flat = torch.empty(value.numel(), dtype=value.dtype).copy_(value.detach().flatten())
        return _tensor, (flat.view(torch.uint8).numpy(), value.dtype, tuple(value.shape))


def _tensor(data: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    import torch

    return torch.from_numpy(data).view(dtype).view(shape)


def local_ranks() -> int:
    """Ranks on this machine, which share its memory."""
    return max(1, _number(os.environ, "LOCAL_WORLD_SIZE", _number(os.environ, "WORLD_SIZE", 1)))


def _number(variables: Mapping[str, str], name: str, default: int) -> int:
    text = variables.get(name, "")
    if text and not text.isdecimal():
        raise ConfigError(f"the environment variable {name} must be a number, got {text!r}")
    return int(text) if text else default


def _store() -> Any:
    """The store of the default group, in rank 0's process or torchrun's."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def _control_group(timeout: float) -> Any:
    """Join the default group, unless the process has, and make one on gloo for Python values."""
    import torch
    import torch.distributed as dist

    limit = timedelta(seconds=timeout)
    try:
        if not dist.is_initialized():
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=limit)
        store = dist.PrefixStore("cohort", dist.distributed_c10d._get_default_store())
        share(store, dist.get_rank(), dist.get_world_size())
        return dist.new_group(backend="gloo", timeout=limit)
    except (RuntimeError, ValueError) as error:
        raise RankError(
            f"cannot reach the other ranks at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}: "
            f"{str(error).splitlines()[0]}"
        ) from error


# ----------------------------------------
# Which rank does which part of the work.


def shares(costs: Sequence[float], size: int) -> list[list[int]]:
    """Divide items over ranks, the dearest first to the rank with the least work: at most 4/3 of the best maximum
    (Graham 1969). Every rank computes the same shares. With fewer items than ranks, some are empty.

    Args:
        costs: of each item.
        size: number of ranks.

    Returns:
        For each rank, the indices of its items in order.

    >>> shares([5, 3, 3, 2, 2], 2)
    [[0, 3], [1, 2, 4]]
    """
    least = [(0.0, rank) for rank in range(size)]
    found: list[list[int]] = [[] for _ in range(size)]
    for item in sorted(range(len(costs)), key=lambda item: (-costs[item], item)):
        load, rank = heapq.heappop(least)
        found[rank].append(item)
        heapq.heappush(least, (load + costs[item], rank))
    return [sorted(items) for items in found]


def prompt_shares(prompts: Sequence[Prompt], size: int) -> list[list[int]]:
    """Which rank samples and scores which prompts, by their indices: as many prompts each as possible, since the length
    of their completions is not known, then as many tokens."""
    lengths = [len(prompt.token_ids) for prompt in prompts]
    return shares([sum(lengths) + length for length in lengths], size)


def imbalance(costs: Sequence[float], divided: Sequence[Sequence[int]]) -> float:
    """The largest share's cost over the mean; 1 when all are equal, or nothing costs anything."""
    loads = [sum(costs[item] for item in items) for items in divided]
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0
