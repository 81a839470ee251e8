"""Calls of user functions: here, on the event loop, and in worker processes."""

import pytest

from cohort.calls import Call, Calls, as_failure, is_async, recorded


def double(x, log_metric=None):
    if log_metric:
        log_metric("x", x)
    return {}["gold"] if x == 0 else 2 * x


async def double_async(x, log_metric=None):
    return double(x, log_metric)


@pytest.mark.parametrize("where", ["here", "worker", "async"])
def test_a_call_ends_in_a_future_wherever_it_runs(where):
    calls, function = Calls(workers=1), double_async if where == "async" else double
    assert is_async(recorded(function)) is (where == "async")
    for called, value in ((function, 4), (recorded(function, ["log_metric"]), Call(4, metrics=[("x", 2.0)]))):
        result = calls.submit(called, {"x": 2}, 60, here=where == "here").result()
        if called is not function:
            assert result.seconds > 0
            result.seconds = 0.0
        assert result == value
        failure = as_failure(calls.submit(called, {"x": 0}, 60, here=where == "here").exception())
        assert str(failure).startswith("raised KeyError: 'gold' (test_calls.py, line")
        assert 'return {}["gold"]' in failure.details
        assert not failure.timed_out
    calls.close()
