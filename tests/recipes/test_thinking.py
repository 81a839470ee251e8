"""Recipe thinking: the answer begins with the template's <think>, and thinking without an end is what costs most."""

import json
import statistics

import pyarrow.parquet
import pytest

from cohort.errors import DataError
from tests.data.templates import QWEN3
from tests.recipes.conftest import ROLES

R1 = ROLES.replace("'<|assistant|>' }}{% endif %}", "'<|assistant|><think>\\n' }}{% endif %}")


@pytest.fixture
def data(tmp_path):
    rows = [{"question": f"What is {n} - {n - 1}?", "answer": f"{n} - {n - 1} = 1\n#### 1"} for n in (5, 6)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return "--data.train", tmp_path / "rows.jsonl", "--data.eval", tmp_path / "rows.jsonl"


FORMS = {
    r"a</think>\boxed{1}": (1.0, 1.0, 0.0),  # right, of the form, no penalty
    r"a</think>\boxed{2}": (0.0, 1.0, 0.0),
    r"c</think>\boxed{1}</think>": (0.0, 0.0, 0.0),
    "b" * 40: (0.0, 0.0, -1.0),  # the budget is spent before the thinking ends
}


def test_the_prefilled_tag_counts_and_thinking_must_end(run_recipe, tiny_chat_model, data):
    form = r"a</think>\\boxed\{[12]\}|c</think>\\boxed\{1\}</think>|b{60}"
    run = run_recipe(
        "thinking", *data, "--model.path", tiny_chat_model, "--data.chat_template", R1, "--rollout.regex", form,
        "--rollout.max_completion_length", "40", "--rollout.prompts_per_step", "2", "--rollout.num_generations", "8", "--run.seed", "1",
        "--rollout.temperature", "20", "--run.max_steps", "1", "--model.precision", "float32",
    )  # fmt: skip
    prompt = (run / "first_prompt.txt").read_text()
    assert prompt.endswith("Put the final answer in \\boxed{}.<|end|><|assistant|><think>\n")
    table = pyarrow.parquet.read_table(run / "rollouts" / "step-1.parquet").to_pylist()
    assert {row["completion"].removesuffix("<eos>") for row in table} == FORMS.keys()
    totals: dict[int, list[float]] = {}
    for row in table:
        right, of_the_form, late = FORMS[row["completion"].removesuffix("<eos>")]
        assert (row["rewards/reasoning_answer"], row["rewards/think_format"]) == (right, of_the_form)
        assert row["reward"] == pytest.approx(right + 0.1 * of_the_form)
        totals.setdefault(row["group"], []).append(row["reward"] + late)  # the objective's own term is not in `reward`
    for group, rewards in totals.items():
        spread = statistics.stdev(rewards) + 1e-6
        expected = [(reward - statistics.mean(rewards)) / spread for reward in rewards]
        found = [row["advantage"] for row in table if row["group"] == group]
        assert found == pytest.approx(expected, abs=1e-5)  # stored in float32
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["eval/pass@1/mean"] == last["eval/rewards/reasoning_answer/mean"]


def test_variables_of_the_template_choose_the_prefill(run_recipe, tiny_chat_model, data):
    small = ("--model.path", tiny_chat_model, "--run.max_steps", "1", "--rollout.max_completion_length", "2")
    small += ("--rollout.prompts_per_step", "1", "--rollout.num_generations", "2", "--data.eval", "")
    run = run_recipe(
        "thinking", *data[:2], *small, "--data.chat_template", QWEN3,
        "--data.chat_template_kwargs.enable_thinking", "false", "--reward.functions", "think_format",
        "--reward.weights", "[1.0]", "--eval.success", "none", "--rollout.regex", "[ab]{2}",
    )  # fmt: skip
    assert (run / "first_prompt.txt").read_text().endswith("assistant\n<think>\n\n</think>\n\n")
    table = pyarrow.parquet.read_table(run / "rollouts" / "step-1.parquet").to_pylist()
    assert [row["rewards/think_format"] for row in table] == [1.0, 1.0]  # an empty thought has the form as well
    with pytest.raises(DataError, match="reads no variable 'enable_thinking'"):
        run_recipe("thinking", *data[:2], *small, "--data.chat_template_kwargs.enable_thinking", "false")
