"""Every causal architecture of the installed transformers; ``python -m tests.families`` writes docs/models.md."""

import datetime
import os

import pytest

from tests.families.configs import MODEL_TYPES
from tests.families.measure import measure

PARTS = 20
TODAY = int(os.environ.get("COHORT_FAMILIES", datetime.datetime.now(datetime.UTC).date().toordinal())) % PARTS
"""The part that is measured today; set COHORT_FAMILIES to repeat another day's."""


@pytest.mark.parametrize("model_type", MODEL_TYPES[TODAY::PARTS])
def test_a_twentieth_of_the_architectures(model_type):
    found = measure(model_type, whole=False)
    assert not found.failures, f"COHORT_FAMILIES={TODAY}: {found}"


@pytest.mark.slow
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_architecture(model_type):
    found = measure(model_type)
    assert not found.failures, found
