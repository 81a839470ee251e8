"""An update on several ranks is the update on one: gradients, statistics, log-probs, weights. float64: the sums differ
in their order only, hence 1e-10."""

import pickle

import numpy as np
import pytest

from tests.parallel.launching import on_ranks
from tests.parallel.updates import CASES, gradients, training


def compare(ranks, single):
    """Every rank has the numbers of one rank, and all ranks have the same bits."""
    for found in ranks:
        assert found.keys() == single.keys()
        for key in single.keys() - {"load"}:
            np.testing.assert_allclose(found[key], single[key], rtol=1e-10, atol=1e-10, err_msg=key)
    assert len({pickle.dumps(found) for found in ranks}) == 1


def check_gradients(size, names):
    ranks, single = on_ranks(size, gradients, "replicate", names), gradients("replicate", names)
    for name in names:
        compare([found[name] for found in ranks], single[name])
    moving = [name for name in names if abs(single[name]["gradient"]).max() > 1e-3]
    assert len(moving) > 0.7 * len(names), moving  # trust regions of whole sequences clip every token of this batch


@pytest.mark.ranks
def test_gradients_on_two_ranks():
    check_gradients(2, ("grpo", "full_kl", "top_entropy", "masked", "gspo"))


@pytest.mark.ranks
@pytest.mark.parametrize("size", [2, 4])
def test_the_gradient_of_every_preset(size):
    check_gradients(size, tuple(CASES))


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft asks for it
@pytest.mark.ranks
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["plain", "lora", "few", "minibatches"])
def test_three_updates(size, kind):
    """With "few", and in each of the "minibatches", one prompt's completions are all there is: the other ranks' shares
    are empty."""
    ranks, single = on_ranks(size, training, "replicate", kind), training("replicate", kind)
    compare(ranks, single)
    assert single["version"] == np.count_nonzero(single["norms"]) > 1  # an update whose tokens are all clipped is none
    assert (ranks[0]["load"][0] == size) == (kind in ("few", "minibatches"))
