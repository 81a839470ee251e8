"""The loop on a tiny model: which log-probs are computed when, the reference, metrics, resuming."""

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import cohort.train.loop as loop_module
from cohort.errors import ConfigError, PolicyMismatchError, RewardError, RunFolderError
from cohort.train.loop import due
from tests.conftest import tiny_llama
from tests.train.harness import ROWS, digits_reward, make_trainer, parameters, shift_sampler_logps


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def without_times(metrics):
    return {k: v for k, v in metrics.items() if not k.startswith("seconds") and k not in ("time", "tokens_per_second")}


@pytest.mark.parametrize(
    ("settings", "old", "ref"),
    [
        ({}, 0, 0),
        ({"beta": 0.1}, 0, 1),
        ({"num_iterations": 2}, 1, 0),
        ({"minibatches": 2}, 1, 0),
        ({"num_iterations": 3, "minibatches": 4, "beta": 0.1}, 1, 1),
    ],
)
def test_which_log_probs_are_computed(demo_tokenizer, tmp_path, monkeypatch, settings, old, ref):
    calls = []
    real = loop_module.policy_logps
    monkeypatch.setattr(
        loop_module, "policy_logps", lambda context, policy, *a: calls.append(policy) or real(context, policy, *a)
    )
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", max_steps=2, **settings)
    trainer.train()
    assert sum(policy is trainer.policy for policy in calls) == 2 * old
    assert sum(policy is trainer.reference for policy in calls) == 2 * ref
    assert (trainer.reference is None) == (ref == 0)
    assert trainer.policy.version == 2 * trainer.args.objective.updates_per_rollout


def test_a_single_update_has_ratio_one_by_identity(demo_tokenizer, tmp_path):
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", max_steps=2)
    for metrics in trainer.steps():
        assert metrics["tokens/clipped_low_share"] == metrics["tokens/clipped_high_share"] == 0
        assert metrics["policy_value"] == pytest.approx(0, abs=1e-8)  # float32 advantages
        assert metrics["grad_norm"] > 0


def test_later_updates_of_a_rollout_move_away_from_the_old_policy(demo_tokenizer, tmp_path):
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", max_steps=3, num_iterations=4)
    metrics = list(trainer.steps())
    assert any(m["tokens/clipped_low_share"] + m["tokens/clipped_high_share"] > 0 for m in metrics)
    assert all(m["updates"] == 4 for m in metrics)


def test_iterating_once_with_old_log_probs_equals_the_identity(demo_tokenizer, tmp_path, monkeypatch):
    """Computing the old log-probs where one update needs none gives the same run to rounding."""
    plain = make_trainer(demo_tokenizer, tmp_path / "a", max_steps=2)
    plain.train()
    spelled = make_trainer(demo_tokenizer, tmp_path / "b", max_steps=2)
    import dataclasses

    spelled.schedule = dataclasses.replace(spelled.schedule, needs_old_logps=True)
    spelled.train()
    for name, value in parameters(plain).items():
        torch.testing.assert_close(
            parameters(spelled)[name], value, rtol=1e-3, atol=1e-5
        )  # float32, Adam's first steps


def test_sampler_and_trainer_agree(demo_tokenizer, tmp_path):
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", max_steps=2)
    assert all(metrics["sampler/gap"] < 1e-5 for metrics in trainer.steps())


@pytest.mark.parametrize("gap", [0.2, math.nan])
def test_a_sampler_that_disagrees_stops_the_run_before_its_first_update(demo_tokenizer, tmp_path, monkeypatch, gap):
    shift_sampler_logps(monkeypatch, lambda: gap)
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", max_steps=2)
    before = parameters(trainer)
    with pytest.raises(PolicyMismatchError, match="nats from the trainer's"):
        trainer.train()
    assert all(torch.equal(value, before[name]) for name, value in parameters(trainer).items())
    monkeypatch.undo()
    shift_sampler_logps(monkeypatch, lambda: 0.01)
    make_trainer(demo_tokenizer, tmp_path / "run2", max_steps=1).train()


def test_the_reference_stands_still(demo_tokenizer, tmp_path):
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", max_steps=2, beta=0.1)
    before = [p.clone() for p in trainer.reference.model.parameters()]
    start = [p.clone() for p in trainer.policy.model.parameters()]
    metrics = list(trainer.steps())
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.reference.model.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before, start, strict=True))
    assert metrics[0]["kl/k3"] == pytest.approx(0, abs=1e-9)
    assert metrics[1]["kl/k3"] > 1e-6


def test_the_reference_follows_when_told_to(demo_tokenizer, tmp_path):
    settings = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 1.0}
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", max_steps=3, **settings)
    steps = trainer.steps()
    next(steps)
    initial = [p.clone() for p in trainer.reference.model.parameters()]
    next(steps)  # the second update: the reference becomes the policy
    pairs = zip(trainer.reference.model.parameters(), trainer.policy.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not all(torch.equal(a, b) for a, b in zip(initial, trainer.reference.model.parameters(), strict=True))


def test_a_mixed_reference_counts_updates_not_steps(demo_tokenizer, tmp_path):
    settings = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 3, "minibatches": 2}
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", max_steps=3, **settings)
    moved, before = [], [p.clone() for p in trainer.reference.model.parameters()]
    for _ in trainer.steps():
        now = [p.clone() for p in trainer.reference.model.parameters()]
        moved.append(not all(torch.equal(a, b) for a, b in zip(before, now, strict=True)))
        before = now
    assert moved == [False, True, True]  # updates 2, 4, 6: the multiples of 3 fall into steps 2 and 3


def test_metrics_are_written_every_step(demo_tokenizer, tmp_path):
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", max_steps=3, beta=0.1, eval_rows=ROWS[:4], eval_steps=2)
    trainer.train()
    steps = lines(tmp_path / "run")
    assert [m["step"] for m in steps] == [0, 1, 2, 3]
    before, *steps = steps
    assert set(before) == {"step", "time"} | {k for k in steps[1] if k.startswith("eval/")}
    groups = {
        "reward",
        "groups",
        "length",
        "advantage",
        "tokens",
        "gradient",
        "ratio",
        "ess",
        "sampler",
        "kl",
        "seconds",
    }
    assert groups <= {key.split("/")[0] for key in steps[0]}
    expected = {"policy_value", "kl_value", "entropy", "grad_norm", "learning_rate", "updates", "update_kl", "beta"}
    assert expected <= set(steps[0])
    assert "loss" not in steps[0]
    assert "eval/reward/mean" in steps[1]
    assert "eval/reward/mean" in steps[2]


def test_every_metric_is_documented(demo_tokenizer, tmp_path):
    from pathlib import Path

    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", max_steps=1, beta=0.1, eval_rows=ROWS[:4])
    (metrics,) = trainer.steps()
    for key in metrics:
        name = key.replace("digits_reward", "NAME").replace("pass@1", "pass@K")
        assert f"`{name}`" in page, name


def test_metric_values_by_hand(demo_tokenizer, tmp_path):
    import pyarrow.parquet

    trainer = make_trainer(demo_tokenizer, tmp_path / "run", max_steps=1)
    (metrics,) = trainer.steps()
    rows = pyarrow.parquet.read_table(tmp_path / "run" / "rollouts" / "step-1.parquet").to_pylist()
    rewards = torch.tensor([row["reward"] for row in rows])
    lengths = [len(row["token_ids"]) for row in rows]
    assert metrics["reward/mean"] == pytest.approx(rewards.mean().item())
    assert metrics["reward/std"] == pytest.approx(rewards.std(correction=0).item(), rel=1e-5)
    assert metrics["reward/within_group_std"] == pytest.approx(
        rewards.view(4, 4).std(1, correction=0).mean().item(), rel=1e-5
    )
    assert metrics["length/mean"] == pytest.approx(sum(lengths) / 16)
    assert metrics["length/cut_share"] == sum(row["finish_reason"] == "length" for row in rows) / 16
    assert metrics["tokens"] == sum(lengths)
    assert len({row["group"] for row in rows}) == 4
    assert all(len(row["token_ids"]) == len(row["sampler_logps"]) for row in rows)


def test_unscored_completions_are_counted_and_kept_out(demo_tokenizer, tmp_path):
    def sometimes(completions, **_):
        return [None if i % 4 == 0 else float(i) for i in range(len(completions))]

    (metrics,) = make_trainer(demo_tokenizer, tmp_path / "run", max_steps=1, rewards=sometimes).steps()
    assert metrics["reward/unscored"] == 4
    assert metrics["reward/mean"] == pytest.approx(sum(i for i in range(16) if i % 4) / 12)

    def never(completions, **_):
        return [None] * len(completions)

    (metrics,) = make_trainer(demo_tokenizer, tmp_path / "run2", max_steps=1, rewards=never).steps()
    assert metrics["reward/mean"] is None
    assert metrics["grad_norm"] == 0
    assert metrics["groups/dead_share"] == 1


@pytest.mark.parametrize(
    "settings", [{}, {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2, "minibatches": 2}]
)
def test_a_resumed_run_equals_an_uninterrupted_one(demo_tokenizer, tmp_path, settings):
    common = {"lr_scheduler_type": "cosine", "warmup_steps": 2, "save_steps": 2, **settings}
    straight = make_trainer(demo_tokenizer, tmp_path / "straight", max_steps=5, **common)
    straight.train()
    broken = make_trainer(demo_tokenizer, tmp_path / "broken", max_steps=5, **common)
    for metrics in broken.steps():
        if metrics["step"] == 3:
            break  # after the checkpoint of step 2: step 3 will be done again
    resumed = make_trainer(demo_tokenizer, tmp_path / "broken", max_steps=5, **common)
    summary = resumed.train(resume=True)
    for name, value in parameters(straight).items():
        assert torch.equal(parameters(resumed)[name], value), name
    assert [without_times(m) for m in lines(tmp_path / "broken")] == [
        without_times(m) for m in lines(tmp_path / "straight")
    ]
    assert summary["steps"] == 5


def test_tied_embeddings_resume_too(demo_tokenizer, tmp_path):
    def trainer(name, **settings):
        model = tiny_llama(vocab_size=len(demo_tokenizer), tie_word_embeddings=True)
        return make_trainer(demo_tokenizer, tmp_path / name, model=model, save_steps=1, **settings)

    straight = trainer("straight", max_steps=2)
    straight.train()
    trainer("broken", max_steps=1).train()
    resumed = trainer("broken", max_steps=2)
    assert resumed.train(resume=True)["completions"] == 32
    for name, value in parameters(straight).items():
        assert torch.equal(parameters(resumed)[name], value), name
    assert resumed.policy.model.lm_head.weight is resumed.policy.model.model.embed_tokens.weight


def test_a_finished_run_can_be_made_longer(demo_tokenizer, tmp_path):
    make_trainer(demo_tokenizer, tmp_path / "run", max_steps=2).train()
    with pytest.raises(ConfigError, match="is complete"):
        make_trainer(demo_tokenizer, tmp_path / "run", max_steps=2).train(resume=True)
    make_trainer(demo_tokenizer, tmp_path / "run", max_steps=3).train(resume=True)
    assert [m["step"] for m in lines(tmp_path / "run")] == [1, 2, 3]


def test_resuming_with_other_settings_is_refused(demo_tokenizer, tmp_path):
    make_trainer(demo_tokenizer, tmp_path / "run", max_steps=1).train()
    with pytest.raises(RunFolderError, match=r"optim.learning_rate: the run has 0.01, now 0.5"):
        make_trainer(demo_tokenizer, tmp_path / "run", max_steps=2, learning_rate=0.5).train(resume=True)
    with pytest.raises(RunFolderError, match="there is no run folder"):
        make_trainer(demo_tokenizer, tmp_path / "none", max_steps=2).train(resume=True)


def test_a_torn_checkpoint_is_not_a_checkpoint(demo_tokenizer, tmp_path):
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", max_steps=2, save_steps=1)
    trainer.train()
    newest = tmp_path / "run" / "checkpoints" / "step-2"
    newest.rename(newest.with_name("step-2.part"))  # as a kill while writing leaves it
    resumed = make_trainer(demo_tokenizer, tmp_path / "run", max_steps=2, save_steps=1)
    resumed.train(resume=True)
    for name, value in parameters(trainer).items():
        assert torch.equal(parameters(resumed)[name], value), name
    assert not newest.with_name("step-2.part").exists()


def test_an_output_folder_with_a_run_is_left_alone(demo_tokenizer, tmp_path):
    make_trainer(demo_tokenizer, tmp_path / "run", max_steps=1).train()
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    with pytest.raises(RunFolderError, match="already holds a run"):
        make_trainer(demo_tokenizer, tmp_path / "run", max_steps=1).train()
    assert {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()} == before
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("precious")
    with pytest.raises(RunFolderError, match="is not empty"):
        make_trainer(demo_tokenizer, tmp_path / "other", max_steps=1).train()


def test_only_the_newest_checkpoints_are_kept(demo_tokenizer, tmp_path):
    make_trainer(demo_tokenizer, tmp_path / "run", max_steps=4, save_steps=1, save_total_limit=2).train()
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == ["step-3", "step-4"]


def test_checkpoints_load_with_transformers_as_they_are(demo_tokenizer, tmp_path):
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", max_steps=2)
    trainer.train()
    trainer.save_model(tmp_path / "saved")
    ids = torch.tensor([[5, 6, 7]])
    expected = trainer.policy.model(ids).logits
    for folder in (tmp_path / "run" / "checkpoints" / "step-2", tmp_path / "saved"):
        assert torch.equal(AutoModelForCausalLM.from_pretrained(folder)(ids).logits, expected)
        assert AutoTokenizer.from_pretrained(folder)("1+2")["input_ids"] == demo_tokenizer("1+2")["input_ids"]


def test_the_same_seed_gives_the_same_run_and_another_seed_another(demo_tokenizer, tmp_path):
    runs = {}
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        make_trainer(demo_tokenizer, tmp_path / name, max_steps=2, seed=seed).train()
        runs[name] = [without_times(m) for m in lines(tmp_path / name)]
    assert runs["a"] == runs["b"]
    assert runs["a"][0]["reward/mean"] != runs["c"][0]["reward/mean"]


def test_the_run_learns(demo_tokenizer, tmp_path):
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", max_steps=25, rewards=digits_reward)
    rewards = [metrics["reward/mean"] for metrics in trainer.steps()]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2


def test_a_step_without_any_signal_is_skipped(demo_tokenizer, tmp_path):
    def second_step_dead(completions, **_):
        calls.append(1)
        return [0.0] * 16 if len(calls) == 3 else digits_reward(completions)  # the first call is the dry run

    calls = []
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", max_steps=3, rewards=second_step_dead, weight_decay=0.1)
    steps = trainer.steps()
    first = next(steps)
    before = parameters(trainer)
    second = next(steps)
    assert (first["updates_skipped"], second["updates_skipped"], second["grad_norm"]) == (0, 1, 0)
    assert all(torch.equal(value, before[name]) for name, value in parameters(trainer).items())
    assert trainer.policy.version == 1
    next(steps)
    assert trainer.policy.version == 2


def test_a_reward_that_fails_leaves_a_checkpoint_of_the_last_whole_step(demo_tokenizer, tmp_path):
    def fails_once(completions, **_):
        calls.append(1)
        if len(calls) == 4:
            raise TimeoutError("judge")
        return digits_reward(completions)

    calls = []
    with pytest.raises(RewardError, match="TimeoutError: judge"):
        make_trainer(demo_tokenizer, tmp_path / "run", max_steps=4, rewards=fails_once, save_steps=0).train()
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-2"]
    resumed = make_trainer(demo_tokenizer, tmp_path / "run", max_steps=4, rewards=fails_once, save_steps=0)
    resumed.train(resume=True)
    straight = make_trainer(demo_tokenizer, tmp_path / "straight", max_steps=4)
    straight.train()
    for name, value in parameters(straight).items():
        assert torch.equal(parameters(resumed)[name], value), name


def test_a_reward_that_fails_in_an_evaluation_keeps_the_whole_step_before_it(demo_tokenizer, tmp_path):
    def fails_in_evaluation(completions, **_):
        calls.append(1)
        if len(calls) == 7:  # two dry runs, the evaluation before, step 1, step 2, its evaluation is call 6
            raise TimeoutError("judge")
        return digits_reward(completions)

    calls = [0]
    settings = {"eval_rows": ROWS[:4], "eval_steps": 2, "max_steps": 4, "save_steps": 0}
    with pytest.raises(RewardError, match="TimeoutError: judge .*a checkpoint of step 2 is kept"):
        make_trainer(demo_tokenizer, tmp_path / "run", rewards=fails_in_evaluation, **settings).train()
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-2"]


def test_other_prompts_or_rewards_are_not_a_resumed_run(demo_tokenizer, tmp_path):
    def other_reward(completions, **_):
        return [0.0] * len(completions)

    make_trainer(demo_tokenizer, tmp_path / "run", max_steps=1).train()
    with pytest.raises(RunFolderError, match="its prompts were"):
        make_trainer(demo_tokenizer, tmp_path / "run", max_steps=2, rows=ROWS[::-1]).train(resume=True)
    with pytest.raises(RunFolderError, match="reward functions were digits_reward, now other_reward"):
        make_trainer(demo_tokenizer, tmp_path / "run", max_steps=2, rewards=other_reward).train(resume=True)


def test_an_ending_schedule_is_not_stretched(demo_tokenizer, tmp_path):
    settings = {"lr_scheduler_type": "linear"}
    make_trainer(demo_tokenizer, tmp_path / "run", max_steps=2, **settings).train()
    with pytest.raises(RunFolderError, match="depends on the end of the run"):
        make_trainer(demo_tokenizer, tmp_path / "run", max_steps=3, **settings).train(resume=True)


def test_a_trainer_runs_once(demo_tokenizer, tmp_path):
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", max_steps=1)
    trainer.train()
    with pytest.raises(RunFolderError, match="has started"):
        trainer.train()


def test_mixtures_of_experts_resume_too(demo_tokenizer, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    from tests.rollout.test_families import ATTENTION

    def trainer(name, **settings):
        torch.manual_seed(0)
        shape = ATTENTION | {"vocab_size": len(demo_tokenizer), "num_local_experts": 4}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **shape))
        return make_trainer(demo_tokenizer, tmp_path / name, model=model, save_steps=1, **settings)

    straight = trainer("straight", max_steps=2)
    straight.train()
    trainer("broken", max_steps=1).train()
    resumed = trainer("broken", max_steps=2)
    resumed.train(resume=True)
    for name, value in parameters(straight).items():
        assert torch.equal(parameters(resumed)[name], value), name


def test_a_generation_config_that_transformers_would_not_write_is_no_reason_to_fail(demo_tokenizer, tmp_path):
    model = tiny_llama(vocab_size=len(demo_tokenizer))
    model.generation_config.temperature = 0.6
    make_trainer(demo_tokenizer, tmp_path / "run", model=model, max_steps=1).train()
    assert (tmp_path / "run" / "checkpoints" / "step-1" / "generation_config.json").exists()


def test_due_counts_from_one():
    assert [step for step in range(1, 6) if due(step, 2)] == [2, 4]
    assert not any(due(step, 0) for step in range(6))
