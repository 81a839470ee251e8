"""Recipe gsm8k: chat format, rows in the form of GSM8K, and a reward that reads the number after ####."""

import json
import re

import pyarrow.parquet
import pytest

from cohort.errors import DataError


def test_answers_in_the_asked_form_are_scored_and_learned_from(run_recipe, gsm8k_data, tiny_chat_model):
    # A random model writes no numbers. The form leaves the digit to chance, so that groups have both rewards.
    form = ("--rollout.regex", "#### [2-5]", "--rollout.max_completion_length", "8", "--model.precision", "float32")
    size = ("--rollout.prompts_per_step", "2", "--rollout.num_generations", "6", "--run.max_steps", "1")
    run = run_recipe(
        "gsm8k", *gsm8k_data, "--model.path", tiny_chat_model, *form, *size, "--optim.lr_scheduler_type", "constant",
        "--optim.warmup_steps", "0",
    )  # fmt: skip
    table = pyarrow.parquet.read_table(run / "rollouts" / "step-1.parquet").to_pylist()
    assert len(table) == 12
    for row in table:
        assert row["prompt"].startswith("<|system|>Solve the problem step by step. End with a line '#### '")
        (eggs,) = re.findall(r"<\|user\|>Ann has (\d) eggs and eats one\.<\|end\|><\|assistant\|>$", row["prompt"])
        assert row["reward"] == float(row["completion"].removesuffix("<eos>") == f"#### {int(eggs) - 1}")
    assert 0 < sum(row["reward"] for row in table) < 12
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["updates"], summary["completions"]) == (1, 12)
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert "eval/rewards/gsm8k/mean" in last


def test_a_file_of_other_columns_is_refused(run_recipe, tiny_chat_model, tmp_path):
    (tmp_path / "wrong.jsonl").write_text('{"problem": "1+1", "answer": "#### 2"}\n' * 16)
    data = ("--data.train", tmp_path / "wrong.jsonl", "--data.eval", "")
    with pytest.raises(DataError, match="question"):
        run_recipe("gsm8k", *data, "--model.path", tiny_chat_model)
