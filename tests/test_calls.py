"""Calls of user functions: here, on the event loop, and in worker processes."""

import contextlib
import threading
from concurrent.futures import CancelledError, Future, wait
from functools import partial

import pytest

from cohort.calls import (
    Call,
    Calls,
    Interrupted,
    Settled,
    as_failure,
    interrupt,
    interruptible,
    is_async,
    own_parameter,
    recorded,
)


def double(x, log_metric=None):
    if log_metric:
        log_metric("x", x)
    return {}["gold"] if x == 0 else 2 * x


async def double_async(x, log_metric=None):
    return double(x, log_metric)


class Method:
    def call(self, **columns):
        return columns

    async def later(self, **columns):
        return columns

    def by_position(self, /, **columns):
        return columns

    __call__ = call


def everything(**columns):
    return columns


async def everything_later(**columns):
    return columns


NAMES = (
    *("function", "cls", "call", "logs", "arguments", "named", "own", "timeout", "here", "args", "kwargs", "a-b", "1"),
    "self",
)


@pytest.mark.parametrize("here", [True, False])
def test_arguments_may_have_any_name(here):
    given = dict.fromkeys(NAMES, 1)
    with contextlib.closing(Calls(workers=1)) as calls:
        for function in (everything, Method().by_position):
            assert calls.submit(function, given, 60, here=here).result() == given
            assert calls.submit(recorded(function), given, 60, here=here).result().returned == given
        assert calls.submit(recorded(everything_later), given, 60).result().returned == given


def test_a_method_takes_its_object_by_a_name_that_no_other_argument_can_have():
    bound = Method()
    methods = (bound, bound.call, bound.later, partial(bound.call, x=1))
    assert [own_parameter(one) for one in methods] == ["self"] * 4
    assert [own_parameter(one) for one in (bound.by_position, everything, Method, pow, [].append)] == [None] * 5


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


def test_a_settled_future_is_done_from_the_start():
    pending, settled, called = Future(), [Settled.of(pow, 2, 5), Settled.of(int, "x"), Settled(error=ValueError())], []
    settled[0].add_done_callback(called.append)
    assert called == [settled[0]]
    assert [(one.done(), one.running(), one.cancel(), one.cancelled()) for one in settled] == [(True, *[False] * 3)] * 3
    assert settled[0].result() == 32
    assert type(settled[2].exception()) is ValueError
    with pytest.raises(ValueError, match="invalid literal"):
        settled[1].result()
    assert wait([*settled, pending], timeout=0.01) == (set(settled), {pending})
    threading.Timer(0.01, pending.set_result, [1]).start()
    assert wait([*settled, pending], timeout=60).not_done == set()
