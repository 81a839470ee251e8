"""A run in two parts: checkpoints, a second trainer that resumes, evaluation before and after."""

import os

from datasets import load_dataset
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig, GRPOTrainer

OUTPUT = "grpo-resume"


def boxed_reward(completions, solution, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    right = [f"boxed{{{s.strip('$')}}}" in content for s, content in zip(solution, contents)]
    return [1.0 if r else 0.5 if "boxed" in content else 0.0 for r, content in zip(right, contents)]


def make_trainer(max_steps):
    dataset = load_dataset("trl-lib/DeepMath-103K", split="train").train_test_split(test_size=32, seed=1)
    training_args = GRPOConfig(
        output_dir=OUTPUT,
        use_cpu=True,
        learning_rate=2e-4,
        lr_scheduler_type="constant",
        per_device_train_batch_size=32,
        per_device_eval_batch_size=64,
        num_generations=8,
        num_generations_eval=2,
        max_completion_length=40,
        max_steps=max_steps,
        logging_steps=1,
        save_strategy="steps",
        save_steps=3,
        save_total_limit=2,
        seed=3,
    )
    return GRPOTrainer(
        model="Qwen/Qwen2-0.5B-Instruct",
        reward_funcs=boxed_reward,
        args=training_args,
        train_dataset=dataset["train"],
        eval_dataset=dataset["test"],
    )


trainer = make_trainer(max_steps=6)
print(trainer.evaluate())
trainer.train()

checkpoint = get_last_checkpoint(OUTPUT)
print("resuming from", checkpoint)
assert os.path.basename(checkpoint) == "checkpoint-6"
trainer = make_trainer(max_steps=12)
trainer.train(resume_from_checkpoint=True)
assert trainer.state.global_step == 12
print(trainer.evaluate())
