"""Adapters that vLLM loads by name: the base weights go to it once, and after each update the adapter alone.

No merged copy of the weights is made, and weights that are quantized can be sampled with.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from cohort.policy import adapter_weights, has_adapters, trained_adapter

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The highest ranks for which vLLM reserves memory."""
OTHER = ("use_dora", "modules_to_save", "rank_pattern", "alpha_pattern", "trainable_token_indices", "lora_bias")
"""Settings of peft that vLLM does not know. With one of them, the adapter is merged into the weights that are sent."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """The adapter that a model trains."""

    model: Any
    rank: int

    @classmethod
    def of(cls, model: Any) -> Adapter | None:
        """A model's adapter; None if it has none that vLLM can load."""
        if not has_adapters(model):
            return None
        config = model.peft_config[trained_adapter(model)]
        plain = str(getattr(config.peft_type, "value", config.peft_type)) == "LORA" and config.bias == "none"
        if not plain or any(getattr(config, name, None) for name in (*OTHER, "target_parameters", "layer_replication")):
            return None
        embeddings = any("lora_embedding" in name or "lm_head" in name for name in adapter_weights(model))
        return None if embeddings or config.r > RANKS[-1] else cls(model, config.r)

    @property
    def reserved(self) -> int:
        """The lowest of ``RANKS`` that holds it."""
        return next(rank for rank in RANKS if rank >= self.rank)

    def save(self, folder: Path) -> None:
        """Write the adapter to a folder, as peft does."""
        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in adapter_weights(self.model).items()}
        save_file(weights, folder / "adapter_model.safetensors")
        self.model.peft_config[trained_adapter(self.model)].save_pretrained(str(folder))
