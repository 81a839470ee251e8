"""A loop that leaves ``GRPOTrainer.steps()``: nothing is printed, and the run goes on where it was left."""

import pytest

from tests import warm
from tests.conftest import telling
from tests.train import left
from tests.train.harness import checkpoints_of, same_parameters, untimed_metrics_of, untimed_rows_of

CASES = [(how, lag) for how in ("break", "deleted", "alive", "raised") for lag in (0, 1)]


@pytest.mark.parametrize(("how", "lag"), telling(CASES, ("alive", 1)))
def test_a_run_that_is_left_goes_on_from_that_instant(tmp_path, how, lag):
    folder, straight = tmp_path / "left", left.make(tmp_path / "straight", lag)
    process = warm.begin(str(folder), how, str(lag), folder=tmp_path, module="tests.train.left")
    straight.train()
    _, output = process.communicate(120)
    assert process.returncode == (how == "raised")
    assert "unscored" not in output
    assert "ignored" not in output
    assert output.count("Traceback") == output.count("ValueError: of the script") == (how == "raised")
    assert checkpoints_of(folder) == ["step-1"]
    resumed = left.make(folder, lag)
    resumed.train(resume=True)
    assert same_parameters(straight, resumed)
    assert untimed_metrics_of(folder) == untimed_metrics_of(straight.folder.path)
    assert untimed_rows_of(folder, 2) == untimed_rows_of(straight.folder.path, 2)
