"""``python -m cohort.trl``: a run from flags and a recipe, and mistakes, which end it with exit code 2."""

import json

import pytest

import cohort.cli
from cohort.runs.starts import how_to_continue
from cohort.trl import GRPOTrainer
from cohort.trl.__main__ import REWARDS, load_reward, main, make_parser
from tests.conftest import DEMO_MODEL


def shortness(completions, **_):
    """The reward of the run."""
    return [-float(len(completion[0]["content"])) for completion in completions]


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A data set with one split, in the working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [{"prompt": [{"role": "user", "content": f"{n}+2"}], "answer": str(n + 2)} for n in range(8)]
    (tmp_path / "sums").mkdir()
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "sums" / "train.jsonl").write_text(lines, encoding="utf-8")
    return tmp_path


RECIPE = f"""
model_name_or_path: {DEMO_MODEL}
dataset_name: sums
reward_funcs: [tests.trl.test_command.shortness]
output_dir: run
use_cpu: true
max_steps: 2
per_device_train_batch_size: 4
num_generations: 4
max_completion_length: 6
logging_steps: 1
disable_tqdm: true
"""


def test_a_recipe(data, capsys):
    (data / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    assert main(["grpo", "--config", "recipe.yaml", "--learning_rate", "1e-4"]) == 0
    assert (data / "run" / "model.safetensors").exists()
    state = json.loads((data / "run" / "checkpoint-2" / "trainer_state.json").read_text(encoding="utf-8"))
    assert [entry["step"] for entry in state["log_history"] if "rewards/shortness/mean" in entry] == [1, 2]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--max_stepps 5", "unknown argument 'max_stepps'; did you mean max_steps?"),
        ("--num_generations 3", "generation_batch_size (4) must be divisible by num_generations (3)"),
        ("--reward_funcs acuracy_reward", "unknown reward function 'acuracy_reward'"),
        ("--reward_funcs tests.trl.test_command.nothing", "cannot import the reward function"),
        ("--dataset_train_split training", "dataset_train_split = 'training': the data set has train"),
        ("--eval_strategy steps", "dataset_test_split = 'test': the data set has train"),
        ("--dataset_name nowhere/sums", "cannot load the data set 'nowhere/sums'"),
        ("sft", "unknown argument 'sft'"),
    ],
)
def test_mistakes(data, capsys, flags, message):
    (data / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    try:
        code = main(["--config", "recipe.yaml", *flags.split()])
    except SystemExit as end:  # argparse's
        code = end.code
    assert code == 2
    assert message in capsys.readouterr().err
    assert not (data / "run").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--output_dir", "run", "--use_cpu"], "no model: set --model_name_or_path"),
        (["--output_dir", "run", "--use_cpu", "--model_name_or_path", str(DEMO_MODEL)], "no data: set --dataset_name"),
    ],
)
def test_what_is_missing(data, capsys, flags, message):
    assert main(flags) == 2
    assert message in capsys.readouterr().err


def test_names_of_rewards():
    assert load_reward("accuracy_reward") is REWARDS["accuracy_reward"]
    assert load_reward("soft_overlong(max_length=8, buffer=2)").keywords == {"max_length": 8, "buffer": 2}
    assert load_reward("gsm8k").__name__ == "gsm8k"
    assert load_reward("tests.trl.test_command.shortness")(completions=[[{"content": "ab"}]]) == [-2.0]


def test_one_reward_function_in_a_recipe(data):
    (data / "recipe.yaml").write_text(RECIPE.replace("[tests", "tests").replace("shortness]", "shortness"))
    script, *_ = make_parser().parse_args_and_config(["--config", "recipe.yaml"])
    assert script.reward_funcs == ["tests.trl.test_command.shortness"]


def test_a_stopped_run_goes_on(data, capsys, monkeypatch):
    """In a folder with the log of a shell; by the flag that the messages name, and by nothing else."""
    recipe = RECIPE.replace("run\n", "run\nlr_scheduler_type: constant\n").replace("disable_tqdm: true\n", "")
    (data / "recipe.yaml").write_text(recipe, encoding="utf-8")
    (data / "run").mkdir()
    (data / "run" / "train.log").write_text("mine", encoding="utf-8")
    command, evaluated = ["--config", "recipe.yaml"], GRPOTrainer._end_rollout

    def stopping(self, *given):
        self.core.stop()
        return evaluated(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(GRPOTrainer, "_end_rollout", stopping)
        assert main(command) == 75
    said = capsys.readouterr().err
    assert said.count("; continue with the same command and --resume_from_checkpoint true") == 1
    assert main(command) == 2
    assert "already holds a run: continue it with --resume_from_checkpoint true, or choose" in capsys.readouterr().err
    assert cohort.cli.main(["resume", "run"]) == 2
    assert "with the same command and --resume_from_checkpoint true" in capsys.readouterr().err
    assert how_to_continue(data / "run").startswith("the same command")
    assert main([*command, "--resume_from_checkpoint", "true"]) == 0
    assert (data / "run" / "checkpoint-2" / "trainer_state.json").exists()
    assert (data / "run" / "train.log").read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize("name", ["checkpoint-7/", "model.safetensors", "rollouts/"])
def test_nothing_is_written_over(data, capsys, name):
    (data / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    path = data / "run" / name
    path.mkdir(parents=True) if name.endswith("/") else (path.parent.mkdir(), path.touch())
    assert main(["--config", "recipe.yaml"]) == 2
    assert f"run has {path.name}, which " in capsys.readouterr().err
