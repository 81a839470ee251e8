"""Run programs that nobody has reviewed, within limits, and report how they ended.

``Executor`` is the interface that the rest of Cohort uses. ``Sandbox`` implements it with bubblewrap and seccomp.
``docs/sandbox.md`` lists what the sandbox stops and what it does not.
"""

from cohort.sandbox.executor import Executor, Limits, Outcome, Program, Result
from cohort.sandbox.sandbox import Sandbox
