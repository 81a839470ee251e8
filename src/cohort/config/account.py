"""Records of what this account has run. They lie outside of run folders, which may come from strangers."""

from __future__ import annotations

import os
from pathlib import Path


def account_records(of: str) -> Path:
    """A folder in ``$COHORT_STATE``, else in ``$XDG_STATE_HOME/cohort``, else in ``~/.local/state/cohort``. In it, a
    file for each record."""
    state = os.environ.get("COHORT_STATE") or Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state") / "cohort"
    return Path(state).expanduser() / of
