"""What the enumeration tests share."""

import pytest


@pytest.fixture
def seed():
    """Of the random policies and rewards."""
    return 0
