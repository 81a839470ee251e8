"""Write the golden values anew: ``python -m tests.golden.regenerate``, with ``PYTHONPATH=src``.

Do this only in a commit that says why a number must change. Before anything is written, the runs and samples are
recorded again with weights disturbed by some thousand units in the last place: the sampled tokens must stay the same,
and every other number must stay within a tenth of the tests' tolerance. So another processor's order of summation
cannot fail the tests.
"""

from __future__ import annotations

import json

from tests.golden.recorder import Record, record_engine, record_presets, record_runs
from tests.golden.test_golden import FOLDER, TOLERANCES, differences

NOISE = 1e-12


def rounded(value: object) -> object:
    """Floats to 12 significant digits, far below every tolerance."""
    if isinstance(value, list):
        return [rounded(item) for item in value]
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return float(f"{value:.12g}") if isinstance(value, float) else value


def write(name: str, record: Record) -> None:
    lines = (f"{json.dumps(key)}: {json.dumps(rounded(value))}" for key, value in record.items())
    (FOLDER / f"{name}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


def check_margins(name: str, record: Record, disturbed: Record) -> None:
    """Numbers that rounding could change beyond the tolerance must not become golden."""
    rtol, atol = TOLERANCES[name]
    if found := differences(record, disturbed, rtol / 10, atol / 10):
        raise SystemExit(f"{name}: a disturbance of {NOISE:g} changes\n" + "\n".join(found[:20]))


if __name__ == "__main__":
    write("presets", record_presets("float64", seeds=(0,)))
    for name, disturbed, record in (
        ("runs", record_runs("float64", NOISE, every_weight=False), record_runs("float64", every_weight=False)),
        ("engine", record_engine("float64", NOISE), record_engine("float64")),
    ):
        check_margins(name, record, disturbed)
        write(name, record)
