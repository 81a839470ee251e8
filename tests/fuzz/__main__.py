"""Fuzz the readers of files: ``python -m tests.fuzz [CASES [READER ...]]``. Prints a row for each reader; an input that
raises anything but a clean error ends the command with the smallest such input."""

import logging
import sys
import tempfile
import time
import warnings
from pathlib import Path

from tests.fuzz.readers import READERS
from tests.fuzz.test_readers import fuzz


def main(cases: str = "100000", *names: str) -> None:
    warnings.simplefilter("error")
    logging.disable()
    print("| reader | inputs | read | refused | seconds |\n|---|---|---|---|---|")
    for name in names or READERS:
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            answers = fuzz(name, Path(folder), int(cases))
        total, whole = sum(answers.values()), answers.get("read", 0)
        seconds = time.perf_counter() - started
        print(f"| {name} | {total:,} | {whole:,} | {total - whole:,} | {seconds:.0f} |", flush=True)


main(*sys.argv[1:])
