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
    update. Weights that are divided over ranks have to be whole; see ``Layout.whole``."""
    model: Any = merged(policy.model) if has_adapters(policy.model) else policy.model
    # Not state_dict(), before which FSDP2 divides the weights again.
    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for prefix, module in model.named_modules():
        saved = module._buffers.keys() - module._non_persistent_buffers_set
        state |= {f"{prefix}.{name}".lstrip("."): module.get_buffer(name) for name in saved}
    yield from revert_weight_conversion(model, state).items()
