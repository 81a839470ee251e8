"""The application that the commands belong to, and the time at which it started."""

from __future__ import annotations

import time

STARTED = time.perf_counter()  # before the heavy imports, so that reported times include them

from cyclopts import App, Group, Parameter  # noqa: E402

from cohort import __version__  # noqa: E402

ANY_TEXT = Parameter(allow_leading_hyphen=True)
FIRST_HOUR = Group("Commands", sort_key=0)
"""What a newcomer needs; ``cohort --help`` shows these commands first."""

app = App(
    name="cohort",
    help="GRPO for causal language models.",
    version=f"cohort {__version__}",
    help_format="plaintext",
    group_commands=Group("More commands", sort_key=1),
    default_parameter=Parameter(negative=(), show_default=False, allow_repeating=True),
    suppress_keyboard_interrupt=False,
)
