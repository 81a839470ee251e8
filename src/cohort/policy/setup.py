"""The policy of the settings."""

from __future__ import annotations

from typing import Any

from cohort.config import ModelConfig
from cohort.errors import ModelError
from cohort.policy.adapters import add_adapters
from cohort.policy.compute import enable_checkpointing
from cohort.policy.load import load_model, resolve_device, resolve_precision
from cohort.policy.policy import Policy
from cohort.policy.router import experts_per_token


def load_policy(model: Any, config: ModelConfig, model_config: Any, *, seed: int = 0) -> Policy:
    """Load the policy from a folder, a hub id or a loaded model, with the precision and options of the settings."""
    device = resolve_device(config.device)
    precision = resolve_precision(config.precision, device, getattr(model_config, "hidden_size", 0))
    if isinstance(model, str):
        model = load_model(
            model,
            precision,
            device,
            trust_remote_code=config.trust_remote_code,
            quantization=config.quantization,
        )
    elif not getattr(model, "is_quantized", False):
        model.to(device=device, dtype=precision.master)
    if config.lora.wanted:
        model = add_adapters(model, config.lora, precision, seed=seed)
    if config.gradient_checkpointing:
        enable_checkpointing(model)
    policy = Policy(model, precision, dropout=config.dropout)
    policy.native_kernels = config.native_kernels
    if config.router_aux_loss_coef:
        experts_per_token(model_config)
        policy.router_aux_loss_coef = config.router_aux_loss_coef
        if not policy.passes.shared:
            raise ModelError(
                f"model.router_aux_loss_coef needs packed completions, and here: {policy.passes.description}"
            )
    return policy
