"""One rank's fault becomes every rank's, and a rank that dies ends the others."""

import pytest

from tests.parallel.launching import Ranks, on_ranks
from tests.parallel.runs import faults, killed, trained


def ended(folder, *names):
    """How runs with faults on one rank ended: the same on both."""
    first, second = on_ranks(2, faults, folder, names)
    for name in names:
        assert repr(first[name]) == repr(second[name]), name
    return first


@pytest.mark.ranks
def test_a_broken_reward_on_one_rank(tmp_path):
    kind, text = ended(tmp_path, "reward")["reward"]
    assert kind == "RewardError"
    assert "rank 1 of 2" in text
    assert "in step 2; a checkpoint of step 1 is kept" in text


@pytest.mark.ranks
def test_memory_that_runs_out_on_one_rank(tmp_path):
    found = ended(tmp_path, "nothing", "memory")
    for name, value in found["nothing"][1].items():  # smaller passes on both ranks, the same gradient in float32
        assert (abs(found["memory"][1][name] - value) < 1e-5).all(), name


@pytest.mark.ranks
def test_a_fault_on_one_rank_is_the_same_on_all(tmp_path):
    found = ended(tmp_path, "nonfinite", "episode", "interrupt", "unknown", "evaluation")
    assert found["nonfinite"][2:] == ([1, 0], 1)
    assert len(list((tmp_path / "nonfinite" / "nonfinite").iterdir())) == 1
    assert found["episode"][0] == "EpisodeError"
    assert "rank 1 of 2: all failed; in step 2" in found["episode"][1]
    assert found["interrupt"] == ("KeyboardInterrupt", "rank 0 of 2")
    assert found["unknown"] == ("FaultError", "rank 1 of 2: a bug")
    assert found["evaluation"][0] == "RewardError"
    assert "rank 1 of 2: no judge" in found["evaluation"][1]
    assert (tmp_path / "evaluation" / "checkpoints" / "step-1").exists()  # a failed evaluation costs no progress


@pytest.mark.ranks
@pytest.mark.parametrize("place", ["sampling", "update", "checkpoint"])
def test_a_killed_rank_ends_all_within_ten_seconds(tmp_path, place, record_property):
    folder = tmp_path / "run"
    with Ranks(2, killed, folder, place) as ranks:
        ranks.wait(900)
        outcomes = ranks.outcomes()
    dead = 0 if place == "checkpoint" else 1
    assert outcomes[dead][:2] == ("died", -9)
    kind, (name, text, seconds), _ = outcomes[1 - dead]
    assert (kind, name) == ("returned", "RankError")
    assert "another rank has ended" in text
    assert seconds < 10
    print(f"{place}: {seconds:.2f} s")
    # What was complete is there, and the run goes on from it.
    _, steps, summary = trained(folder, resume=True, max_steps=3, save_steps=1)
    assert [line["step"] for line in steps] == [2, 3]
    assert summary["steps"] == 3
