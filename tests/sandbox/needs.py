"""The skip mark for tests that run programs."""

import pytest

from cohort.errors import SandboxError
from cohort.sandbox import Sandbox

try:
    Sandbox().check()
    PROBLEM = ""
except SandboxError as error:
    PROBLEM = str(error)[:200]
needs_bwrap = pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM)
