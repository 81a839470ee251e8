"""Runs that are killed at any instant and continued end as if nothing had happened (``tests/faults/kills``)."""

import re

import pytest

from tests import warm
from tests.conftest import telling


def kills(tmp_path, *arguments):
    """Run the harness in a process without threads; returns what it prints."""
    process = warm.begin(*arguments, module="tests.faults.kills", TMPDIR=str(tmp_path))
    shown, errors = process.communicate()
    assert process.returncode == 0, shown + errors[-3000:]
    return shown


@pytest.mark.parametrize("number", telling([4, 10], 4))
def test_a_few_kills(tmp_path, number):
    shown = kills(tmp_path, "--kills", str(number), "--again", "0.7", "--only", "updates,lag")
    met, runs, equal = map(int, re.search(r"(\d+) kills of (\d+) runs; (\d+) runs bit-equal, 0 not", shown).groups())
    assert runs == equal
    assert met >= 0.6 * number, "runs end before the instants at which they were to be killed again"


@pytest.mark.slow
def test_kills_of_every_variant(tmp_path):
    assert "runs bit-equal, 0 not" in kills(tmp_path, "--kills", "60", "--seed", "1", "--timed", "0.5")
