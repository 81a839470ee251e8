"""``cohort.trl.GRPOConfig`` has every field of the installed TRL's, with its default."""

from __future__ import annotations

from cohort.trl import GRPOConfig
from cohort.trl.config import FIELDS, defaults

from .oracle import trl


def test_every_field_has_a_verdict_and_the_default_of_trl():
    theirs, ours = dict(defaults(trl.GRPOConfig)), dict(defaults(GRPOConfig))
    assert len(theirs) == 191
    assert theirs.keys() <= ours.keys() == FIELDS.keys()
    assert {name: ours[name] for name in theirs} == theirs


def test_further_fields_are_old_names():
    theirs = dict(defaults(trl.GRPOConfig))
    assert all(FIELDS[name].old for name, _ in defaults(GRPOConfig) if name not in theirs)
