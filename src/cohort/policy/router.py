"""The load-balancing loss of mixture-of-experts models, over a minibatch however it is cut.

With rows n = 1..M (each drawn token in each layer), router probabilities p_ne, and E experts of which each row uses k:

    L = E sum_e f_e P_e      f_e = fraction of the rows that use expert e      P_e = sum_n p_ne / M

f has no gradient and is counted over the whole minibatch first. L is then a sum over tokens, of which each microbatch
computes its part. Source: Switch Transformer (arXiv 2101.03961) eq. 4 to 6, as in transformers; over drawn tokens only,
because prompts are computed once for many completions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cohort.errors import ModelError


def experts_per_token(config: Any) -> int:
    """k, from a model's config.

    Raises:
        ModelError: the model has no experts.
    """
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    found = getattr(config, "num_experts_per_tok", None)
    if not isinstance(found, int):
        raise ModelError(
            f"model.router_aux_loss_coef needs a mixture-of-experts model, and {config.model_type!r} has no experts: "
            "set it to 0"
        )
    return found


def expert_counts(router_logits: Sequence[Tensor], per_token: int) -> Tensor:
    """How many rows use each expert, float64, shape ``[E]``.

    Args:
        router_logits: of each layer, ``[N, E]``.
        per_token: k.

    >>> expert_counts([torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 2.0]])], per_token=2)
    tensor([1., 2., 1.], dtype=torch.float64)
    """
    experts = router_logits[0].shape[-1]
    used = [logits.topk(per_token, dim=-1).indices.flatten() for logits in router_logits]
    return torch.bincount(torch.cat(used), minlength=experts).double()


@dataclass(frozen=True, slots=True)
class ExpertBalance:
    """What a microbatch needs to know about the whole minibatch."""

    counts_E: Tensor
    """How many rows use each expert."""
    rows: int
    """M."""
    coefficient: float

    def loss(self, router_logits: Sequence[Tensor]) -> Tensor:
        """A microbatch's part of the coefficient times L.

        Args:
            router_logits: of each layer, ``[N, E]``; differentiable.

        >>> balance = ExpertBalance(torch.tensor([4.0, 0.0]), rows=4, coefficient=1.0)
        >>> balance.loss([torch.zeros(4, 2)])  # E = 2, P = 1/2: 1 for any counts
        tensor(1.)
        """
        wide = [logits.to(torch.promote_types(logits.dtype, torch.float32)) for logits in router_logits]
        probs_E = torch.stack([torch.softmax(logits, dim=-1).sum(0) for logits in wide]).sum(0)
        fractions_E = (self.counts_E / self.rows).to(probs_E)
        return self.coefficient * len(fractions_E) * torch.sum(fractions_E * probs_E) / self.rows
