"""Calls of user functions: here, on the event loop, and in worker processes."""

import threading
from concurrent.futures import CancelledError, Future, wait

import pytest

from cohort.calls import Call, Calls, Interrupted, Settled, as_failure, interrupt, interruptible, is_async, recorded


def double(x, log_metric=None):
    if log_metric:
        log_metric("x", x)
    return {}["gold"] if x == 0 else 2 * x


async def double_async(x, log_metric=None):
    return double(x, log_metric)


def test_only_what_the_main_thread_runs_is_interrupted():
    inside, end = threading.Event(), threading.Event()

    def other():
        with interruptible():
            inside.set()
            end.wait()

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait()
    try:
        interrupt()  # a signal that comes while a thread scores beside the training
        with pytest.raises(CancelledError), interruptible():
            interrupt()
    except Interrupted:
        pytest.fail("the main thread is interrupted")
    finally:
        end.set()
        thread.join()


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


def test_a_settled_future_is_like_one_that_was_set():
    pending, failed = Future(), Settled(error=ValueError("no"))
    settled = [Settled.of(pow, 2, 5), Settled.of(int, "x")]
    for future, like in ((settled[0], _set(Future(), 32)), (failed, _set(Future(), error=ValueError("no")))):
        called = []
        future.add_done_callback(called.append)
        assert called == [future]
        for method in ("done", "cancelled", "running", "cancel"):
            assert getattr(future, method)() == getattr(like, method)()
        assert repr(future.exception()) == repr(like.exception())
    assert settled[0].result() == 32
    with pytest.raises(ValueError, match="invalid literal"):
        settled[1].result()
    done, left = wait([*settled, pending], timeout=0.01)
    assert (done, left) == (set(settled), {pending})
    threading.Timer(0.01, pending.set_result, [1]).start()
    assert wait([*settled, pending], timeout=60).not_done == set()


def _set(future, value=None, error=None):
    if error:
        future.set_exception(error)
    else:
        future.set_result(value)
    return future
