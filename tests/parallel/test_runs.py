"""A run on several ranks is the run on one."""

import math

import numpy as np
import pytest

from cohort.report.rollouts import StoredStep
from tests.parallel.launching import on_ranks
from tests.parallel.runs import demo, precise, resumed, stopped, various
from tests.train.harness import ROWS, metrics_of, rows_of

EVAL = ROWS[:3]
TIMED = ("seconds", "time", "tokens_per_second", "memory/", "parallel/")


def same_metrics(one, other):
    assert len(one) == len(other)
    for ours, theirs in zip(one, other, strict=True):
        names = [name for name in ours if not name.startswith(TIMED)]
        assert names == [name for name in theirs if not name.startswith(TIMED)]
        for name in names:
            rounding = 1e-8 if name.endswith("_se") else 1e-12  # the root of a difference that is 0
            expected = theirs[name]
            if expected is not None:
                expected = pytest.approx(expected, rel=1e-9, abs=rounding, nan_ok=True)
            assert ours[name] == expected, name


def drawn(folder, step=1):
    keys = ("group", "row", "token_ids", "finish_reason")
    return [{key: row[key] for key in keys} for row in rows_of(folder, step)]


def test_a_run_on_two_ranks_is_the_run_on_one(tmp_path):
    """float64: gradients differ in the order of their sums only."""
    settings = {"max_steps": 2, "beta": 0.04, "eval_rows": EVAL, "eval_steps": 1, "num_iterations": 2}
    alone = precise(tmp_path / "one", **settings)
    ranks = on_ranks(2, run_two, tmp_path / "two", settings)
    for weights, steps, summary in ranks:
        same_metrics(steps, alone[1])
        for name, value in alone[0].items():
            np.testing.assert_allclose(weights[name], value, rtol=0, atol=1e-10, err_msg=name)
        assert summary["updates"] == alone[2]["updates"]
    assert ranks[0][0].keys() == ranks[1][0].keys()
    assert all((ranks[0][0][name] == ranks[1][0][name]).all() for name in ranks[0][0])
    same_metrics(metrics_of(tmp_path / "two"), metrics_of(tmp_path / "one"))
    for step in (1, 2):
        assert drawn(tmp_path / "two", step) == drawn(tmp_path / "one", step)
    last = ranks[0][1][-1]
    assert last["parallel/ranks"] == 2
    assert 1 <= last["parallel/load"] <= 2
    assert last["parallel/exchange_share"] < 1
    assert (tmp_path / "two" / "logs" / "rank-1.log").exists()
    assert not math.isnan(last["grad_norm"])


def run_two(folder, settings):
    return precise(folder, **settings)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft asks for it
@pytest.mark.ranks
@pytest.mark.parametrize("size", [2, 4])
def test_runs_of_every_kind(tmp_path, size):
    """LoRA, filters with rounds, episodes, fewer prompts than ranks: as on one rank."""
    alone, ranks = various(tmp_path / "one"), on_ranks(size, various, tmp_path / "ranks")
    for found in ranks:
        assert found.keys() == alone.keys()
        for name in alone.keys() - {"first"}:  # whose updates are in float32
            same_metrics(found[name], alone[name])
    exact = ("group", "token_ids", "sampler_logps", "finish_reason", "reward")
    first, second = (rows_of(tmp_path / one / "first") for one in ("one", "ranks"))
    assert [[row[key] for key in exact] for row in first] == [[row[key] for key in exact] for row in second]
    same_stores(*(tmp_path / one / "minibatches" / "rollouts" / "step-2.parquet" for one in ("one", "ranks")))


def same_stores(*paths):
    """What the updates saw of each token, up to the rounding of float64."""
    one, other = map(StoredStep.read, paths)
    for name in ("group", "minibatch", "update", "no_gradient"):
        assert one.values(name) == other.values(name)
    for name in ("logps", "old_logps", "ratio", "policy_coefficient", "entropy", "weight"):
        for mine, theirs in zip(one.arrays(name), other.arrays(name), strict=True):
            assert (mine is None) == (theirs is None)
            if mine is not None:
                np.testing.assert_allclose(mine, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.ranks
def test_the_demos_task_on_two_ranks(tmp_path):
    alone, ranks = demo(tmp_path / "one"), on_ranks(2, demo, tmp_path / "two")
    for steps in ranks:
        same_metrics(steps, alone)
    assert max(line["reward/mean"] for line in alone) > 0.1


@pytest.mark.ranks
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 4), (4, 2)])
def test_a_run_goes_on_with_another_number_of_ranks(tmp_path, before, after):
    settings = {"max_steps": 3, "beta": 0.04}
    straight = precise(tmp_path / "straight", **settings)[1]
    on_ranks(before, stop_at_one, tmp_path / "run", settings)
    for steps in on_ranks(after, go_on, tmp_path / "run", settings):
        same_metrics(steps, straight[1:])
    same_metrics(metrics_of(tmp_path / "run"), metrics_of(tmp_path / "straight"))


def stop_at_one(folder, settings):
    stopped(folder, 1, **settings)


def go_on(folder, settings):
    return resumed(folder, **settings)
