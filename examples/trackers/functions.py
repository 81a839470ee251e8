"""A reward that logs a metric, two callbacks, and a run with them:

python functions.py [--section.key value ...]
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cohort import GRPOTrainer
from cohort.config import load_config
from cohort.errors import Stopped


def right(completion: str, answer: str, log_metric: Callable[[str, float], None]) -> float:
    """1 if the last line is the row's answer. Logs the number of written carries as ``custom/carries``."""
    log_metric("carries", completion.count("carry"))
    return float(completion.splitlines()[-1:] == [answer])


class StopWhenSolved:
    """Ends the run, with a checkpoint, at the first evaluation whose mean reward is high enough."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold

    def on_evaluate(self, trainer: GRPOTrainer, evaluation: Any) -> None:
        reward = evaluation.metrics["eval/reward/mean"]  # None: no completion was scored
        if reward is not None and reward >= self.threshold:
            trainer.stop()


class Notify:
    """Posts warnings of the diagnosis and the end of the run to a webhook that takes ``{"text": ...}``, as those of
    Slack and Mattermost do."""

    def __init__(self, url: str) -> None:
        self.url = url

    def on_step(self, trainer: GRPOTrainer, step: Any) -> None:  # noqa: ARG002
        for finding in step.findings:
            if finding.stands and str(finding.level) != "note":
                self.post(f"step {step.step}: {finding.level} {finding.check}: {finding.found}. {finding.advice}")

    def on_end(self, trainer: GRPOTrainer, end: Any) -> None:  # noqa: ARG002
        self.post(f"{end.outcome} after step {end.summary['steps']}{f': {end.error}' * (end.outcome == 'error')}")

    def post(self, text: str) -> None:
        body, head = json.dumps({"text": text}).encode(), {"Content-Type": "application/json"}
        try:
            urllib.request.urlopen(urllib.request.Request(self.url, body, head), timeout=10).close()
        except OSError as error:  # an exception in a callback ends the run, and a lost message should not
            print(f"not posted to {self.url}: {error}", file=sys.stderr)


def main(overrides: Sequence[str]) -> None:
    callbacks: list[Any] = [StopWhenSolved(0.95)]
    if url := os.environ.get("NOTIFY_URL"):
        callbacks.append(Notify(url))
    trainer = GRPOTrainer(args=load_config(Path(__file__).with_name("config.toml"), overrides), callbacks=callbacks)
    with contextlib.suppress(Stopped):  # the run has said how it is resumed
        trainer.train()


if __name__ == "__main__":
    main(sys.argv[1:])
