"""What the file of a stored step says about the whole step, checked: anybody can have written it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

Count = Annotated[int, Field(ge=1, lt=2**31)]


class _Table(BaseModel):
    """A JSON object. Keys that a replay does not use are left out."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)


class _KL(_Table):
    beta: float = Field(ge=0)


class _Objective(_Table):
    kl: _KL


class _Update(_Table):
    skipped: bool
    learning_rate: float | None = Field(None, ge=0)


class Facts(_Table):
    """What holds for the whole step (``docs/store.md``)."""

    groups: int = Field(ge=0, lt=2**31)
    """Groups that were sampled."""
    minibatches: Count
    max_completion_length: Count
    microbatch_tokens: Count
    shared_prompts: bool
    objective: _Objective
    updates: list[_Update]
    reward_weights: dict[str, float]

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Facts:
        """Check the facts of a file.

        Raises:
            ValueError: one is missing, has another type than documented, or is out of bounds.
        """
        try:
            return cls.model_validate(facts)
        except ValidationError as error:
            first = error.errors()[0]
            name, got = ".".join(map(str, first["loc"])), repr(first["input"])
            raise ValueError(f"{name} of the step: {first['msg']}, got {got:.80}") from None

    @property
    def beta(self) -> float:
        """Weight of the KL in this step."""
        return self.objective.kl.beta

    @property
    def learning_rates(self) -> list[float | None]:
        """Of each update; None in the place of one that was skipped."""
        return [None if update.skipped else update.learning_rate for update in self.updates]
