"""The coefficients' own contract: types, what is refused, and their effect off the loss."""

import pytest
import torch

from cohort.objective import PRESETS, coefficients
from tests.conftest import each
from tests.objective.batches import coefficients_of, random_batch, weights_of

PAPER = PRESETS["grpo"]
BATCH = random_batch(0)
WEIGHTS = weights_of(PAPER, BATCH)


def coefficients_without(objective, *left_out):
    """The batch's coefficients without some of the arguments."""
    given = {
        "sequence_N": BATCH.sequence_N,
        "old_logps_N": BATCH.old,
        "sampler_logps_N": BATCH.sampler,
        "ref_logps_N": BATCH.ref if objective.beta else None,
    }
    given |= dict.fromkeys(left_out)
    return coefficients(objective, BATCH.logps, BATCH.advantages_N, WEIGHTS, **given)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_coefficients_are_float32_or_better_and_carry_no_graph(dtype):
    leaf = BATCH.logps.to(dtype).requires_grad_()
    got = coefficients(PAPER, leaf, BATCH.advantages_N, WEIGHTS, old_logps_N=BATCH.old, ref_logps_N=BATCH.ref)
    assert got.total_N.dtype == got.value_N.dtype == got.log_ratio_N.dtype == torch.float32
    assert not got.total_N.requires_grad
    assert not got.value_N.requires_grad
    assert coefficients_of(PAPER, BATCH).total_N.dtype == torch.float64


def test_reference_log_probs_must_match_beta():
    with pytest.raises(ValueError, match="beta"):
        coefficients_without(PAPER, "ref_logps_N")
    with pytest.raises(ValueError, match="beta"):
        coefficients(PAPER.replace(beta=0.0), BATCH.logps, BATCH.advantages_N, WEIGHTS, ref_logps_N=BATCH.ref)


@each(
    ("settings", "argument"),
    [
        ({"ratio_anchor": "sampler"}, "sampler_logps_N"),
        ({"mismatch": "off_policy_mask"}, "sampler_logps_N"),
        ({"mismatch": "weight"}, "sampler_logps_N"),
        ({"kl": {"beta": 0.1, "anchor": "sampler"}}, "sampler_logps_N"),
        ({"ratio_level": "sequence_mean"}, "sequence_N"),
        ({"trust_region": "gmpo", "ratio_level": "sequence_mean"}, "sequence_N"),
        ({"trust_region": "fipo"}, "sequence_N"),
        ({"mismatch": "veto"}, "sequence_N"),
    ],
    ids=lambda value: None,
)
def test_what_a_rule_needs(settings, argument):
    with pytest.raises(ValueError, match=argument):
        coefficients_without(PRESETS["default"].replace(**settings), argument)
