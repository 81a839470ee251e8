"""GSPO: ratios of sequences, several minibatches per generation, a reference that follows the policy."""

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import reasoning_accuracy_reward, think_format_reward


def main():
    dataset = load_dataset("trl-lib/DeepMath-103K", split="train")
    dataset = dataset.train_test_split(test_size=32, seed=0)

    training_args = GRPOConfig(
        output_dir="gspo",
        importance_sampling_level="sequence",
        loss_type="grpo",
        epsilon=3e-4,
        epsilon_high=4e-4,
        beta=0.01,
        sync_ref_model=True,
        ref_model_mixup_alpha=0.6,
        ref_model_sync_steps=4,
        gradient_accumulation_steps=1,
        steps_per_generation=4,
        per_device_train_batch_size=16,
        num_generations=8,
        max_completion_length=40,
        learning_rate=1e-4,
        lr_scheduler_type="cosine",
        max_steps=16,
        logging_steps=4,
        eval_strategy="steps",
        eval_steps=8,
        per_device_eval_batch_size=32,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
    )
    trainer = GRPOTrainer(
        model="Qwen/Qwen2.5-0.5B-Instruct",
        args=training_args,
        reward_funcs=[think_format_reward, reasoning_accuracy_reward],
        train_dataset=dataset["train"],
        eval_dataset=dataset["test"],
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)


if __name__ == "__main__":
    main()
