"""What this account has done, outside of any run folder: a run folder can come from anybody."""

from __future__ import annotations

import os
from pathlib import Path


def account_records(of: str) -> Path:
    """A folder in ``$COHORT_STATE``, else in ``$XDG_STATE_HOME/cohort``, else in ``~/.local/state/cohort``. In it, a
    file for each record."""
    state = os.environ.get("COHORT_STATE") or Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state") / "cohort"
    return Path(state).expanduser() / of
