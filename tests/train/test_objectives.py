"""Objectives in the training loop: presets, group filters, controllers, rewards per token, user functions."""

import itertools
import math

import pytest
import torch

from cohort.errors import ConfigError, RewardError
from cohort.presets import PRESETS
from tests.conftest import telling
from tests.train.harness import (
    ROWS,
    digits_reward,
    make_trainer,
    metrics_of,
    parameters,
    rows_of,
    same_parameters,
    shift_sampler_logps,
    straight_and_resumed,
)


def is_odd(completions, **_):
    """0 or 1, so that a group may have equal rewards."""
    return [float(len(text) % 2) for text in completions]


def mostly_dead(prompts, completions, **_):
    """Rewards differ only in groups whose prompt begins with a 1."""
    return [
        float(len(text)) if prompt.startswith("1") else 1.0 for prompt, text in zip(prompts, completions, strict=True)
    ]


def equal_rewards(completions, **_):
    return [1.0] * len(completions)


def groups_of(folder):
    rows = rows_of(folder)
    return [rows[start : start + 4] for start in range(0, len(rows), 4)]


def unchanged(trainer, before):
    return all(torch.equal(value, before[name]) for name, value in parameters(trainer).items())


TRAINED = ("grpo", "dapo", "gspo", "cispo", "rloo", "gdpo", "gfpo")  # tests/objective has every preset


@pytest.mark.parametrize("name", telling(PRESETS, *TRAINED))
def test_every_preset_trains(demo_tokenizer, tmp_path, name):
    settings = {"group_filter": {"k": 2}} if name == "gfpo" else {}
    several = [is_odd, digits_reward]
    rewards = {"gdpo": several, "mo_grpo": several, "dapo": digits_reward, "gfpo": digits_reward}.get(name, is_odd)
    trainer = make_trainer(
        demo_tokenizer, tmp_path / "run", max_steps=1, minibatches=2, rewards=rewards, preset=name, **settings
    )
    before = parameters(trainer)
    (metrics,) = trainer.steps()
    assert not unchanged(trainer, before)
    assert sum(value for key, value in metrics.items() if key.startswith("tokens/")) == pytest.approx(1, abs=1e-12)
    assert (tmp_path / "run" / "objective.txt").read_text().startswith(f"objective {PRESETS[name].identity}")
    assert f'preset = "{PRESETS[name].identity}"' in (tmp_path / "run" / "config.toml").read_text()


# Group filters and controllers ----------------------------------------------------------------------------------------


def test_dynamic_sampling_fills_the_step_with_groups_of_different_rewards(demo_tokenizer, tmp_path):
    settings = {
        "group_filter": {"rule": "dynamic_sampling", "max_rounds": 6},
        "rewards": mostly_dead,
        "order": "sequential",
    }
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", max_steps=2, **settings)
    first, second = trainer.steps()
    # Rows 0 and 9 to 18 begin with a 1. Rounds sample rows 0-3, 4-6, 7-9 and 10-11: the fourth such row is row 11.
    live = [row for row, item in enumerate(ROWS) if item["prompt"].startswith("1")]
    assert live == [0, *range(9, 19)]
    assert first["groups/rounds"] == 4
    assert first["groups/sampled"] == 4 + 3 + 3 + 2
    assert first["groups/left_out"] == 8
    assert first["groups/dead_share"] == pytest.approx(8 / 12)
    # The second step continues after the last prompt of the first one, with rows 12 to 15.
    assert (second["groups/sampled"], second["groups/rounds"], second["updates"]) == (4, 1, 1)


def test_dynamic_sampling_stops_after_its_rounds(demo_tokenizer, tmp_path):
    trainer = make_trainer(
        demo_tokenizer,
        tmp_path / "run",
        max_steps=1,
        group_filter={"rule": "dynamic_sampling", "max_rounds": 3},
        rewards=equal_rewards,
    )
    before = parameters(trainer)
    (metrics,) = trainer.steps()
    assert (metrics["groups/rounds"], metrics["groups/sampled"], metrics["groups/left_out"]) == (3, 12, 12)
    assert (metrics["updates"], metrics["tokens"]) == (0, 0)
    assert unchanged(trainer, before)


def test_dynamic_sampling_and_controllers_resume_exactly(demo_tokenizer, tmp_path):
    settings = {
        "group_filter": {"rule": "dynamic_sampling", "max_rounds": 3},
        "beta": 0.1,
        "kl": {"target": 0.01, "horizon": 50},
        "entropy": {"coefficient": 0.001, "target": 3.0},
        "rewards": mostly_dead,
        "save_steps": 1,
        "max_steps": 3,
    }
    straight_and_resumed(lambda folder: make_trainer(demo_tokenizer, folder, **settings), tmp_path, stop=2)
    assert len({line["beta"] for line in metrics_of(tmp_path / "straight")}) == 3  # beta changed in every step


def test_dropped_groups_leave_the_denominator_and_stay_on_disk(demo_tokenizer, tmp_path):
    """Half of the groups have equal rewards: dropping them doubles the gradient."""
    settings = {"rows": [ROWS[0], ROWS[1], ROWS[9], ROWS[2]], "rewards": mostly_dead, "order": "sequential"}
    kept = make_trainer(demo_tokenizer, tmp_path / "kept", max_steps=1, **settings)
    dropped = make_trainer(demo_tokenizer, tmp_path / "dropped", max_steps=1, group_filter="drop_dead", **settings)
    (one,), (other,) = kept.steps(), dropped.steps()
    assert (one["groups/left_out"], other["groups/left_out"]) == (0, 2)
    assert other["grad_norm"] == pytest.approx(2 * one["grad_norm"], rel=1e-4)  # float32
    rows = rows_of(tmp_path / "dropped")
    assert [row["advantage"] is None for row in rows] == [*[False] * 4, *[True] * 4] * 2


def test_whitened_returns_work_with_dropped_groups(demo_tokenizer, tmp_path):
    trainer = make_trainer(
        demo_tokenizer,
        tmp_path / "run",
        max_steps=1,
        credit="return_to_go",
        scale={"rule": "batch_std", "unit": "token"},
        group_filter="drop_dead",
    )
    (metrics,) = trainer.steps()
    assert metrics["grad_norm"] > 0


def test_an_adaptive_beta_rises_while_the_kl_is_above_its_target(demo_tokenizer, tmp_path):
    trainer = make_trainer(
        demo_tokenizer, tmp_path / "run", max_steps=3, beta=0.1, kl={"target": 1e-9, "horizon": 16}, num_iterations=2
    )
    betas = [metrics["beta"] for metrics in trainer.steps()]
    # 16 completions per step and a horizon of 16 allow a factor of 1.2. The KL is 0 only before the first update.
    assert betas == pytest.approx([0.1, 0.12, 0.144], rel=1e-12)


def test_an_adaptive_entropy_bonus_acts_only_below_its_target(demo_tokenizer, tmp_path):
    below = make_trainer(demo_tokenizer, tmp_path / "a", max_steps=3, entropy={"target": 100.0, "step": 0.004})
    # The first step has no measured entropy; then the coefficient rises by one step each time.
    assert [m["entropy_coefficient"] for m in below.steps()] == pytest.approx([0, 0.004, 0.008])
    settings = {"entropy": {"coefficient": 0.01, "target": 0.001, "step": 0.004}}
    above = make_trainer(demo_tokenizer, tmp_path / "b", max_steps=2, **settings)
    assert [m["entropy_coefficient"] for m in above.steps()] == [0, 0]
    assert above.args.resolved_objective.entropy.target == 0.001


# The KL to the reference ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["reward", "advantage"])
def test_a_kl_in_the_reward_lowers_the_advantage_where_the_policy_exceeds_the_reference(
    demo_tokenizer, tmp_path, place
):
    """All rewards are equal, so the advantages come from the KL alone. The sampler's log-probs are the old policy's."""
    trainer = make_trainer(
        demo_tokenizer,
        tmp_path / "run",
        max_steps=1,
        preset="rloo",
        beta=1.0,
        kl={"place": place},
        rewards=equal_rewards,
    )
    assert trainer.schedule.needs_old_logps
    with torch.no_grad():
        for index, parameter in enumerate(trainer.policy.model.parameters()):
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)))
    (metrics,) = trainer.steps()
    rows = rows_of(tmp_path / "run")
    prompts = [trainer.tokenizer(row["prompt"])["input_ids"] for row in rows]
    reference = trainer.reference.logps(prompts, [row["token_ids"] for row in rows], 1.0).logps_N
    gaps = torch.tensor([logp for row in rows for logp in row["sampler_logps"]]) - reference.detach()
    sums = torch.stack([part.sum() for part in gaps.split([len(row["token_ids"]) for row in rows])]).view(4, 4)
    baseline = (sums.sum(1, keepdim=True) - sums) / 3 if place == "reward" else 0.0  # the mean of the other three
    got = torch.tensor([row["advantage"] for row in rows]).view(4, 4)
    torch.testing.assert_close(got, (baseline - sums).to(got), rtol=1e-3, atol=1e-4)  # float32 log-probs
    assert metrics["grad_norm"] > 0


# Rewards per step and per token ---------------------------------------------------------------------------------------


def step_rewards(completion_ids, **_):
    """A step ends at every second token."""
    return [[float(t % 3) if i % 2 else None for i, t in enumerate(ids)] for ids in completion_ids]


def token_rewards(completion_ids, **_):
    return [[float(t % 3) - 1 for t in ids] for ids in completion_ids]


PER_TOKEN = {"credit": "given", "baseline": "none", "scale": "none"}


def test_rewards_per_token_are_the_advantages(demo_tokenizer, tmp_path):
    settings = PER_TOKEN | {"rewards": [token_rewards, token_rewards], "reward": {"weights": [1.0, 2.0]}}
    (metrics,) = make_trainer(demo_tokenizer, tmp_path / "run", max_steps=1, **settings).steps()
    for row in rows_of(tmp_path / "run"):
        expected = [3.0 * (t % 3 - 1) for t in row["token_ids"]]
        assert row["token_advantages"] == expected
        assert row["reward"] == sum(expected)
        assert row["advantage"] == pytest.approx(sum(expected) / len(expected))
    assert metrics["grad_norm"] > 0


def test_rewards_per_step_are_normalized_in_the_group_and_summed_to_the_end(demo_tokenizer, tmp_path, capsys):
    make_trainer(demo_tokenizer, tmp_path / "run", max_steps=1, credit="process", rewards=step_rewards).train()
    assert capsys.readouterr().out == ""  # as report.progress is off
    for group in groups_of(tmp_path / "run"):
        steps = [t % 3 for row in group for i, t in enumerate(row["token_ids"]) if i % 2]
        mean = sum(steps) / len(steps)
        std = math.sqrt(sum((s - mean) ** 2 for s in steps) / (len(steps) - 1))
        for row in group:
            ids = row["token_ids"]
            for t, advantage in enumerate(row["token_advantages"]):
                later = sum((ids[i] % 3 - mean) / (std + 1e-6) for i in range(t, len(ids)) if i % 2)
                assert advantage == pytest.approx(later, abs=1e-9)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (PER_TOKEN, r"takes rewards per token: reward function digits_reward must return a list"),
        ({"rewards": token_rewards}, r"rewards per token need objective\.credit 'process' or 'given'"),
        (
            PER_TOKEN | {"rewards": lambda completion_ids, **_: [[0.0, 0.0]] * len(completion_ids)},
            r"a list of 1 numbers or None as result 0 .*got 2 values",
        ),
        (
            {"preset": "maxrl", "rewards": lambda completions, **_: [-1.0] * len(completions)},
            r"returned a negative reward, which does not go with objective\.scale 'group_mean'",
        ),
    ],
)
def test_rewards_of_the_wrong_kind_are_errors(demo_tokenizer, tmp_path, settings, message):
    with pytest.raises(RewardError, match=message):
        make_trainer(demo_tokenizer, tmp_path / "run", **settings)


# User functions -------------------------------------------------------------------------------------------------------

RULE = """
import torch

def leaky(ratio_N, advantages_N):
    return torch.where((advantages_N > 0) & (ratio_N > 1.2), 0.1 * ratio_N, ratio_N)
"""


def test_a_trust_region_from_a_file(demo_tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rule.py").write_text(RULE.replace("torch.where(", "undefined("))
    with pytest.raises(ConfigError, match="raised NameError"):
        make_trainer(demo_tokenizer, tmp_path / "run", trust_region="my_rule.py:leaky")
    (tmp_path / "my_rule.py").write_text(RULE)  # corrected in the same process: the new text is used
    trainer = make_trainer(
        demo_tokenizer, tmp_path / "run", max_steps=1, trust_region="my_rule.py:leaky", num_iterations=2
    )
    (metrics,) = trainer.steps()
    assert metrics["grad_norm"] > 0
    assert "my_rule.py:leaky" in (tmp_path / "run" / "config.toml").read_text()
    with pytest.raises(ConfigError, match="my_rule.py has no function 'lossy'; it has: leaky"):
        make_trainer(demo_tokenizer, tmp_path / "other", trust_region="my_rule.py:lossy")


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("def f(r): return r", "raised TypeError"),
        ("def f(r, a): return r / r.mean()", "must be a function of each token alone"),
        ("def f(r, a): return r / 0 * (r < 0)", "not finite"),
    ],
)
def test_a_broken_trust_region_is_found_before_the_model_is_loaded(
    demo_tokenizer, tmp_path, monkeypatch, rule, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken_rule.py").write_text(rule + "\n")
    with pytest.raises(ConfigError, match=message):
        make_trainer(demo_tokenizer, tmp_path / "run", model="./nowhere", trust_region="broken_rule.py:f")


def test_a_baseline_from_a_file(demo_tokenizer, tmp_path, monkeypatch):
    """It may leave out the completion itself, which a check must not mistake for an error."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_baseline.py").write_text(
        "def others(rewards_S, group_S):\n"
        "    rewards_PG = rewards_S.view(-1, 4)\n"
        "    return ((rewards_PG.sum(1, keepdim=True) - rewards_PG) / 3).flatten()\n"
    )
    settings = {"baseline": "my_baseline.py:others", "scale": "none"}
    make_trainer(demo_tokenizer, tmp_path / "run", max_steps=1, **settings).train()
    for group in groups_of(tmp_path / "run"):
        total = sum(row["reward"] for row in group)
        expected = [row["reward"] - (total - row["reward"]) / 3 for row in group]
        assert [row["advantage"] for row in group] == pytest.approx(expected, abs=1e-6)  # rewards are float32


# Masks and measures ---------------------------------------------------------------------------------------------------


def test_an_update_without_unmasked_tokens_is_skipped(demo_tokenizer, tmp_path):
    """The limit is one token, so every completion is truncated."""
    settings = {"max_completion_length": 1, "min_completion_length": 1, "truncated": "mask", "beta": 0.1}
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", max_steps=1, **settings)
    before = parameters(trainer)
    (metrics,) = trainer.steps()
    assert metrics["length/cut_share"] == 1
    assert (metrics["updates"], metrics["updates_skipped"]) == (1, 1)
    assert unchanged(trainer, before)


def test_each_mismatch_rule_has_its_metrics(demo_tokenizer, tmp_path, monkeypatch):
    shift_sampler_logps(monkeypatch, lambda: -0.005)  # rho = e^0.005 at every token
    rules = [{"rule": "weight", "high": 1.001}, {"rule": "weight", "high": 2.0}, {"rule": "veto", "high": 1.001}]
    (metrics,) = make_trainer(demo_tokenizer, tmp_path / "run", max_steps=1, mismatch=rules).steps()
    shares = {key: value for key, value in metrics.items() if key.startswith("mismatch/")}
    assert shares == {
        "mismatch/weight/tokens_share": 1.0,
        "mismatch/weight/sequences_share": 1.0,
        "mismatch/weight_no_2/tokens_share": 0.0,
        "mismatch/weight_no_2/sequences_share": 0.0,
        "mismatch/veto/tokens_share": 1.0,
        "mismatch/veto/sequences_share": 1.0,
    }


def test_a_gap_that_grows_with_the_position_is_measured(demo_tokenizer, tmp_path, monkeypatch):
    steps = itertools.count(1)
    shift_sampler_logps(monkeypatch, lambda: 0.001 * next(steps))
    (metrics,) = make_trainer(demo_tokenizer, tmp_path / "run", max_steps=1).steps()
    assert 0.002 < metrics["sampler/kl_k1_drift"] < 0.008  # halves of completions of up to 10 tokens are 5 apart


def test_term_norms_are_measured_on_request_and_change_nothing(demo_tokenizer, tmp_path):
    plain = make_trainer(demo_tokenizer, tmp_path / "plain", max_steps=2, beta=0.1)
    plain.train()
    asked = make_trainer(demo_tokenizer, tmp_path / "asked", max_steps=2, beta=0.1, term_norms_steps=2)
    first, second = asked.steps()
    assert "gradient/kl_norm" not in first
    assert {"gradient/policy_norm", "gradient/kl_norm", "gradient/exact_cosine"} <= set(second)
    assert same_parameters(plain, asked)
