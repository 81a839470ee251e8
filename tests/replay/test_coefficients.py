"""A stored step gives the coefficients of its updates again, and those of other objectives by hand."""

import dataclasses
import math

import pytest
import torch

from cohort.errors import RunFolderError
from cohort.objective import PRESETS, Cause
from cohort.policy import Policy, Precision
from cohort.replay import coefficients_of
from cohort.replay.command import from_sampler
from cohort.replay.compare import LEFT_OUT
from cohort.replay.stored import Facts
from tests.conftest import tiny_llama
from tests.replay.steps import FACTS, made_up_step, stored_step

TWO = {"token_ids": [[7], [8]], "reward": [1.0, 0.0]}
"""Two completions of one token each."""


def small_policy():
    return Policy(
        tiny_llama(num_hidden_layers=1, hidden_size=8, intermediate_size=8), Precision(torch.float32, torch.float32)
    )


# By hand --------------------------------------------------------------------------------------------------------------


def test_two_completions_of_one_token(tmp_path):
    stored = made_up_step(tmp_path, TWO)
    run = coefficients_of(stored.filled(from_sampler(stored)), PRESETS["default"])
    # Rewards 1 and 0: mean 1/2, deviation 1/sqrt(2); each of the 2 completions is a token long: 1/Z = 1/2.
    a = 0.5 / (math.sqrt(0.5) + 1e-6)
    assert run.advantages_N.tolist() == pytest.approx([a, -a], rel=1e-12)
    assert run.total_N.tolist() == pytest.approx([a / 2, -a / 2], rel=1e-6)  # float32
    other = PRESETS["dr_grpo"].replace(aggregation_length=10)
    replay = coefficients_of(stored.filled(from_sampler(stored)), other)
    assert replay.total_N.tolist() == pytest.approx([0.5 / 20, -0.5 / 20], rel=1e-6)  # 1 / (B L)


def test_what_is_not_stored_is_taken_from_the_sampler(tmp_path):
    stored = made_up_step(tmp_path, TWO)
    assert bool(stored.known.logps_N.isnan().all())
    filled = stored.filled(from_sampler(stored)).known
    assert filled.logps_N.tolist() == filled.old_logps_N.tolist() == [-1.0, -1.0]
    assert bool(filled.ref_logps_N.isnan().all())


def test_a_group_filter_leaves_groups_out(tmp_path):
    columns = {"token_ids": [[7], [8], [7], [8]], "reward": [1.0, 0.0, 1.0, 1.0], "group": [3, 3, 5, 5]}
    stored = made_up_step(tmp_path, columns)
    filled = stored.filled(from_sampler(stored))
    dropped = coefficients_of(filled, PRESETS["default"].replace(group_filter="drop_dead"))
    assert dropped.cause_N.tolist() == [Cause.ACTIVE, Cause.ACTIVE, LEFT_OUT, LEFT_OUT]
    kept = coefficients_of(filled, PRESETS["default"])
    assert kept.cause_N.tolist() == [Cause.ACTIVE, Cause.ACTIVE, Cause.NO_ADVANTAGE, Cause.NO_ADVANTAGE]
    torch.testing.assert_close(dropped.total_N, 2 * kept.total_N, rtol=1e-6, atol=0)  # B is 2, not 4


def test_a_missing_reference_is_named(tmp_path):
    stored = made_up_step(tmp_path, TWO)
    with pytest.raises(RunFolderError, match=r"\(beta 0.1\), and step-1.parquet has none .* the run's beta was 0"):
        coefficients_of(stored.filled(from_sampler(stored)), PRESETS["default"].replace(beta=0.1))


def test_a_reference_that_dropped_groups_lack_is_named(tmp_path):
    """The run has a KL, but its updates used one of the two groups: the other has no log-probs of the reference."""
    columns = {"token_ids": [[7], [8], [7], [8]], "reward": [1.0, 0.0, 1.0, 1.0], "group": [3, 3, 5, 5]}
    stored = made_up_step(tmp_path, columns | {"ref_logps": [[-1.1], [-1.2], None, None]})
    stored = dataclasses.replace(
        stored.filled(from_sampler(stored)), facts=Facts.of(FACTS | {"objective": {"kl": {"beta": 0.01}}})
    )
    objective = PRESETS["default"].replace(beta=0.01, group_filter="drop_dead")
    assert bool(coefficients_of(stored, objective).kl_N.isfinite().all())
    with pytest.raises(
        RunFolderError, match="none for 2 of the 4 tokens that the updates would use: the run's updates did not need"
    ) as error:
        coefficients_of(stored, objective.replace(group_filter=None))
    assert "beta was 0" not in str(error.value)
    assert bool(coefficients_of(stored, objective.replace(group_filter=None, beta=0)).total_N.isfinite().all())


@pytest.mark.parametrize("credit", ["given", "process"])
def test_missing_token_rewards_are_named(tmp_path, credit):
    stored = made_up_step(tmp_path, TWO)
    more = {"baseline": "none", "scale": "none"} if credit == "given" else {}
    with pytest.raises(RunFolderError, match="needs a reward for each token"):
        coefficients_of(stored.filled(from_sampler(stored)), PRESETS["default"].replace(credit=credit, **more))


# Bit for bit ----------------------------------------------------------------------------------------------------------

KL = {"beta": 0.1, "kl": {"correction": "none"}}
CASES = {
    "one update, ratio 1": ({}, {"old": False}),
    "several updates": (KL, {"minibatches": 2, "iterations": 2}),
    "a pass per sequence": ({**KL, "trust_region": "sapo"}, {"minibatches": 2, "budget": 5}),
    "top_entropy": ({**KL, "top_entropy": 0.5, "denominator": "after_masks"}, {"minibatches": 2, "budget": 5}),
    "mismatch": ({"mismatch": ["weight", "off_policy_mask"], "truncated": "mask"}, {"minibatches": 2}),
    "KL in the advantage": ({"kl": {"beta": 0.1, "place": "advantage"}, "group_filter": "drop_dead"}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_stored_coefficients_come_again(tmp_path, case):
    changes, settings = CASES[case]
    objective = PRESETS["default"].replace(**changes)
    assert_same(stored_step(tmp_path, small_policy(), objective, **settings), objective)


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("budget", [5, 10_000])
def test_every_preset_gives_the_stored_coefficients_again(tmp_path, name, budget):
    objective = PRESETS[name]
    if objective.aggregation == "constant":
        objective = objective.replace(aggregation_length=8)
    if objective.credit in ("given", "process", "turns"):
        pytest.skip("needs rewards per token or turns")
    stored = stored_step(tmp_path, small_policy(), objective, minibatches=2, iterations=2, budget=budget)
    assert_same(stored, objective)


def assert_same(stored, objective):
    """The replay of a step under its own objective is what is stored."""
    found = coefficients_of(stored, objective)
    assert bool(found.policy_N.any())
    assert torch.equal(found.policy_N.double(), stored.policy_N.nan_to_num(nan=0.0))
    if stored.kl_N is not None:
        assert bool(found.kl_N.any())
        assert torch.equal(found.kl_N.double(), stored.kl_N.nan_to_num(nan=0.0))
    assert found.is_used_S.tolist() == stored.is_used_S.tolist()


def test_float64_stays_float64(tmp_path, float64_policy):
    stored = stored_step(tmp_path, float64_policy, PRESETS["default"])
    assert stored.dtype == torch.float64
    assert_same(stored, PRESETS["default"])
