"""``agreed`` where the others have ended."""

from concurrent.futures import CancelledError

import pytest

from cohort.errors import RankError
from cohort.parallel import agreed


class Alone:
    """Rank 0 of 2, whose other rank has ended."""

    rank, size, is_main = 0, 2, True

    def gather_pickled(self, _):
        raise RankError("the other has ended")


def test_a_rank_that_fails_after_the_others_have_ended_reports_its_own_failure():
    def interrupted():
        raise KeyboardInterrupt("by Ctrl-C")

    with pytest.raises(KeyboardInterrupt, match="by Ctrl-C"):
        agreed(Alone(), interrupted)
    with pytest.raises(RankError, match="the other has ended"):
        agreed(Alone(), lambda: 1)


@pytest.mark.parametrize(("error", "logged"), [(ValueError("no"), 1), (CancelledError(), 0)])
def test_a_rank_that_is_stopped_logs_no_traceback(caplog, error, logged):
    class Second(Alone):
        rank, is_main = 1, False

    def ends():
        raise error

    with pytest.raises(type(error)):
        agreed(Second(), ends)
    assert len(caplog.records) == logged
