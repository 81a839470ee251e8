"""Numbers that are none: found before they do harm, named, kept, and survived a few times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cohort.errors import NonFiniteError
from cohort.types import TokenBatch


def check_finite(batch: TokenBatch, values: Mapping[str, Tensor | None]) -> None:
    """Look at tensors per token of a batch.

    Args:
        batch: whose tokens they are.
        values: by name, shape ``[N]``; None is none.

    Raises:
        NonFiniteError: naming the first tensor, completion and token whose number is NaN or infinite.
    """
    given = {name: values_N for name, values_N in values.items() if values_N is not None}
    if not given or bool(torch.stack([values_N.isfinite().all() for values_N in given.values()]).all()):
        return
    for name, values_N in given.items():
        places = (~values_N.isfinite()).nonzero()
        if places.numel():
            place = int(places[0])
            s = int(batch.sequence_N[place])
            first = int((batch.sequence_N < s).sum())
            raise NonFiniteError(
                f"{name} is {float(values_N[place])} at token {place - first + 1} of the "
                f"{len(batch.completion_ids[s])} of a completion (token ids {_shortened(batch.completion_ids[s])}, "
                f"after a prompt of {len(batch.prompt_ids[s])} tokens)"
            )


def _shortened(ids: tuple[int, ...]) -> str:
    return ", ".join(map(str, ids[:8])) + (", ..." if len(ids) > 8 else "")


class Guard:
    """What becomes of updates whose numbers are not finite: none is made, its batch is kept, and after several in a row
    the run stops.

    Args:
        folder: the run's; batches go to ``nonfinite/`` in it.
        limit: so many in a row stop the run.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder = folder / "nonfinite"
        self._limit = limit
        self._in_a_row = 0
        self._skipped = 0

    @contextmanager
    def __call__(self, minibatch: TokenBatch, step: int) -> Iterator[None]:
        """Around one update: what is left of the block is skipped when it raises ``NonFiniteError``.

        Raises:
            NonFiniteError: it was the last that is put up with.
        """
        try:
            yield
        except NonFiniteError as error:
            self._skipped += 1
            self._in_a_row += 1
            self._keep(error, minibatch, step)
        else:
            self._in_a_row = 0

    def take_count(self) -> int:
        """How many updates were skipped since this was last asked."""
        count, self._skipped = self._skipped, 0
        return count

    def _keep(self, error: NonFiniteError, minibatch: TokenBatch, step: int) -> None:
        path = self._write(minibatch, step, str(error))
        if self._in_a_row >= self._limit:
            raise NonFiniteError(
                f"step {step}: {error}. No update was made, {self._in_a_row} in a row "
                f"(optim.max_nonfinite_updates); the batch is in {path}. To go on, start a new run from a checkpoint "
                "of this one (model.path) with a lower optim.learning_rate or model.precision 'float32'"
            ) from error

    def _write(self, minibatch: TokenBatch, step: int, message: str) -> Path:
        import pyarrow
        import pyarrow.parquet

        lengths = [len(ids) for ids in minibatch.completion_ids]
        columns: dict[str, Any] = {
            "prompt_ids": list(map(list, minibatch.prompt_ids)),
            "token_ids": list(map(list, minibatch.completion_ids)),
            "group": minibatch.group_S.tolist(),
        }
        for name in ("advantages", "sampler_logps", "old_logps", "ref_logps"):
            values_N = getattr(minibatch, f"{name}_N")
            if values_N is not None:
                columns[name] = [part.tolist() for part in values_N.cpu().split(lengths)]
        self._folder.mkdir(parents=True, exist_ok=True)
        number = sum(1 for _ in self._folder.glob(f"step-{step}-*.parquet")) + 1
        path = self._folder / f"step-{step}-{number}.parquet"
        table = pyarrow.table(columns).replace_schema_metadata({"problem": message})
        pyarrow.parquet.write_table(table, path)
        return path
