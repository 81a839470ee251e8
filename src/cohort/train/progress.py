"""How far a run is within a step, so that a checkpoint can be of the instant between any two updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from cohort.errors import RunFolderError
from cohort.objective import TokenStatistics
from cohort.train.layout import Part
from cohort.train.seen import Seen, bits_of, of_bits
from cohort.train.update import NonFinite, UpdateResult
from cohort.types import TokenBatch


@dataclass(slots=True)
class Updates:
    """The updates of a step: what is done of them, and what they share. Part of a checkpoint that is written between
    two of them."""

    version_before: int
    """``Policy.version`` before the first of them."""
    results: list[UpdateResult] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    """Numbers, from 0, of those that were skipped because a value was not finite."""
    old_logps_N: Tensor | None = None
    """Of the batch, with the weights before the first update."""
    ref_logps_N: Tensor | None = None
    term_norms: dict[str, Any] = field(default_factory=dict)
    """Metrics that were measured before the first update."""
    seen: Seen | None = None
    """What the updates have seen of the batch; None before ``share``."""

    @property
    def num_nonfinite(self) -> int:
        """Number of updates that were skipped."""
        return len(self.skipped)

    @property
    def done(self) -> int:
        """Updates that were made or skipped."""
        return len(self.results) + self.num_nonfinite

    def left(self, minibatches: Sequence[Part]) -> Sequence[Part]:
        """The minibatches whose updates are still to be made."""
        return minibatches[self.done :]

    def resumed(self, batch: TokenBatch) -> TokenBatch:
        """The batch with the log-probs that were shared before the run was stopped."""
        return replace(batch, old_logps_N=self.old_logps_N, ref_logps_N=self.ref_logps_N)

    def share(self, batch: TokenBatch) -> TokenBatch:
        """Remember what the updates share."""
        self.old_logps_N, self.ref_logps_N = batch.old_logps_N, batch.ref_logps_N
        self.seen = self.seen or Seen.nothing(batch)
        return batch

    def ended(self, outcome: UpdateResult | NonFinite) -> UpdateResult | NonFinite:
        """Count an update. Returns its outcome without ``used``, whose tensors the record has no use for."""
        if isinstance(outcome, NonFinite):
            self.skipped.append(self.done)
            return outcome
        if self.seen is not None and outcome.used is not None:
            self.seen.add(self.done, outcome.used, len(outcome.logps_N))
        self.results.append(replace(outcome, used=None))
        return self.results[-1]

    def to_store(self) -> dict[str, Any]:
        """Everything, in types that files hold."""
        return {
            "version_before": self.version_before,
            "results": [_plain(result) for result in self.results],
            "skipped": self.skipped,
            "old_logps_N": _bits(self.old_logps_N),
            "ref_logps_N": _bits(self.ref_logps_N),
            "term_norms": self.term_norms,
            "seen": self.seen and self.seen.to_store(),
        }

    @classmethod
    def stored(cls, stored: Mapping[str, Any], device: torch.device) -> Updates:
        """The inverse of ``to_store``.

        Raises:
            RunFolderError: another version of Cohort has stored them.
        """
        if set(stored) != {one.name for one in fields(cls)}:
            raise RunFolderError(
                "the newest checkpoint is of the middle of a step, and another version of Cohort wrote it: finish the "
                "step with that version, or remove the checkpoint to go on from the one before"
            )
        values = dict(stored)
        for name in ("old_logps_N", "ref_logps_N"):
            values[name] = _of_bits(values[name], device)
        values["seen"] = values["seen"] and Seen.stored(values["seen"], device)
        values["results"] = [
            UpdateResult(
                **{
                    **result,
                    "statistics": TokenStatistics(**result["statistics"]),
                    "logps_N": _of_bits(result["logps_N"], device),
                }
            )
            for result in values["results"]
        ]
        return cls(**values)


def _plain(result: UpdateResult) -> dict[str, Any]:
    values = {one.name: getattr(result, one.name) for one in fields(result) if one.name != "used"}
    statistics = {one.name: getattr(result.statistics, one.name) for one in fields(result.statistics)}
    return values | {"statistics": statistics, "logps_N": _bits(result.logps_N)}


def _bits(values_N: Tensor | None) -> tuple[str, Tensor] | None:
    return None if values_N is None else bits_of(values_N)


def _of_bits(bits: tuple[str, Tensor] | None, device: torch.device) -> Tensor | None:
    return None if bits is None else of_bits(bits, device)
