"""TRL's log from Cohort's numbers: when each key appears, what it averages, and divisors, on made-up numbers."""

import pytest
import torch

from cohort import GRPOConfig
from cohort.presets import preset
from cohort.trl.logs import Window, evaluation_keys, rollout_keys, update_keys, zero_std_share

REWARDS = torch.tensor([[1.0, 0.0, 2.0, 2.0], [0.5, 0.5, 0.5, 0.5]], dtype=torch.float64)
"""Two groups of four; the second is dead."""


def rollout(shift=0.0, **changes):
    """The metrics of a rollout with ``REWARDS`` plus a shift."""
    rewards = REWARDS + shift
    return {
        "step": 1,
        "time": 1e9,
        "groups/sampled": 2,
        "groups/dead_share": 0.5,
        "groups/unscored_share": 0.0,
        "reward/mean": rewards.mean().item(),
        "reward/std": rewards.std(correction=0).item(),
        "reward/unscored": 0,
        "rewards/digits": rewards.mean().item(),
        "rewards/digits/std": rewards.std(correction=0).item(),
        "rewards/digits/dead_share": 0.5,
        "rewards/digits/unscored_share": 0.0,
        "custom/answers": 3.0 + shift,
        "length/mean": 6.0,
        "length/min": 2,
        "length/max": 8,
        "length/ended_share": 0.75,
        "length/ended_mean": 4.0,
        "length/ended_min": 2,
        "length/ended_max": 7,
        "rollout/tokens": 100,
        "updates": 2,
        "updates_nonfinite": 0,
        "seconds/step": 3.0,
        "eval/reward/mean": 1.0,
        "entropy": 9.0,
        **changes,
    }


def update(number, **changes):
    """The metrics of an update."""
    return {
        "grad_norm": float(number),
        "learning_rate": number / 10,
        "tokens": 8,
        "policy_value": 0.25 * number,
        "entropy": 1.0 + number,
        "clip/low_share": 0.1,
        "clip/high_share": 0.2,
        "clip/low_min": 0.0,
        "clip/high_max": 0.5,
        **changes,
    }


def window(**settings):
    return Window(GRPOConfig(num_generations=4, **settings))


def test_a_rollouts_numbers_belong_to_its_first_update_and_all_are_averaged_over_the_window():
    log = window()
    log.add(update(1), rollout())
    first = log.entry()
    assert list(first)[:3] == ["loss", "grad_norm", "learning_rate"]
    assert (first["reward"], first["num_tokens"], first["step_time"], first["answers"]) == (0.875, 100, 1.5, 3.0)
    log.add(update(2))
    second = log.entry()
    assert "reward" not in second
    assert "num_tokens" not in second
    assert second["step_time"] == 1.5
    log.add(update(3), rollout(shift=1.0))
    log.add(update(4))
    log.add(update(5), rollout(shift=2.0))
    third = log.entry()
    assert third["reward"] == pytest.approx(0.875 + 1.5)
    assert third["num_tokens"] == 300
    assert (third["grad_norm"], third["learning_rate"]) == (5.0, 0.5)
    assert third["loss"] == pytest.approx(-0.25 * 4)
    assert third["entropy"] == pytest.approx(5.0)  # TRL's, not that of the rollout
    assert log.total_loss == pytest.approx(-0.25 * 15)
    assert log.updates == 5


def test_cohorts_own_keys_stand_beside_trls():
    log = window()
    log.add(update(1), rollout())
    entry = log.entry()
    assert entry["rewards/digits"] == entry["rewards/digits/mean"] == 0.875
    assert entry["groups/dead_share"] == entry["frac_reward_zero_std"] == 0.5
    assert not {"step", "time", "eval/reward/mean"} & entry.keys()


def test_standard_deviations_are_divided_by_n_minus_1_over_what_was_scored():
    found = rollout_keys(rollout(), preset("default"), 4)
    assert found["reward_std"] == pytest.approx(REWARDS.std().item(), rel=1e-12)
    assert found["rewards/digits/std"] == pytest.approx(REWARDS.std().item(), rel=1e-12)
    scored = REWARDS.flatten()[:6]
    metrics = rollout(
        **{"reward/std": scored.std(correction=0).item(), "rewards/digits/std": scored.std(correction=0).item()},
        **{"reward/unscored": 2, "rewards/digits/unscored_share": 0.25},
    )
    found = rollout_keys(metrics, preset("default"), 4)
    assert found["reward_std"] == found["rewards/digits/std"] == pytest.approx(scored.std().item(), rel=1e-12)
    assert rollout_keys(rollout(**{"reward/unscored": 7}), preset("default"), 4)["reward_std"] is None


def test_lengths():
    found = rollout_keys(rollout(), preset("default"), 4)
    assert [found[f"completions/{part}_length"] for part in ("mean", "min", "max")] == [6.0, 2, 8]
    assert [found[f"completions/{part}_terminated_length"] for part in ("mean", "min", "max")] == [4.0, 2, 7]
    assert found["completions/clipped_ratio"] == 0.25
    none_ended = {f"length/ended_{part}": None for part in ("mean", "min", "max")} | {"length/ended_share": 0.0}
    found = rollout_keys(rollout(**none_ended), preset("default"), 4)
    assert found["completions/mean_terminated_length"] == 0.0  # as in TRL
    assert found["completions/clipped_ratio"] == 1.0


def test_where_all_rewards_have_one_standard_deviation_the_share_is_0_or_1():
    of_batch = preset("default").replace(scale="batch_std")
    assert zero_std_share(rollout(), of_batch) == 0.0
    assert zero_std_share(rollout(**{"reward/std": 0.0}), of_batch) == 1.0
    of_groups = {"groups/dead_share": 0.75, "groups/unscored_share": 0.5}
    assert zero_std_share(rollout(**of_groups), preset("default")) == 0.25  # a single reward has no deviation in TRL
    gdpo = preset("gdpo")
    assert zero_std_share(rollout(), gdpo) == 0.0
    assert zero_std_share(rollout(**{"rewards/digits/dead_share": 1.0}), gdpo) == 1.0


def test_the_loss_has_all_terms():
    objective = preset("default").replace(beta=0.1, entropy={"rule": "entropy", "coefficient": 0.01})
    metrics = update(2, entropy_coefficient=0.01, kl_value_weighted=0.3, **{"kl/k3_weighted": 0.7})
    found = update_keys(metrics, objective)
    assert found["policy_loss"] == pytest.approx(-0.5 + 0.03)
    assert found["loss"] == pytest.approx(-0.5 + 0.03 - 0.01 * 3.0)
    assert found["kl"] == 0.7
    assert update_keys({"grad_norm": 0.0, "learning_rate": 0.1, "tokens": 0}, preset("default"))["loss"] == 0.0


def test_the_entropy_coefficient_is_the_one_after_the_update():
    log = window(entropy={"rule": "entropy", "coefficient": 0.01, "target": 2.5, "step": 0.004, "maximum": 0.013})
    logged = []
    for number, applied in ((1, 0.0), (1, 0.013), (2, 0.013)):  # entropies 2, 2, 3
        log.add(update(number, entropy_coefficient=applied))
        stored = log.state_dict()  # a run may be stopped and resumed here
        log = window(entropy={"rule": "entropy", "coefficient": 0.01, "target": 2.5, "step": 0.004, "maximum": 0.013})
        log.load_state_dict(stored)
        logged.append(log.entry())
    assert [entry["entropy_coef"] for entry in logged] == pytest.approx([0.013, 0.013, 0.009])
    assert logged[1]["loss"] == pytest.approx(-0.25 - 0.013 * 2)


def test_the_load_balancing_loss_is_part_of_the_loss():
    log = window(model={"router_aux_loss_coef": 0.1})
    log.add(update(1, router_loss=2.0))
    entry = log.entry()
    assert (entry["aux_loss"], entry["loss"]) == (2.0, pytest.approx(-0.25 + 0.2))


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("default", ["low_mean", "high_mean", "region_mean", "low_min", "high_max"]),
        ("cispo", ["cispo"]),
        ("sapo", []),
    ],
)
def test_clip_ratios(name, keys):
    found = update_keys(update(1), preset(name))
    named = {"cispo": "cispo_clip_ratio"}
    expected = {named.get(key, f"clip_ratio/{key}") for key in keys}
    assert {key for key in found if "clip" in key} == expected
    if name == "default":
        assert found["clip_ratio/region_mean"] == pytest.approx(0.3)
    if name == "cispo":
        assert found["cispo_clip_ratio"] == 0.2


def test_an_update_that_was_skipped_and_values_that_are_none_leave_the_means():
    log = window()
    log.add(update(1), rollout(**{"reward/mean": None}))
    log.add({})
    log.add(update(3, entropy=float("nan")))
    entry = log.entry()
    assert "reward" not in entry
    assert entry["loss"] == pytest.approx(-0.5)
    assert entry["entropy"] == 2.0
    assert log.updates == 3


def test_a_window_without_updates_is_empty():
    assert window().entry() == {}


def test_evaluations():
    scored = [0.0, 1.0, 1.0]
    metrics = {
        **{"reward/mean": 0.5, "reward/std": torch.tensor(scored).std(correction=0).item(), "reward/scored": 3},
        **{"rewards/digits/mean": 0.25, "rewards/digits/std": None, "rewards/digits/scored": 0},
        **{"reward/dead_share": 0.5, "length/mean": 7.0, "length/min": 3, "length/max": 8, "length/ended_share": 0.75},
        **{"length/ended_mean": 4.0, "length/ended_min": 3, "length/ended_max": 6},
        **{"custom/answers": 2.0, "reward/low": 0.1, "reward/high": 0.9},
    }
    expected = {
        **{"reward": 0.5, "reward_std": pytest.approx(torch.tensor(scored).std().item()), "frac_reward_zero_std": 0.5},
        **{"rewards/digits/mean": 0.25, "rewards/digits/std": None, "answers": 2.0, "num_tokens": 100},
        "completions/clipped_ratio": 0.25,
        **{f"completions/{part}_length": length for part, length in (("mean", 7.0), ("min", 3), ("max", 8))},
        **{f"completions/{part}_terminated_length": one for part, one in (("mean", 4.0), ("min", 3), ("max", 6))},
    }
    one = evaluation_keys({f"eval/{key}": value for key, value in metrics.items()}, num_tokens=100)
    assert one == {f"eval_{key}": value for key, value in expected.items()}
    named = evaluation_keys({f"eval/hard/{key}": value for key, value in metrics.items()}, "hard", 100)
    assert named == {f"eval_hard_{key}": value for key, value in expected.items()}


def test_the_printed_line_has_all_but_cohorts_own_keys():
    log = window()
    log.add(update(1), rollout())
    entry = log.entry()
    shown = log.without_own(entry | {"mine": 1.0, "eval_reward": 2.0})
    assert shown.items() >= {"mine": 1.0, "eval_reward": 2.0, "reward": entry["reward"]}.items()
    assert "seconds/step" in entry
    assert "seconds/step" not in shown
