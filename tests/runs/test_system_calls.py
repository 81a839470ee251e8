"""A crash before any system call of a save leaves a whole checkpoint: every call of Python, Rust and C is a point."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or shutil.which("cc") is None, reason="needs Linux and a C compiler")
def test_a_crash_before_each_system_call_of_a_save(tmp_path):
    library, source = tmp_path / "crash.so", Path(__file__).with_name("crash.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    command = [sys.executable, "-m", "tests.runs.crash_points", tmp_path, library]
    variables = {**os.environ, "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[2]
    result = subprocess.run(command, env=variables, cwd=root, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 100
