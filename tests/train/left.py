"""A process whose script leaves the steps of a run: the module's arguments are the run's folder, how, and the lag."""

import sys
import time

from cohort.policy import load_tokenizer
from tests.conftest import DEMO_MODEL
from tests.train.harness import make_trainer

KEPT = []
"""What the interpreter's exit finds."""


def make(folder, lag):
    def slow_digits(completion, **_):  # sent by value: workers import neither this module nor torch
        time.sleep(0.02)  # at exit, rewards of the next rollout are awaited
        return sum(letter.isdigit() for letter in completion) / (len(completion) + 1)

    tokenizer = load_tokenizer(str(DEMO_MODEL))
    return make_trainer(tokenizer, folder, rewards=slow_digits, lag=lag, max_steps=3, save_steps=0, workers=2)


def main():
    folder, how, lag = sys.argv[1:]
    trainer = make(folder, int(lag))
    if how == "break":
        for _ in trainer.steps():
            break
        return 0
    steps = trainer.steps()
    next(steps)
    if how == "deleted":
        del steps
    elif how == "alive":
        KEPT.append(steps)
    elif how == "raised":
        KEPT.append(steps)
        raise ValueError("of the script")
    return 0
