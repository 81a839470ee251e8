"""The kernels compile wherever there is a compiler. Tests of what they compute are skipped where they are not available."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from cohort.native import Unavailable, load
from cohort.native.build import FLAGS, SOURCE, compiler

try:
    COMMAND = compiler()
except Unavailable as reason:
    pytest.skip(str(reason), allow_module_level=True)


@pytest.mark.skipif(sys.platform != "linux", reason="torch's threads may not be shared")
def test_they_are_available_with_a_compiler():
    load()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="levels of x86-64")
@pytest.mark.parametrize("level", ["x86-64", "x86-64-v3", "x86-64-v4", "znver4"])
def test_they_are_valid_for_other_processors(level):
    """``znver4`` multiplies pairs of bfloat16 numbers."""
    flags = [flag for flag in FLAGS if flag != "-shared"]
    warnings = ["-Wall", "-Wextra", "-Wno-unused-parameter"]
    given = [*COMMAND, *flags, f"-march={level}", "-fsyntax-only", *warnings, str(SOURCE)]
    done = subprocess.run(given, capture_output=True, text=True, timeout=120, check=False)
    if "unrecognized" in done.stderr or "unknown target CPU" in done.stderr or "bad value" in done.stderr:
        pytest.skip(f"the compiler does not know {level}")
    assert (done.returncode, done.stderr[:2000]) == (0, "")
