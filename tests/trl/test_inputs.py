"""What GRPOTrainer refuses before it loads a model: unknown names, orders that TRL does not have, other kinds."""

import warnings
from pathlib import Path

import pytest
from transformers import TrainerCallback, TrainingArguments

from cohort.errors import CohortError, ConfigError, RewardError
from cohort.trl import GRPOConfig, GRPOTrainer
from cohort.trl.checkpoints import create_repo
from tests.conftest import DEMO_MODEL

MODEL = str(DEMO_MODEL)
ROWS = [{"prompt": [{"role": "user", "content": f"{n}+2"}], "answer": str(n + 2)} for n in range(8)]


def zero(completions, **_):
    return [0.0] * len(completions)


@pytest.fixture
def args(tmp_path):
    return GRPOConfig(
        str(tmp_path / "run"),
        use_cpu=True,
        num_generations=4,
        per_device_train_batch_size=4,
        max_steps=1,
        max_completion_length=8,
    )


@pytest.fixture(autouse=True)
def no_model(monkeypatch):
    def load(*_, **__):
        pytest.fail("a model was loaded")

    monkeypatch.setattr("cohort.trainer.load_policy", load)


class OwnAdapters:
    peft_type = "LORA"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda a, t: (a, MODEL, zero, ROWS), "model: expected a folder, a hub id, or a loaded model, got GRPOConfig"),
        (lambda a, t: (zero, MODEL, a, ROWS), "model: expected a folder, a hub id, or a loaded model, got function"),
        (
            lambda a, t: (MODEL, a, zero, ROWS),
            "reward_funcs: expected functions, .*, got GRPOConfig; the order is model",
        ),
        (lambda a, t: (MODEL, t, zero, a, ROWS), "reward_funcs: expected functions, .* got TokenizersBackend"),
        (lambda a, t: (MODEL, zero, ROWS, a), "train_dataset: expected rows, got GRPOConfig"),
        (lambda a, t: (MODEL, zero, a, t, ROWS), "train_dataset: expected rows, got TokenizersBackend"),
        (lambda a, t: (MODEL, zero, a, ROWS, t), "eval_dataset: expected rows, .*, got TokenizersBackend"),
        (lambda a, t: (MODEL, zero, a, ROWS, None, ROWS), "processing_class: expected a tokenizer, got list"),
        (lambda a, t: (MODEL, zero, a, ROWS, None, t, OwnAdapters()), "reward_processing_classes: expected tokenizers"),
        (lambda a, t: (MODEL, zero, a, ROWS, None, t, None, OwnAdapters()), "callbacks: expected a list of callbacks"),
        (lambda a, t: (MODEL, zero, a, ROWS, None, t, None, None, [TrainerCallback()]), "optimizers: expected"),
        (
            lambda a, t: (MODEL, zero, a, ROWS, None, t, None, None, (None, None), OwnAdapters()),
            "quantization_config: ",
        ),
        (lambda a, t: (MODEL, zero, *[None] * 20), "too many positional arguments; it takes model, reward_funcs, args"),
        (lambda a, t: (), "missing a required argument: 'model'"),
    ],
)
def test_orders_that_trl_does_not_have(args, demo_tokenizer, given, words):
    with pytest.raises(ConfigError, match=words):
        GRPOTrainer(*given(args, demo_tokenizer))


@pytest.mark.parametrize(
    ("named", "error", "words"),
    [
        ({"train_data": ROWS}, ConfigError, "unknown argument 'train_data'; did you mean train_dataset"),
        ({"procesing_class": None}, ConfigError, "did you mean processing_class"),
        ({"tokenizer": None}, ConfigError, "unknown argument 'tokenizer'; use processing_class"),
        ({"args": TrainingArguments("x", use_cpu=True)}, ConfigError, "args is transformers's TrainingArguments"),
        ({"args": {"max_steps": 1}}, ConfigError, "args is builtins's dict: expected cohort.trl.GRPOConfig"),
        ({"reward_funcs": "accuracy_reward"}, ConfigError, "from cohort.trl.rewards import accuracy_reward"),
        ({"reward_funcs": Path("no/reward_model")}, CohortError, "no/reward_model"),
        ({"rollout_func": zero}, ConfigError, "rollout_func is not supported here"),
        ({"peft_config": {"r": 8}}, ConfigError, "peft_config: expected a peft.PeftConfig"),
        ({"tools": zero}, ConfigError, "tools: expected a list of functions, got function"),
        ({"optimizers": ("a", None)}, ConfigError, "optimizers: expected .*of torch"),
        ({"environment_factory": 3}, ConfigError, "environment_factory: expected a class or function"),
        ({"train_dataset": None}, ConfigError, "`train_dataset` is required"),
        ({"train_dataset": "data/train.jsonl"}, ConfigError, "train_dataset: expected rows, got the name 'data/train"),
        ({"eval_dataset": Path("test.jsonl")}, ConfigError, "eval_dataset: expected rows, got the name 'test.jsonl'"),
        ({"eval_dataset": {"aime": "aime"}}, ConfigError, r"eval_dataset\['aime'\]: expected rows, got the name"),
        ({"train_dataset": {"train": ROWS}}, ConfigError, r"a dict with 'train': pass one of its splits"),
        ({"train_dataset": [ROWS[0], "a"]}, ConfigError, "each a dict of columns, got a list with 'a'"),
        ({"train_dataset": [{"question": "1+2"}]}, CohortError, "(?s)prompt"),
        ({"reward_funcs": [lambda completions: 1 / 0]}, RewardError, "ZeroDivisionError"),
    ],
)
def test_other_mistakes(args, demo_tokenizer, named, error, words):
    given = {
        "model": MODEL,
        "reward_funcs": zero,
        "args": args,
        "train_dataset": ROWS,
        "processing_class": demo_tokenizer,
    }
    with pytest.raises(error, match=words):
        GRPOTrainer(**given | named)


def test_the_config_of_trl_is_refused(args, demo_tokenizer, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of TRL's imports
        trl = pytest.importorskip("trl", minversion="1.0")  # not this folder, which user code may put on the path
        theirs = trl.GRPOConfig(str(tmp_path), use_cpu=True)
    with pytest.raises(ConfigError, match=r"args is trl's GRPOConfig: expected cohort.trl.GRPOConfig"):
        GRPOTrainer(MODEL, zero, theirs, ROWS)


@pytest.mark.parametrize(
    ("name", "words"),
    [("tensorbord", "got 'tensorbord'; did you mean tensorboard"), ("wandb", "report_to: 'wandb' is not installed")],
)
def test_trackers_are_checked_before_the_model_is_loaded(args, name, words, monkeypatch):
    monkeypatch.setattr("transformers.integrations.integration_utils.is_wandb_available", lambda: False)
    args.report_to = [name]
    with pytest.raises(ConfigError, match=words):
        GRPOTrainer(MODEL, zero, args, ROWS)


def test_a_hub_that_refuses_is_an_error_of_the_arguments(args, monkeypatch):
    def refuse(*_, **__):
        raise OSError("401 Client Error")

    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", refuse)
    with pytest.raises(ConfigError, match="cannot make the repository 'run' on the hub: 401 Client Error. Log in"):
        create_repo(args)
