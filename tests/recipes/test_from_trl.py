"""Recipe from_trl: the script with one import changed and the settings are the same run, to the bit."""

import importlib.util

import pytest
import torch
from safetensors.torch import load_file

from cohort import shipped
from cohort.errors import CohortError, RewardError
from cohort.trl import GRPOConfig


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("from_trl", shipped.recipes()["from_trl"].folder / "train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_script_and_settings_are_one_run(run_recipe, script, tmp_path, monkeypatch):
    small = {"max_steps": 2, "per_device_train_batch_size": 4, "output_dir": str(tmp_path / "run"), "save_steps": 2}
    monkeypatch.setattr(script, "GRPOConfig", lambda **given: GRPOConfig(**given | small, disable_tqdm=True))
    script.main()
    run = run_recipe("from_trl", "--run.max_steps", "2", "--rollout.prompts_per_step", "2")
    made, start = (
        load_file(path / "model.safetensors")
        for path in (run / "checkpoints" / "step-2", shipped.MODELS["cohort:demo"])
    )
    of_script = load_file(tmp_path / "run" / "checkpoint-2" / "model.safetensors")
    assert made.keys() == of_script.keys()
    for name, tensor in made.items():
        assert torch.equal(tensor, of_script[name]), name
    assert not torch.equal(made["model.norm.weight"], start["model.norm.weight"])


def test_the_rewards_of_the_script(script):
    chats = [[{"role": "assistant", "content": text}] for text in ("8+9=17\n#### 15201", "#### 15211", "15201")]
    assert script.correct(chats, ["15201"] * 3) == [1.0, 0.0, 0.0]
    assert script.digits(chats, ["15201"] * 3) == [0.5, 0.4, 0.0]


def test_mistakes_are_named(run_recipe, tmp_path):
    with pytest.raises(CohortError, match="per_device_train_batch_size"):
        GRPOConfig(output_dir=str(tmp_path), per_device_train_batchsize=4)
    with pytest.raises(RewardError, match=r"train.py has no function 'corect'; it has: .*correct"):
        run_recipe("from_trl", "--reward.functions", f"{shipped.recipes()['from_trl'].folder}/train.py:corect")
