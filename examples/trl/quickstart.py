"""The quickstart: summaries of 40 characters."""

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

dataset = load_dataset("trl-lib/tldr", split="train")


def reward_len(completions, **kwargs):
    return [-abs(40 - len(completion)) for completion in completions]


training_args = GRPOConfig(
    output_dir="Qwen2-0.5B-GRPO",
    per_device_train_batch_size=16,
    max_completion_length=32,
    learning_rate=1e-4,
    logging_steps=2,
    max_steps=10,
    use_cpu=True,
)
trainer = GRPOTrainer(
    model="Qwen/Qwen2-0.5B-Instruct",
    reward_funcs=reward_len,
    args=training_args,
    train_dataset=dataset,
)
trainer.train()
