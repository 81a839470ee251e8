"""Sampler and trainer disagree: TRL 1.16.0's importance sampling weights for vLLM are Cohort's ``MismatchWeight``.

The weights come from TRL's own ``_generate_and_score_completions``, and what it returns goes into its own loss.
"""

from __future__ import annotations

import pytest
import torch

from cohort.objective import PRESETS, mismatch_weights
from cohort.presets.parts import KL, MismatchWeight, OffPolicyMask
from cohort.presets.trust_regions import PPOClip

from .oracle import (
    assert_same,
    assert_same_loss,
    cohort_loss,
    random_batch,
    run_trl,
    trl_loss,
    trl_rollout,
    trl_trainer,
)

MODES = {
    "token_truncate": ("token", "truncate"),
    "token_mask": ("token", "mask"),
    "sequence_truncate": ("sequence", "truncate"),
    "sequence_mask": ("sequence", "mask"),
}
BOUNDS = [(None, 1.1), (0.9, None), (0.9, 1.1), (None, 3.0)]
SEEDS = range(3)


def rewards_of(batch, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand((len(batch.mask_ST), 1), dtype=torch.float64, generator=generator)


def under_vllm(batch, mode, low, high, **settings):
    """TRL's rollout and loss, and the batch with the advantages that TRL made."""
    settings |= {
        "use_vllm": True,
        "vllm_importance_sampling_mode": mode,
        "vllm_importance_sampling_clip_min": low,
        "vllm_importance_sampling_clip_max": high,
        "num_generations": 4,
    }
    rollout = trl_rollout(rewards_of(batch), batch=batch, **settings)
    batch = batch.replace(advantages_S=rollout["advantages"])
    return rollout, run_trl(trl_trainer(**settings), batch, rollout), batch


def rule_of(mode, low, high):
    level, what = MODES[mode]
    return MismatchWeight(level=level, mode=what, low=low or 0.0, high=high or torch.inf)


def cohort_weights(rule, batch):
    return mismatch_weights(
        (rule,),
        batch.flat(batch.old_ST),
        batch.flat(batch.sampler_ST),
        batch.flat(batch.logps_ST),
        batch.advantages_S[batch.sequence_N],
        batch.sequence_N,
    ).weight_N


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("low", "high"), BOUNDS)
@pytest.mark.parametrize("mode", MODES)
def test_weights_and_loss_in_every_mode(mode, low, high, seed):
    batch = random_batch(seed, gaps=False)
    rollout, from_trl, batch = under_vllm(batch, mode, low, high, loss_type="grpo", beta=0.04)
    rule = rule_of(mode, low, high)
    weights_ST = rollout["importance_sampling_ratio"].expand(batch.mask_ST.shape)
    assert_same(cohort_weights(rule, batch), batch.flat(weights_ST))
    # The KL term is not weighted in either.
    objective = PRESETS["default"].replace(mismatch=(rule,), beta=0.04)
    assert_same_loss(from_trl, cohort_loss(objective, batch))
    if high == 1.1:  # else the bound was not compared
        plain = batch.flat((batch.old_ST - batch.sampler_ST).exp())
        assert not torch.allclose(batch.flat(weights_ST), plain, rtol=1e-3)


@pytest.mark.parametrize("mode", MODES)
def test_unknown_sampler_logps_weigh_one(mode):
    batch = random_batch(3, gaps=False)
    batch.sampler_ST[:, 1] = torch.nan
    rollout, from_trl, batch = under_vllm(batch, mode, None, 1.1, loss_type="dapo")
    rule = rule_of(mode, None, 1.1)
    weights_ST = rollout["importance_sampling_ratio"].expand(batch.mask_ST.shape)
    assert_same(cohort_weights(rule, batch), batch.flat(weights_ST))
    objective = PRESETS["bnpo"].replace(mismatch=(rule,))
    assert_same_loss(from_trl, cohort_loss(objective, batch))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo", "cispo", "sapo"])
def test_every_loss_is_weighted_alike(loss, mode):
    batch = random_batch(4, gaps=False)
    settings = {"cispo": {"epsilon_high": 5.0}, "dapo": {"epsilon_high": 0.28}}.get(loss, {})
    _, from_trl, batch = under_vllm(batch, mode, 0.8, 1.2, loss_type=loss, **settings)
    name = "default" if loss == "grpo" else loss
    # TRL rounds SAPO's temperature to float32; see IN_FLOAT32 in test_trl_losses.
    rounded = {"trust_region": {"tau_negative": float(torch.tensor(1.05))}} if loss == "sapo" else {}
    objective = PRESETS[name].replace(mismatch=(rule_of(mode, 0.8, 1.2),), **rounded)
    assert_same_loss(from_trl, cohort_loss(objective, batch))


@pytest.mark.parametrize("mode", ["sequence_truncate", "sequence_mask"])
def test_weights_with_a_ratio_per_sequence(mode):
    """One weight and one ratio per sequence; for token weights see the differences."""
    batch = random_batch(5, gaps=False)
    settings = {"importance_sampling_level": "sequence", "epsilon": 0.05}
    objective = PRESETS["gspo"].replace(mismatch=(rule_of(mode, 0.8, 1.2),), epsilon=0.05, epsilon_high=0.05)
    _, from_trl, batch = under_vllm(batch, mode, 0.8, 1.2, loss_type="grpo", **settings)
    assert_same_loss(from_trl, cohort_loss(objective, batch))


def test_vespo_within_the_bounds():
    """TRL multiplies pi / old by its token weights; where no bound acts that is pi / sampler, VESPO's own ratio."""
    batch = random_batch(6, gaps=False)
    _, from_trl, batch = under_vllm(batch, "token_truncate", None, 100.0, loss_type="vespo")
    assert_same_loss(from_trl, cohort_loss(PRESETS["vespo"], batch))


def test_without_correction_nothing_is_weighted():
    batch = random_batch(7)
    from_trl = trl_loss(batch, sampler=True, loss_type="grpo", use_vllm=True, vllm_importance_sampling_correction=False)
    assert_same_loss(from_trl, cohort_loss(PRESETS["default"], batch))


@pytest.mark.parametrize("seed", SEEDS)
def test_everything_at_once(seed):
    batch = random_batch(seed, gaps=False, spread=0.8)
    _, from_trl, batch = under_vllm(
        batch,
        "token_mask",
        0.5,
        1.5,
        loss_type="dapo",
        epsilon_high=0.28,
        delta=2.0,
        top_entropy_quantile=0.5,
        off_policy_mask_threshold=0.1,
        beta=0.04,
        use_bias_correction_kl=False,
    )
    objective = PRESETS["dapo"].replace(
        trust_region=PPOClip(low=0.8, high=1.28, dual=2.0),
        top_entropy=0.5,
        mismatch=(rule_of("token_mask", 0.5, 1.5), OffPolicyMask(threshold=0.1)),
        kl=KL(beta=0.04, direction="forward"),
    )
    assert_same_loss(from_trl, cohort_loss(objective, batch))
