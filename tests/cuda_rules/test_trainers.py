"""Whole runs in bfloat16 under what CUDA refuses: sampling, memory budget, updates, checkpoints."""

import pytest
import torch

from cohort.doctor import Status, examine
from cohort.policy import PackedRows, Policy
from tests.conftest import telling
from tests.cuda_on_cpu import cuda_on_cpu
from tests.environments import test_training as turns
from tests.families.configs import small_model
from tests.policy.plain import DOUBLE, MIXED
from tests.train.harness import break_after, make_trainer, same_parameters, untimed_metrics_of

RUN = {"precision": "bfloat16", "max_steps": 1, "microbatch_tokens": 16, "prompts_per_step": 3, "num_generations": 3}
"""Packs of several prompts, and microbatches of some of them."""

MODELS = ("gemma2", "gpt2", "falcon_h1", "gpt_oss", "mistral", "qwen3_moe", "qwen3_next")
"""Soft caps, transformers' own modules, a state space beside attention, experts with windows and sinks; windows alone,
plain experts, experts in a hybrid. (The runs below are of a Qwen3.)"""
RUNS = {
    "a budget that is measured, full reference": {
        "microbatch_tokens": None, "beta": 0.1, "objective": {"kl": {"estimator": "full"}},
    },
    "a reference, two iterations, truncated sampling and Muon": {
        "beta": 0.1, "num_iterations": 2, "top_k": 5, "min_p": 0.01, "repetition_penalty": 1.2, "optimizer": "muon",
        "prompts_per_step": 2,
    },
    "two minibatches, an entropy bonus, checkpointed layers and a head in float32": {
        "prompts_per_step": 4, "objective": {"minibatches": 2, "entropy": {"coefficient": 0.01}},
        "gradient_checkpointing": True, "float32_head": True,
    },
    "a lag": {"lag": 1, "max_steps": 2},
    "LoRA": {"lora": {"rank": 4}, "beta": 0.1},
    "LoRA on four bits": {"lora": {"rank": 4}, "quantization": "4bit", "prompts_per_step": 2},
}  # fmt: skip


@pytest.fixture(params=["rules", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request):
    """A CPU that obeys CUDA's rules; with ``-m gpu`` the GPU itself."""
    if request.param == "gpu":
        yield "cuda"
    else:
        with cuda_on_cpu():
            yield "cpu"


def trained(device, tokenizer, folder, model=None, **settings):
    """A run, which CUDA refuses nothing of."""
    settings = RUN | {"device": device} | settings
    trainer = make_trainer(tokenizer, folder, model or small_model("qwen3"), **settings)
    metrics = list(trainer.steps())
    assert len(metrics) == trainer.args.run.max_steps
    assert all(0 < line["grad_norm"] < 1e4 for line in metrics)
    return trainer


@pytest.mark.parametrize("family", telling(MODELS, *MODELS[:4]))
def test_models(device, demo_tokenizer, tmp_path, family):
    trainer = trained(device, demo_tokenizer, tmp_path / "run", small_model(family))
    assert "Refused" not in trainer.describe()  # no better way was passed over


@pytest.mark.parametrize("name", telling(RUNS, *(name for name in RUNS if name != "LoRA")))
def test_runs(device, demo_tokenizer, tmp_path, name):
    model = "cohort:demo" if "quantization" in RUNS[name] else None  # weights are read as they are quantized
    trainer = trained(device, demo_tokenizer, tmp_path / "run", model, **RUNS[name])
    assert "Refused" not in trainer.describe()


def test_completions_in_pieces(device, demo_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("cohort.train.memory.FEWEST_TOKENS", 4)
    settings = {"microbatch_tokens": 4, "prompts_per_step": 2, "num_generations": 2}
    trainer = trained(device, demo_tokenizer, tmp_path / "run", **settings)
    assert trainer.budget.longest > trainer.budget.piece


def test_a_resumed_run(device, demo_tokenizer, tmp_path, request):
    """Bit-equal to one in one go: checkpoints hold what updates on CUDA's ways need."""
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))  # else it stays for other tests
    settings = RUN | {"device": device, "prompts_per_step": 2, "max_steps": 2, "deterministic": True}
    straight = make_trainer(demo_tokenizer, tmp_path / "straight", small_model("qwen3"), **settings)
    straight.train()
    break_after(make_trainer(demo_tokenizer, tmp_path / "run", small_model("qwen3"), **settings), 1)
    resumed = make_trainer(demo_tokenizer, tmp_path / "run", small_model("qwen3"), **settings)
    resumed.train(resume=True)
    assert same_parameters(straight, resumed)
    assert untimed_metrics_of(tmp_path / "run") == untimed_metrics_of(tmp_path / "straight")


def test_several_turns(device, tmp_path):
    """Parked rows, tokens of a tool's answer, and a grammar."""
    trainer = turns.trainer(
        tmp_path / "run", lambda completions, **_: list(map(len, completions)), [turns.add], regex=turns.CALL,
        device=device, precision="bfloat16", microbatch_tokens=64, max_completion_length=128, max_steps=1,
    )  # fmt: skip
    metrics = list(trainer.steps())
    assert any(line["episodes/turns"] > 1 for line in metrics)
    assert metrics[0]["grad_norm"] > 0


def test_the_doctor(device, demo_tokenizer, tmp_path):
    settings = RUN | {"device": device, "beta": 0.1, "prompts_per_step": 2}
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", small_model("qwen3"), **settings)
    found = {one.check: one for one in examine(trainer, ["folder", "answers", "time"])}
    assert found["sampler"].status is found["reference"].status is Status.PASS
    assert not {"update", "rollout"} & set(found)  # both were made


ROWS = [("qwen3", "in order"), ("qwen3", "some"), ("mistral", "apart"), ("mistral", "one"), ("gpt2", "apart")]
ROWS += [("qwen3", "apart"), ("qwen3", "one"), ("gemma3_text", "some")]


@pytest.mark.parametrize(("family", "rows"), telling(ROWS, *ROWS[:5]))
def test_gradients_of_a_pack(device, family, rows):
    """Of prompts of which a microbatch uses some, against the formulas in float64: bfloat16 has 8 bits, so that a
    gradient of a few thousand numbers turns by less than 0.1."""
    prompts = [(1, 2, 3, 4, 5, 6, 7, 8, 9), (6, 7, 8), (4, 4, 4, 4)]
    of = {"in order": [0, 0, 1], "apart": [0, 1, 0], "some": [0, 2, 2], "one": [0]}[rows]
    completions = [(7, 8, 9), (4, 4), (5, 6, 7, 8)][: len(of)]
    drawn, found = PackedRows.of(of, completions), []
    for precision in (MIXED, DOUBLE):
        policy = Policy(small_model(family).to(device, precision.master), precision)
        assert policy.passes.shared
        with policy.training(), policy.compute(), policy.gradients_in_place():
            for _ in range(2):  # packs
                prefixes = policy.passes.read(prompts)
                for _ in range(2):  # gradients of prompts add up over microbatches
                    policy.states(prefixes, drawn, temperature=0.9).logps().logps_N.sum().backward()
                prefixes.backward()
        grads = [p.grad.double().flatten() for p in policy.model.parameters() if p.grad is not None]
        found.append(torch.cat(grads))
    one, other = found
    assert float((one - other).norm() / other.norm()) < 0.1
