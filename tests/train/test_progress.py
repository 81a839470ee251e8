"""The record of the updates of a step in progress."""

import pytest
import torch

from cohort.errors import RunFolderError
from cohort.train.progress import Updates

CPU = torch.device("cpu")


def test_the_updates_of_another_version_are_refused():
    stored = Updates(3).to_store()
    assert Updates.stored(stored, CPU) == Updates(3)
    with pytest.raises(RunFolderError, match="another version of Cohort wrote it"):
        Updates.stored({**stored, "num_nonfinite": 0}, CPU)
    del stored["seen"]
    with pytest.raises(RunFolderError, match="another version of Cohort wrote it"):
        Updates.stored(stored, CPU)
