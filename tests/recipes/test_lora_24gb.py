"""Recipe lora_24gb: adapters alone are trained and saved, on weights as they are and on four bits."""

import json

import pytest
from safetensors.torch import load_file

from tests.conftest import telling

# On the tiny model: half of the digits are right, so that groups have both rewards.
SMALL = (
    *("--rollout.regex", "#### [2-5]", "--rollout.max_completion_length", "8", "--model.precision", "float32"),
    *("--rollout.prompts_per_step", "2", "--rollout.num_generations", "6", "--run.max_steps", "1"),
    *("--optim.lr_scheduler_type", "constant", "--optim.warmup_steps", "0"),
)


@pytest.mark.parametrize("quantization", telling(["none", "4bit"], "4bit"))
def test_only_adapters_are_trained_and_saved(run_recipe, gsm8k_data, tiny_chat_model, quantization, capsys):
    run = run_recipe(
        "lora_24gb", *gsm8k_data, *SMALL, "--model.path", tiny_chat_model, "--model.quantization", quantization
    )
    # Rank 32 on seven matrices of each of two layers, of 24 and 40 units, keys and values of 12: r (inputs + outputs).
    trained = 2 * 32 * (2 * (24 + 24) + 2 * (24 + 12) + 3 * (24 + 40))
    assert f"({trained:,} of them trained)" in capsys.readouterr().out
    checkpoint = run / "checkpoints" / "step-1"
    assert [file.name for file in checkpoint.glob("*.safetensors")] == ["adapter_model.safetensors"]
    adapter = load_file(checkpoint / "adapter_model.safetensors")
    assert sum(tensor.numel() for tensor in adapter.values()) == trained
    moved = [name for name, tensor in adapter.items() if "lora_B" in name and tensor.any()]
    assert len(moved) == 14  # they begin at 0, and one update moves each
    summary = json.loads((run / "summary.json").read_text())
    assert summary["updates"] == 1
