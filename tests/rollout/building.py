"""A process that builds a library from another source, and says how many OpenMP runtimes that adds to those it has."""

import os
from pathlib import Path

import torch  # noqa: F401  # its OpenMP runtime is the one

from cohort.native import build


def runtimes():
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
    return {path for path in mapped if "omp" in path.rsplit("/")[-1]}


def main():
    before = runtimes()
    assert before
    build.SOURCE = Path(os.environ["SOURCE"])
    build.load()
    print(len(runtimes() - before))
    return 0
