"""Callbacks: a table of completions, an early stop, and a plot's numbers from the log history."""

import json
import re
import time

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, TrainerControl, TrainerState
from trl import GRPOConfig, GRPOTrainer


class EarlyStoppingOnReward(TrainerCallback):
    """Stops once the mean reward of the last logs is above a threshold."""

    def __init__(self, threshold: float, patience: int = 2):
        self.threshold = threshold
        self.patience = patience
        self.hits = 0

    def on_log(self, args, state: TrainerState, control: TrainerControl, logs=None, **kwargs):
        if logs and "reward" in logs:
            self.hits = self.hits + 1 if logs["reward"] >= self.threshold else 0
            if self.hits >= self.patience:
                print(f"Stopping at step {state.global_step}")
                control.should_training_stop = True
        return control


class Timer(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        self.start = time.time()
        self.steps = 0

    def on_step_end(self, args, state, control, model=None, processing_class=None, optimizer=None, **kwargs):
        self.steps += 1
        assert model is not None
        if state.global_step == 6:
            control.should_save = True

    def on_train_end(self, args, state, control, **kwargs):
        print(f"{self.steps} steps in {time.time() - self.start:.1f} s, {state.epoch:.2f} epochs")


def boxed_reward(completions, **kwargs):
    return [1.0 if re.search(r"\\boxed\{\d+\}", completion[0]["content"]) else 0.0 for completion in completions]


def brevity_reward(completion_ids, **kwargs):
    return [-len(ids) / 100 for ids in completion_ids]


model_id = "Qwen/Qwen2-0.5B-Instruct"
model = AutoModelForCausalLM.from_pretrained(model_id)
tokenizer = AutoTokenizer.from_pretrained(model_id, padding_side="left")
dataset = load_dataset("trl-lib/DeepMath-103K", split="train").select(range(200))

training_args = GRPOConfig(
    output_dir="grpo-callbacks",
    use_cpu=True,
    learning_rate=3e-4,
    lr_scheduler_type="constant_with_warmup",
    warmup_steps=2,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=4,
    num_generations=8,
    max_completion_length=40,
    max_steps=14,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
)
trainer = GRPOTrainer(
    model=model,
    processing_class=tokenizer,
    reward_funcs=[boxed_reward, brevity_reward],
    args=training_args,
    train_dataset=dataset,
    callbacks=[EarlyStoppingOnReward(threshold=0.9)],
)
trainer.add_callback(Timer())
trainer.train()

steps = [log["step"] for log in trainer.state.log_history if "reward" in log]
rewards = [log["reward"] for log in trainer.state.log_history if "reward" in log]
lengths = [log["completions/mean_length"] for log in trainer.state.log_history if "reward" in log]
with open("history.json", "w") as file:
    json.dump({"steps": steps, "rewards": rewards, "lengths": lengths}, file)
trainer.save_model("final_model")
