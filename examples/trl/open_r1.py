"""Reasoning with a registry of rewards, evaluation, and callbacks, in the manner of open-r1.

python open_r1.py --config recipes/open_r1.yaml
"""

import logging
import os
import sys
from dataclasses import dataclass, field

import datasets
import transformers
from datasets import load_dataset
from transformers import AutoTokenizer, TrainerCallback, set_seed
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config
from trl.rewards import accuracy_reward, get_repetition_penalty_reward

logger = logging.getLogger(__name__)


@dataclass
class GRPOScriptArguments(ScriptArguments):
    reward_funcs: list[str] = field(
        default_factory=lambda: ["accuracy", "format", "tag_count"],
        metadata={"help": "List of reward functions."},
    )
    dataset_prompt_column: str = field(default="prompt", metadata={"help": "Column to use as prompts for training."})
    repetition_n_grams: int = field(default=3, metadata={"help": "Number of n-grams for repetition penalty reward"})
    repetition_max_penalty: float = field(default=-1.0, metadata={"help": "Maximum (negative) repetition penalty"})


@dataclass
class OwnGRPOConfig(GRPOConfig):
    system_prompt: str | None = field(default=None, metadata={"help": "The system prompt to use."})
    benchmarks: list[str] = field(default_factory=list, metadata={"help": "The benchmarks to run after training."})


def format_reward(completions, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if c.startswith("<think>") and "</think>" in c and "<answer>" in c else 0.0 for c in contents]


def tag_count_reward(completions, **kwargs) -> list[float]:
    def count_tags(text: str) -> float:
        return 0.25 * sum(text.count(tag) == 1 for tag in ("<think>", "</think>", "<answer>", "</answer>"))

    return [count_tags(completion[0]["content"]) for completion in completions]


def get_reward_funcs(script_args):
    registry = {
        "accuracy": accuracy_reward,
        "format": format_reward,
        "tag_count": tag_count_reward,
        "repetition_penalty": get_repetition_penalty_reward(
            ngram_size=script_args.repetition_n_grams, max_penalty=script_args.repetition_max_penalty
        ),
    }
    return [registry[func] for func in script_args.reward_funcs]


class LogRewards(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and logs and "reward" in logs:
            logger.info(f"step {state.global_step}: reward {logs['reward']:.3f} +- {logs['reward_std']:.3f}")


def main(script_args, training_args, model_args):
    set_seed(training_args.seed)
    logging.basicConfig(
        format="%(asctime)s - %(levelname)s - %(name)s - %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
        handlers=[logging.StreamHandler(sys.stdout)],
    )
    log_level = training_args.get_process_log_level()
    logger.setLevel(log_level)
    datasets.utils.logging.set_verbosity(log_level)
    transformers.utils.logging.set_verbosity(log_level)
    logger.warning(
        f"Process rank: {training_args.local_rank}, device: {training_args.device}, n_gpu: {training_args.n_gpu}"
        f" distributed training: {bool(training_args.local_rank != -1)}, 16-bits training: {training_args.fp16}"
    )

    last_checkpoint = None
    if os.path.isdir(training_args.output_dir):
        last_checkpoint = get_last_checkpoint(training_args.output_dir)

    dataset = load_dataset(script_args.dataset_name, name=script_args.dataset_config)
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path, revision=model_args.model_revision)

    def make_conversation(example, prompt_column=script_args.dataset_prompt_column):
        prompt = []
        if training_args.system_prompt is not None:
            prompt.append({"role": "system", "content": training_args.system_prompt})
        prompt.append({"role": "user", "content": example[prompt_column]})
        return {"prompt": prompt}

    dataset = dataset.map(make_conversation)
    for split in dataset:
        if "messages" in dataset[split].column_names:
            dataset[split] = dataset[split].remove_columns("messages")

    training_args.model_init_kwargs = dict(
        revision=model_args.model_revision,
        attn_implementation=model_args.attn_implementation,
        dtype=model_args.dtype,
        use_cache=not training_args.gradient_checkpointing,
    )

    trainer = GRPOTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=get_reward_funcs(script_args),
        args=training_args,
        train_dataset=dataset[script_args.dataset_train_split],
        eval_dataset=dataset[script_args.dataset_test_split] if training_args.eval_strategy != "no" else None,
        peft_config=get_peft_config(model_args),
        callbacks=[LogRewards()],
        processing_class=tokenizer,
    )

    logger.info("*** Train ***")
    checkpoint = None
    if training_args.resume_from_checkpoint is not None:
        checkpoint = training_args.resume_from_checkpoint
    elif last_checkpoint is not None:
        checkpoint = last_checkpoint
    train_result = trainer.train(resume_from_checkpoint=checkpoint)
    metrics = train_result.metrics
    metrics["train_samples"] = len(dataset[script_args.dataset_train_split])
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", metrics)
    trainer.save_state()

    logger.info("*** Save model ***")
    trainer.model.generation_config.eos_token_id = tokenizer.eos_token_id
    trainer.save_model(training_args.output_dir)

    kwargs = {"dataset_name": script_args.dataset_name, "tags": ["open-r1"]}
    if trainer.accelerator.is_main_process:
        trainer.create_model_card(**kwargs)
        trainer.model.config.use_cache = True
        trainer.model.config.save_pretrained(training_args.output_dir)

    if training_args.do_eval:
        logger.info("*** Evaluate ***")
        metrics = trainer.evaluate()
        metrics["eval_samples"] = len(dataset[script_args.dataset_test_split])
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)

    if training_args.push_to_hub:
        trainer.push_to_hub(**kwargs)


if __name__ == "__main__":
    parser = TrlParser((GRPOScriptArguments, OwnGRPOConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config()
    main(script_args, training_args, model_args)
