"""examples/minimal_grpo.py is GRPO: its parameters equal the trainer's after three steps, to rounding."""

import importlib.util
from pathlib import Path

import torch

from cohort import GRPOConfig, GRPOTrainer
from cohort.demo.task import accuracy, problems
from tests.conftest import DEMO_MODEL

EXAMPLE = Path(__file__).parents[1] / "examples" / "minimal_grpo.py"
STEPS = 3


def load_example():
    spec = importlib.util.spec_from_file_location("minimal_grpo", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_minimal_example_equals_the_loop(tmp_path):
    example = load_example()
    example.PROMPTS_PER_STEP = example.NUM_GENERATIONS = 4
    rows = problems(STEPS * example.PROMPTS_PER_STEP, held_out=False, seed=0)
    config = GRPOConfig(
        format="chat",
        prompt_column="question",
        order="sequential",
        prompts_per_step=example.PROMPTS_PER_STEP,
        num_generations=example.NUM_GENERATIONS,
        max_completion_length=96,
        beta=example.OBJECTIVE.beta,
        learning_rate=example.LEARNING_RATE,
        max_grad_norm=example.MAX_GRAD_NORM,
        # One microbatch, as in the example: float32 sums depend on their order.
        microbatch_tokens=1_000_000,
        precision="float32",
        device="cpu",
        output_dir=str(tmp_path / "run"),
        progress=False,
    )
    trainer = GRPOTrainer(str(DEMO_MODEL), accuracy, config, rows)
    trainer_metrics = list(trainer.steps())

    policy, reference, engine, optimizer, tokenizer = example.build()
    prompts = example.make_prompts(tokenizer, rows)
    for step in range(STEPS):
        prompts_P = prompts[step * example.PROMPTS_PER_STEP : (step + 1) * example.PROMPTS_PER_STEP]
        result = example.train_step(step, prompts_P, policy, reference, engine, optimizer)
        assert result["reward"] == trainer_metrics[step]["reward/mean"]
    for mine, theirs in zip(policy.model.parameters(), trainer.policy.model.parameters(), strict=True):
        # The trainer computes equal completions of a prompt once: sums in another order. A step moves a parameter by up to
        # the learning rate, a hundred times as far.
        torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-6)


def test_the_example_is_short():
    assert len(EXAMPLE.read_text().splitlines()) < 200
