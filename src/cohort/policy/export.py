"""A policy's weights as checkpoints name them, for engines in other processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from cohort.policy.adapters import has_adapters, merged
from cohort.policy.policy import Policy


def named_weights(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors, as ``save_pretrained`` writes them: adapters are merged, a tied weight comes once, under the
    name of the embedding. The tensors are the policy's own where nothing was converted: read them before the next
    update."""
    model: Any = merged(policy.model) if has_adapters(policy.model) else policy.model
    state: dict[str, Tensor] = model.state_dict()
    for name, source in model.all_tied_weights_keys.items():
        if source in state and name in state and state[name].data_ptr() == state[source].data_ptr():
            del state[name]
    yield from revert_weight_conversion(model, state).items()
