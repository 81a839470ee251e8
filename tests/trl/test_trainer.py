"""TRL's trainer over Cohort's: what its callbacks are told, its checkpoints, resuming, and what it refuses."""

import json

import pytest
import torch
from transformers import TrainerCallback, TrainerState
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import get_last_checkpoint

from cohort.trl import GRPOConfig, GRPOTrainer
from tests.conftest import tiny_llama
from tests.train.harness import ROWS, digits_reward, metrics_of, untimed_metrics_of

SETTINGS = {
    "per_device_train_batch_size": 4,
    "num_generations": 2,
    "steps_per_generation": 2,
    "gradient_accumulation_steps": 1,
    "max_completion_length": 4,
    "learning_rate": 1e-2,
    "logging_steps": 3,
    "save_steps": 4,
    "max_steps": 8,
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
}
"""A rollout has 4 prompts with 2 completions, and 2 updates use it."""


class Recorder(TrainerCallback, ExportableState):
    """Keeps what it is told. Its count is part of every checkpoint."""

    def __init__(self):
        self.told, self.count = [], 0

    def state(self):
        return {"args": {}, "attributes": {"count": self.count}}


def _keep(name):
    def method(self, args, state, control, **given):
        self.told.append((name, state.global_step))
        self.count += name == "on_step_end"
        assert {"model", "processing_class", "optimizer", "lr_scheduler"} <= set(given)

    return method


EVENTS = ("init_end", "train_begin", "epoch_begin", "step_begin", "step_end", "epoch_end", "evaluate", "save", "log")
for _event in (*EVENTS, "train_end"):
    setattr(Recorder, f"on_{_event}", _keep(f"on_{_event}"))


def with_state(completions, trainer_state, **_):
    assert isinstance(trainer_state, TrainerState)
    return digits_reward(completions)


def make(tokenizer, folder, *callbacks, eval_rows=None, reward=with_state, rows=ROWS, given=(), **settings):
    args = GRPOConfig(str(folder), **SETTINGS | settings)
    model = tiny_llama(vocab_size=len(tokenizer))
    options = {"processing_class": tokenizer, "callbacks": list(callbacks), **dict(given)}
    return GRPOTrainer(model, reward, args, rows, eval_rows, **options)


EVALUATED = {"eval_rows": ROWS[:2], "eval_strategy": "steps", "eval_steps": 4, "per_device_eval_batch_size": 2}


@pytest.fixture(scope="module")
def straight(demo_tokenizer, tmp_path_factory):
    """A run of 8 updates on 4 rollouts, with an evaluation and a checkpoint after every second one."""
    folder, recorder = tmp_path_factory.mktemp("straight") / "run", Recorder()
    trainer = make(demo_tokenizer, folder, recorder, **EVALUATED)
    return trainer, recorder, trainer.train(), folder


def test_callbacks_are_told_of_every_update(straight):
    trainer, recorder, output, _ = straight
    told = recorder.told
    assert told[:3] == [("on_init_end", 0), ("on_train_begin", 0), ("on_epoch_begin", 0)]
    names = [name for name, _ in told]
    assert [step for name, step in told if name == "on_step_begin"] == list(range(8))
    assert [step for name, step in told if name == "on_step_end"] == list(range(1, 9))
    fourth = told.index(("on_step_end", 4))
    assert told[fourth : fourth + 4] == [("on_step_end", 4), ("on_log", 4), ("on_evaluate", 4), ("on_save", 4)]
    assert [step for name, step in told if name == "on_log"] == [3, 4, 6, 8, 8]  # 4, 8: evaluations, and the end
    assert names[-1] == "on_train_end"
    assert names.count("on_epoch_begin") == names.count("on_epoch_end") == 1  # 10 updates are an epoch
    assert (output.global_step, trainer.state.global_step, trainer.state.max_steps) == (8, 8, 8)
    assert trainer.state.epoch == 0.8


def test_the_log_and_the_output(straight):
    trainer, _, output, folder = straight
    history = trainer.state.log_history
    assert [entry["step"] for entry in history] == [3, 4, 6, 8, 8]
    assert {"loss", "grad_norm", "learning_rate", "reward", "reward_std", "epoch", "num_tokens"} <= set(history[0])
    assert history[0]["rewards/with_state/mean"] == pytest.approx(
        sum(line["rewards/with_state"] for line in metrics_of(folder)[:2]) / 2
    )
    assert history[1]["eval_reward"] == metrics_of(folder)[1]["eval/reward/mean"]
    assert history[-1].items() >= {"train_loss": output.training_loss, "step": 8}.items()
    assert output.metrics["train_loss"] == output.training_loss
    assert json.loads((folder / "summary.json").read_text())["steps"] == 4


def test_checkpoints_are_found_by_transformers(straight):
    trainer, _, _, folder = straight
    assert get_last_checkpoint(str(folder)) == str(folder / "checkpoint-8")
    found = TrainerState.load_from_json(str(folder / "checkpoint-4" / "trainer_state.json"))
    assert (found.global_step, found.log_history) == (4, trainer.state.log_history[:2])
    assert found.stateful_callbacks["Recorder"]["attributes"] == {"count": 4}
    assert (folder / "checkpoint-4").resolve() == folder / "checkpoints" / "step-2"


def test_a_resumed_run_is_bit_equal(straight, demo_tokenizer, tmp_path):
    """Stopped by a callback within the third rollout; the window of the log goes on in its middle."""

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_training_stop = state.global_step == 5

    def log_of(one):
        timed = ("seconds", "tokens_per_second", "memory/", "step_time", "train_")
        return [{k: v for k, v in entry.items() if not k.startswith(timed)} for entry in one.state.log_history]

    whole, folder, first = straight[0], tmp_path / "run", Recorder()
    make(demo_tokenizer, folder, first, Stop(), **EVALUATED).train()
    assert first.count == 6  # the rollout is used in full
    assert get_last_checkpoint(str(folder)) == str(folder / "checkpoint-6")
    recorder = Recorder()
    resumed = make(demo_tokenizer, folder, recorder, **EVALUATED)
    output = resumed.train(resume_from_checkpoint=get_last_checkpoint(str(folder)))
    assert output.global_step == 8
    assert (recorder.count, [step for name, step in recorder.told if name == "on_step_end"]) == (8, [7, 8])
    assert log_of(resumed)[:-1] == log_of(whole)[:-1]  # the last has the seconds of this process
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert untimed_metrics_of(folder) == untimed_metrics_of(straight[3])
