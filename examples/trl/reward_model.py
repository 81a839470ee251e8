"""A reward model by its name, LoRA, and a KL penalty against the base model."""

import torch
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer


def main():
    dataset = load_dataset("trl-lib/DeepMath-103K", split="train")
    dataset = dataset.remove_columns("solution")

    training_args = GRPOConfig(
        "grpo-reward-model",
        learning_rate=1e-3,
        beta=0.04,
        num_generations=4,
        max_completion_length=32,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        max_steps=8,
        temperature=0.9,
        logging_steps=1,
        save_strategy="no",
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = GRPOTrainer(
        "Qwen/Qwen2.5-0.5B-Instruct",
        "OpenAssistant/reward-model-deberta-v3-large-v2",
        training_args,
        dataset,
        peft_config=LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear"),
    )
    result = trainer.train()
    print(result.metrics)
    trainer.save_model()


if __name__ == "__main__":
    main()
