"""Objectives in the real loop: every preset trains, filters and controllers do what they say, and a resumed run goes
on with what they carry."""

import itertools
import json
import math

import pytest
import torch

from cohort.errors import ConfigError, RewardError, RunFolderError
from cohort.presets import PRESETS
from tests.train.harness import ROWS, digits_reward, make_trainer, parameters, shift_sampler_logps


def is_odd(completions, **_):
    """0 or 1, so that groups may be dead."""
    return [float(len(text) % 2) for text in completions]


def mostly_dead(prompts, completions, **_):
    """Groups of prompts that begin with a 1 have something to learn from; the others' rewards are equal."""
    return [
        float(len(text)) if prompt.startswith("1") else 1.0 for prompt, text in zip(prompts, completions, strict=True)
    ]


def settings_for(name):
    settings = {"group_filter": {"k": 2}} if name == "gfpo" else {}
    return {"preset": name, **settings}


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_trains(demo_tokenizer, tmp_path, name):
    rewards = [is_odd, digits_reward] if name in ("gdpo", "mo_grpo") else is_odd
    trainer = make_trainer(
        demo_tokenizer, tmp_path / "run", max_steps=2, minibatches=2, rewards=rewards, **settings_for(name)
    )
    before = parameters(trainer)
    metrics = list(trainer.steps())
    assert any(not torch.equal(value, before[key]) for key, value in parameters(trainer).items())
    shares = [sum(v for key, v in m.items() if key.startswith("tokens/")) for m in metrics]
    assert shares == pytest.approx([1.0] * len(metrics), abs=1e-12)
    said = (tmp_path / "run" / "objective.txt").read_text()
    assert said.startswith(f"objective {name}@1")
    assert f'preset = "{name}@1"' in (tmp_path / "run" / "config.toml").read_text()


def test_dynamic_sampling_fills_the_step_with_live_groups(demo_tokenizer, tmp_path):
    settings = {
        "group_filter": {"rule": "dynamic_sampling", "max_rounds": 6},
        "rewards": mostly_dead,
        "order": "sequential",
    }
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", max_steps=2, **settings)
    first, second = trainer.steps()
    # Rows 1, 10 .. 19 begin with a 1. Rounds take rows 0-3, 4-6, 7-9, 10-11, ...: the 4th live one is row 12 at last.
    live = [row for row, item in enumerate(ROWS) if item["prompt"].startswith("1")]
    assert live == [0, *range(9, 19)]
    assert first["groups/rounds"] == 4
    assert first["groups/sampled"] == 4 + 3 + 3 + 2
    assert first["groups/left_out"] == 8
    assert first["groups/dead_share"] == pytest.approx(8 / 12)
    assert second["groups/sampled"] == 4  # rows 12 to 15, all live: the stream went on where the first step stopped
    assert second["groups/rounds"] == 1
    assert second["updates"] == 1


def test_dynamic_sampling_gives_up_after_its_rounds(demo_tokenizer, tmp_path):
    trainer = make_trainer(
        demo_tokenizer,
        tmp_path / "run",
        max_steps=1,
        group_filter={"rule": "dynamic_sampling", "max_rounds": 3},
        rewards=lambda completions, **_: [1.0] * len(completions),
    )
    before = parameters(trainer)
    (metrics,) = trainer.steps()
    assert (metrics["groups/rounds"], metrics["groups/sampled"], metrics["groups/left_out"]) == (3, 12, 12)
    assert (metrics["updates"], metrics["tokens"]) == (0, 0)
    assert all(torch.equal(value, before[name]) for name, value in parameters(trainer).items())


def test_a_run_with_dynamic_sampling_and_moving_weights_resumes_bit_for_bit(demo_tokenizer, tmp_path):
    settings = {
        "group_filter": {"rule": "dynamic_sampling", "max_rounds": 3},
        "beta": 0.1,
        "kl": {"target": 0.01, "horizon": 50},
        "entropy": {"coefficient": 0.001, "target": 3.0},
        "rewards": mostly_dead,
        "save_steps": 1,
    }
    straight = make_trainer(demo_tokenizer, tmp_path / "straight", max_steps=4, **settings)
    whole = list(straight.steps())
    make_trainer(demo_tokenizer, tmp_path / "run", max_steps=2, **settings).train()
    resumed = make_trainer(demo_tokenizer, tmp_path / "run", max_steps=4, **settings)
    resumed.train(resume=True)
    for name, value in parameters(straight).items():
        assert torch.equal(parameters(resumed)[name], value), name
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    for key in ("beta", "entropy_coefficient", "reward/mean", "groups/sampled"):
        assert last[key] == whole[-1][key]
    assert len({m["beta"] for m in whole}) == 4  # it moved in every step


def test_dropping_dead_groups_takes_them_out_of_the_denominator(demo_tokenizer, tmp_path):
    """Half the groups are dead: leaving them out of B doubles the gradient."""
    rows = [ROWS[0], ROWS[1], ROWS[9], ROWS[2]]  # the first and third begin with a 1
    kept = make_trainer(demo_tokenizer, tmp_path / "kept", max_steps=1, rows=rows, rewards=mostly_dead)
    dropped = make_trainer(
        demo_tokenizer, tmp_path / "dropped", max_steps=1, rows=rows, rewards=mostly_dead, group_filter="drop_dead"
    )
    (one,), (other,) = kept.steps(), dropped.steps()
    assert (one["groups/left_out"], other["groups/left_out"]) == (0, 2)
    assert other["grad_norm"] == pytest.approx(2 * one["grad_norm"], rel=1e-4)  # float32


def test_left_out_completions_are_kept_on_disk(demo_tokenizer, tmp_path):
    import pyarrow.parquet

    trainer = make_trainer(
        demo_tokenizer, tmp_path / "run", max_steps=1, rewards=mostly_dead, group_filter="drop_dead", order="sequential"
    )
    trainer.train()
    rows = pyarrow.parquet.read_table(tmp_path / "run" / "rollouts" / "step-1.parquet").to_pylist()
    assert len(rows) == 16
    assert [row["advantage"] is None for row in rows] == [False] * 4 + [True] * 12


def test_an_adaptive_beta_rises_while_the_kl_is_above_its_target(demo_tokenizer, tmp_path):
    trainer = make_trainer(
        demo_tokenizer, tmp_path / "run", max_steps=3, beta=0.1, kl={"target": 1e-9, "horizon": 16}, num_iterations=2
    )
    betas = [m["beta"] for m in trainer.steps()]
    # 16 completions a step and a horizon of 16: the largest step, a factor of 1.2; the KL is 0 only before any update
    assert betas == pytest.approx([0.1, 0.12, 0.144], rel=1e-12)


def test_an_entropy_bonus_raises_entropy(demo_tokenizer, tmp_path):
    def run(name, **settings):
        trainer = make_trainer(demo_tokenizer, tmp_path / name, max_steps=3, learning_rate=3e-3, **settings)
        return [m["entropy"] for m in trainer.steps()]

    plain, bonus = run("plain"), run("bonus", entropy={"coefficient": 1.0})
    assert bonus[0] == plain[0]
    assert bonus[-1] > plain[-1]


def test_an_adaptive_entropy_bonus_acts_only_below_its_target(demo_tokenizer, tmp_path):
    settings = {"entropy": {"coefficient": 0.01, "target": 0.001, "step": 0.004}}
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", max_steps=4, **settings)
    assert [m["entropy_coefficient"] for m in trainer.steps()] == [0, 0, 0, 0]  # the entropy is far above
    assert trainer.args.resolved_objective.entropy.target == 0.001
    trainer = make_trainer(demo_tokenizer, tmp_path / "up", max_steps=3, entropy={"target": 100.0, "step": 0.004})
    # not before an entropy is measured; then up by a step each time
    assert [m["entropy_coefficient"] for m in trainer.steps()] == pytest.approx([0, 0.004, 0.008])


def test_a_kl_over_the_vocabulary_trains_toward_the_reference(demo_tokenizer, tmp_path):
    """Without any reward signal, a policy that was pushed away comes back."""
    for estimator in (
        {"estimator": "full", "correction": "none"},
        {"estimator": "full", "top_k": 4, "correction": "none"},
    ):
        trainer = make_trainer(
            demo_tokenizer,
            tmp_path / str(len(estimator)),
            max_steps=20,
            beta=1.0,
            kl=estimator,
            learning_rate=2e-3,
            num_generations=16,
            rewards=lambda completions, **_: [1.0] * len(completions),
        )
        with torch.no_grad():
            for index, parameter in enumerate(trainer.policy.model.parameters()):
                noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index))
                parameter.add_(0.05 * noise)
        kls = [m["kl/k3"] for m in trainer.steps()]
        assert kls[0] > 1e-3
        assert sum(kls[-3:]) < 0.7 * sum(kls[:3])  # means of several steps: k3 is a noisy measure


@pytest.mark.parametrize("place", ["reward", "advantage"])
def test_a_kl_in_the_reward_pulls_toward_the_reference(demo_tokenizer, tmp_path, place):
    trainer = make_trainer(
        demo_tokenizer,
        tmp_path / "run",
        max_steps=30,
        preset="rloo",
        beta=1.0,
        kl={"place": place},
        learning_rate=1e-3,
        num_generations=32,
        max_completion_length=5,
        rewards=lambda completions, **_: [1.0] * len(completions),
    )
    assert trainer.schedule.needs_old_logps
    with torch.no_grad():
        for index, parameter in enumerate(trainer.policy.model.parameters()):
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)))
    kls = [m["kl/k3"] for m in trainer.steps()]
    assert sum(kls[-5:]) < 0.7 * sum(kls[:3]) * 5 / 3  # a noisy gradient: means of several steps


def step_rewards(completion_ids, **_):
    """A step ends at every second token."""
    return [[float(t % 3) if i % 2 else None for i, t in enumerate(ids)] for ids in completion_ids]


def token_rewards(completion_ids, **_):
    return [[float(t % 3) - 1 for t in ids] for ids in completion_ids]


def test_rewards_per_step_and_per_token_reach_the_advantages(demo_tokenizer, tmp_path):
    import pyarrow.parquet

    trainer = make_trainer(
        demo_tokenizer,
        tmp_path / "given",
        max_steps=1,
        credit="given",
        baseline="none",
        scale="none",
        rewards=[token_rewards, token_rewards],
        reward={"weights": [1.0, 2.0]},
    )
    (metrics,) = trainer.steps()
    rows = pyarrow.parquet.read_table(tmp_path / "given" / "rollouts" / "step-1.parquet").to_pylist()
    for row in rows:
        expected = [3.0 * (t % 3 - 1) for t in row["token_ids"]]
        assert row["token_advantages"] == expected
        assert row["reward"] == sum(expected)
        assert row["advantage"] == pytest.approx(sum(expected) / len(expected))
    assert metrics["grad_norm"] > 0
    process = make_trainer(demo_tokenizer, tmp_path / "process", max_steps=1, credit="process", rewards=step_rewards)
    (metrics,) = process.steps()
    rows = pyarrow.parquet.read_table(tmp_path / "process" / "rollouts" / "step-1.parquet").to_pylist()
    for start in range(0, 16, 4):
        group = rows[start : start + 4]
        steps = [t % 3 for row in group for i, t in enumerate(row["token_ids"]) if i % 2]
        mean = sum(steps) / len(steps)
        std = math.sqrt(sum((s - mean) ** 2 for s in steps) / (len(steps) - 1))
        for row in group:
            ids = row["token_ids"]
            for t, advantage in enumerate(row["token_advantages"]):
                later = sum((ids[i] % 3 - mean) / (std + 1e-6) for i in range(t, len(ids)) if i % 2)
                assert advantage == pytest.approx(later, abs=1e-9)


def test_rewards_of_the_wrong_kind_are_named(demo_tokenizer, tmp_path):
    with pytest.raises(RewardError, match=r"takes rewards per token: reward function digits_reward must return a list"):
        make_trainer(demo_tokenizer, tmp_path / "a", credit="given", baseline="none", scale="none")
    with pytest.raises(RewardError, match=r"rewards per token need objective\.credit 'process' or 'given'"):
        make_trainer(demo_tokenizer, tmp_path / "b", rewards=token_rewards)
    with pytest.raises(RewardError, match=r"a list of 1 numbers or None as result 0 .*got 2 values"):
        make_trainer(
            demo_tokenizer,
            tmp_path / "c",
            credit="given",
            baseline="none",
            scale="none",
            rewards=lambda completion_ids, **_: [[0.0, 0.0]] * len(completion_ids),
        )
    with pytest.raises(
        RewardError, match=r"returned a negative reward, which does not go with objective\.scale 'group_mean'"
    ):
        make_trainer(
            demo_tokenizer, tmp_path / "d", preset="maxrl", rewards=lambda completions, **_: [-1.0] * len(completions)
        )


RULE = """
import torch

def leaky(ratio_N, advantages_N):
    return torch.where((advantages_N > 0) & (ratio_N > 1.2), 0.1 * ratio_N, ratio_N)
"""


def test_a_rule_of_ones_own_trains(demo_tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rule.py").write_text(RULE)
    trainer = make_trainer(
        demo_tokenizer, tmp_path / "run", max_steps=2, trust_region="my_rule.py:leaky", num_iterations=2
    )
    metrics = list(trainer.steps())
    assert all(m["grad_norm"] > 0 for m in metrics)
    assert 'rule = "custom", function = "my_rule.py:leaky"' in (tmp_path / "run" / "config.toml").read_text() or (
        'trust_region = "my_rule.py:leaky"' in (tmp_path / "run" / "config.toml").read_text()
    )
    with pytest.raises(ConfigError, match="my_rule.py has no function 'lossy'; it has: leaky"):
        make_trainer(demo_tokenizer, tmp_path / "other", trust_region="my_rule.py:lossy")


def test_masked_truncated_completions_leave_the_loss_and_stay_in_the_baseline(demo_tokenizer, tmp_path):
    """Every completion is cut at 1 token, so every token is masked: no update is made, and the log says why."""
    trainer = make_trainer(
        demo_tokenizer, tmp_path / "run", max_steps=1, max_completion_length=1, truncated="mask", beta=0.1
    )
    before = parameters(trainer)
    (metrics,) = trainer.steps()
    assert metrics["length/cut_share"] > 0.5
    masked = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert masked["updates"] == 1
    if metrics["length/cut_share"] == 1:
        assert metrics["updates_skipped"] == 1
        assert all(torch.equal(value, before[name]) for name, value in parameters(trainer).items())


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("def f(r): return r", "raised TypeError"),
        ("def f(r, a): return undefined", "raised NameError"),
        ("def f(r, a): return r / r.mean()", "must decide token by token"),
        ("def f(r, a): return r / 0 * (r < 0)", "not finite"),
    ],
)
def test_a_broken_rule_of_ones_own_is_found_before_the_model_loads(
    demo_tokenizer, tmp_path, monkeypatch, rule, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken_rule.py").write_text(rule + "\n")
    with pytest.raises(ConfigError, match=message):
        make_trainer(demo_tokenizer, tmp_path / "run", trust_region="broken_rule.py:f")
    (tmp_path / "broken_rule.py").write_text("def f(r, a): return r\n")  # mended: the new one is used
    make_trainer(demo_tokenizer, tmp_path / "run", trust_region="broken_rule.py:f")


def test_a_baseline_of_ones_own(demo_tokenizer, tmp_path, monkeypatch):
    import pyarrow.parquet

    monkeypatch.chdir(tmp_path)
    source = "import torch\ndef lowest(rewards_S, group_S):\n    return torch.full_like(rewards_S, rewards_S.min())\n"
    (tmp_path / "own_baseline.py").write_text(source.replace("rewards_S.min()", "rewards_S.nan_to_num(9.0).min()"))
    settings = {"baseline": "own_baseline.py:lowest", "scale": "none"}
    make_trainer(demo_tokenizer, tmp_path / "run", max_steps=1, **settings).train()
    rows = pyarrow.parquet.read_table(tmp_path / "run" / "rollouts" / "step-1.parquet").to_pylist()
    lowest = min(row["reward"] for row in rows)
    assert [row["advantage"] for row in rows] == pytest.approx([row["reward"] - lowest for row in rows])


def test_each_mismatch_rule_says_what_it_did(demo_tokenizer, tmp_path, monkeypatch):
    shift_sampler_logps(monkeypatch, lambda: -0.05)  # rho = e^0.05 everywhere, as if the sampler were a little off
    rules = [{"rule": "weight", "high": 1.01}, {"rule": "weight", "high": 2.0}, {"rule": "veto", "high": 1.01}]
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


def test_an_objective_written_in_another_way_may_be_resumed(demo_tokenizer, tmp_path):
    make_trainer(demo_tokenizer, tmp_path / "run", max_steps=1).train()
    again = {"trust_region": {"rule": "ppo_clip", "low": 0.8, "high": 1.2}, "beta": 0.0}
    make_trainer(demo_tokenizer, tmp_path / "run", max_steps=2, **again).train(resume=True)
    with pytest.raises(RunFolderError, match="start a new run whose model.path is"):
        make_trainer(demo_tokenizer, tmp_path / "run", max_steps=3, epsilon=0.3).train(resume=True)


def test_whitened_returns_go_with_dropped_groups(demo_tokenizer, tmp_path):
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


def test_a_baseline_that_leaves_one_out_may_be_ones_own(demo_tokenizer, tmp_path, monkeypatch):
    import pyarrow.parquet

    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_loo.py").write_text(
        "def others(rewards_S, group_S):\n"
        "    whole = rewards_S.view(-1, 4)\n"
        "    return ((whole.sum(1, keepdim=True) - whole) / 3).flatten()\n"
    )
    rows = []
    for name, baseline in (("own", "own_loo.py:others"), ("built_in", "leave_one_out")):
        make_trainer(demo_tokenizer, tmp_path / name, max_steps=1, baseline=baseline, scale="none").train()
        rows.append(pyarrow.parquet.read_table(tmp_path / name / "rollouts" / "step-1.parquet").to_pylist())
    assert [r["advantage"] for r in rows[0]] == pytest.approx([r["advantage"] for r in rows[1]], abs=1e-12)


def test_a_drift_of_the_sampler_with_the_position_is_seen(demo_tokenizer, tmp_path, monkeypatch):
    (even,) = make_trainer(demo_tokenizer, tmp_path / "even", max_steps=1).steps()
    assert abs(even["sampler/kl_k1_drift"]) < 1e-5
    steps = itertools.count(1)
    shift_sampler_logps(monkeypatch, lambda: 0.01 * next(steps))  # the later, the surer it says it was
    (odd,) = make_trainer(demo_tokenizer, tmp_path / "odd", max_steps=1).steps()
    assert 0.02 < odd["sampler/kl_k1_drift"] < 0.08  # halves of completions of up to 10 tokens are 5 apart


def test_the_norms_of_the_terms_are_measured_when_asked_and_change_nothing(demo_tokenizer, tmp_path):
    plain = make_trainer(demo_tokenizer, tmp_path / "plain", max_steps=2, beta=0.1)
    plain.train()
    asked = make_trainer(demo_tokenizer, tmp_path / "asked", max_steps=2, beta=0.1, term_norms_steps=2)
    first, second = asked.steps()
    assert "gradient/kl_norm" not in first
    assert {"gradient/policy_norm", "gradient/kl_norm", "gradient/exact_cosine"} <= set(second)
    for name, value in parameters(plain).items():
        assert torch.equal(parameters(asked)[name], value)
