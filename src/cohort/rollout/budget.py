"""How many completions are decoded at a time: what fits into the memory that keys and values may take."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from cohort.errors import ConfigError
from cohort.rollout.backend import Capacity
from cohort.rollout.cache import round_up

FREE_SHARE = 0.5
"""Share of the free memory that keys and values may take where no budget is set: activations need room too."""
CGROUP = Path("/sys/fs/cgroup")
"""Where Linux says what a container may use."""


def free_bytes(device: torch.device) -> int | None:
    """Memory that is free now on a device; None where the system does not say."""
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
    return int(min(free, _left_in_container()))


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
    num_generations: int,
    completion_length: int,
    *,
    max_rows: int,
    max_tokens: int | None,
    token_bytes: int,
    token_multiple: int,
    device: torch.device,
) -> Capacity:
    """The most rows that fit, with room for the prompts they come after.

    Args:
        prompt_lengths: of all prompts of the call.
        num_generations: completions of each.
        completion_length: tokens of the longest completion.
        max_rows: rows at a time, at most.
        max_tokens: tokens whose keys and values may be held; None: from the memory that is free now.
        token_bytes: memory of one token's keys and values; 0 where nothing is held.
        token_multiple: what lengths are rounded up to in memory.
        device: where they are held.

    Raises:
        ConfigError: not even one completion fits.
    """
    free = free_bytes(device) if max_tokens is None and token_bytes else None
    limit = max_tokens if free is None else int(free * FREE_SHARE) // token_bytes
    longest, length = (round_up(tokens, token_multiple) for tokens in (max(prompt_lengths), completion_length))

    def capacity(rows: int) -> Capacity:
        # Twice the groups that fit the rows: some completions of a group outlast the rest of it.
        prompts = min(len(prompt_lengths), 2 * math.ceil(rows / num_generations))
        return Capacity(rows, prompts, longest, length)

    fitting = min(max_rows, len(prompt_lengths) * num_generations)
    if limit is None or capacity(fitting).cells <= limit:
        return capacity(fitting)
    low, high = 1, fitting  # cells grow with rows
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if capacity(middle).cells <= limit else (low, middle - 1)
    if capacity(low).cells <= limit:
        return capacity(low)
    tight = Capacity(1, 1, longest, length)
    if tight.cells > limit:
        source = "rollout.cache_tokens is" if max_tokens is not None else f"{FREE_SHARE:.0%} of the free memory holds"
        raise ConfigError(
            f"one completion of {completion_length} tokens after a prompt of {max(prompt_lengths)} needs keys and "
            f"values of {tight.cells} tokens, and {source} {limit}: raise rollout.cache_tokens, or lower "
            "rollout.max_completion_length"
        )
    return tight
