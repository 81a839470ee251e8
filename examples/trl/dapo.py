"""DAPO: clip-higher, mean over all tokens, overlong completions punished and masked, weighted rewards."""

import argparse

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward, get_soft_overlong_punishment

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="Qwen/Qwen2.5-0.5B-Instruct")
parser.add_argument("--max_completion_length", type=int, default=40)
parser.add_argument("--max_steps", type=int, default=10)
args = parser.parse_args()

SYSTEM_PROMPT = "Put your final answer within \\boxed{}."


def make_conversation(example):
    return {
        "prompt": [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": example["problem"]},
        ],
    }


train_dataset, test_dataset = load_dataset("AI-MO/NuminaMath-TIR", split=["train", "test"])
train_dataset = train_dataset.map(make_conversation, remove_columns=["problem"])
test_dataset = test_dataset.map(make_conversation, remove_columns=["problem"])

training_args = GRPOConfig(
    output_dir="dapo",
    loss_type="dapo",
    epsilon=0.2,
    epsilon_high=0.28,
    beta=0.0,
    scale_rewards="group",
    mask_truncated_completions=True,
    reward_weights=[1.0, 0.2],
    num_iterations=2,
    learning_rate=2e-4,
    per_device_train_batch_size=16,
    gradient_accumulation_steps=2,
    num_generations=8,
    max_completion_length=args.max_completion_length,
    max_steps=args.max_steps,
    logging_steps=1,
    log_completions=True,
    num_completions_to_print=2,
    save_strategy="no",
    use_cpu=True,
)
trainer = GRPOTrainer(
    model=args.model,
    args=training_args,
    reward_funcs=[
        accuracy_reward,
        get_soft_overlong_punishment(max_completion_len=args.max_completion_length, soft_punish_cache=12),
    ],
    train_dataset=train_dataset,
    eval_dataset=test_dataset,
)
trainer.train()
