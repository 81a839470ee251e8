"""What watches a run: it is told of updates, asks for evaluations, and its state is in every checkpoint."""

import pytest

from cohort.errors import RunFolderError
from cohort.train import Observer, Wishes
from tests.train.harness import ROWS, make_trainer, metrics_of, same_parameters

SMALL = {"prompts_per_step": 2, "num_generations": 2, "max_completion_length": 4, "max_steps": 4, "eval_steps": 0}


class Counter(Observer):
    """Counts steps, and asks for an evaluation after the second."""

    def __init__(self):
        self.count, self.told = 0, []

    def updated(self, metrics):
        self.count += 1
        self.told.append(metrics["step"])
        assert not any(key.startswith("eval/") for key in metrics)
        return Wishes(evaluate=metrics["step"] == 2)

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def test_state_evaluation_and_checkpoint_between_steps(demo_tokenizer, tmp_path):
    """A run that a caller left after its second step, with a checkpoint, goes on bit-equal to the one in one go."""

    def make(name):
        trainer = make_trainer(demo_tokenizer, tmp_path / name, eval_rows=ROWS[:2], eval_on_start=False, **SMALL)
        return trainer, Counter()

    straight, whole = make("straight")
    list(straight.steps(observers=[whole]))
    evaluated = [line["step"] for line in metrics_of(tmp_path / "straight") if "eval/reward/mean" in line]
    assert evaluated == [2, 4]  # asked for, and the last

    broken, counter = make("broken")
    with pytest.raises(RunFolderError, match="no run to write a checkpoint of"):
        broken.checkpoint()
    steps = broken.steps(observers=[counter])
    next(steps), next(steps)
    assert broken.checkpoint() == tmp_path / "broken" / "checkpoints" / "step-2"
    assert (broken.checkpoint() / "manifest.json").exists()  # it is written already
    steps.close()
    with pytest.raises(RunFolderError, match=r"^the run was begun with cohort\.trl"):
        make("broken")[0].steps(resume=True)
    resumed, counter = make("broken")
    list(resumed.steps(resume=True, observers=[counter]))
    assert (counter.count, counter.told, whole.told) == (4, [3, 4], [1, 2, 3, 4])
    assert same_parameters(straight, resumed)
