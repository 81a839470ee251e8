"""How many trajectories are decoded at a time: as many as fit into the memory for keys and values."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from cohort.errors import ConfigError
from cohort.parallel.world import local_ranks
from cohort.rollout.cache import round_up
from cohort.rollout.capacity import Capacity

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
    row_tokens: int = 0,
) -> Capacity:
    """The most rows that fit, with room for the prompts that they follow.

    Args:
        prompt_lengths: tokens of each prompt.
        trajectories: how many there are, of all prompts.
        prefix_length: tokens of the longest text that is prefilled: a prompt, or a history.
        completion_length: tokens of the longest completion.
        max_rows: most rows.
        max_tokens: tokens whose keys and values may be kept. None: from the memory that is free now.
        token_bytes: memory of the keys and values of one token; 0 if none are kept.
        token_multiple: lengths are rounded up to a multiple of this in memory.
        device: where keys and values are kept.
        row_tokens: memory of a row or prompt that does not grow, in tokens.

    Raises:
        ConfigError: not even one completion fits.
    """
    free = free_bytes(device) if max_tokens is None and token_bytes else None
    limit = max_tokens if free is None else int(free * FREE_SHARE) // token_bytes
    longest, length = (round_up(tokens, token_multiple) for tokens in (prefix_length, completion_length))
    per_prompt = max(1, trajectories // len(prompt_lengths))

    def needed(capacity: Capacity) -> int:
        return capacity.cells + (capacity.rows + capacity.prompts) * row_tokens

    def capacity(rows: int) -> Capacity:
        # Twice the groups that fit the rows: some completions of a group outlast the rest of it.
        prompts = min(len(prompt_lengths), 2 * math.ceil(rows / per_prompt))
        return Capacity(rows, prompts, longest, length)

    fitting = min(max_rows, trajectories)
    if limit is None or needed(capacity(fitting)) <= limit:
        return capacity(fitting)
    low, high = 1, fitting  # what is needed grows with rows
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if needed(capacity(middle)) <= limit else (low, middle - 1)
    if needed(capacity(low)) <= limit:
        return capacity(low)
    if needed(tight := Capacity(1, 1, longest, length)) > limit:
        source = "rollout.cache_tokens is" if max_tokens is not None else f"{FREE_SHARE:.0%} of the free memory holds"
        raise ConfigError(
            f"one completion of {completion_length} tokens after a prompt of {max(prompt_lengths)} needs keys and "
            f"values of {needed(tight)} tokens, and {source} {limit}: raise rollout.cache_tokens, or lower "
            "rollout.max_completion_length"
        )
    return tight
