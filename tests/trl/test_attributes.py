"""What scripts read of TRL's trainer, and the loss of an evaluation."""

import logging

import datasets
import pytest
import torch

from tests.conftest import telling
from tests.train.harness import ROWS, digits_reward
from tests.trl.test_trainer import make

SCORED = {"eval_rows": ROWS[:2], "eval_strategy": "steps", "eval_steps": 4, "per_device_eval_batch_size": 4}


def logged(completions, log_extra, **_):
    log_extra("first", [text[:1] for text in completions])
    return digits_reward(completions)


def test_what_can_be_read(demo_tokenizer, tmp_path):
    settings = {"beta": 0.1, "use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_target": 15.0, "max_steps": 4}
    trainer = make(demo_tokenizer, tmp_path / "run", reward=logged, **settings)
    assert trainer._logs["extra"] == {}
    assert (trainer.aux_loss_enabled, trainer.reward_processing_classes, trainer.entropy_coef) == (False, [None], 0.01)
    before = {name: one.clone() for name, one in trainer.ref_model.named_parameters()}
    assert trainer.ref_model is not trainer.model
    trainer.train()
    assert all(torch.equal(one, before[name]) for name, one in trainer.ref_model.named_parameters())
    assert trainer.entropy_coef == pytest.approx(0.01 + 4 * 0.005)  # below the target, it grows with each update
    logs = trainer._logs
    assert logs["extra"]["first"] == [text[:1] for text in logs["completion"]]
    assert len(logs["rewards"]["logged"]) == len(logs["advantages"]) == len(logs["prompt"]) == 8
    assert make(demo_tokenizer, tmp_path / "other").ref_model is None


def by_length(completion_ids, **_):
    return [float(len(ids)) for ids in completion_ids]


@pytest.mark.parametrize("loss", ["dapo", "grpo", "dr_grpo", "luspo", "cispo", "sapo", "vespo"])
def test_the_loss_of_an_evaluation_is_trls(demo_tokenizer, tmp_path, loss):
    """By hand, at ratios of 1, from the completions that it sampled: two batches of two groups."""
    settings = {"loss_type": loss, "per_device_eval_batch_size": 4, "max_completion_length": 8}
    settings |= {"epsilon_high": 5.0} if loss == "cispo" else {}
    trainer = make(demo_tokenizer, tmp_path / "run", eval_rows=ROWS[:4], reward=by_length, **settings)
    found = trainer.evaluate()
    (one,) = trainer.core.evaluations(ROWS[:4]).values()
    rows, losses = one.table.to_pylist(), []
    for batch in (rows[:4], rows[4:]):
        rewards = torch.tensor([row["reward"] for row in batch]).view(2, 2)
        spread = rewards.std(dim=1, keepdim=True) + 1e-4
        advantages = ((rewards - rewards.mean(dim=1, keepdim=True)) / spread).flatten().tolist()
        sums, counts = [], []
        for row, a in zip(batch, advantages, strict=True):
            logps = torch.tensor(row["sampler_logps"])
            gate = 2 / (1.0 if a > 0 else 1.05)
            terms = {"cispo": -a * logps, "vespo": -a * logps, "sapo": -a * gate * torch.ones(len(logps))}
            sums.append(float(terms.get(loss, -a * torch.ones(len(logps))).sum()))
            counts.append(len(logps))
        means = sum(total / count for total, count in zip(sums, counts, strict=True)) / 4
        by_kind = {"grpo": means, "sapo": means, "dr_grpo": sum(sums) / (4 * 8), "luspo": sum(sums) / 4}
        losses.append(by_kind.get(loss, sum(sums) / sum(counts)))
    assert found["eval_loss"] == pytest.approx(sum(losses) / 2, abs=1e-6)


def test_no_loss_of_an_evaluation_that_needs_a_pass(demo_tokenizer, tmp_path):
    assert "eval_loss" not in make(demo_tokenizer, tmp_path / "run", eval_rows=ROWS[:2], beta=0.1).evaluate()


@pytest.mark.parametrize("named", telling([False, True], True))
def test_streams_are_read_whole_for_evaluation(demo_tokenizer, tmp_path, named):
    stream = datasets.Dataset.from_list(ROWS[:2]).to_iterable_dataset()
    given = {"one": stream, "two": stream} if named else stream
    trainer = make(demo_tokenizer, tmp_path / "run", **SCORED | {"eval_rows": given, "max_steps": 4})
    trainer.train()
    keys = {"eval_one_loss", "eval_two_loss", "eval_one_reward"} if named else {"eval_loss", "eval_reward"}
    assert keys <= {key for entry in trainer.state.log_history for key in entry}
    assert keys <= trainer.evaluate(given).keys()


@pytest.mark.parametrize("loss", ["grpo", "dapo", "bnpo", "dr_grpo", "luspo"])
def test_a_sequence_ratio_with_a_loss_that_sums_over_tokens_is_warned_of(demo_tokenizer, tmp_path, caplog, loss):
    make(demo_tokenizer, tmp_path / "run", importance_sampling_level="sequence", loss_type=loss)
    assert ("weights each sequence by its completion length" in caplog.text) == (loss not in ("grpo", "luspo"))


def test_completions_that_no_function_scores_are_warned_of(demo_tokenizer, tmp_path, caplog):
    def none(completions, **_):
        return [None] * len(completions)

    with caplog.at_level(logging.WARNING):
        make(demo_tokenizer, tmp_path / "run", reward=none, max_steps=2).train()
    assert "All reward functions returned None for the following kwargs: {" in caplog.text
    assert ROWS[0]["prompt"] in caplog.text or "'prompt': " in caplog.text


def test_template_variables_that_nothing_reads_have_no_effect(demo_tokenizer, tmp_path, caplog):
    """As in TRL, which says nothing: here a warning names them."""
    chats = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]
    switch = {"chat_template_kwargs": {"enable_thinking": False}}
    text = make(demo_tokenizer, tmp_path / "text", **switch)
    assert "enable_thinking (prompts are text)" in caplog.text
    assert text.core.args.data.chat_template_kwargs == {}
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ style }}{% if add_generation_prompt %}:{% endif %}"
    demo_tokenizer = type(demo_tokenizer).from_pretrained(demo_tokenizer.name_or_path)
    demo_tokenizer.chat_template = template
    switch["chat_template_kwargs"]["style"] = "1"
    chat = make(demo_tokenizer, tmp_path / "chat", rows=chats, **switch)
    assert "enable_thinking (the chat template does not read it)" in caplog.text
    assert chat.core.args.data.chat_template_kwargs == {"style": "1"}
