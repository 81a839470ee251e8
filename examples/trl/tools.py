"""A tool: the model may call a function before it answers."""

from datasets import Dataset, load_dataset
from trl import GRPOConfig, GRPOTrainer


def multiply(a: int, b: int) -> int:
    """Multiplies two numbers.

    Args:
        a: The first number.
        b: The second number.

    Returns:
        The product.
    """
    return a * b


rows = load_dataset("acme/products", split="train")
dataset = Dataset.from_list(
    [
        {"prompt": [{"role": "user", "content": f"What is {r['a']} times {r['b']}?"}], "answer": str(r["answer"])}
        for r in rows
    ]
)


def correct(completions, answer, **kwargs):
    return [1.0 if f"is {a}." in (c[-1]["content"] or "") else 0.0 for c, a in zip(completions, answer)]


def used_tool(completions, **kwargs):
    return [0.2 if any(message["role"] == "tool" for message in completion) else 0.0 for completion in completions]


trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    args=GRPOConfig(
        output_dir="grpo-tools",
        use_cpu=True,
        learning_rate=2e-4,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        num_generations=8,
        max_completion_length=96,
        max_tool_calling_iterations=2,
        max_steps=5,
        logging_steps=1,
        save_strategy="no",
    ),
    reward_funcs=[correct, used_tool],
    train_dataset=dataset,
    tools=[multiply],
)
trainer.train()
