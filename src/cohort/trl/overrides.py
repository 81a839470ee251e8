"""Attributes of TRL's trainer that ``cohort.trl.GRPOTrainer`` does not have: a subclass may not override its methods,
and an error says what to use instead."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from transformers import Trainer

from cohort.errors import ConfigError
from cohort.trl.config import GRPOConfig

PRIVATE = frozenset(
    (
        *("_calculate_rewards", "_compute_loss", "_generate", "_generate_and_score_completions"),
        *("_generate_single_turn", "_get_per_token_logps_and_entropies", "_get_tool_suffix_ids"),
        *("_log_completion_extra", "_log_metric", "_send_telemetry", "_tokenize_prompts", "_tool_call_loop"),
        *("get_gamma_weights", "get_high_entropy_mask", "get_off_policy_mask"),
    )
)
"""Methods of TRL's ``GRPOTrainer`` that transformers' ``Trainer`` does not have."""

INSTEAD = {
    "_metrics": "a reward function adds a metric by its parameter log_metric, other code by trainer.log({...})",
    "_step": "trainer.state.global_step counts updates",
    "chat_template": "it is trainer.processing_class.chat_template",
    "create_optimizer": "pass optimizers=(optimizer, scheduler)",
    "create_scheduler": "pass optimizers=(optimizer, scheduler)",
    "data_collator": "pass rows with a column 'prompt'",
    "deepspeed": "DeepSpeed is not used; save_model() gathers the weights in any layout",
    "epsilon_low": "it is trainer.args.epsilon",
    "generation_config": "set temperature, top_p, ... of GRPOConfig",
    "get_eval_dataloader": "the rows are trainer.eval_dataset",
    "get_train_dataloader": "the rows are trainer.train_dataset",
    "llm": "set use_vllm of GRPOConfig",
    "model_wrapped": "the model is trainer.model",
    "predict": "trainer.evaluate(rows) samples and scores",
    "tokenizer": "it is trainer.processing_class",
    "vllm_client": "set use_vllm of GRPOConfig",
    "vllm_generation": "set use_vllm of GRPOConfig",
}
"""What to use for attributes of TRL's trainer. For those with the name of an argument, it is ``trainer.args.NAME``."""


def absent_attribute(trainer: Any, name: str) -> Any:
    """``GRPOTrainer.__getattr__``.

    Raises:
        AttributeError: always; says what to use for an attribute of TRL's trainer.
    """
    instead = INSTEAD.get(name)
    if instead is None and name in {field.name for field in fields(GRPOConfig)}:
        instead = f"it is trainer.args.{name}"
    if instead is None and (name in PRIVATE or hasattr(Trainer, name)):
        instead = "Cohort's trainer does not work by TRL's methods (see 'cohort docs trl')"
    hint = f": {instead}" if instead else ""
    raise AttributeError(f"cohort.trl.GRPOTrainer has no attribute {name!r}{hint}", name=name, obj=trainer)


def check_overrides(subclass: type, own: type) -> None:
    """Check that a subclass overrides nothing that would never be called.

    Args:
        subclass: the class.
        own: ``cohort.trl.GRPOTrainer``.

    Raises:
        ConfigError: names what it overrides.
    """
    public = {name for name in vars(own) if not name.startswith("_")}
    private = {name for name, value in vars(own).items() if callable(value) and not name.startswith("__")} - public
    refused = (PRIVATE | private | {name for name in dir(Trainer) if not name.startswith("__")}) - public
    mixed = [base for base in subclass.__mro__ if not issubclass(own, base)]
    if found := sorted({name for base in mixed for name, value in vars(base).items() if _is_method(value)} & refused):
        raise ConfigError(
            f"{subclass.__name__} overrides {', '.join(found)}, which cohort.trl.GRPOTrainer never calls: use reward "
            "functions, callbacks, environment_factory, or the settings of cohort.GRPOTrainer"
        )


def _is_method(value: Any) -> bool:
    return callable(value) or isinstance(value, staticmethod | classmethod | property)
