"""Memory that runs out in sampling: the rest is drawn with fewer rows at a time, and nothing is drawn twice or lost."""

import pytest
import torch

from cohort.errors import ModelError
from cohort.rollout import RNGKey, Sampling, Watch
from cohort.rollout.local import engine as local
from tests.rollout.conftest import drawn_ids
from tests.rollout.test_continuation import GIVEN, PROMPTS, engine_of, play

WORK = ("begin", "prefill", "add_rows", "step", "extend")
"""The methods of a backend that may allocate."""


OUT = torch.OutOfMemoryError("CUDA out of memory")


def run_out(monkeypatch, engine, *at, error=OUT):
    """Memory runs out in some of the backend's calls, counted over all methods."""
    calls = []
    monkeypatch.setattr(local, "release_memory", lambda: None)  # the garbage collector takes longer than the test

    def failing(method):
        real = getattr(engine.backend, method)

        def call(*arguments):
            calls.append(method)
            if len(calls) in at:
                raise error
            return real(*arguments)

        return call

    for method in WORK:
        monkeypatch.setattr(engine.backend, method, failing(method), raising=False)
    return calls


def turns_of(played):
    return [
        [(drawn_ids(turn.completion), turn.completion.finish_reason, turn.num_drawn) for turn in mine]
        for mine in played
    ]


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("native", "modules", "recompute")]


@pytest.mark.parametrize("backend", ["lean", "static", *SLOW])
@pytest.mark.filterwarnings("ignore:out of memory in sampling")
def test_trajectories_of_several_turns_are_the_same_wherever_memory_runs_out(backend, monkeypatch):
    """In the first call of each method, and again soon after."""
    sampling, replies = Sampling(12, temperature=0.9, max_turn_length=4), [GIVEN[:2]]
    engine = engine_of(backend, max_batch_size=8)
    with monkeypatch.context() as patch:
        calls = run_out(patch, engine)
        expected = turns_of(play(engine, sampling, replies))
    for at in [calls.index(method) + 1 for method in WORK if method in calls]:
        engine.max_batch_size = 8
        with monkeypatch.context() as patch:
            run_out(patch, engine, at, at + 3)
            assert turns_of(play(engine, sampling, replies)) == expected
        assert engine.max_batch_size < 8


@pytest.mark.parametrize("error", [OUT, torch.AcceleratorError("CUDA error: out of memory")])
def test_nothing_is_drawn_or_reported_twice(error, monkeypatch):
    """Log-probs, supports and what is watched are those of an undisturbed run; the run says what it changed."""
    engine, seen = engine_of("lean", max_batch_size=12), []
    watch = Watch(
        on_token=lambda event: seen.append((event.prompt_index, event.sample, event.position, event.token_id)),
        on_completion=lambda prompt, sample, _: seen.append((prompt, sample, "ended")),
    )
    sampling = Sampling(16, top_k=5, record_support=True)
    expected = engine.generate(PROMPTS, 4, sampling, RNGKey(0, 0), watch)
    undisturbed, engine = sorted(seen, key=str), engine_of("lean", max_batch_size=12)
    seen.clear()
    run_out(monkeypatch, engine, 9, error=error)
    with pytest.warns(UserWarning, match="going on with 6 completions at a time.*rollout.max_batch_size"):
        groups = engine.generate(PROMPTS, 4, sampling, RNGKey(0, 0), watch)
    assert sorted(seen, key=str) == undisturbed
    for group, other in zip(groups, expected, strict=True):
        for mine, theirs in zip(group.completions, other.completions, strict=True):
            assert drawn_ids(mine) == drawn_ids(theirs)
            assert mine.sampler_logps == pytest.approx(theirs.sampler_logps, abs=1e-9)  # float64, other shapes
            assert mine.support == theirs.support


def test_without_memory_for_one_completion_the_error_says_what_to_set(monkeypatch):
    engine = engine_of("lean", max_batch_size=4)
    run_out(monkeypatch, engine, *range(3, 99))
    with pytest.warns(UserWarning, match="out of memory"), pytest.raises(ModelError, match="max_completion_length"):
        engine.generate(PROMPTS, 4, Sampling(16), RNGKey(0, 0))
    assert engine.unfinished == 0
