"""Recipe distil: a reward model and a check are learned from, each in units of its own spread; a judge only watches."""

import json
import tomllib

import numpy as np
import pyarrow.parquet
import pytest

from cohort import shipped
from cohort.errors import RewardError
from cohort.rewards import RewardModel

SMALL = ("--rollout.prompts_per_step", "2", "--rollout.num_generations", "4", "--run.max_steps", "1")
SMALL += ("--eval.eval_steps", "0", "--optim.warmup_steps", "0", "--data.eval_rows", "2")


@pytest.fixture(scope="module")
def reward_model(recipe_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "reward_model"
    module = recipe_file("distil", "reward_model.py")
    module.PAIRS = 4
    assert 0 <= module.train(str(folder), steps=2) <= 1
    return folder


def functions(reward_model):
    names = tomllib.loads((shipped.recipes()["distil"].folder / "config.toml").read_text())["reward"]["functions"]
    return "--reward.functions", json.dumps([str(reward_model), *names[1:]])


@pytest.fixture(scope="module")
def run(run_recipe, reward_model):
    return run_recipe("distil", *functions(reward_model), *SMALL)


def test_the_reward_model_and_the_check_are_learned_from_and_the_judge_is_not(run, reward_model):
    table = pyarrow.parquet.read_table(run / "rollouts" / "step-1.parquet").to_pylist()
    assert len(table) == 8
    prompts = [row["prompt"].removeprefix("<|user|>").removesuffix("<|assistant|>") for row in table]
    talks = [[{"role": "user", "content": prompt}] for prompt in prompts]
    scores = RewardModel(reward_model)(talks, [row["completion"] for row in table])
    # The passes of the run hold other completions beside these, and sums of float32 round differently.
    assert [row["rewards/reward_model"] for row in table] == pytest.approx(scores, abs=1e-5)
    found = {
        name: np.array([row[f"rewards/{name}"] for row in table]).reshape(2, 4) for name in ("reward_model", "regex")
    }
    normal = [(R - R.mean(1, keepdims=True)) / (R.std(1, ddof=1, keepdims=True) + 1e-6) for R in found.values()]
    expected = sum(np.where(R.std(1, keepdims=True) > 0, N, 0) for R, N in zip(found.values(), normal, strict=True))
    np.testing.assert_allclose([row["advantage"] for row in table], expected.ravel(), atol=1e-4)  # float32 scores
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert {"rewards/gsm8k", "eval/rewards/gsm8k/mean", "eval/pass@1/mean", "kl/k3"} <= last.keys()
    assert json.loads((run / "summary.json").read_text())["updates"] == 1


def test_no_carry_comes_from_a_sum_below_ten():
    from cohort.rewards import resolve_reward

    names = tomllib.loads((shipped.recipes()["distil"].folder / "config.toml").read_text())["reward"]["functions"]
    check = resolve_reward(names[1])
    assert check("8+9=17, write 7, carry 1\n7+1+1=9, write 9\n#### 97") == 1.0
    assert check("8+1=9, write 9, carry 1\n7+1+1=9, write 9\n#### 99") == 0.0
    assert check("8+9=17, write 7, carry 1\n7+1+1=9, write 9") == 0.0


def test_before_the_reward_model_is_made_its_folder_is_named(run_recipe):
    with pytest.raises(RewardError, match="reward_model"):
        run_recipe("distil", *SMALL)
