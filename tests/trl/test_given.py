"""What TRL's trainer is given, as Cohort's takes it."""

from __future__ import annotations

from typing import Any

import pytest

from cohort.trl import GRPOConfig
from cohort.trl.given import of_revision


@pytest.mark.parametrize(
    ("model", "loading", "expected"),
    [
        ("owner/name", {"revision": "v1"}, "owner/name@v1"),
        ("owner/name", {"revision": "main"}, "owner/name"),
        ("owner/name", None, "owner/name"),
        (3, {"revision": "v1"}, 3),
    ],
)
def test_a_revision_is_the_folder_of_its_snapshot(model: Any, loading: Any, expected: Any, monkeypatch):
    monkeypatch.setattr("cohort.trl.given.folder_of_revision", lambda name, revision: f"{name}@{revision}")
    assert of_revision(model, GRPOConfig("out", model_init_kwargs=loading)) == expected
