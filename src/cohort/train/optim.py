"""AdamW with gradient clipping and a learning-rate schedule."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cohort.config import OptimConfig
from cohort.errors import ModelError, NonFiniteError


class Optimizer:
    """AdamW (fused where torch has it), transformers' schedules, and clipping by the gradient's norm.

    Weight decay acts on matrices only: biases, norms and other vectors are left alone.

    Args:
        model: what is trained: its parameters that require gradients.
        config: the settings.
        num_updates: updates of the whole run, for schedules that end.
    """

    def __init__(self, model: nn.Module, config: OptimConfig, num_updates: int) -> None:
        from transformers import get_scheduler

        self.parameters = [p for p in model.parameters() if p.requires_grad]
        if not self.parameters:
            raise ModelError("no parameter of the model requires a gradient: there is nothing to train")
        groups = [
            {"params": [p for p in self.parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in self.parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.max_grad_norm = config.max_grad_norm
        self.adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_epsilon,
            fused=self.parameters[0].device.type in ("cpu", "cuda"),
        )
        schedule = get_scheduler(
            config.lr_scheduler_type,
            self.adamw,
            num_warmup_steps=config.warmup_steps,
            num_training_steps=num_updates,
        )
        factor = schedule.lr_lambdas[0]
        # transformers' warm-up begins at a rate of exactly 0, which would spend the first rollout on nothing. Here
        # update k of w has k/w of the peak; after the warm-up the schedule is transformers' own.
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.adamw, lambda update: factor(update + 1 if update < config.warmup_steps else update)
        )

    @property
    def learning_rate(self) -> float:
        """The next update's learning rate."""
        return float(self.schedule.get_last_lr()[0])

    def zero_grad(self) -> None:
        """Forget the last update's gradients."""
        self.adamw.zero_grad(set_to_none=True)

    def step(self) -> float:
        """Clip, step, advance the schedule. Returns the gradient's norm before clipping.

        A gradient of exactly 0 (every group dead, no KL term) makes no step: AdamW's momentum and weight decay would
        move the weights although nothing was learned.

        Raises:
            NonFiniteError: the gradient is not finite; the weights are left as they were.
        """
        grad_norm = nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm)
        if not torch.isfinite(grad_norm):
            raise NonFiniteError(
                f"the gradient's norm is {grad_norm.item()}: the update was not made. To go on, start a new run from a "
                "checkpoint of this one (model.path) with a lower optim.learning_rate or model.precision 'float32'"
            )
        if grad_norm == 0:
            return 0.0
        self.adamw.step()
        self.schedule.step()
        return float(grad_norm)

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs."""
        return {"adamw": self.adamw.state_dict(), "schedule": self.schedule.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of ``state_dict``."""
        self.adamw.load_state_dict(state["adamw"])
        self.schedule.load_state_dict(state["schedule"])
