"""Settings of the optimizer."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from cohort.config.data import Table
from cohort.config.section import PositiveFloat, PositiveInt, Section
from cohort.errors import did_you_mean

LRSchedule = Literal[
    "constant",
    "constant_with_warmup",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "polynomial",
    "inverse_sqrt",
    "warmup_stable_decay",
]
"""transformers' schedules."""
ARGUMENTS: dict[str, tuple[str, ...]] = {
    "cosine": ("num_cycles",),
    "cosine_with_restarts": ("num_cycles",),
    "cosine_with_min_lr": ("num_cycles", "min_lr", "min_lr_rate"),
    "cosine_warmup_with_min_lr": ("num_cycles", "min_lr", "min_lr_rate", "warmup_lr_rate"),
    "polynomial": ("lr_end", "power"),
    "inverse_sqrt": ("timescale",),
    "warmup_stable_decay": (
        *("num_decay_steps", "num_stable_steps", "warmup_type", "decay_type", "min_lr_ratio", "num_cycles"),
    ),
}
"""The arguments that schedules take beside warm-up and length."""
NEEDED = {
    "cosine_with_min_lr": ("min_lr", "min_lr_rate"),
    "cosine_warmup_with_min_lr": ("min_lr", "min_lr_rate"),
    "warmup_stable_decay": ("num_decay_steps",),
}
"""Of these, arguments of which one has to be set."""
WITHOUT_AN_END = ("constant", "constant_with_warmup", "inverse_sqrt")
"""Schedules that do not depend on the number of updates of the whole run."""


class OptimConfig(Section):
    """The optimizer."""

    optimizer: Literal["adamw", "adamw_8bit", "adafactor", "muon"] = "adamw"
    """"adamw_8bit" keeps AdamW's state in 8 bits (bitsandbytes, in the extra "quantized"); "adafactor" keeps one row
    and one column per matrix, and uses none of `adam_*`; "muon" orthogonalises the updates of the layers' matrices,
    scaled to AdamW's size, and uses AdamW for embeddings, head and vectors."""
    learning_rate: Annotated[float, Field(ge=0)] = 1e-6
    """Peak learning rate."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay, on matrices only."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the gradient's running mean."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Decay of the squared gradient's running mean."""
    adam_epsilon: PositiveFloat = 1e-8
    """Added to the root of the squared gradient's mean."""
    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    """Maximum gradient norm; larger gradients are scaled down to it. 0: none are."""
    lr_scheduler_type: LRSchedule = "constant"
    """Schedule after the warm-up, by transformers' names. "constant" with `warmup_steps` is "constant_with_warmup"."""
    lr_scheduler_kwargs: Table = Field({})
    """Further arguments of the schedule, by transformers' names, as in { min_lr_rate = 0.1 } of
    "cosine_with_min_lr"."""
    warmup_steps: int | float = 0
    """Updates over which the learning rate rises: update k has k/warmup_steps of the peak. Below 1: this share of the
    run's updates, rounded up."""
    microbatch_tokens: PositiveInt | None = None
    """Maximum number of tokens in one forward and backward pass. Affects memory only: the gradient is the same. Unset:
    what half of the free memory holds, at most 16,384 on CUDA; on a CPU at most 1,024, or up to 4,096 whose
    activations take at most 256 MiB. Halved when memory runs out."""
    max_nonfinite_updates: PositiveInt = 3
    """An update with non-finite log-probabilities, coefficients or gradient is skipped, and its batch is written to
    nonfinite/ in the run folder. This many in a row stop the run."""

    @field_validator("warmup_steps")
    @classmethod
    def _number_or_share(cls, value: int | float) -> int | float:
        if value < 0 or (value >= 1 and value != int(value)):
            raise ValueError(f"expected a number of updates, or a share of the run's updates below 1, got {value:g}")
        return int(value) if value >= 1 or value == 0 else value

    @model_validator(mode="after")
    def _known_arguments(self) -> OptimConfig:
        """Refuse arguments that the schedule does not take, which transformers would refuse with the model loaded."""
        kind, given = self.lr_scheduler_type, self.lr_scheduler_kwargs
        known = ARGUMENTS.get(kind, ())
        for name in given:
            if name not in known:
                hint = did_you_mean(name, known) or (f"; it takes {', '.join(known)}" if known else "; it takes none")
                raise ValueError(f"lr_scheduler_kwargs: lr_scheduler_type {kind!r} has no argument {name!r}{hint}")
        if kind in NEEDED and not any(name in given for name in NEEDED[kind]):
            raise ValueError(f"lr_scheduler_type {kind!r} needs lr_scheduler_kwargs with {' or '.join(NEEDED[kind])}")
        return self

    def warmup_of(self, updates: int) -> int:
        """Updates of warm-up in a run of so many updates."""
        return math.ceil(updates * self.warmup_steps) if self.warmup_steps < 1 else int(self.warmup_steps)

    @property
    def depends_on_the_end(self) -> bool:
        """Whether a longer run has other learning rates."""
        return self.lr_scheduler_type not in WITHOUT_AN_END or 0 < self.warmup_steps < 1
