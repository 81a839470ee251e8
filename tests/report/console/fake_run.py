"""A process that shows a run with ``Display`` as a training does, and trains nothing.

python -m tests.report.console.fake_run FOLDER STEPS SECONDS
"""

import logging
import os
import sys
import time
from pathlib import Path

from cohort.report.console import Display
from cohort.watchdog import waiting
from tests.report.console.made import line, make_run, write_step


def main(folder, steps, seconds):
    run = make_run(Path(folder), steps=steps)
    write_step(run, 1)
    print("described", flush=True)
    with Display.of_training(steps, run) as display:
        for step in range(1, steps + 1):
            with waiting("sampling", lambda: "3 of 8 completions have ended"):
                time.sleep(seconds)
            if step == 2:
                print("printed by a reward function")
                logging.getLogger("my").warning("a warning")
                os.write(2, b"written by a worker\n")
            display.show(line(step, time=time.time(), rewards__right=0.5))
    print("after the run")


if __name__ == "__main__":
    try:
        main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
    except KeyboardInterrupt:
        print("interrupted")
