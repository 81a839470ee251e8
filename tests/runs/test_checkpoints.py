"""Checkpoints are read back and compared with the trained weights."""

import math
import resource
import time
from threading import Event

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from cohort.config import OptimConfig
from cohort.config.schema import RunConfig
from cohort.errors import DiskError, RunFolderError
from cohort.policy import Policy, Precision
from cohort.runs import checkpoints
from cohort.runs.checkpoints import NEEDED, Models, SavedState, load_checkpoint, load_weights, random_state
from cohort.runs.folder import RunFolder
from cohort.runs.models import check_saved, save_model
from cohort.train import Optimizer, loop
from tests.conftest import tiny_llama
from tests.families.configs import ATTENTION
from tests.train.harness import ROWS, checkpoints_of, digits_reward, make_trainer, parameters

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft asks for it


def saved(model, tokenizer, path, dtype=torch.float32):
    policy = Policy(model.to(dtype), Precision(dtype, dtype))
    save_model(policy, tokenizer, path)
    return policy


def spoil(path, change):
    (file,) = path.glob("*.safetensors")
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize(("tied", "dtype"), [(True, torch.float32), (False, torch.float64)])
def test_a_saved_model_is_the_trained_one(demo_tokenizer, tmp_path, tied, dtype):
    model = tiny_llama(vocab_size=len(demo_tokenizer), tie_word_embeddings=tied)
    policy = saved(model, demo_tokenizer, tmp_path, dtype)
    check_saved(policy, tmp_path)
    with torch.no_grad():  # the smallest possible change
        weight = policy.model.model.layers[1].mlp.up_proj.weight
        weight[3, 4] = torch.nextafter(weight[3, 4], torch.tensor(math.inf, dtype=dtype))
    with pytest.raises(RunFolderError, match="model.layers.1.mlp.up_proj.weight differs"):
        check_saved(policy, tmp_path)


def test_a_missing_tensor_and_another_precision(demo_tokenizer, tmp_path):
    policy = saved(tiny_llama(vocab_size=len(demo_tokenizer)), demo_tokenizer, tmp_path)
    spoil(tmp_path, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(RunFolderError, match="lacks model.norm.weight, which the trained model has: 1 in all"):
        check_saved(policy, tmp_path)
    spoil(tmp_path, lambda tensors: tensors.update({name: value.bfloat16() for name, value in tensors.items()}))
    with pytest.raises(RunFolderError, match="differs"):
        check_saved(policy, tmp_path)


def test_weights_of_another_dtype_are_not_converted(demo_tokenizer, tmp_path):
    saved(tiny_llama(vocab_size=len(demo_tokenizer)), demo_tokenizer, tmp_path)
    half = Policy(tiny_llama(vocab_size=len(demo_tokenizer)).bfloat16(), Precision(torch.bfloat16, torch.bfloat16))
    with pytest.raises(RunFolderError, match=r"is torch.float32 \[.*; the model has torch.bfloat16"):
        load_weights(half, tmp_path)


def test_nan_weights_are_saved_unchanged(demo_tokenizer, tmp_path):
    model = tiny_llama(vocab_size=len(demo_tokenizer))
    with torch.no_grad():
        model.model.norm.weight[0] = math.nan
    check_saved(saved(model, demo_tokenizer, tmp_path), tmp_path)


def test_weights_with_other_names_in_files(demo_tokenizer, tmp_path):
    shape = ATTENTION | {"vocab_size": len(demo_tokenizer), "num_local_experts": 4}
    policy = saved(AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **shape)), demo_tokenizer, tmp_path)
    check_saved(policy, tmp_path)
    experts = next(name for name, _ in policy.model.named_parameters() if "experts" in name)
    with torch.no_grad():
        policy.model.get_parameter(experts)[0, 0] += 1
    with pytest.raises(RunFolderError, match="experts.* differs"):
        check_saved(policy, tmp_path)


def test_adapters(demo_tokenizer, tmp_path):
    pytest.importorskip("peft")
    settings = {"lora": {"rank": 2, "modules_to_save": ["lm_head"]}, "max_steps": 1}
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", **settings)
    trainer.train()
    folder = tmp_path / "run" / "checkpoints" / "step-1"
    check_saved(trainer.policy, folder)
    name = next(name for name, _ in trainer.policy.model.named_parameters() if "lora_A" in name)
    with torch.no_grad():
        trainer.policy.model.get_parameter(name)[0, 0] += 1
    with pytest.raises(RunFolderError, match="lora_A.* differs"):
        check_saved(trainer.policy, folder)


@pytest.mark.parametrize("limit", [100, 1000, 5000, 40_000, 80_000])
def test_files_that_cannot_be_written(demo_tokenizer, tmp_path, limit):
    """The first file that is larger than the limit fails: the config, the weights or the optimizer's state."""
    model = tiny_llama(vocab_size=len(demo_tokenizer))
    models = Models(Policy(model, Precision(torch.float32, torch.float32)), None, demo_tokenizer)
    optimizer = Optimizer(model, OptimConfig(), 1)
    model(torch.tensor([[3, 4]])).logits.sum().backward()
    optimizer.step()
    state = SavedState(1, optimizer.state_dict(), {key: {} for key in NEEDED} | {"random": [random_state()]})
    drawn = torch.rand(1)
    settings = RunConfig(stop_when_unsaved_minutes=0)
    folder, before = RunFolder(tmp_path, settings), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(DiskError, match=r"for 0 minutes .*: checkpoint of step 1: .*File too large"):
            folder.save_checkpoint(models, state, wait=True)
        folder.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list((tmp_path / "checkpoints").iterdir()) == []
    folder = RunFolder(tmp_path)
    folder.save_checkpoint(models, state, wait=True)
    assert load_checkpoint(folder.checkpoint(1), models).step == 1
    assert torch.rand(1) == drawn  # goes on where it was


def test_a_run_checks_its_last_checkpoint_and_the_best_model(demo_tokenizer, tmp_path, monkeypatch):
    checked = []
    monkeypatch.setattr(loop, "check_saved", lambda policy, folder: checked.append(folder.name))
    settings = {"max_steps": 2, "save_steps": 1, "eval_rows": ROWS[:3], "metric_for_best_model": "eval/reward/mean"}
    make_trainer(demo_tokenizer, tmp_path / "run", **settings).train()
    assert (checked[0], checked[-1], "step-1" in checked) == ("best", "step-2", False)
    checked.clear()
    make_trainer(demo_tokenizer, tmp_path / "off", check_saved=False, **settings).train()
    assert checked == []


@pytest.mark.parametrize(
    ("settings", "kept"),
    [({}, [1, 2, 3, 4, 5]), ({"save_total_limit": 2}, [4, 5]), ({"save_total_limit": 1, "keep_every": 2}, [2, 4, 5])],
)
def test_which_checkpoints_are_kept(demo_tokenizer, tmp_path, settings, kept):
    models = Models(Policy(tiny_llama(), Precision(torch.float32, torch.float32)), None, demo_tokenizer)
    folder = RunFolder(tmp_path, RunConfig(**settings))
    for step in range(1, 6):
        folder.save_checkpoint(models, SavedState(step, {"tensors": {}, "numbers": {}}, {}), wait=True)
    assert folder.checkpoint_steps() == kept


def test_when_a_checkpoint_is_due(tmp_path, monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    folder = RunFolder(tmp_path, RunConfig(save_steps=3, save_minutes=2))
    assert [folder.checkpoint_due(step) for step in range(1, 7)] == [False, False, True, False, False, True]
    now += 119
    assert not folder.checkpoint_due(1)
    now += 1
    assert folder.checkpoint_due(1)


def test_a_checkpoint_by_the_clock_is_written_once(demo_tokenizer, tmp_path, monkeypatch):
    real, passed = time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: real() + passed[0])

    def rewards(completions, trainer_state, **_):
        passed[0] += 600 * (trainer_state.max_steps and trainer_state.global_step == 1)
        return digits_reward(completions)

    settings = {"save_steps": 0, "save_minutes": 5, "max_steps": 5, "stop_when_unsaved_minutes": 1000}
    make_trainer(demo_tokenizer, tmp_path / "run", rewards=rewards, **settings).train()
    assert checkpoints_of(tmp_path / "run") == ["step-2", "step-5"]


def test_a_checkpoint_that_is_written_beside_the_next_step_has_the_weights_of_its_own(
    demo_tokenizer, tmp_path, monkeypatch
):
    trainer, going = make_trainer(demo_tokenizer, tmp_path / "run", max_steps=2, save_steps=1), Event()
    replaced, update = checkpoints.replaced, trainer.optimizer.step

    def late(target, **settings):
        assert target.name != "step-1" or going.wait(30)
        return replaced(target, **settings)

    def step(*arguments):
        norm = update(*arguments)
        if trainer.policy.version == 1:
            going.set()
        return norm

    monkeypatch.setattr(checkpoints, "replaced", late)
    trainer.optimizer.step = step
    steps = trainer.steps()
    next(steps)
    before = parameters(trainer)
    list(steps)
    found = load_file(tmp_path / "run" / "checkpoints" / "step-1" / "model.safetensors")
    assert all(torch.equal(found[name], weight) for name, weight in before.items())


def test_without_memory_for_a_copy_the_step_waits_for_the_checkpoint(demo_tokenizer, tmp_path, monkeypatch, caplog):
    """Also while the disk fails."""
    monkeypatch.setattr(checkpoints, "free_bytes", lambda _: 1000)
    monkeypatch.setattr("cohort.runs.writer.RETRY_SECONDS", 0.01)
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", max_steps=4, save_steps=2)
    real, steps = checkpoints.replaced, []

    def fails_once(target, **settings):
        steps.append(target.name)
        if len(steps) == 1:
            raise DiskError("cannot write") from OSError(28, "No space left on device")
        return real(target, **settings)

    monkeypatch.setattr(checkpoints, "replaced", fails_once)
    for metrics in trainer.steps():
        assert trainer.folder.checkpoint_steps() == list(range(2, metrics["step"] + 1, 2))
    assert steps == ["step-2", "step-2", "step-4"]
    first, second = caplog.messages
    assert first.startswith("not written yet: checkpoint of step 2: No space left on device. Training waits")
    assert second.startswith("everything is written again")
