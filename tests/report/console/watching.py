"""A process that watches a run in a terminal, whose path is its second argument, as the leader of a session."""

import os
import sys
from pathlib import Path

from cohort.report.watch import watch


def main():
    run, terminal = sys.argv[1:]
    os.setsid()
    descriptor = os.open(terminal, os.O_RDWR)  # which becomes the session's terminal
    for stream in range(3):
        os.dup2(descriptor, stream)
    watch(Path(run))
    return 0
