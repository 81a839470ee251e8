"""``rollout.lag`` on several ranks: exchanges of the background do not meet those of the training."""

import threading

import numpy as np
import pytest

from cohort.errors import RewardError
from tests.parallel.launching import on_ranks
from tests.parallel.runs import precise
from tests.parallel.test_runs import drawn, same_metrics

DYNAMIC = {"group_filter": {"rule": "dynamic_sampling", "max_rounds": 3}}


@pytest.mark.ranks
@pytest.mark.parametrize(
    "settings", [{"lag": 1}, {"lag": 2, "minibatches": 2} | DYNAMIC], ids=["lag 1", "lag 2, rounds"]
)
def test_a_run_on_two_ranks_is_the_run_on_one(tmp_path, settings):
    settings = {"max_steps": 4, "save_steps": 2, **settings}
    weights, steps, _ = precise(tmp_path / "one", **settings)
    for others, metrics, _ in on_ranks(2, run_both, tmp_path / "two", settings):
        same_metrics(metrics, steps)
        for name, value in weights.items():
            np.testing.assert_allclose(others[name], value, rtol=0, atol=1e-10, err_msg=name)
    for step in range(1, 5):
        two, one = drawn(tmp_path / "two", step), drawn(tmp_path / "one", step)
        assert [row["token_ids"] for row in two] == [row["token_ids"] for row in one]


def run_both(folder, settings):
    return precise(folder, **settings)


@pytest.mark.ranks
def test_a_reward_that_raises_on_one_rank_stops_all_at_its_step(tmp_path):
    texts = on_ranks(2, run_failing, tmp_path / "run")
    assert texts[0] == texts[1]
    assert "in step 3; a checkpoint of step 2 is kept" in texts[0]


def run_failing(folder):
    from cohort.rewards import reward
    from tests.parallel.runs import digits, tokenizer
    from tests.train.harness import make_trainer

    @reward(per="group")
    def fails(completions, trainer_state, **_):
        if trainer_state.global_step == 2 and completions[0] and ord(completions[0][0]) % 2:
            raise ValueError("no")
        return [float(len(text)) for text in completions]

    trainer = make_trainer(tokenizer(), folder, rewards=[digits, fails], lag=1, max_steps=4, on_error="stop")
    with pytest.raises(RewardError) as error:
        list(trainer.steps())
    trainer.world.close()
    return str(error.value)


@pytest.mark.ranks
def test_a_stop_on_one_rank_waits_for_what_all_sample_beside_the_training(tmp_path):
    """The run that goes on has the metrics and weights of one that was not stopped."""
    for straight, resumed in on_ranks(2, run_stopped, tmp_path):
        assert straight[1] == resumed[1]
        for name, value in straight[0].items():
            np.testing.assert_array_equal(resumed[0][name], value, err_msg=name)


def run_stopped(folder):
    """Rank 1 asks for the stop while it samples the third rollout."""
    from cohort.errors import Stopped
    from tests.conftest import tiny_llama
    from tests.parallel.runs import REWARDS, tokenizer
    from tests.train.harness import make_trainer, parameters, untimed_metrics_of

    def make(name):
        model = tiny_llama(vocab_size=len(tokenizer()), hidden_size=64)  # completions have the same bits alone
        settings = {"lag": 1, "max_steps": 4, "save_steps": 0, "minibatches": 2}
        return make_trainer(tokenizer(), folder / name, model, rewards=REWARDS, **settings)

    def found(trainer, name):
        weights = {name: value.numpy() for name, value in parameters(trainer).items()}
        lines = untimed_metrics_of(folder / name)
        return weights, [{key: one for key, one in line.items() if not key.startswith("parallel/")} for line in lines]

    straight = make("straight")
    list(straight.steps())
    stopped, calls = make("run"), []
    real = stopped.engine.backend.step

    def step(slots, tokens):
        if threading.current_thread().name == "rollout-3":
            calls.append(1)
            if len(calls) == 5 and stopped.world.rank == 1:
                stopped.stop()
        return real(slots, tokens)

    stopped.engine.backend.step = step
    with pytest.raises(Stopped):
        list(stopped.steps())
    assert (folder / "run" / "journal" / "step-3.safetensors").exists()
    resumed = make("run")
    list(resumed.steps(resume=True))
    both = found(straight, "straight"), found(resumed, "run")
    resumed.world.close()
    return both
