"""``agreed`` where the others have ended; see also ``test_world``."""

from concurrent.futures import CancelledError

import pytest

from cohort.errors import RankError
from cohort.parallel import agreed


class Alone:
    """Rank 0 of 2, whose other rank has ended."""

    rank, size, is_main = 0, 2, True

    def gather_pickled(self, _):
        raise RankError("the other has ended")


@pytest.mark.parametrize(("error", "logged"), [(ValueError("no"), 1), (CancelledError(), 0)])
def test_a_rank_that_is_stopped_logs_no_traceback(caplog, error, logged):
    class Second(Alone):
        rank, is_main = 1, False

    def ends():
        raise error

    with pytest.raises(type(error)):
        agreed(Second(), ends)
    assert len(caplog.records) == logged
