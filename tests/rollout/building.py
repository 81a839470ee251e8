"""A process that builds the kernels, and says how many OpenMP runtimes that adds to those it has."""

from pathlib import Path

from cohort.native import build
from cohort.rollout.native import Kernels


def runtimes():
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
    return {path for path in mapped if "omp" in path.rsplit("/")[-1]}


def main():
    before = runtimes()
    assert before
    build.FLAGS += ("-O0",)
    Kernels()
    print(len(runtimes() - before))
    return 0
