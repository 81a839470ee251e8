"""Runs that are killed at any instant and continued end as if nothing had happened (``tests/faults/kills``)."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def kills(tmp_path, *arguments):
    """Run the harness; returns what it prints."""
    command = [sys.executable, "-m", "tests.faults.kills", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"TMPDIR": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


def test_twenty_kills(tmp_path):
    shown = kills(tmp_path, "--kills", "24", "--only", "updates,reference,lag")
    met, runs, equal = map(int, re.search(r"(\d+) kills of (\d+) runs; (\d+) runs bit-equal, 0 not", shown).groups())
    assert runs == equal
    assert met >= 12, "runs end before the instants at which they were to be killed again"


@pytest.mark.slow
def test_kills_of_every_variant(tmp_path):
    assert "runs bit-equal, 0 not" in kills(tmp_path, "--kills", "60", "--seed", "1", "--timed", "0.5")
