"""Runs whose data is more than a list of rows: epochs to their last prompt, mixtures, curricula, streams, limits."""

import json
from collections import Counter

import pyarrow.parquet
import pytest
import torch
from datasets import Dataset

from cohort import GRPOConfig, GRPOTrainer
from cohort.config import Source
from cohort.data import DataCursor
from cohort.errors import CohortError, ConfigError, DataError, RunFolderError
from tests.train.harness import ROWS, SETTINGS, digits_reward, make_trainer, parameters


def rollouts(folder):
    steps = sorted((folder / "rollouts").iterdir(), key=lambda path: int(path.stem.removeprefix("step-")))
    return [pyarrow.parquet.read_table(path).to_pylist() for path in steps]


def rows_of_steps(folder):
    """The rows of each step, one per group."""
    return [list({line["group"]: line["row"] for line in step}.values()) for step in rollouts(folder)]


def without_times(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if "time" not in k and "second" not in k} for line in lines]


def same_parameters(one, other):
    return all(torch.equal(parameters(other)[name], value) for name, value in parameters(one).items())


def test_the_last_step_of_the_epochs_takes_what_is_left(demo_tokenizer, tmp_path):
    # 20 rows, 2 epochs, 16 a step: 16, 16 and 8, of which the second step spans the epochs' border; and the last step
    # has fewer prompts than there are minibatches.
    settings = {"prompts_per_step": 16, "num_epochs": 2, "minibatches": 16, "num_generations": 2}
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", **settings)
    assert "2 epochs = 3 rollouts = 40 updates, the last of 8 prompts" in trainer.describe()
    summary = trainer.train()
    taken = rows_of_steps(tmp_path / "run")
    assert [len(rows) for rows in taken] == [16, 16, 8]
    flat = [row for rows in taken for row in rows]
    assert sorted(flat[:20]) == sorted(flat[20:]) == list(range(20))
    assert (summary["steps"], summary["completions"]) == (3, 80)
    assert [line["updates"] for line in without_times(tmp_path / "run")] == [16, 16, 8]


def test_a_last_step_of_one_completion(demo_tokenizer, tmp_path):
    # Nothing to compare it with: its advantage is 0, and nothing fails.
    settings = {"prompts_per_step": 2, "num_generations": 1, "baseline": "batch_mean", "scale": "batch_std"}
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", rows=ROWS[:3], **settings)
    assert trainer.train()["steps"] == 2
    assert [line["advantage"] for line in rollouts(tmp_path / "run")[1]] == [0.0]


def test_more_epochs_after_a_short_last_step(demo_tokenizer, tmp_path, capsys):
    settings = {"prompts_per_step": 8, "num_generations": 2, "rows": ROWS[:10]}
    make_trainer(demo_tokenizer, tmp_path / "run", num_epochs=1, **settings).train()
    make_trainer(demo_tokenizer, tmp_path / "run", num_epochs=2, **settings).train(resume=True)
    with pytest.raises(ConfigError, match="is complete: it is at step 4 of 4; raise run.num_epochs or run.max_steps"):
        make_trainer(demo_tokenizer, tmp_path / "run", num_epochs=2, **settings).train(resume=True)
    capsys.readouterr()
    make_trainer(demo_tokenizer, tmp_path / "run", num_epochs=3, progress=True, **settings).train(resume=True)
    said = capsys.readouterr().out
    assert "\nstep 5/6 " in said
    assert "\nstep 6/6 " in said
    taken = rows_of_steps(tmp_path / "run")
    assert [len(rows) for rows in taken] == [8, 2, 8, 2, 8, 2]
    assert sorted(taken[2] + taken[3]) == sorted(taken[4] + taken[5]) == list(range(10))


def test_a_mixture_says_which_source_a_row_is_of(demo_tokenizer, tmp_path):
    sources = [Source(path=ROWS[:10], name="few", weight=3.0), Source(path=ROWS[10:], name="many", weight=1.0)]
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", rows=sources, max_steps=2)
    trainer.train()
    lines = [line for step in rollouts(tmp_path / "run") for line in step]
    assert Counter(line["source"] for line in lines) == {"few": 24, "many": 8}
    for line in lines:
        rows = ROWS[:10] if line["source"] == "few" else ROWS[10:]
        assert line["prompt"] == rows[line["row"]]["prompt"]
    alone = make_trainer(demo_tokenizer, tmp_path / "alone", max_steps=1)
    alone.train()
    assert "source" not in rollouts(tmp_path / "alone")[0][0]


@pytest.mark.parametrize("stop", [3, 5, 6])
def test_a_measured_curriculum_resumes_exactly(demo_tokenizer, tmp_path, stop):
    # 10 rows, 4 a step: steps 3, 5 and 8 span or end a pass.
    settings = {"order": "curriculum", "curriculum": "measured", "max_steps": 8, "save_steps": 1, "rows": ROWS[:10]}
    straight = make_trainer(demo_tokenizer, tmp_path / "straight", **settings)
    straight.train()
    broken = make_trainer(demo_tokenizer, tmp_path / "broken", **settings)
    for metrics in broken.steps():
        if metrics["step"] == stop:
            break
    resumed = make_trainer(demo_tokenizer, tmp_path / "broken", **settings)
    resumed.train(resume=True)
    assert same_parameters(straight, resumed)
    assert without_times(tmp_path / "broken") == without_times(tmp_path / "straight")
    steps = rollouts(tmp_path / "straight")
    rows = [row for step in rows_of_steps(tmp_path / "straight") for row in step]
    assert sorted(rows[10:20]) == list(range(10))
    # The second pass begins in step 3, after two steps that measured eight rows; those come by their rewards.
    rewards = {}
    for line in steps[0] + steps[1]:
        rewards.setdefault(line["row"], []).append(line["reward"])
    means = [sum(rewards[row]) / 4 for row in rows[10:18]]
    assert means == sorted(means, reverse=True)


def test_a_reward_that_fails_in_a_curriculum_loses_nothing(demo_tokenizer, tmp_path):
    # The checkpoint is written in the middle of the step that begins the second pass.
    settings = {"order": "curriculum", "curriculum": "measured", "max_steps": 5, "rows": ROWS[:10]}
    straight = make_trainer(demo_tokenizer, tmp_path / "straight", **settings)
    straight.train()
    calls = []

    def fails_once(completions, **columns):
        calls.append(1)
        if len(calls) == 4:  # the trial, steps 1 and 2, and then step 3
            raise TimeoutError("judge")
        return digits_reward(completions)

    fails_once.__name__ = "digits_reward"
    with pytest.raises(CohortError, match="judge"):
        make_trainer(demo_tokenizer, tmp_path / "broken", rewards=fails_once, **settings).train()
    resumed = make_trainer(demo_tokenizer, tmp_path / "broken", **settings)
    resumed.train(resume=True)
    assert same_parameters(straight, resumed)


def test_a_streamed_run_resumes_exactly(demo_tokenizer, tmp_path):
    rows = [row | {"prompt": "1" * 9} if n % 6 == 5 else row for n, row in enumerate(ROWS)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = {
        "train": tmp_path / "rows.jsonl",
        "streaming": True,
        "shuffle_buffer": 7,
        "max_prompt_length": 6,
        "overlong_prompts": "drop",
        "max_steps": 7,
        "save_steps": 2,
        "rows": None,
    }
    straight = make_trainer(demo_tokenizer, tmp_path / "straight", **settings)
    summary = straight.train()
    broken = make_trainer(demo_tokenizer, tmp_path / "broken", **settings)
    for metrics in broken.steps():
        if metrics["step"] == 5:
            break
    resumed = make_trainer(demo_tokenizer, tmp_path / "broken", **settings)
    assert resumed.train(resume=True)["completions"] == summary["completions"] == 7 * 4 * 4
    assert same_parameters(straight, resumed)
    assert without_times(tmp_path / "broken") == without_times(tmp_path / "straight")
    taken = [row for rows in rows_of_steps(tmp_path / "straight") for row in rows]
    kept = [n for n in range(20) if n % 6 != 5]
    assert sorted(taken[:17]) == kept  # the first pass
    assert set(taken) == set(kept)


def test_an_iterable_data_set_needs_a_number_of_steps(demo_tokenizer, tmp_path):
    stream = Dataset.from_list(ROWS).to_iterable_dataset()
    with pytest.raises(DataError, match="the training data is streamed, so its length is unknown: set run.max_steps"):
        make_trainer(demo_tokenizer, tmp_path / "run", rows=stream)
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", rows=stream, max_steps=2)
    assert "prompts: streamed; of the first 20: " in trainer.describe()
    assert trainer.train()["steps"] == 2
    with pytest.raises(ConfigError, match="data.streaming reads data of unknown length: set run.max_steps"):
        GRPOConfig(streaming=True)


def test_the_first_prompt_is_said_and_kept(demo_tokenizer, tmp_path, capsys):
    settings = {"format": "chat", "order": "sequential", "max_steps": 1, "progress": True}
    make_trainer(demo_tokenizer, tmp_path / "run", **settings).train()
    text = (tmp_path / "run" / "first_prompt.txt").read_text()
    assert text == "<|user|>1+7<|assistant|>"
    assert f"first prompt (row 0, 5 tokens), as the model reads it:\n  | {text}\n" in capsys.readouterr().out


def test_the_settings_chat_template_is_saved_with_the_tokenizer(demo_tokenizer, tmp_path):
    import copy

    tokenizer = copy.deepcopy(demo_tokenizer)
    template = "{{ messages[0].content }}={% if add_generation_prompt %}<|assistant|>2{% endif %}"
    trainer = make_trainer(tokenizer, tmp_path / "run", format="chat", chat_template=template, max_steps=1)
    trainer.train()
    saved = tmp_path / "run" / "checkpoints" / "step-1" / "chat_template.jinja"
    assert saved.read_text() == template
    assert trainer.prompts.fetch(DataCursor(), 1)[0].text.endswith("=<|assistant|>2")


def test_prompts_that_are_too_long_for_the_context(demo_tokenizer, tmp_path):
    rows = [*ROWS, {"prompt": "1" * 60, "answer": "1"}]  # the tiny model's context is 128
    settings = {"rows": rows, "max_completion_length": 100, "max_steps": 1}
    with pytest.raises(
        DataError, match=r"1 of 21 prompts have more than 28 tokens .the model's context of 128 less .*row 20, has 60"
    ):
        make_trainer(demo_tokenizer, tmp_path / "run", **settings)
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", overlong_prompts="drop", **settings)
    assert len(trainer.prompts) == trainer.schedule.num_prompts == 20
    assert "1 longer prompts dropped" in trainer.describe()
    cut = make_trainer(demo_tokenizer, tmp_path / "run", overlong_prompts="truncate_left", **settings)
    assert cut.prompts.longest == 28


@pytest.mark.parametrize(
    ("data", "settings", "message"),
    [
        ([{"prompt": ""}] * 4, {}, "row 0: the prompt is empty"),
        ([{"q": "1"}] * 4, {}, "row 0: no column 'prompt'; the row has: q"),
        (ROWS, {"filter": {"answer": "none"}}, "data.filter leaves none of 20 rows"),
        (ROWS, {"train_rows": 3}, "the training data has 3 prompts, fewer than one step uses"),
        ([row | {"prefill": 1} for row in ROWS], {}, "has a column 'prefill'"),
        ("nowhere.jsonl", {}, "no data file nowhere.jsonl"),
        (ROWS, {"order": "curriculum", "curriculum": "lvl"}, "data.curriculum names column 'lvl'"),
    ],
)
def test_mistakes_in_the_data_are_found_before_a_tokenizer_is_looked_for(data, settings, message):
    with pytest.raises(DataError, match=message):
        GRPOTrainer("./no/such/model", digits_reward, GRPOConfig(**SETTINGS, **settings), data)


def test_a_column_that_orders_is_part_of_what_the_run_is(demo_tokenizer, tmp_path):
    def trainer(sign, **settings):
        rows = [row | {"level": sign * n} for n, row in enumerate(ROWS)]
        settings |= {"order": "curriculum", "curriculum": "level"}
        return make_trainer(demo_tokenizer, tmp_path / "run", rows=rows, **settings)

    trainer(1, max_steps=1).train()
    assert rows_of_steps(tmp_path / "run") == [[0, 1, 2, 3]]
    with pytest.raises(RunFolderError, match="its prompts were"):
        trainer(-1, max_steps=2).train(resume=True)


def test_a_bad_row_in_a_stream_loses_nothing(demo_tokenizer, tmp_path):
    rows = [{"prompt": f"{n % 9}+1", "answer": "1"} for n in range(1100)]
    settings = {"rows": None, "train": tmp_path / "rows.jsonl", "streaming": True, "order": "sequential"}
    settings |= {"prompts_per_step": 525, "num_generations": 2, "max_completion_length": 1, "max_steps": 3}
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    straight = make_trainer(demo_tokenizer, tmp_path / "straight", **settings)
    straight.train()
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, [*rows[:1050], {"prompt": ""}])))
    with pytest.raises(
        DataError,
        match="row 1050: the prompt is empty; in step 3; a checkpoint of step 2 is kept: mend it and resume",
    ):
        make_trainer(demo_tokenizer, tmp_path / "broken", **settings).train()
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    resumed = make_trainer(demo_tokenizer, tmp_path / "broken", **settings)
    resumed.train(resume=True)
    assert same_parameters(straight, resumed)


def test_rows_of_a_stream_that_are_cut_are_counted(demo_tokenizer, tmp_path):
    rows = [{"prompt": "1", "answer": "1"}] * 1000 + [{"prompt": "1" * 60, "answer": "1"}] * 100
    settings = {"streaming": True, "order": "sequential", "max_prompt_length": 5, "overlong_prompts": "truncate_left"}
    settings |= {"prompts_per_step": 520, "num_generations": 2, "max_completion_length": 1, "max_steps": 2}
    make_trainer(demo_tokenizer, tmp_path / "run", rows=rows, **settings).train()
    lines = without_times(tmp_path / "run")
    assert [(line["prompts/dropped"], line["prompts/truncated"]) for line in lines] == [(0, 0), (0, 40)]


def test_the_start_says_what_is_evaluated(demo_tokenizer, tmp_path):
    long = {"prompt": "1" * 60, "answer": "1"}
    sets = {"a": [*ROWS[:5], long], "b": [Source(path=ROWS[:2], name="x"), Source(path=ROWS, name="y", rows=3)]}
    settings = {"max_prompt_length": 20, "max_steps": 1}
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", eval_rows=sets, overlong_prompts="drop", **settings)
    said = trainer.describe()
    assert (
        "\n  a: data: 6 rows\n  a: prompts: 5; 3 to 3 tokens, median 3, 99% at most 3; 1 longer prompts dropped" in said
    )
    assert "\n  b: data: 2 sources, one after another" in said
    assert "\n  b:   y: 20 rows; of these the first 3\n  b: prompts: 5; 3 to 3 tokens" in said
    cut = make_trainer(
        demo_tokenizer, tmp_path / "run", eval_rows=sets["a"], overlong_prompts="truncate_left", **settings
    )
    assert (
        "\n  data: 6 rows\n  prompts: 6; 3 to 20 tokens, median 3, 99% at most 20; 1 longer prompts cut"
        in cut.describe()
    )


def test_a_mixture_whose_small_source_comes_again_is_not_too_small(demo_tokenizer, tmp_path):
    sources = [Source(path=ROWS[:2], name="a", weight=10.0), Source(path=ROWS[2:12], name="b", weight=1.0)]
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", rows=sources, prompts_per_step=16)
    assert trainer.schedule.num_prompts == 110
