"""TRL's trainer over Cohort's: what its callbacks are told, its checkpoints, resuming, and what it refuses."""

import gc
import json
import weakref
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import get_last_checkpoint

import cohort
from cohort.errors import ConfigError, DataError, RewardError, RunFolderError, Stopped
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
    assert trainer.end() is None
    assert not trainer.is_fsdp_enabled
    assert not trainer.is_deepspeed_enabled


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
        timed = ("seconds", "tokens_per_second", "memory/", "step_time", "train_", "eval_runtime")
        timed += ("eval_samples_per_second", "eval_steps_per_second")
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


def test_a_stopped_run_is_found_by_transformers_too(straight, demo_tokenizer, tmp_path, capsys):
    """Asked to stop while the second rollout is scored: the checkpoint has its part, and the state of the first."""
    folder, calls = tmp_path / "run", []

    def stopping(completions, trainer_state, **_):
        calls.append(trainer_state.global_step)
        if trainer_state.global_step == 2:
            trainer.core.stop()
        return digits_reward(completions)

    trainer = make(demo_tokenizer, folder, reward=stopping)
    with pytest.raises(Stopped, match=r"continue with the same script and train\(resume_from_checkpoint=True\)"):
        trainer.train()
    assert max(calls) == 2
    assert get_last_checkpoint(str(folder)) == str(folder / "checkpoint-2")
    assert json.loads((folder / "checkpoint-2" / "trainer_state.json").read_text())["global_step"] == 2
    assert make(demo_tokenizer, folder, reward=stopping).train(True).global_step == 8
    assert "continue with" in capsys.readouterr().err


def test_a_complete_run_ends_at_once_or_goes_on(demo_tokenizer, tmp_path):
    """As in transformers: the same script makes no step, and has the model of the end; a longer one goes on."""
    folder, recorder = tmp_path / "run", Recorder()
    first = make(demo_tokenizer, folder, **EVALUATED, max_steps=4, lr_scheduler_type="constant")
    loss = first.train().training_loss
    again = make(demo_tokenizer, folder, recorder, **EVALUATED, max_steps=4, lr_scheduler_type="constant")
    output = again.train(resume_from_checkpoint=True)
    assert (output.global_step, output.training_loss) == (4, loss)
    assert [name for name, _ in recorder.told] == ["on_init_end", "on_train_begin", "on_log", "on_train_end"]
    assert again.state.log_history[:-1] == first.state.log_history[:-1]
    for one, other in zip(first.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)
    again.save_model()
    assert (folder / "model.safetensors").exists()
    longer = make(demo_tokenizer, folder, **EVALUATED, max_steps=6, lr_scheduler_type="constant")
    assert longer.train(resume_from_checkpoint=True).global_step == 6
    history = longer.state.log_history
    assert [entry["step"] for entry in history if "eval_reward" in entry] == [4, 6]
    assert [entry["step"] for entry in history if "loss" in entry] == [3, 6]
    gone = weakref.ref(longer.core)
    gc.disable()  # no cycle keeps the trainer
    try:
        del longer
        assert gone() is None
    finally:
        gc.enable()


def test_early_stopping_and_the_best_model(demo_tokenizer, tmp_path):
    """The best model is loaded at the end, whatever checkpoints are kept; one worse evaluation ends the run."""
    trainer = make(
        demo_tokenizer,
        tmp_path / "run",
        EarlyStoppingCallback(early_stopping_patience=1),
        **EVALUATED | {"eval_steps": 2, "save_steps": 2},
        load_best_model_at_end=True,
        metric_for_best_model="eval_reward",
        save_total_limit=1,
        learning_rate=0.05,
    )
    trainer.train()
    evaluated = {one["step"]: one["eval_reward"] for one in trainer.state.log_history if "eval_reward" in one}
    assert sorted(evaluated) == [2, 4]
    assert evaluated[2] > evaluated[4]
    assert (trainer.state.best_metric, trainer.state.best_global_step) == (evaluated[2], 2)
    best, last = (load_file(tmp_path / "run" / name / "model.safetensors") for name in ("best", "checkpoint-4"))
    for name, weight in trainer.model.state_dict().items():
        assert torch.equal(weight, best[name])
    assert any(not torch.equal(one, last[name]) for name, one in best.items())


def test_a_reward_function_that_fails_is_repaired(demo_tokenizer, tmp_path):
    """The run ends with a checkpoint, which transformers finds; another function and learning rate are to be allowed."""

    def broken(completions, trainer_state, **_):
        if trainer_state.global_step == 2:
            raise KeyError("answer")
        return digits_reward(completions)

    folder = tmp_path / "run"
    with pytest.raises(RewardError, match="fix it and resume"):
        make(demo_tokenizer, folder, reward=broken, max_steps=4).train()
    assert get_last_checkpoint(str(folder)) == str(folder / "checkpoint-2")
    assert json.loads((folder / "checkpoint-2" / "trainer_state.json").read_text())["global_step"] == 2

    def repaired(learning_rate):
        return make(demo_tokenizer, folder, reward=with_state, max_steps=4, learning_rate=learning_rate)

    how = r"To go on all the same: train\(resume_from_checkpoint=True, allow_changed=\['learning_rate'\]\)"
    with pytest.raises(RunFolderError, match=how):
        repaired(2e-2).train(resume_from_checkpoint=True)
    allowed = ["learning_rate", "rewards", "code"]
    assert repaired(2e-2).train(resume_from_checkpoint=True, allow_changed=allowed).global_step == 4


class Asking(TrainerCallback):
    """Asks for a checkpoint after update 1, for an evaluation after update 2, and for the end after update 5."""

    def on_step_end(self, args, state, control, **_):
        control.should_save |= state.global_step == 1
        control.should_evaluate |= state.global_step == 2
        control.should_training_stop |= state.global_step == 5


def test_events_have_transformers_order(demo_tokenizer, tmp_path):
    """Of a run with an evaluation before it, and a callback that asks for everything; an epoch has 4 updates."""
    settings = {"eval_on_start": True, "logging_steps": 2, "save_strategy": "no", "max_steps": 6, "report_to": "none"}
    ours, theirs = Recorder(), Recorder()
    given = {"eval_rows": ROWS[:2], "rows": ROWS[:8], "steps_per_generation": 1, **settings}
    make(demo_tokenizer, tmp_path / "run", Asking(), ours, **given).train()
    rows = [{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}] * 20
    args = {"per_device_train_batch_size": 5, "use_cpu": True, "disable_tqdm": True, **settings}
    arguments = TrainingArguments(str(tmp_path / "trainer"), **args)
    model = tiny_llama(vocab_size=len(demo_tokenizer))
    data = {"train_dataset": rows, "eval_dataset": rows[:2], "processing_class": demo_tokenizer}
    Trainer(model, arguments, callbacks=[Asking(), theirs], **data).train()
    assert ours.told == theirs.told


def test_the_initial_model_is_not_the_best(demo_tokenizer, tmp_path):
    """As in transformers, it is evaluated for comparison."""

    def falling(completions, trainer_state, **_):
        return [score / 10 - trainer_state.global_step for score in digits_reward(completions)]

    asked = {**EVALUATED, "eval_on_start": True, "eval_steps": 3, "save_steps": 3, "max_steps": 8}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_reward"}
    trainer = make(demo_tokenizer, tmp_path / "run", reward=falling, steps_per_generation=1, **asked, **best)
    trainer.train()
    evaluated = [one["step"] for one in trainer.state.log_history if "eval_reward" in one]
    assert evaluated == [0, 3, 6, 8]
    assert trainer.state.best_global_step == 3
    assert trainer.state.best_model_checkpoint == str(tmp_path / "run" / "checkpoint-3")
    third = load_file(tmp_path / "run" / "checkpoint-3" / "model.safetensors")
    for name, weight in trainer.model.state_dict().items():
        assert torch.equal(weight, third[name])


def test_should_epoch_stop_is_refused_once(demo_tokenizer, tmp_path):
    """The checkpoint of the refusal is of the whole rollout: without that callback, the run goes on."""

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_epoch_stop = state.global_step == 3

    folder, start = tmp_path / "run", {"eval_rows": ROWS[:2], "eval_on_start": True}
    with pytest.raises(ConfigError, match="should_epoch_stop is not supported"):
        make(demo_tokenizer, folder, Stop(), **start).train()
    recorder = Recorder()
    resumed = make(demo_tokenizer, folder, recorder, **start)
    assert resumed.train(resume_from_checkpoint=True).global_step == 8
    assert [step for name, step in recorder.told if name == "on_step_end"] == [5, 6, 7, 8]
    assert [one["step"] for one in resumed.state.log_history if "eval_reward" in one] == [0]  # and not at the end


def test_evaluation_on_demand_and_files_of_scripts(straight, tmp_path, capsys):
    trainer, _, output, folder = straight
    entries = len(trainer.state.log_history)
    metrics = trainer.evaluate()
    assert trainer.evaluate({"one": ROWS[:1], "two": ROWS[1:2]}).keys() >= {"eval_one_reward", "eval_two_reward"}
    assert metrics["eval_reward"] == trainer.state.log_history[entries]["eval_reward"]
    speed = metrics["eval_runtime"] * metrics["eval_samples_per_second"]
    assert speed == pytest.approx(2, rel=0.05)  # rounded to 4 and 3 digits; 2 prompts
    renamed = trainer.evaluate(metric_key_prefix="test")
    assert {"test_reward", "test/reward/mean", "test_runtime"} <= renamed.keys()
    assert not any(key.startswith("eval") for key in renamed)
    assert [entry["step"] for entry in trainer.state.log_history[entries:]] == [8, 8, 8, 8]
    trainer.log_metrics("train", output.metrics)
    assert "train_loss" in capsys.readouterr().out
    trainer.save_metrics("train", output.metrics)
    trainer.save_state()
    assert json.loads((folder / "train_results.json").read_text())["train_loss"] == output.training_loss
    assert json.loads((folder / "trainer_state.json").read_text())["global_step"] == 8
    trainer.save_model(str(tmp_path / "model"))
    assert (tmp_path / "model" / "model.safetensors").exists()
    assert trainer.accelerator.is_main_process
    assert trainer.get_learning_rates()[0] < 1e-2
    assert trainer.get_num_trainable_parameters() == sum(one.numel() for one in trainer.model.parameters())


def test_uploads_leave_the_runs_own_files_here(demo_tokenizer, tmp_path, monkeypatch):
    """The hub is asked for a repository, and gets the model and its card at the end of the run, and when asked to."""
    folder, asked = tmp_path / "run", []

    class Hub:
        def create_repo(self, name, **options):
            asked.append((name, options))
            return SimpleNamespace(repo_id=f"me/{name}")

        def upload_folder(self, **options):
            asked.append(options)
            return "done"

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    trainer = make(demo_tokenizer, folder, push_to_hub=True, max_steps=2)
    trainer.train()
    assert trainer.push_to_hub(dataset_name="me/sums", tags="sums") == "done"
    (name, _), ended, options = asked
    assert ended == options
    assert (name, options["repo_id"], options["commit_message"]) == ("run", "me/run", "End of training")
    from huggingface_hub.utils import filter_repo_objects

    paths = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    sent = set(filter_repo_objects(paths, ignore_patterns=options["ignore_patterns"]))
    assert {"model.safetensors", "config.json", "README.md", "tokenizer.json"} <= sent
    assert not any(path.startswith(("checkpoint", "rollouts", "config.toml", "metrics", "starts")) for path in sent)
    card = (folder / "README.md").read_text()
    assert "datasets: me/sums" in card
    assert "- sums" in card


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft asks for it
def test_adapters_and_a_ready_optimizer(demo_tokenizer, demo_model_path, tmp_path, monkeypatch):
    """peft's configuration is used as it is; an optimizer of the model's parameters steps in place of AdamW."""
    from peft import LoraConfig, PeftModel, get_peft_model

    def lora():  # peft writes the model's name into it
        return LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")

    args = GRPOConfig(str(tmp_path / "lora"), **SETTINGS | {"max_steps": 2, "save_steps": 2})
    with monkeypatch.context() as context:
        context.setattr("cohort.trl.given.load_model", None)
        with pytest.raises(DataError):  # before the model is loaded
            GRPOTrainer(demo_model_path, with_state, args, [{"prompt": 1}] * 4, peft_config=lora())

    def by_tokens(completion_ids, **_):
        return [float(sum(ids) * 7 % 11) + position for position, ids in enumerate(completion_ids)]

    trainer = GRPOTrainer(demo_model_path, by_tokens, args, ROWS, peft_config=lora())
    trainer.train()
    assert isinstance(trainer.model, PeftModel)
    assert (tmp_path / "lora" / "checkpoint-2" / "adapter_model.safetensors").exists()
    assert any(bool(one.any()) for name, one in trainer.model.named_parameters() if "lora_B" in name)

    absent = LoraConfig(target_modules=["q_prj"])
    with pytest.raises(ConfigError, match=r"peft_config: .*q_prj.* not found .* layers are named .*lm_head.* q_proj"):
        GRPOTrainer(tiny_llama(), by_tokens, args, ROWS, processing_class=demo_tokenizer, peft_config=absent)
    for name, words in (
        ("_metrics", "its parameter log_metric"),
        ("num_generations", "it is trainer.args.num_generations"),
        ("training_step", "does not work by TRL's methods"),
    ):
        with pytest.raises(AttributeError, match=f"has no attribute '{name}': .*{words}"):
            getattr(trainer, name)
    model = get_peft_model(tiny_llama(vocab_size=len(demo_tokenizer)), lora())
    with pytest.raises(ConfigError, match="the model has adapters"):
        GRPOTrainer(model, with_state, trainer.args, ROWS, processing_class=demo_tokenizer, peft_config=lora())
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.5, momentum=0.5)
    args = GRPOConfig(str(tmp_path / "sgd"), **SETTINGS | {"max_steps": 2, "lr_scheduler_type": "constant"})
    before = [one.detach().clone() for one in trained]
    options = {"processing_class": demo_tokenizer, "optimizers": (optimizer, None)}
    with mock.patch("torch.optim.AdamW.step", side_effect=AssertionError):  # its state may not fit into memory
        ready = GRPOTrainer(model, with_state, args, ROWS, **options)
    assert len(optimizer.state) == len(trained)  # before the first rollout
    ready.train()
    assert ready.optimizer is optimizer
    assert ready.state.log_history[0]["train_loss"] is not None
    assert any(not torch.equal(one, other) for one, other in zip(before, trained, strict=True))
    with pytest.raises(ConfigError, match="parameters that are not trained here"):
        ready.core.optimizer.use(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0))
    with pytest.raises(ConfigError, match="expected a LambdaLR"):
        ready.core.optimizer.use(optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"processing_class": print}, "processing_class: expected a tokenizer, got builtin_function_or_method"),
        ({"callbacks": [EarlyStoppingCallback]}, "EarlyStoppingCallback needs eval_strategy and metric_for_best_model"),
        ({"callbacks": [object()]}, "expected objects or classes of transformers.TrainerCallback, got object"),
        ({"callbacks": Recorder()}, "callbacks: expected a list"),
        ({"optimizers": Recorder()}, "optimizers: expected .*: pass arguments by name"),
        ({"optimizers": (None, SimpleNamespace(step=print))}, "a schedule needs its optimizer"),
        ({"reward_processing_classes": [None, None]}, "2 entries for 1 reward functions"),
        ({"quantization_config": SimpleNamespace(quant_method="bitsandbytes")}, "the model is loaded already"),
    ],
)
def test_what_is_refused(demo_tokenizer, tmp_path, given, message):
    with pytest.raises(ConfigError, match=message):
        make(demo_tokenizer, tmp_path / "run", given=given)
    assert not (tmp_path / "run").exists()


def test_other_configurations_are_refused(demo_tokenizer):
    with pytest.raises(ConfigError, match="Cohort's own GRPOConfig"):
        GRPOTrainer(tiny_llama(), with_state, cohort.GRPOConfig(), ROWS, processing_class=demo_tokenizer)
    with pytest.raises(ConfigError, match="the data has the column 'images', and models read text only"):
        GRPOTrainer(tiny_llama(), with_state, GRPOConfig("unused", **SETTINGS), [{"prompt": "", "images": []}])


def test_an_evaluation_without_rows_is_refused(demo_tokenizer, tmp_path):
    with pytest.raises(ConfigError, match="eval_strategy is 'steps', and there is no eval_dataset"):
        make(demo_tokenizer, tmp_path / "run", **EVALUATED | {"eval_rows": None})


def test_subclasses_may_not_override_what_is_never_called():
    with pytest.raises(ConfigError, match="Mine overrides _generate, compute_loss, which .* never calls"):

        class Mine(GRPOTrainer):
            def _generate(self, prompts):
                return prompts

            def compute_loss(self, model, inputs):
                return 0.0

    class Fine(GRPOTrainer):
        _tag_names = ("mine",)

        def log(self, logs, start_time=None):
            super().log(logs | {"mine": 1.0}, start_time)

        def _helper(self):
            return 1


def test_folders_that_are_taken(straight, demo_tokenizer, tmp_path):
    folder = straight[3]
    with pytest.raises(RunFolderError, match=r"train\(resume_from_checkpoint=True\), or choose another output_dir"):
        make(demo_tokenizer, folder).train()
    with pytest.raises(RunFolderError, match="no checkpoint to resume from in output_dir"):
        make(demo_tokenizer, tmp_path / "none").train(resume_from_checkpoint=True)
    with pytest.raises(RunFolderError, match="there is no checkpoint .*nowhere/checkpoint-3"):
        make(demo_tokenizer, tmp_path / "none").train(resume_from_checkpoint=str(tmp_path / "nowhere" / "checkpoint-3"))
    with pytest.raises(RunFolderError, match="belongs to another run than output_dir"):
        make(demo_tokenizer, tmp_path / "none").train(resume_from_checkpoint=str(folder / "checkpoint-8"))
    with pytest.raises(RunFolderError, match="is not the newest checkpoint of the run"):
        make(demo_tokenizer, folder).train(resume_from_checkpoint=str(folder / "checkpoint-4"))
    (tmp_path / "other" / "checkpoints" / "step-1").mkdir(parents=True)
    with pytest.raises(RunFolderError, match="belongs to another run than output_dir"):
        make(demo_tokenizer, tmp_path / "other").train(resume_from_checkpoint=str(folder / "checkpoint-8"))


def test_a_run_without_scores_says_so(demo_tokenizer, tmp_path, capsys):
    def unscored(completions, **_):
        return [None] * len(completions)

    trainer = make(demo_tokenizer, tmp_path / "run", reward=unscored, max_steps=4, logging_steps=1)
    trainer.train()
    said = capsys.readouterr().out
    assert "how this run differs" in said
    assert "first prompt" in said  # disable_tqdm hides the progress bar alone
    assert "rollout 1: " in said
    assert ": None" not in said
    assert None not in [value for entry in trainer.state.log_history for value in entry.values()]
