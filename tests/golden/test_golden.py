"""Numbers that no refactoring may change, in float64, against those committed beside this file.

Regenerate them with ``tests/golden/regenerate.py``, and only in a commit that says why a number must change.

The sampled tokens are compared exactly. They are the same on every processor because weights come from numpy's uniform
numbers, random numbers are keyed by seed, prompt and position (Philox), and in float64 a token changes only where its
random number lies within about 1e-13 of a boundary between two tokens; ``regenerate`` checks that none does.
"""

import json
import math
from pathlib import Path

import pytest

from tests.golden.recorder import record_engine, record_presets, record_runs

FOLDER = Path(__file__).parent
TOLERANCES = {
    # Pure functions of some 30 tokens: sums in another order, and exp and log of another library.
    "presets": (1e-9, 1e-12),
    # Three optimizer steps. Quantiles are stored in float32 (6e-8); standard errors are square roots of rounding (1e-8).
    "runs": (1e-6, 1e-7),
    # Log-probs of one forward pass of two layers; transformers computes some norms and rotations in float32.
    "engine": (1e-5, 1e-6),
}
"""Relative and absolute."""


def differences(expected, got, rtol, atol, name=""):
    """Where two recordings differ. The present one may hold more names."""
    if isinstance(expected, dict) and isinstance(got, dict):
        missing = [f"{name}/{key}: missing" for key in expected if key not in got]
        pairs = [(f"{name}/{key}", value, got[key]) for key, value in expected.items() if key in got]
    elif isinstance(expected, list) and isinstance(got, list) and len(expected) == len(got):
        missing = []
        pairs = [(f"{name}[{i}]", value, other) for i, (value, other) in enumerate(zip(expected, got, strict=True))]
    else:
        numbers = all(isinstance(value, int | float) for value in (expected, got))
        whole = isinstance(expected, int) and isinstance(got, int)
        same = expected == got if whole or not numbers else close(expected, got, rtol, atol)
        return [] if same else [f"{name}: expected {expected!r}, got {got!r}"]
    return missing + [found for pair in pairs for found in differences(*pair[1:], rtol, atol, pair[0])]


def close(expected, got, rtol, atol):
    both_nan = math.isnan(expected) and math.isnan(got)
    return both_nan or expected == got or abs(expected - got) <= atol + rtol * abs(expected)


def check(name, record):
    expected = json.loads((FOLDER / f"{name}.json").read_text())
    found = differences(expected, json.loads(json.dumps(record)), *TOLERANCES[name])
    assert not found, f"{len(found)} numbers differ:\n" + "\n".join(found[:20])


def test_coefficients_statistics_and_advantages_of_every_preset():
    check("presets", record_presets("float64", seeds=(0,)))


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft
def test_two_whole_runs():
    check("runs", record_runs("float64", every_weight=False))


def test_samples_of_several_families():
    check("engine", record_engine("float64"))
