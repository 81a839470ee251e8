"""Several ranks that sample from the same servers."""

import threading

import numpy as np
import pytest

from cohort.policy import load_tokenizer
from tests.conftest import DEMO_MODEL, tiny_llama
from tests.parallel.launching import on_ranks
from tests.parallel.runs import trained
from tests.rollout.served.stand_in import StandIn
from tests.train.harness import make_trainer, rows_of

STEPS = 3


def tokenizer():
    return load_tokenizer(str(DEMO_MODEL))


@pytest.fixture
def stand_ins():
    model = tiny_llama(len(tokenizer()), initializer_range=0.1)
    made = [StandIn(model, tokenizer=tokenizer()) for _ in range(2)]
    yield made
    for one in made:
        one.die()


def settings(folder, stand_ins, **more):
    url = tuple(one.url for one in stand_ins)
    return {"max_steps": STEPS, "engine": "server", "server": {"url": url, "folder": str(folder)}, **more}


def run(folder, changes):
    return trained(folder, **changes)


def steps_of(folder, changes):
    """The steps alone: of divided weights, a rank has its share."""
    trainer = make_trainer(tokenizer(), folder, **changes)
    steps = list(trainer.steps())
    trainer.world.close()
    return steps


def drawn(folder, step):
    return [(row["group"], row["token_ids"]) for row in rows_of(folder, step)]


@pytest.mark.ranks
def test_two_ranks_share_the_servers_and_one_sends_the_weights(tmp_path, stand_ins):
    alone = trained(tmp_path / "one", **settings(tmp_path, stand_ins))
    for one in stand_ins:
        one.calls.clear()
    ranks = on_ranks(2, run, tmp_path / "two", settings(tmp_path, stand_ins))
    for weights, steps, _ in ranks:
        assert [line["server/servers"] for line in steps] == [2] * STEPS
        assert all(line["sampler/gap"] < 1e-5 for line in steps)
        for name, value in alone[0].items():
            # float32: gradients are added up in another order, and Adam makes steps of 0.01 of what is left of them.
            np.testing.assert_allclose(weights[name], value, rtol=0, atol=1e-3, err_msg=name)
    assert drawn(tmp_path / "two", 1) == drawn(tmp_path / "one", 1)
    for one in stand_ins:
        loads = [body for path, body in one.calls if path == "/collective_rpc" and body["method"] == "cohort_load"]
        assert len(loads) == STEPS


@pytest.mark.ranks
@pytest.mark.parametrize("layout", ["optimizer", "full"])
def test_divided_weights_are_sent_whole(tmp_path, stand_ins, layout):
    changes = settings(tmp_path, stand_ins, layout=layout, max_steps=2)
    for steps in on_ranks(2, steps_of, tmp_path / "two", changes):
        assert all(line["sampler/gap"] < 1e-5 and line["server/probe_gap"] < 1e-5 for line in steps)
        assert len(steps) == 2


@pytest.mark.ranks
def test_a_server_that_dies_is_left_out_by_every_rank(tmp_path, stand_ins):
    first, _ = stand_ins

    def dies(number, body, answer):
        if number == 14:
            threading.Thread(target=first.die).start()
        return answer

    first.fault = dies
    ranks = on_ranks(2, run, tmp_path / "two", settings(tmp_path, stand_ins))
    for _, steps, _ in ranks:
        assert len(steps) == STEPS
        assert steps[-1]["server/servers"] == 1


@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft asks for it
def test_every_rank_samples_with_the_adapter(tmp_path, stand_ins):
    """One rank loads it into the servers; the requests of both name it."""
    pytest.importorskip("peft")
    for one in stand_ins:
        one.config["lora_config"] = {"max_lora_rank": 8}
    for _, steps, _ in on_ranks(2, run, tmp_path / "two", settings(tmp_path, stand_ins, lora={"rank": 4})):
        assert all(line["sampler/gap"] < 1e-5 for line in steps)  # float32
        assert len(steps) == STEPS
    assert [len(one.adapters) for one in stand_ins] == [1, 1]  # they were not merged
