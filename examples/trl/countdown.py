"""The countdown game: arguments from a recipe, resumed from the last checkpoint, metrics and a model card.

python countdown.py --config recipes/countdown.yaml
"""

import logging
import os
import re
from dataclasses import dataclass
from datetime import datetime

from datasets import load_dataset
from transformers import AutoTokenizer
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser, get_peft_config

logging.basicConfig(level=logging.INFO)
logger = logging.getLogger(__name__)


@dataclass
class ScriptArguments:
    dataset_id_or_path: str = "Jiayi-Pan/Countdown-Tasks-3to4"
    dataset_splits: str = "train"
    tokenizer_name_or_path: str | None = None


def format_reward_func(completions, target, **kwargs):
    rewards = []
    for completion, _ in zip(completions, target):
        completion = "<think>" + completion
        regex = r"^<think>([^<]*(?:<(?!/?think>)[^<]*)*)<\/think>\n<answer>([\s\S]*?)<\/answer>$"
        match = re.search(regex, completion, re.DOTALL)
        rewards.append(0.0 if match is None or len(match.groups()) != 2 else 1.0)
    return rewards


def equation_reward_func(completions, target, nums, **kwargs):
    rewards = []
    for completion, gt, numbers in zip(completions, target, nums):
        match = re.search(r"<answer>(.*?)<\/answer>", completion)
        if match is None:
            rewards.append(0.0)
            continue
        equation = match.group(1).strip()
        used_numbers = [int(n) for n in re.findall(r"\d+", equation)]
        rewards.append(1.0 if used_numbers in ([gt], sorted(numbers)) else 0.0)
    return rewards


def grpo_function(model_args: ModelConfig, script_args: ScriptArguments, training_args: GRPOConfig):
    logger.info(f"Model parameters {model_args}")
    logger.info(f"Training/evaluation parameters {training_args}")

    tokenizer = AutoTokenizer.from_pretrained(
        script_args.tokenizer_name_or_path or model_args.model_name_or_path,
        revision=model_args.model_revision,
    )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token

    dataset = load_dataset(script_args.dataset_id_or_path, split=script_args.dataset_splits)
    dataset = dataset.shuffle(seed=42).select(range(128))

    def generate_r1_prompt(numbers, target):
        r1_prefix = [
            {
                "role": "system",
                "content": "You are a helpful assistant. You first think about the reasoning process and then give "
                "the answer, within <think> </think> and <answer> </answer> tags.",
            },
            {
                "role": "user",
                "content": f"Tom has {numbers[0]} apples and buys {numbers[1]} more. How many apples does he have?",
            },
        ]
        prompt = tokenizer.apply_chat_template(r1_prefix, tokenize=False, add_generation_prompt=True)
        return {"prompt": prompt + "<think>", "target": target, "nums": numbers}

    dataset = dataset.map(lambda x: generate_r1_prompt(x["nums"], x["target"]))
    train_test_split = dataset.train_test_split(test_size=0.1)
    train_dataset = train_test_split["train"]
    test_dataset = train_test_split["test"]

    trainer = GRPOTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=[format_reward_func, equation_reward_func],
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=test_dataset,
        peft_config=get_peft_config(model_args),
    )

    last_checkpoint = get_last_checkpoint(training_args.output_dir) if os.path.isdir(training_args.output_dir) else None
    if last_checkpoint is not None and training_args.resume_from_checkpoint is None:
        logger.info(f"Checkpoint detected, resuming training at {last_checkpoint}.")

    logger.info(
        f"*** Starting training {datetime.now():%Y-%m-%d %H:%M:%S} for {training_args.num_train_epochs} epochs***"
    )
    train_result = trainer.train(resume_from_checkpoint=last_checkpoint)
    metrics = train_result.metrics
    metrics["train_samples"] = len(train_dataset)
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", metrics)
    trainer.save_state()

    trainer.model.config.use_cache = True
    trainer.save_model(training_args.output_dir)
    logger.info(f"Model saved to {training_args.output_dir}")
    training_args.distributed_state.wait_for_everyone()

    tokenizer.save_pretrained(training_args.output_dir)
    if trainer.accelerator.is_main_process:
        trainer.create_model_card(tags=["rl", "grpo", "tutorial"])
    if training_args.push_to_hub is True:
        trainer.push_to_hub()


def main():
    parser = TrlParser((ModelConfig, ScriptArguments, GRPOConfig))
    model_args, script_args, training_args = parser.parse_args_and_config()
    grpo_function(model_args, script_args, training_args)


if __name__ == "__main__":
    main()
