"""``log_completions``: the table on the console and in trackers."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from cohort.callbacks import ScoredRollout
from cohort.rewards.runner import Scores
from cohort.trl import GRPOConfig, GRPOTrainer
from cohort.trl.logs import CompletionTables, LastRollout
from cohort.types import Completion, FinishReason, Group, Prompt
from tests.conftest import tiny_llama
from tests.train.harness import ROWS, digits_reward


def group(prompt, *texts):
    completions = (Completion.of_tokens([1], [-0.5], FinishReason.EOS, text, 0) for text in texts)
    return Group(Prompt(0, 0, (1,), "rendered", prompt, {}), tuple(completions))


@pytest.fixture
def tables():
    last = LastRollout()
    scores = Scores(
        rewards_S=torch.tensor([1.0, 0.5, 0.25, 0.0]),
        by_function_SK=torch.tensor([[1.0], [0.5], [0.25], [float("nan")]]),
        names=("good",),
        extras={"answer": ["4", "5", None, "6"]},
    )
    groups = [group("1+3=", "four", "[red]five\x1b[2J"), group([{"role": "user", "content": "2+3="}], "six", "seven")]
    last.on_rollout(None, ScoredRollout(1, groups, scores, [[0.7, 0.7], [-0.7], [0.0], None]))
    return CompletionTables(last)


def tell(tables, logs, **settings):
    args = GRPOConfig("out", log_completions=True, **settings)
    tables.on_log(args, SimpleNamespace(global_step=7), None, logs=logs)


def test_every_completion_is_printed_as_it_is(tables, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    tell(tables, {"reward": 0.4})
    printed = capsys.readouterr().out
    for text in ("Step 7", "prompt", "good", "answer", "four", r"[red]five\x1b[2J", "USER", "0.70", "-0.70", "nan"):
        assert text in printed


def test_a_sample_is_printed_with_entries_of_training_alone(tables, capsys):
    tell(tables, {"reward": 0.4}, num_completions_to_print=1)
    printed = capsys.readouterr().out
    assert sum(word in printed for word in ("four", "five", "six", "seven")) == 1
    tell(tables, {"eval_reward": 0.4})
    CompletionTables(LastRollout()).on_log(None, None, None, logs={"reward": 0.4})
    assert capsys.readouterr().out == ""


def test_trackers_get_the_table(tables, monkeypatch):
    sent = []
    wandb = SimpleNamespace(run=object(), log=sent.append, Table=lambda dataframe: dataframe)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    tell(tables, {"reward": 0.4}, report_to="wandb")
    tell(tables, {"reward": 0.4}, report_to="wandb", log_unique_prompts=True)
    tell(tables, {"reward": 0.4})
    everything, unique = (one["completions"] for one in sent)
    assert list(everything) == ["step", "prompt", "completion", "good", "advantage", "answer"]
    assert list(everything["advantage"]) == [0.7, -0.7, 0.0, 0.0]
    assert list(unique["completion"]) == ["four", "six"]


def test_a_run_prints_its_completions(demo_tokenizer, tmp_path, capsys):
    args = GRPOConfig(
        str(tmp_path / "run"),
        per_device_train_batch_size=4,
        num_generations=2,
        max_completion_length=4,
        max_steps=1,
        logging_steps=1,
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        log_completions=True,
        disable_tqdm=True,
    )
    model = tiny_llama(vocab_size=len(demo_tokenizer))
    trainer = GRPOTrainer(model, lambda completions, **_: digits_reward(completions), args, ROWS, None, demo_tokenizer)
    trainer.train()
    assert "Step 1" in capsys.readouterr().out
