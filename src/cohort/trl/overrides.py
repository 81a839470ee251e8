"""What a subclass of ``cohort.trl.GRPOTrainer`` may not override: methods that TRL's trainer calls and this one does
not."""

from __future__ import annotations

from typing import Any

from transformers import Trainer

from cohort.errors import ConfigError

PRIVATE = frozenset(
    (
        *("_calculate_rewards", "_compute_loss", "_generate", "_generate_and_score_completions"),
        *("_generate_single_turn", "_get_per_token_logps_and_entropies", "_get_tool_suffix_ids"),
        *("_log_completion_extra", "_log_metric", "_send_telemetry", "_tokenize_prompts", "_tool_call_loop"),
        *("get_gamma_weights", "get_high_entropy_mask", "get_off_policy_mask"),
        *("_get_last_hidden_state", "_get_per_token_logps", "_move_model_to_vllm", "compute_liger_loss"),  # older ones
    )
)
"""Methods of TRL's ``GRPOTrainer`` that transformers' ``Trainer`` does not have."""


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
