"""GRPOTrainer from Python: its arguments, its errors, and its numeric types."""

import io
import json
import os
import sys

import pytest
import torch
from datasets import Dataset

from cohort import GRPOConfig, GRPOTrainer
from cohort.errors import CohortError, ConfigError, DataError, ModelError, RewardError
from tests.conftest import DEMO_MODEL, each, tiny_llama
from tests.data.templates import byte_tokenizer
from tests.policy.test_vision import made
from tests.train.harness import ROWS, SETTINGS, digits_reward, make_trainer


def test_a_model_folder_and_a_data_set(tmp_path):
    config = GRPOConfig(**SETTINGS, output_dir=str(tmp_path / "run"), max_steps=1)
    trainer = GRPOTrainer(
        model=str(DEMO_MODEL),
        reward_funcs=[digits_reward, "exact_match"],
        args=config,
        train_dataset=Dataset.from_list(ROWS),
        eval_dataset=Dataset.from_list(ROWS[:3]),
    )
    summary = trainer.train()
    assert trainer.rewards.names == ("digits_reward", "exact_match")
    assert summary["updates"] == 1
    assert "eval/reward/mean" in summary["eval_before"]
    assert "eval/reward/mean" in summary["eval_after"]
    trainer.save_model(tmp_path / "saved")
    assert (tmp_path / "saved" / "model.safetensors").exists()


def test_a_run_from_settings_only(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    settings = SETTINGS | {"train": rows, "train_rows": 12, "functions": ["exact_match"], "path": DEMO_MODEL}
    trainer = GRPOTrainer(args=GRPOConfig(**settings, output_dir=tmp_path / "run", max_steps=1))
    assert trainer.train()["steps"] == 1
    assert trainer.schedule.num_prompts == 12


def test_a_loaded_model_is_trained_in_place(demo_tokenizer, tmp_path):
    model = tiny_llama(vocab_size=len(demo_tokenizer))
    before = model.model.embed_tokens.weight.detach().clone()
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", model=model, max_steps=1)
    trainer.train()
    assert trainer.policy.model is model
    assert not torch.equal(before, model.model.embed_tokens.weight)


@pytest.mark.parametrize(
    ("precision", "loaded", "trained", "gap"),
    [("bfloat16", torch.bfloat16, torch.float32, 0.1), ("float64", torch.float32, torch.float64, 1e-6)],
)
def test_types_of_the_trained_weights(demo_tokenizer, tmp_path, precision, loaded, trained, gap):
    model = tiny_llama(vocab_size=len(demo_tokenizer)).to(loaded)
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", model=model, precision=precision, beta=0.1, max_steps=2)
    _, metrics = trainer.steps()
    assert {p.dtype for p in trainer.policy.model.parameters()} == {trained}
    assert metrics["sampler/gap"] < gap  # sampler and trainer compute in the same precision
    assert metrics["grad_norm"] > 0


@each(
    ("arguments", "error", "message"),
    [
        ({"args": {"beta": 0.1}}, ConfigError, "args must be a cohort.GRPOConfig, got dict"),
        ({"train_dataset": None}, DataError, "pass train_dataset"),
        ({"train_dataset": []}, DataError, "the training data has no rows"),
        ({"train_dataset": ROWS[:2]}, DataError, "2 prompts, fewer than one step"),
        ({"train_dataset": iter(ROWS)}, DataError, "must have a length"),
        ({"eval_dataset": [{"q": "1"}]}, DataError, "the evaluation data, row 0: no column 'prompt'"),
        ({"reward_funcs": []}, RewardError, "no reward function"),
        ({"reward_funcs": None}, RewardError, "no reward function"),
        ({"reward_funcs": [1]}, RewardError, "must be callable, got 1"),
        ({"reward_funcs": lambda completions, zzz: []}, RewardError, "needs the argument 'zzz'"),
        ({"model": "./nowhere"}, ModelError, "no model folder ./nowhere"),
    ],
)
def test_errors_from_python(arguments, error, message):
    given = {
        "model": str(DEMO_MODEL),
        "reward_funcs": digits_reward,
        "args": GRPOConfig(**SETTINGS),
        "train_dataset": ROWS,
        **arguments,
    }
    with pytest.raises(error, match=message) as caught:
        GRPOTrainer(**given)
    assert isinstance(caught.value, CohortError)
    assert isinstance(caught.value, ValueError)


@each("where", ["train", "eval", "images"])
def test_tokens_that_the_model_lacks_are_refused_before_the_first_step(demo_tokenizer, tmp_path, where):
    """The model has one token less than its tokenizer, or calls that token an image."""
    model = made("gemma3") if where == "images" else tiny_llama(vocab_size=33)
    if where == "images":
        model.config.image_token_index = model.config.image_token_id = 33
    rows = [*ROWS, {"prompt": "#### 1+1", "answer": "2"}]
    given = {"rows": ROWS, "eval_rows": rows} if where == "eval" else {"rows": rows}
    words = "stands for an image" if where == "images" else r"\('####'\), and the model has embeddings of 33 tokens"
    with pytest.raises(DataError, match=f"row {len(ROWS)} holds token 33.*{words}"):
        make_trainer(demo_tokenizer, tmp_path / "run", model=model, **given)
    assert not (tmp_path / "run").exists()


@each("encoding", ["ascii", "latin-1", "cp1252", "utf-8", "utf-16", None])
def test_no_letter_and_no_reader_of_the_output_ends_a_run(tmp_path_factory, monkeypatch, capfd, encoding):
    """None: the reader has gone. Half of a surrogate pair is no letter of any encoding."""
    if encoding is None:
        reader, writer = os.pipe()
        os.close(reader)
        output, kept = os.fdopen(writer, "w"), None
    else:
        kept = io.BytesIO()
        output = io.TextIOWrapper(kept, encoding=encoding)
    monkeypatch.setattr(sys, "stdout", output)

    def loud(completion, **_):
        print("приклад 例 \ud83d")
        return digits_reward([completion])[0]

    tokenizer = byte_tokenizer()
    rows = [{"prompt": f"приклад {number} 例"} for number in range(4)]
    settings = {"model": tiny_llama(len(tokenizer)), "rewards": loud, "rows": rows, "progress": True, "max_steps": 1}
    trainer = make_trainer(tokenizer, tmp_path_factory.mktemp("loud") / "run", **settings)
    assert trainer.train()["steps"] == 1
    assert sys.stdout is output
    if kept:
        output.flush()
        written = kept.getvalue().decode(encoding)
        assert "\\ud83d" in written
        assert ("例" if "utf" in encoding else "\\u4f8b") in written
        assert "step 1/1" in written
    else:
        assert "standard output is closed; the run goes on" in capfd.readouterr().err
        output.close()


def test_evaluation_items_are_held_out():
    pytest.importorskip("reasoning_gym")
    data = {"train": "reasoning_gym:lcm?size=4", "eval": {"lcm": "reasoning_gym:lcm?size=2&seed=1"}}
    with pytest.raises(DataError, match="items of reasoning_gym:lcm in common"):
        GRPOTrainer(DEMO_MODEL, digits_reward, GRPOConfig(data=data, prompts_per_step=4))


def test_a_model_in_memory_needs_a_tokenizer():
    with pytest.raises(ModelError, match="pass processing_class"):
        GRPOTrainer(tiny_llama(), digits_reward, GRPOConfig(**SETTINGS), ROWS)


def test_the_description(demo_tokenizer, tmp_path):
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", beta=0.25, num_iterations=2, stop=["."])
    text = trainer.describe()
    for part in (
        "float32, on cpu",
        "stop strings ['.'], 0 to",
        "end tokens: '<|end|>' (1)",
        "data: 20 rows",
        "prompts: 20; 3 to 5 tokens, median",
        "order: a new order for each epoch",
        "first prompt (row",
        "beta = 0.25",
        "4 prompts x 4 = 16 completions per rollout, 2 updates each",
        "old log-probs: one no-grad pass per rollout (2 updates use it)",
        "ref log-probs: one no-grad pass per rollout",
    ):
        assert part in text


def test_the_default_folder_is_the_next_free_one(demo_tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "run-001").mkdir(parents=True)
    trainer = make_trainer(demo_tokenizer, None, max_steps=1)
    trainer.train()
    assert str(trainer.folder.path) == "runs/run-002"
