"""Detect non-finite values before they reach the weights; keep the batch; stop after several in a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cohort.errors import NonFiniteError
from cohort.parallel import World, on_main
from cohort.train.layout import Part
from cohort.types import TokenBatch

GO_ON = (
    "To go on, start a new run from a checkpoint of this one (model.path) with a lower optim.learning_rate or "
    "model.precision 'float32'"
)


def check_finite(batch: TokenBatch, part: Part, values: Mapping[str, Tensor | None]) -> None:
    """Check tensors on the axis N of a part.

    Args:
        batch: the rollout.
        part: the sequences whose tokens the tensors belong to.
        values: by name, shape ``[N]``; None is skipped.

    Raises:
        NonFiniteError: a value is NaN or infinite; names the first tensor, completion and token.
    """
    given = {name: values_N for name, values_N in values.items() if values_N is not None}
    if not given or bool(torch.stack([values_N.isfinite().all() for values_N in given.values()]).all()):
        return
    for name, values_N in given.items():
        found = (~values_N.isfinite()).nonzero()
        if found.numel():
            n = int(found[0])
            s = int(part.sequence_N[n])
            first = int((part.sequence_N < s).sum())
            ids = batch_ids(batch, int(part.sequences_S[s]))
            prompt = batch.prompt_ids[int(batch.group_S[part.sequences_S[s]])]
            raise NonFiniteError(
                f"{name} is {float(values_N[n])} at token {n - first + 1} of {int(part.lengths_S[s])} of a completion "
                f"(token ids {', '.join(map(str, ids[:8]))}{', ...' if len(ids) > 8 else ''}, after a prompt of "
                f"{len(prompt)} tokens)"
            )


def batch_ids(batch: TokenBatch, sequence: int) -> list[int]:
    """The ids of a sequence's segments, drawn or given."""
    ids: list[int] = batch.ids_T[torch.repeat_interleave(batch.sequence_B == sequence, batch.lengths_B)].tolist()
    return ids


@dataclass(frozen=True, slots=True)
class NonFiniteLog:
    """Keeps the batches of skipped updates; ends the run after several in a row."""

    folder: Path
    """Of the batches."""
    limit: int
    """This many in a row end the run."""
    world: World = field(default_factory=World)
    """The ranks, of which the first writes."""

    def skipped(self, message: str, batch: TokenBatch, minibatch: Part, step: int, in_a_row: int) -> None:
        """An update was skipped, and it is the last of so many in a row.

        Raises:
            NonFiniteError: it was the last one in a row that is tolerated.
        """
        kept = on_main(self.world, lambda: self._keep(batch, minibatch, step, message))
        if in_a_row >= self.limit:
            raise NonFiniteError(
                f"step {step}: {message}. No update was made, {in_a_row} in a row "
                f"(optim.max_nonfinite_updates); {kept}. {GO_ON}"
            )

    def _keep(self, batch: TokenBatch, minibatch: Part, step: int, message: str) -> str:
        """Write the batch; returns where it is, in words. A failing disk does not end the run."""
        import pyarrow
        import pyarrow.parquet

        sequences, lengths = minibatch.sequences_S.tolist(), minibatch.lengths_S.tolist()
        groups = batch.group_S[minibatch.sequences_S].tolist()
        columns: dict[str, Any] = {
            "prompt_ids": [list(batch.prompt_ids[group]) for group in groups],
            "token_ids": [batch_ids(batch, sequence) for sequence in sequences],
            "group": groups,
        }
        for name in ("advantages", "sampler_logps", "old_logps", "ref_logps"):
            values_N = getattr(batch, f"{name}_N")
            if values_N is not None:
                columns[name] = [some.tolist() for some in values_N[minibatch.tokens_N].cpu().split(lengths)]
        table = pyarrow.table(columns).replace_schema_metadata({"problem": message})
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            number = sum(1 for _ in self.folder.glob(f"step-{step}-*.parquet")) + 1
            path = self.folder / f"step-{step}-{number}.parquet"
            pyarrow.parquet.write_table(table, path)
        except OSError as error:
            return f"the batch could not be written ({error.strerror or error})"
        return f"the batch is in {path}"
