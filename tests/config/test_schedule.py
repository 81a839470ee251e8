"""The schedule: steps, prompts per step, and what is computed."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.config import GRPOConfig, Schedule
from cohort.errors import DataError
from tests.conftest import each

SEVERAL = {"num_iterations": 2, "minibatches": 4, "beta": 0.1}


@each(
    ("settings", "num_prompts", "words"),
    [
        ({"num_epochs": 2}, 7473, "2 epochs = 1,869 rollouts = 1,869 updates, the last of 2 prompts\n"),
        ({"num_epochs": 2}, 7473, "64 completions per rollout, 1 update each"),
        ({"max_steps": 10}, 100, "10 rollouts = 10 updates, 0.8 epochs\n"),
        ({"max_steps": 3}, None, "3 rollouts = 3 updates, on streamed prompts"),
        (SEVERAL, 7473, "8 prompts x 8 = 64 completions per rollout, 8 updates each"),
        # the last step has one prompt, so one minibatch in each of two iterations
        (SEVERAL, 7473, "934.12 rollouts per epoch on 7,473 prompts; 1 epoch = 935 rollouts = 7,474 updates, the last"),
        ({"preset": "gspo"}, 100, "4 updates each (1 iteration x 4 minibatches of preset gspo@2)"),
        ({"preset": "gspo", "minibatches": 2}, 100, "(1 iteration x 2 minibatches of objective.minibatches)"),
        ({"preset": "gspo@1"}, 100, "(1 iteration x 1 minibatch)"),
        ({"preset": "gspo@1"}, 100, "ppo_clip has no effect without several updates (objective.minibatches)"),
        ({"preset": "vespo"}, 100, "the engine samples with the same weights, so every ratio is 1 but for rounding"),
    ],
)
def test_schedule_in_words(settings, num_prompts, words):
    assert words in Schedule.of(GRPOConfig(**settings), num_prompts).describe()


def test_streamed_data_has_no_epochs():
    with pytest.raises(DataError, match="is streamed, so its length is unknown: set run.max_steps"):
        Schedule.of(GRPOConfig(), None)
    schedule = Schedule.of(GRPOConfig(max_steps=3), None)
    assert [schedule.prompts_of(step) for step in range(3)] == [8, 8, 8]


def test_data_smaller_than_a_step():
    with pytest.raises(DataError, match=r"5 prompts, fewer than one step.*prompts_per_step \(now 8\) to 5"):
        Schedule.of(GRPOConfig(), 5)


@settings(deadline=None)  # a busy machine is not a failure
@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 4), st.integers(1, 3))
def test_every_prompt_is_used_equally_often_also_after_a_resume_with_more_epochs(num_prompts, per_step, epochs, more):
    num_prompts = max(num_prompts, per_step)
    schedule = Schedule.of(GRPOConfig(prompts_per_step=per_step, num_epochs=epochs), num_prompts)
    counts = [schedule.prompts_of(step) for step in range(schedule.steps)]
    assert sum(counts) == num_prompts * epochs
    assert all(count == per_step for count in counts[:-1])
    assert 1 <= counts[-1] <= per_step
    longer = Schedule.of(GRPOConfig(prompts_per_step=per_step, num_epochs=epochs + more), num_prompts)
    longer = longer.resumed(schedule.steps, num_prompts * epochs)
    later = map(longer.prompts_of, range(schedule.steps, longer.steps))
    assert sum(counts) + sum(later) == num_prompts * (epochs + more)


@pytest.mark.parametrize(("iterations", "minibatches", "needed"), [(1, 1, False), (2, 1, True), (1, 2, True)])
def test_old_log_probs_are_needed_when_several_updates_use_a_rollout(iterations, minibatches, needed):
    schedule = Schedule.of(GRPOConfig(num_iterations=iterations, minibatches=minibatches, beta=0.1), 100)
    assert schedule.needs_ref_logps
    assert schedule.needs_old_logps is needed
    assert ("by identity" in schedule.describe()) is not needed
