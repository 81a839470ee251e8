"""Two tasks in one data set: rewards that skip rows of the other task, an asynchronous judge, and logged columns."""

import asyncio
import functools
import re

from datasets import Dataset, concatenate_datasets, load_dataset
from trl import GRPOConfig, GRPOTrainer


def add_task(example, task):
    return {"task": task}


math_rows = load_dataset("trl-lib/DeepMath-103K", split="train").map(add_task, fn_kwargs={"task": "math"})
chat_rows = Dataset.from_list(
    [{"prompt": [{"role": "user", "content": "Say hello."}], "solution": "", "task": "chat"} for _ in range(64)]
)
dataset = concatenate_datasets([math_rows.select(range(128)), chat_rows])


def math_reward(completions, solution, task, log_extra=None, log_metric=None, **kwargs):
    found = [re.findall(r"\d+", completion[0]["content"]) for completion in completions]
    if log_extra:
        log_extra("found", [numbers[-1] if numbers else "-" for numbers in found])
    right = [bool(n) and n[-1] == s.strip("$") for n, s in zip(found, solution)]
    if log_metric:
        log_metric("answered", sum(map(bool, found)) / len(found))
    return [float(r) if t == "math" else None for r, t in zip(right, task)]


async def judge(text: str) -> float:
    await asyncio.sleep(0.05)  # a request to a server
    return min(len(set(text)) / 20, 1.0)


async def judge_reward(completions, task, **kwargs):
    scores = await asyncio.gather(*(judge(completion[0]["content"]) for completion in completions))
    return [score if t == "chat" else None for score, t in zip(scores, task)]


def length_reward(completions, target_length, trainer_state=None, **kwargs):
    weight = 1.0 if trainer_state is None else 1 - trainer_state.global_step / max(trainer_state.max_steps, 1)
    return [-weight * abs(target_length - len(c[0]["content"])) / 1000 for c in completions]


training_args = GRPOConfig(
    output_dir="grpo-multi-task",
    use_cpu=True,
    learning_rate=2e-4,
    per_device_train_batch_size=32,
    num_generations=8,
    max_completion_length=40,
    loss_type="dr_grpo",
    scale_rewards=False,
    max_steps=10,
    logging_steps=1,
    log_completions=True,
    save_strategy="no",
    report_to=[],
)
trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    reward_funcs=[math_reward, judge_reward, functools.partial(length_reward, target_length=60)],
    args=training_args,
    train_dataset=dataset,
)
trainer.train()
