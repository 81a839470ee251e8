"""The record of the updates of a step in progress."""

import pytest
import torch

from cohort.errors import RunFolderError
from cohort.objective import TokenStatistics
from cohort.train import part_of
from cohort.train.parts import Updates
from cohort.train.update import NonFinite, UpdateResult, Used
from tests.train.test_layout import make_batch

CPU = torch.device("cpu")


def test_the_updates_of_another_version_are_refused():
    stored = Updates(3).to_store()
    assert Updates.stored(stored, CPU) == Updates(3)
    with pytest.raises(RunFolderError, match="another version of Cohort wrote it"):
        Updates.stored({**stored, "num_nonfinite": 0}, CPU)
    del stored["seen"]
    with pytest.raises(RunFolderError, match="another version of Cohort wrote it"):
        Updates.stored(stored, CPU)


def test_what_is_kept_of_an_update_has_no_tensors_of_its_passes():
    batch = make_batch([[2, 1]], [0.0] * 2)
    part, updates = part_of(batch, [0, 1]), Updates(0)
    updates.share(batch)
    result = UpdateResult(TokenStatistics.of_idle(3, 0), torch.zeros(3), 0.0, 0.1, 0.0, used=Used(part, part, None))
    kept = updates.ended(result)
    assert kept is updates.results[0]
    assert kept.used is None
    skipped = NonFinite("a value is NaN")
    assert updates.ended(skipped) is skipped
    assert (updates.done, updates.skipped) == (2, [1])
