"""``each``: tables whose cases run in one test."""

import inspect

import pytest

from tests.conftest import each


def test_all_cases_run_and_those_that_fail_are_told():
    seen = []

    @each("left", [1, 2])
    @each(("right", "equal"), [(1, True), (2, False)], ids=str)
    def compare(left, right, equal, fixture):
        seen.append((left, right, fixture))
        if left == 2 and equal:
            pytest.fail("not equal")
        assert (left == right) is equal

    assert [*inspect.signature(compare).parameters] == ["fixture"]
    with pytest.raises(BaseExceptionGroup, match="2 cases fail") as raised:
        compare(fixture=0)
    assert seen == [(1, 1, 0), (1, 2, 0), (2, 1, 0), (2, 2, 0)]
    assert [note for error in raised.value.exceptions for note in error.__notes__] == [
        "case 0 of compare: {'right': 1, 'equal': True}",
        "case 1 of compare: {'right': 2, 'equal': False}",
    ]
    assert raised.value.__notes__ == ["case 1 of compare: {'left': 2}"]


def test_a_case_that_is_skipped_keeps_no_other_from_failing():
    @each("number", [0, 1])
    def positive(number):
        if number == 0:
            pytest.skip("none")
        assert number > 1

    with pytest.raises(AssertionError):
        positive()

    @each("number", [0, 1])
    def nowhere(number):
        pytest.skip("not here")

    with pytest.raises(pytest.skip.Exception, match="not here"):
        nowhere()
