"""Recipe ship: adapters are trained, evaluated, merged and uploaded; other programs load what comes out."""

import json
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from cohort import shipped
from cohort.cli import main

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft asks for it


@pytest.fixture(scope="module")
def run(run_recipe):
    size = ("--rollout.prompts_per_step", "8", "--run.max_steps", "1", "--data.eval_rows", "4")
    return run_recipe("ship", *size, "--optim.warmup_steps", "0")


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported") / "model"
    assert main(["export", str(run), str(folder)]) == 0
    return folder


def test_transformers_computes_with_the_merged_model_what_the_adapter_computes(run, exported):
    tokenizer = AutoTokenizer.from_pretrained(exported)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "3478+5869"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
    base = AutoModelForCausalLM.from_pretrained(shipped.MODELS["cohort:demo"])
    with torch.no_grad():
        before = base(ids).logits
        adapted = PeftModel.from_pretrained(base, run / "checkpoints" / "step-1")(ids).logits
        merged = AutoModelForCausalLM.from_pretrained(exported)(ids).logits
    torch.testing.assert_close(merged, adapted, rtol=0, atol=1e-4)  # float32; W + BA is rounded once more
    assert (merged - before).abs().max() > 1e-2  # and it is another model than before


def test_the_folder_has_what_vllm_and_llama_cpp_read(exported):
    assert {file.name for file in exported.iterdir()} == {
        *("config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    }
    config = json.loads((exported / "config.json").read_text())
    assert (config["architectures"], config["model_type"]) == (["LlamaForCausalLM"], "llama")
    assert config["rope_parameters"]["rope_theta"] == 10000.0
    assert config["dtype"] == "float32"


def test_the_run_is_compared_with_the_model_it_began_from(run, tmp_path, capsys):
    arguments = ["--against", "cohort:demo", "--json", str(tmp_path / "eval.json"), "--data.eval_rows", "4"]
    assert main(["eval", str(run), *arguments]) == 0
    assert "the newest checkpoint of the run, after step 1" in capsys.readouterr().err
    models = json.loads((tmp_path / "eval.json").read_text())["models"]
    assert models == [str(run / "checkpoints" / "step-1"), "cohort:demo"]


def test_upload(run, tmp_path, monkeypatch, capsys):
    calls = []

    class Hub:
        def create_repo(self, name, private, exist_ok):
            if name == "me/taken":
                raise OSError("403 Forbidden\nrequest id 7")
            calls.append((name, private, exist_ok))
            return SimpleNamespace(repo_id=name)

        def upload_folder(self, repo_id, folder_path, commit_message):
            calls.append((repo_id, sorted(file.name for file in folder_path.iterdir())))
            return f"https://huggingface.co/{repo_id}"

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    folder = tmp_path / "model"
    half = ["--dtype", "bfloat16", "--push-to-hub", "me/sums", "--private"]
    assert main(["export", str(run), str(folder), *half]) == 0
    assert "uploaded to https://huggingface.co/me/sums" in capsys.readouterr().out
    assert calls[0] == ("me/sums", True, True)
    assert {"README.md", "model.safetensors", "config.json"} <= set(calls[1][1])
    assert not any(name.startswith(("rollouts", "metrics", "adapter")) for name in calls[1][1])
    assert 'pipeline("text-generation", model="me/sums")' in (folder / "README.md").read_text()
    assert AutoModelForCausalLM.from_pretrained(folder, dtype="auto").dtype == torch.bfloat16
    assert main(["export", str(run), str(tmp_path / "other"), "--push-to-hub", "me/taken"]) == 2
    assert "cannot make the repository: 403 Forbidden. Log in with `hf auth login`" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()  # refused before anything takes long


def test_what_cannot_be_exported_is_refused(run, tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").touch()
    for arguments, words in (
        (["export", str(run), str(tmp_path / "a"), "--checkpoint", "7"], "has no checkpoint of step 7. It has: step 1"),
        (["export", str(run), str(tmp_path / "full")], "exists and is not an empty folder"),
        (["export", str(run), str(tmp_path / "a"), "--private"], "add --push-to-hub USER/NAME"),
        (["export", str(run / "rollouts"), str(tmp_path / "a")], "is neither a run nor a model folder"),
        (["export", str(run), str(tmp_path / "a"), "--dtype", "int8"], "bfloat16"),
    ):
        assert main(arguments) == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "a").exists()
