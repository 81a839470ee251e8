"""What turns tokens into logits for the sampler, and how many trajectories it can have at a time."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from cohort.errors import ConfigError
from cohort.parallel.world import local_ranks
from cohort.rollout.local.capacity import Capacity, least_tokens, round_up

PREFILL_TOKENS = 4096
"""Tokens that go through the model at a time outside decoding (a longer text goes alone). Affects memory only."""


class Backend:
    """Turns tokens into logits, and keeps what it computes of prompts and of rows in slots, which the caller numbers. A
    row is a trajectory that is decoded or parked; it has its slot until its end.
    """

    refills: bool
    """Whether rows may be added while others are being decoded."""
    mixed_lengths: bool
    """Whether prompts of different length may be prefilled together."""
    keeps_rows: bool = False
    """Whether rows can wait while others are decoded, and be given tokens: ``extend`` works."""
    grows: bool = False
    """Whether the rooms of rows grow with their lengths; see ``Capacity.row_tokens``."""
    token_multiple: int = 1
    """Lengths are rounded up to a multiple of this in memory."""
    description: str
    """Shown at the start of a run."""

    @property
    def token_bytes(self) -> int:
        """Memory of the keys and values of one token; 0 if none are kept."""
        return 0

    @property
    def row_bytes(self) -> int:
        """Memory of a row or prompt that does not grow with its tokens."""
        return 0

    def begin(self, capacity: Capacity) -> None:
        """Allocate memory."""

    def end(self) -> None:
        """Free it."""

    def sleep(self) -> None:
        """Free what is kept between calls and can be made again."""

    def prefill(self, slots: Sequence[int], prompts: Sequence[Sequence[int]]) -> Tensor:
        """Read prompts into slots; the logits of their next tokens, ``[len(prompts), V]``."""
        raise NotImplementedError

    def add_rows(self, slots: Sequence[int], prompts: Sequence[int]) -> None:
        """Begin rows, each after the prompt in the given slot."""
        raise NotImplementedError

    def step(self, slots: Sequence[int], tokens_S: Tensor) -> Tensor:
        """Read one token for each of these rows; the logits of the next ones, ``[S, V]``."""
        raise NotImplementedError

    def extend(self, slots: Sequence[int], texts: Sequence[Sequence[int]]) -> Tensor:
        """Read tokens for some rows; the logits of their next tokens, ``[len(slots), V]``."""
        raise NotImplementedError

    def release(self, slots: Sequence[int]) -> None:
        """Forget rows."""

    def remove_prompts(self, slots: Sequence[int]) -> None:
        """Forget prompts that no row needs."""


def texts_together(texts: Sequence[Sequence[int]]) -> list[slice]:
    """Texts that go through the model together."""
    parts, start = list[slice](), 0
    while start < len(texts):
        stop, tokens = start + 1, len(texts[start])
        while stop < len(texts) and tokens + len(texts[stop]) <= PREFILL_TOKENS:
            tokens += len(texts[stop])
            stop += 1
        parts.append(slice(start, stop))
        start = stop
    return parts


# ----------------------------------------
# How many trajectories are decoded at a time: as many as fit into the memory for keys and values.


FREE_SHARE = 0.5
"""Share of the free memory for keys and values when no budget is set; activations need the rest."""
CGROUP = Path("/sys/fs/cgroup")
"""Where Linux reports the memory limits of a container."""


def free_bytes(device: torch.device) -> int | None:
    """Memory that is free now on a device; of a machine's main memory, a rank's share. None: unknown."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + unused)
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        available = [line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable")]
        free = int(available[0].split()[1]) * 1024 if available else free
    except (OSError, ValueError, AttributeError):
        return None
    return int(min(free, _left_in_container())) // local_ranks()


def _left_in_container() -> float:
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        used = int((CGROUP / "memory.current").read_text())
        statistics = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        return math.inf if limit == "max" else int(limit) - used + int(statistics["inactive_file"])
    except (OSError, ValueError, KeyError):
        return math.inf


def plan(
    prompt_lengths: Sequence[int],
    trajectories: int,
    prefix_length: int,
    completion_length: int,
    *,
    max_rows: int,
    max_tokens: int | None,
    token_bytes: int,
    token_multiple: int,
    device: torch.device,
    row_bytes: int = 0,
    grows: bool = False,
) -> Capacity:
    """The most rows that fit, with room for the prompts that they follow.

    Args:
        prompt_lengths: tokens of each prompt.
        trajectories: how many there are, of all prompts.
        prefix_length: tokens of the longest text that is prefilled: a prompt, or a history.
        completion_length: tokens of the longest completion.
        max_rows: most rows.
        max_tokens: tokens whose keys and values may be kept. None: from the memory that is free now on ``device``.
        token_bytes: memory of the keys and values of one token; 0 if none are kept.
        token_multiple: lengths are rounded up to a multiple of this in memory.
        row_bytes: memory of a row or prompt that does not grow. Counts against ``max_tokens`` as the keys and values
            that fit into it; if none are kept, against the memory that is free now.
        grows: rows begin with room for a few tokens, and get what is left together (``row_tokens``).

    Raises:
        ConfigError: not even one completion fits.
    """
    longest, length = (round_up(tokens, token_multiple) for tokens in (prefix_length, completion_length))
    per_prompt = max(1, trajectories // len(prompt_lengths))
    limits = _limits(max_tokens, token_bytes, row_bytes, device)

    def capacity(rows: int) -> Capacity:
        # Twice the groups that fit the rows: some completions of a group outlast the rest of it.
        prompts = min(len(prompt_lengths), 2 * math.ceil(rows / per_prompt))
        whole = Capacity(rows, prompts, longest, length)
        return _with_few_tokens(whole) if grows else whole

    def fits(rows: int) -> bool:
        return all(needed(capacity(rows)) <= limit for needed, limit, *_ in limits)

    low, high = 1, min(max_rows, trajectories)  # what is needed grows with rows
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    if fits(low):
        return _with_the_rest(capacity(low), limits)
    tight = Capacity(1, 1, longest, length)
    for needed, limit, what, _ in limits:
        if needed(tight) > limit:
            raise ConfigError(
                f"one completion of {completion_length} tokens after a prompt of {max(prompt_lengths)} needs "
                f"{what.format(needed(tight), limit)}: raise rollout.cache_tokens, or lower "
                "rollout.max_completion_length"
            )
    return tight


def _with_few_tokens(whole: Capacity) -> Capacity:
    """The capacity with tokens for what rows begin with, or for one at full length, and no fewer than the prompts have
    that they follow: more rows bring more prompts."""
    length, of_prompts = whole.completion_length, whole.prompts * whole.prompt_length
    return replace(whole, row_tokens=max(whole.rows * least_tokens(whole), length, of_prompts))


def _with_the_rest(found: Capacity, limits: Sequence[tuple[Callable[[Capacity], int], int, str, int]]) -> Capacity:
    """The capacity with all that is left of the limits for its rows, but no more than they can have."""
    if found.row_tokens is None:
        return found
    left = min([(limit - needed(found)) // unit for needed, limit, _, unit in limits], default=math.inf)
    return replace(found, row_tokens=int(min(found.rows * found.completion_length, found.row_tokens + left)))


def _limits(
    max_tokens: int | None, token_bytes: int, row_bytes: int, device: torch.device
) -> list[tuple[Callable[[Capacity], int], int, str, int]]:
    """What a capacity needs, how much of it there may be, words for both, and what a token needs."""

    def tokens(capacity: Capacity) -> int:
        row_tokens = math.ceil(row_bytes / token_bytes) if token_bytes else 0
        return capacity.cells + (capacity.rows + capacity.prompts) * row_tokens

    def size(capacity: Capacity) -> int:
        return capacity.cells * token_bytes + (capacity.rows + capacity.prompts) * row_bytes

    limits: list[tuple[Callable[[Capacity], int], int, str, int]] = []
    if max_tokens is not None:
        limits.append((tokens, max_tokens, "keys and values of {} tokens, and rollout.cache_tokens is {}", 1))
    free = free_bytes(device) if size(Capacity(1, 1, 1, 1)) and not (max_tokens and token_bytes) else None
    if free is not None:
        what = f"keys, values and states of {{}} bytes, and {FREE_SHARE:.0%} of the free memory holds {{}}"
        limits.append((size, int(free * FREE_SHARE), what, max(1, token_bytes)))
    return limits
