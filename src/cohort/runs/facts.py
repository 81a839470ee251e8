"""Facts about a run that are not settings and on which its results depend: versions, threads, the machine."""

from __future__ import annotations

import functools
import platform
import re
from collections.abc import Iterable, Mapping
from importlib import metadata
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import torch

PACKAGES = ("torch", "transformers", "tokenizers", "numpy")
"""Packages that every run computes with."""
version = functools.cache(metadata.version)
"""The version of an installed package, which a process reads once."""


def entries(values: Mapping[str, str]) -> str:
    """Several values as one fact: "a=1, b=2". Commas and equals signs within are replaced."""
    plain = {name.translate(_SEPARATORS): value.translate(_SEPARATORS) for name, value in values.items()}
    return ", ".join(f"{name}={value}" for name, value in sorted(plain.items()))


_SEPARATORS = str.maketrans({",": ";", "=": ":"})


def versions(more: Iterable[str] = ()) -> str:
    """The versions of Cohort, Python and the packages that a run computes with."""
    found = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in ("cohort-rl", *PACKAGES, *more):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return entries(found)


def machine(device: torch.device) -> str:
    """The processor that computes, and the instructions that torch uses on a CPU."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    return f"{_processor()}, {torch.backends.cpu.get_cpu_capability()}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def take_threads(saved: Mapping[str, str], ranks: int) -> str:
    """Take as many threads as the run had, since rounding depends on them; returns a note if that is a change.

    With another number of ranks, the threads of this process remain: its share of the work is another.
    """
    threads, before = saved.get("threads", ""), torch.get_num_threads()
    if not re.fullmatch("[1-9][0-9]{0,2}", threads) or saved.get("ranks") != str(ranks) or int(threads) == before:
        return ""
    torch.set_num_threads(int(threads))
    return f"threads: {threads}, as the run had, not {before}; --allow-changed threads computes with {before}"
