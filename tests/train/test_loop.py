"""The training loop on a tiny model: log-probs, reference, metrics, checkpoints and resuming."""

import math
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import cohort.train.loop as loop_module
from cohort.errors import PolicyMismatchError, RunFolderError
from tests.conftest import tiny_llama
from tests.train.harness import (
    ROWS,
    break_after,
    digits_reward,
    make_trainer,
    metrics_of,
    rows_of,
    same_parameters,
    shift_sampler_logps,
    straight_and_resumed,
    untimed_metrics_of,
)


def weights_of(policy):
    return [parameter.detach().clone() for parameter in policy.model.parameters()]


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def run(demo_tokenizer, tmp_path_factory):
    """A run of two steps with a reference, an evaluation and a checkpoint of each step: its trainer and its folder."""
    folder = tmp_path_factory.mktemp("loop") / "run"
    model = tiny_llama(vocab_size=len(demo_tokenizer))
    model.generation_config.temperature = 0.6  # without do_sample, transformers would refuse to write it
    settings = {"model": model, "max_steps": 2, "beta": 0.1, "eval_rows": ROWS[:4], "eval_steps": 2, "save_steps": 1}
    trainer = make_trainer(demo_tokenizer, folder, **settings)
    trainer.start = weights_of(trainer.policy)
    trainer.train()
    return trainer, folder


@pytest.fixture
def finished(run, tmp_path):
    """A copy of the run's folder, and a function that makes a trainer which would resume it."""
    shutil.copytree(run[1], tmp_path / "run")
    tokenizer = run[0].tokenizer

    def again(**changes):
        settings = {"max_steps": 2, "beta": 0.1, "eval_rows": ROWS[:4], "eval_steps": 2, "save_steps": 1}
        return make_trainer(tokenizer, tmp_path / "run", **settings | changes)

    return tmp_path / "run", again


# Log-probs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "old", "ref"), [({}, 0, 0), ({"num_iterations": 4}, 1, 0), ({"minibatches": 2, "beta": 0.1}, 1, 1)]
)
def test_which_log_probs_are_computed(demo_tokenizer, tmp_path, monkeypatch, settings, old, ref):
    calls = []
    real = loop_module.policy_logps
    monkeypatch.setattr(
        loop_module, "policy_logps", lambda context, policy, *a: calls.append(policy) or real(context, policy, *a)
    )
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", max_steps=1, **settings)
    (metrics,) = trainer.steps()
    assert sum(policy is trainer.policy for policy in calls) == old
    assert sum(policy is trainer.reference for policy in calls) == ref
    assert (trainer.reference is None) == (ref == 0)
    assert trainer.policy.version == metrics["updates"] == trainer.args.objective.updates_per_rollout
    if "num_iterations" in settings:  # later updates move away from the old policy
        assert metrics["tokens/clipped_low_share"] + metrics["tokens/clipped_high_share"] > 0


def test_with_one_update_per_rollout_all_ratios_are_1(run):
    for metrics in metrics_of(run[1])[1:]:
        assert metrics["tokens/clipped_low_share"] == metrics["tokens/clipped_high_share"] == 0
        assert metrics["policy_value"] == pytest.approx(0, abs=1e-8)  # float32 advantages
        assert metrics["grad_norm"] > 0
        assert metrics["sampler/gap"] < 1e-5  # float32
        assert abs(metrics["sampler/kl_k1_drift"]) < 1e-5


@pytest.mark.parametrize(
    ("gap", "settings"),  # float32 explains a gap of 0.01
    [(0.02, {}), (math.nan, {}), (0.02, {"num_iterations": 2}), (math.nan, {"dropout": True})],
)
def test_a_sampler_that_disagrees_stops_the_run_before_its_first_update(
    demo_tokenizer, tmp_path, monkeypatch, gap, settings
):
    """The update's own log-probs show it; with several updates the old ones, and with dropout a pass without it."""
    shift_sampler_logps(monkeypatch, lambda: gap)
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", max_steps=2, **settings)
    before = weights_of(trainer.policy)
    with pytest.raises(PolicyMismatchError, match="nats from the trainer's"):
        trainer.train()
    assert equal(weights_of(trainer.policy), before)


@pytest.mark.parametrize(("gap", "precision"), [(0.009, "float32"), (0.05, "bfloat16")])
def test_a_small_gap_does_not_stop_the_run(demo_tokenizer, tmp_path, monkeypatch, gap, precision):
    shift_sampler_logps(monkeypatch, lambda: gap)
    make_trainer(demo_tokenizer, tmp_path / "run", max_steps=1, precision=precision).train()
    assert metrics_of(tmp_path / "run")[-1]["sampler/gap"] == pytest.approx(gap, rel=0.4)


def test_a_sampler_that_disagrees_stops_a_resumed_run_too(run, finished, monkeypatch):
    folder, again = finished
    lines = untimed_metrics_of(folder)
    shift_sampler_logps(monkeypatch, lambda: 0.2)
    trainer = again(max_steps=3)
    with pytest.raises(PolicyMismatchError, match="nats from the trainer's"):
        trainer.train(resume=True)
    assert same_parameters(run[0], trainer)
    assert untimed_metrics_of(folder) == lines


# The reference --------------------------------------------------------------------------------------------------------


def test_the_reference_is_the_first_policy(run):
    trainer, folder = run
    assert equal(weights_of(trainer.reference), trainer.start)
    assert not equal(weights_of(trainer.policy), trainer.start)
    first, second = metrics_of(folder)[1:]
    assert first["kl/k3"] == pytest.approx(0, abs=1e-9)
    assert second["kl/k3"] > 1e-6


def test_a_synced_reference_moves_every_so_many_updates(demo_tokenizer, tmp_path):
    settings = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 3, "ref_model_mixup_alpha": 0.25}
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", max_steps=3, minibatches=2, **settings)
    moved, before = [], weights_of(trainer.reference)
    for _ in trainer.steps():
        last, before = before, weights_of(trainer.reference)
        moved.append(not equal(last, before))
    assert moved == [False, True, True]  # updates 2, 4 and 6: the multiples of 3 fall into steps 2 and 3
    for old, new, policy in zip(last, before, weights_of(trainer.policy), strict=True):
        torch.testing.assert_close(new, 0.75 * old + 0.25 * policy)  # update 6 is the last


# Metrics --------------------------------------------------------------------------------------------------------------


def test_metrics_are_written_every_step(run):
    before, first, second = metrics_of(run[1])
    assert [line["step"] for line in (before, first, second)] == [0, 1, 2]
    evaluated = {key for key in second if key.startswith("eval/")}
    assert set(before) == {"step", "time"} | evaluated
    assert "eval/reward/mean" in evaluated
    assert not evaluated & set(first)
    prefixes = {"reward", "groups", "length", "advantage", "tokens", "gradient", "ratio", "ess", "sampler", "kl"}
    assert prefixes | {"seconds"} <= {key.split("/")[0] for key in first}
    names = {"policy_value", "kl_value", "entropy", "grad_norm", "learning_rate", "updates", "update_kl", "beta"}
    assert names <= set(first)
    assert "loss" not in first


def test_the_metrics_of_each_update(run):
    trainer, folder = run
    line, (update,) = metrics_of(folder)[-1], trainer.last_updates
    same = ("grad_norm", "learning_rate", "tokens", "entropy", "policy_value", "kl_value_weighted", "kl/k3_weighted")
    assert {key: update[key] for key in (*same, "clip/high_max")} == {
        key: line[key] for key in (*same, "clip/high_max")
    }
    assert update.keys() <= line.keys()
    assert "each_update" not in line


def test_every_metric_is_documented(run):
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    for key in metrics_of(run[1])[-1]:
        name = key.replace("digits_reward", "NAME").replace("pass@1", "pass@K")
        assert f"`{name}`" in page, name


def test_metric_values_by_hand(run):
    metrics, rows = metrics_of(run[1])[1], rows_of(run[1])
    rewards = torch.tensor([row["reward"] for row in rows])
    lengths = [len(row["token_ids"]) for row in rows]
    assert metrics["reward/mean"] == pytest.approx(rewards.mean().item())
    assert metrics["reward/std"] == pytest.approx(rewards.std(correction=0).item(), rel=1e-5)  # float32
    within = rewards.view(4, 4).std(1, correction=0).mean().item()
    assert metrics["reward/within_group_std"] == pytest.approx(within, rel=1e-5)
    assert metrics["length/mean"] == pytest.approx(sum(lengths) / 16)
    assert metrics["length/cut_share"] == sum(row["finish_reason"] == "length" for row in rows) / 16
    assert metrics["tokens"] == sum(lengths)
    assert len({row["group"] for row in rows}) == 4
    assert all(len(row["token_ids"]) == len(row["sampler_logps"]) for row in rows)


def test_unscored_completions_are_counted_and_left_out(demo_tokenizer, tmp_path):
    def first_some_then_none(completions, trainer_state, **_):
        later = trainer_state.global_step > 0
        return [None if later or i % 4 == 0 else float(i) for i in range(len(completions))]

    trainer = make_trainer(demo_tokenizer, tmp_path / "run", max_steps=2, rewards=first_some_then_none)
    some, none = trainer.steps()
    assert some["reward/unscored"] == 4
    assert some["reward/mean"] == pytest.approx(sum(i for i in range(16) if i % 4) / 12)
    assert (none["reward/mean"], none["grad_norm"], none["groups/dead_share"]) == (None, 0, 1)


# Steps ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"top_entropy": 0.5}], ids=["no pass", "passes, and a gradient of 0"])
def test_a_step_without_any_signal_is_skipped(demo_tokenizer, tmp_path, settings):
    def second_step_dead(completions, trainer_state, **_):
        return [0.0] * len(completions) if trainer_state.global_step == 1 else digits_reward(completions)

    settings |= {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 4, "weight_decay": 0.1}
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", max_steps=3, rewards=second_step_dead, **settings)
    steps = trainer.steps()
    first = next(steps)
    before = weights_of(trainer.policy)
    second = next(steps)
    assert (first["updates_skipped"], second["updates_skipped"], second["grad_norm"]) == (0, 1, 0)
    assert equal(weights_of(trainer.policy), before)
    assert trainer.policy.version == 1
    third = next(steps)
    assert trainer.policy.version == 2
    rates = [line["learning_rate"] for line in (first, second, third)]
    assert rates == pytest.approx([0.25e-2, 0.5e-2, 0.5e-2])  # a skipped update does not warm up


# Checkpoints and resuming ---------------------------------------------------------------------------------------------


def noisy_reward(completions, **_):
    """Draws from every global generator."""
    return [random.random() + np.random.normal() + torch.rand(1).item() for _ in completions]


def test_a_resumed_run_equals_an_uninterrupted_one(demo_tokenizer, tmp_path):
    """With tied embeddings, a learning rate that changes in every step, a reference that moves and a reward that draws
    random numbers."""
    settings = {"lr_scheduler_type": "cosine", "warmup_steps": 2, "save_steps": 2, "max_steps": 4, "minibatches": 2}
    settings |= {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2}

    def make(folder):
        model = tiny_llama(vocab_size=len(demo_tokenizer), tie_word_embeddings=True)
        return make_trainer(demo_tokenizer, folder, model=model, rewards=noisy_reward, **settings)

    _, resumed = straight_and_resumed(make, tmp_path, stop=3)  # the checkpoint is of step 2: step 3 is repeated
    assert (resumed.summary["steps"], resumed.summary["completions"]) == (4, 64)
    assert resumed.policy.model.lm_head.weight is resumed.policy.model.model.embed_tokens.weight


def test_checkpoints_load_with_transformers(run, tmp_path):
    trainer, folder = run
    trainer.save_model(tmp_path / "saved")
    assert (folder / "checkpoints" / "step-2" / "generation_config.json").exists()
    ids = torch.tensor([[5, 6, 7]])
    expected = trainer.policy.model(ids).logits
    for path in (folder / "checkpoints" / "step-2", tmp_path / "saved"):
        assert torch.equal(AutoModelForCausalLM.from_pretrained(path)(ids).logits, expected)
        assert AutoTokenizer.from_pretrained(path)("1+2")["input_ids"] == trainer.tokenizer("1+2")["input_ids"]


def test_when_every_checkpoint_is_broken(finished):
    folder, again = finished
    for path in (folder / "checkpoints").iterdir():
        (path / "state" / "reference.safetensors").write_bytes(b"")
    with pytest.raises(
        RunFolderError, match=r"no whole checkpoint to resume from: .*step-2: state/ref.*; .*step-1: st"
    ):
        again().train(resume=True)


def test_a_checkpoint_holds_nothing_but_safetensors_and_text(run):
    folder = run[1] / "checkpoints" / "step-2"
    for path in (path for path in folder.rglob("*") if path.is_file()):
        if path.suffix == ".safetensors":
            assert load_file(path)
        else:
            path.read_text(encoding="utf-8")
    names = load_file(folder / "state" / "optimizer.safetensors").keys()
    assert {"lm_head.weight/exp_avg", "lm_head.weight/exp_avg_sq", "lm_head.weight/step"} < names
    assert {name.rpartition("/")[0] for name in names} == dict(run[0].policy.model.named_parameters()).keys()


def test_a_run_that_is_killed_while_it_is_made_longer_goes_on(finished):
    folder, again = finished
    break_after(again(max_steps=4), 3, resume=True)
    assert again(max_steps=4).train(resume="auto")["steps"] == 4
    assert [line["step"] for line in metrics_of(folder)] == [0, 1, 2, 3, 4]


def other_reward(completions, **_):
    return [0.0] * len(completions)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": ROWS[::-1]}, "prompts: other prompts"),
        ({"rewards": other_reward}, "rewards: the run has digits_reward, now other_reward"),
        ({"epsilon": 0.3}, "--allow-changed objective.epsilon"),
    ],
)
def test_a_run_is_not_resumed_as_another_one(finished, changes, message):
    with pytest.raises(RunFolderError, match=message):
        finished[1](max_steps=3, **changes).train(resume=True)


def test_what_is_allowed_to_change_does(finished):
    run = finished[1](max_steps=3, learning_rate=0.5)
    run.train(resume=True, allow_changed=["optim.learning_rate"])
    assert run.optimizer.learning_rate == 0.5


def test_a_reference_that_a_checkpoint_lacks_is_said_to_be_missing(demo_tokenizer, tmp_path):
    make_trainer(demo_tokenizer, tmp_path / "run", max_steps=1).train()
    with pytest.raises(RunFolderError, match="step-1 has no reference policy"):
        make_trainer(demo_tokenizer, tmp_path / "run", max_steps=2, beta=0.1).train(
            resume=True, allow_changed=["objective.beta"]
        )


def test_a_run_that_is_made_longer_has_the_rates_of_the_longer_one(demo_tokenizer, tmp_path, capsys):
    linear = {"lr_scheduler_type": "linear", "learning_rate": 0.1}
    make_trainer(demo_tokenizer, tmp_path / "run", max_steps=1, **linear).train()
    longer = make_trainer(demo_tokenizer, tmp_path / "run", max_steps=4, progress=True, **linear)
    rates = [metrics["learning_rate"] for metrics in longer.steps(resume=True)]
    assert rates == pytest.approx([0.075, 0.05, 0.025])
    said = "run.max_steps: the run has 1, now 4; the learning rate (linear) goes on as that of a run with the new end"
    assert said in capsys.readouterr().out


def test_a_folder_that_is_not_empty_is_left_alone(finished, demo_tokenizer, tmp_path):
    folder, again = finished
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(RunFolderError, match="already holds a run"):
        again().train()
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("precious")
    with pytest.raises(RunFolderError, match="is not empty"):
        make_trainer(demo_tokenizer, tmp_path / "other", max_steps=1).train()


def test_a_trainer_runs_once(run):
    with pytest.raises(RunFolderError, match="has started"):
        run[0].train()
