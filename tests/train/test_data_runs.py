"""Runs on data of every kind: epochs, mixtures, curricula, streamed data, prompts that are too long."""

import copy
import itertools
import json
from collections import Counter

import pytest
from datasets import Dataset

from cohort import GRPOConfig, GRPOTrainer
from cohort.config import Source
from cohort.data import DataCursor
from cohort.errors import ConfigError, DataError
from tests.conftest import each
from tests.train.harness import (
    ROWS,
    SETTINGS,
    digits_reward,
    make_trainer,
    metrics_of,
    rows_of,
    same_parameters,
    straight_and_resumed,
)


def rollouts(folder):
    return [rows_of(folder, step + 1) for step in range(len(list((folder / "rollouts").iterdir())))]


def prompts_of_steps(folder):
    """The data rows of each step, one per group."""
    return [list({line["group"]: line["row"] for line in step}.values()) for step in rollouts(folder)]


def flat(lists):
    return list(itertools.chain.from_iterable(lists))


def test_the_last_step_of_the_epochs_uses_the_prompts_that_are_left(demo_tokenizer, tmp_path):
    # 5 rows, 2 epochs, 4 per step: 4, 4 and 2. The second step spans both epochs; the last one has fewer prompts than
    # minibatches.
    settings = {"prompts_per_step": 4, "num_epochs": 2, "minibatches": 4, "num_generations": 2, "rows": ROWS[:5]}
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", max_completion_length=2, **settings)
    assert "2 epochs = 3 rollouts = 10 updates, the last of 2 prompts" in trainer.describe()
    summary = trainer.train()
    rows = prompts_of_steps(tmp_path / "run")
    assert [len(step) for step in rows] == [4, 4, 2]
    assert sorted(flat(rows)[:5]) == sorted(flat(rows)[5:]) == list(range(5))
    assert (summary["steps"], summary["completions"]) == (3, 20)
    assert [line["updates"] for line in metrics_of(tmp_path / "run")] == [4, 4, 2]


def test_a_last_step_of_one_completion(demo_tokenizer, tmp_path):
    # Without another completion to compare it with, its advantage is 0.
    settings = {"prompts_per_step": 2, "num_generations": 1, "baseline": "batch_mean", "scale": "batch_std"}
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", rows=ROWS[:3], **settings)
    assert trainer.train()["steps"] == 2
    assert [line["advantage"] for line in rollouts(tmp_path / "run")[1]] == [0.0]


def test_more_epochs_after_a_short_last_step(demo_tokenizer, tmp_path, capsys):
    settings = {"prompts_per_step": 8, "num_generations": 2, "rows": ROWS[:10]}
    make_trainer(demo_tokenizer, tmp_path / "run", num_epochs=1, **settings).train()
    with pytest.raises(ConfigError, match="is complete: it is at step 2 of 2; raise run.num_epochs or run.max_steps"):
        make_trainer(demo_tokenizer, tmp_path / "run", num_epochs=1, **settings).train(resume=True)
    capsys.readouterr()
    make_trainer(demo_tokenizer, tmp_path / "run", num_epochs=2, progress=True, **settings).train(resume=True)
    shown = capsys.readouterr().out
    assert "\nstep 3/4 " in shown
    assert "\nstep 4/4 " in shown
    rows = prompts_of_steps(tmp_path / "run")
    assert [len(step) for step in rows] == [8, 2, 8, 2]
    assert sorted(rows[0] + rows[1]) == sorted(rows[2] + rows[3]) == list(range(10))


def test_the_rollout_files_of_a_mixture_name_the_source(demo_tokenizer, tmp_path):
    sources = [Source(path=ROWS[:10], name="few", weight=3.0), Source(path=ROWS[10:], name="many", weight=1.0)]
    make_trainer(demo_tokenizer, tmp_path / "run", rows=sources, max_steps=2).train()
    lines = flat(rollouts(tmp_path / "run"))
    assert Counter(line["source"] for line in lines) == {"few": 24, "many": 8}
    for line in lines:
        rows = ROWS[:10] if line["source"] == "few" else ROWS[10:]
        assert line["prompt"] == rows[line["row"]]["prompt"]
    make_trainer(demo_tokenizer, tmp_path / "alone", max_steps=1).train()
    assert "source" not in rollouts(tmp_path / "alone")[0][0]


def test_a_measured_curriculum_resumes_exactly(demo_tokenizer, tmp_path):
    # 10 rows, 4 per step: the second epoch begins within step 3, after which the run is resumed.
    settings = {"order": "curriculum", "curriculum": "measured", "max_steps": 5, "save_steps": 1, "rows": ROWS[:10]}
    straight_and_resumed(lambda folder: make_trainer(demo_tokenizer, folder, **settings), tmp_path, stop=3)
    steps = rollouts(tmp_path / "straight")
    rows = flat(prompts_of_steps(tmp_path / "straight"))
    assert sorted(rows[10:20]) == list(range(10))
    # Steps 1 and 2 measured eight rows, which the second epoch orders by their rewards.
    rewards = {}
    for line in steps[0] + steps[1]:
        rewards.setdefault(line["row"], []).append(line["reward"])
    means = [sum(rewards[row]) / 4 for row in rows[10:18]]
    assert means == sorted(means, reverse=True)


def test_a_streamed_run_resumes_exactly(demo_tokenizer, tmp_path):
    rows = [row | {"prompt": "1" * 9} if n % 6 == 5 else row for n, row in enumerate(ROWS)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = {"train": tmp_path / "rows.jsonl", "rows": None, "streaming": True, "shuffle_buffer": 7}
    settings |= {"max_prompt_length": 6, "overlong_prompts": "drop", "max_steps": 5, "save_steps": 2}
    straight, resumed = straight_and_resumed(
        lambda folder: make_trainer(demo_tokenizer, folder, **settings), tmp_path, stop=3
    )
    assert straight.summary["completions"] == resumed.summary["completions"] == 5 * 4 * 4
    fetched = flat(prompts_of_steps(tmp_path / "straight"))
    kept = [n for n in range(20) if n % 6 != 5]
    assert sorted(fetched[:17]) == kept  # the first epoch
    assert set(fetched) == set(kept)


def test_streamed_data_needs_a_number_of_steps(demo_tokenizer, tmp_path):
    stream = Dataset.from_list(ROWS).to_iterable_dataset()
    with pytest.raises(DataError, match="the training data is streamed, so its length is unknown: set run.max_steps"):
        make_trainer(demo_tokenizer, tmp_path / "run", rows=stream)
    with pytest.raises(ConfigError, match="data.streaming reads data of unknown length: set run.max_steps"):
        GRPOConfig(streaming=True)
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", rows=stream, max_steps=1)
    assert "prompts: streamed; of the first 20: " in trainer.describe()
    assert trainer.train()["steps"] == 1


def test_the_first_prompt_is_shown_and_saved(demo_tokenizer, tmp_path, capsys):
    template = "{{ messages[0].content }}={% if add_generation_prompt %}<|assistant|>2{% endif %}"
    settings = {"format": "chat", "order": "sequential", "max_steps": 1, "progress": True, "chat_template": template}
    trainer = make_trainer(copy.deepcopy(demo_tokenizer), tmp_path / "run", **settings)
    trainer.train()
    text = (tmp_path / "run" / "first_prompt.txt").read_text()
    assert text == trainer.prompts.fetch(DataCursor(), 1)[0].text == "1+7=<|assistant|>2"
    assert f"first prompt (row 0, 6 tokens), as the model reads it:\n  | {text}\n" in capsys.readouterr().out
    assert (tmp_path / "run" / "checkpoints" / "step-1" / "chat_template.jinja").read_text() == template


def test_prompts_that_are_too_long_for_the_context(demo_tokenizer, tmp_path):
    rows = [*ROWS, {"prompt": "1" * 60, "answer": "1"}]  # the tiny model's context is 128
    settings = {"rows": rows, "max_completion_length": 100, "max_steps": 1}
    with pytest.raises(
        DataError, match=r"1 of 21 prompts have more than 28 tokens .the model's context of 128 less .*row 20, has 60"
    ):
        make_trainer(demo_tokenizer, tmp_path / "run", **settings)
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", overlong_prompts="drop", **settings)
    assert len(trainer.prompts.prompts) == trainer.schedule.num_prompts == 20
    assert "1 longer prompts dropped" in trainer.describe()
    cut = make_trainer(demo_tokenizer, tmp_path / "run", overlong_prompts="truncate_left", **settings)
    assert cut.prompts.prompts.longest == 28


@each(
    ("data", "settings", "message"),
    [
        ([{"prompt": ""}] * 4, {}, "row 0: the prompt is empty"),
        (ROWS, {"filter": {"answer": "none"}}, "data.filter leaves none of 20 rows"),
        (ROWS, {"train_rows": 3}, "the training data has 3 prompts, fewer than one step uses"),
        ("nowhere.jsonl", {}, "no data file nowhere.jsonl"),
        (ROWS, {"order": "curriculum", "curriculum": "lvl"}, "data.curriculum names column 'lvl'"),
    ],
)
def test_errors_in_the_data_are_found_before_the_tokenizer_is_loaded(data, settings, message):
    with pytest.raises(DataError, match=message):
        GRPOTrainer("./no/such/model", digits_reward, GRPOConfig(**SETTINGS, **settings), data)


def test_a_bad_row_in_a_stream_loses_nothing(demo_tokenizer, tmp_path):
    # Rows after the first 1,000 are checked only when they are read. Those after row 1,030 are truncated.
    rows = [{"prompt": "1" * (60 if n > 1030 else 2), "answer": "1"} for n in range(1100)]
    settings = {"rows": None, "train": tmp_path / "rows.jsonl", "streaming": True, "order": "sequential"}
    settings |= {"max_prompt_length": 5, "overlong_prompts": "truncate_left"}
    settings |= {"prompts_per_step": 525, "num_generations": 1, "max_completion_length": 1, "max_steps": 3}
    settings |= {"baseline": "batch_mean", "scale": "batch_std"}

    def trainer(folder, rows):
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        return make_trainer(demo_tokenizer, tmp_path / folder, **settings)

    straight = trainer("straight", rows)
    straight.train()
    counts = [(line["prompts/dropped"], line["prompts/truncated"]) for line in metrics_of(tmp_path / "straight")]
    assert counts == [(0, 0), (0, 19), (0, 50)]
    with pytest.raises(
        DataError,
        match="row 1050: the prompt is empty; in step 3; a checkpoint of step 2 is kept: fix it and resume",
    ):
        trainer("broken", [*rows[:1050], {"prompt": ""}]).train()
    resumed = trainer("broken", rows)
    resumed.train(resume=True)
    assert same_parameters(straight, resumed)


def test_the_description_includes_the_evaluation_data(demo_tokenizer, tmp_path):
    long = {"prompt": "1" * 60, "answer": "1"}
    sets = {"a": [*ROWS[:5], long], "b": [Source(path=ROWS[:2], name="x"), Source(path=ROWS, name="y", rows=3)]}
    settings = {"max_prompt_length": 20, "max_steps": 1, "overlong_prompts": "drop"}
    shown = make_trainer(demo_tokenizer, tmp_path / "run", eval_rows=sets, **settings).describe()
    assert (
        "\n  a: data: 6 rows\n  a: prompts: 5; 3 to 3 tokens, median 3, 99% at most 3; 1 longer prompts dropped"
        in shown
    )
    assert "\n  b: data: 2 sources, one after another" in shown
    assert "\n  b:   y: 20 rows; the first 3 of these\n  b: prompts: 5; 3 to 3 tokens" in shown
