"""The losses: values and coefficients are those of TRL 1.16.0 where the two mean the same."""

from __future__ import annotations

import math

import pytest
import torch

from cohort.objective import PRESETS, applied_entropy_coefficient, next_entropy_coefficient
from cohort.presets.parts import KL, EntropyBonus, OffPolicyMask
from cohort.presets.trust_regions import PPOClip

from .oracle import (
    assert_same_loss,
    cohort_loss,
    random_batch,
    run_trl,
    single_token,
    trl_inputs,
    trl_loss,
    trl_trainer,
)

SEEDS = range(4)

K3_AS_A_LOSS = KL(beta=0.04, direction="forward")
"""TRL's ``use_bias_correction_kl=False``: the gradient of k3 is the forward KL's."""
CORRECTED = KL(beta=0.04, direction="reverse", correction="token_ratio")
"""TRL's ``use_bias_correction_kl=True``: d (r k3) = r k1, the reverse KL's."""

IN_FLOAT32 = PRESETS["sapo"].replace(trust_region={"tau_negative": float(torch.tensor(1.05))})
"""TRL picks the temperature with ``torch.where`` of two plain numbers, which rounds 1.05 to float32."""

# Each loss with its preset. Clips are those of the preset, in both; TRL's names for the numbers.
LOSSES = {
    "grpo": (PRESETS["default"], {"epsilon": 0.2}),
    "bnpo": (PRESETS["bnpo"], {"epsilon": 0.2}),
    "dr_grpo": (PRESETS["dr_grpo"], {"epsilon": 0.2}),
    "dapo": (PRESETS["dapo"], {"epsilon": 0.2, "epsilon_high": 0.28}),
    "cispo": (PRESETS["cispo"].replace(trust_region={"high": 1.3}), {"epsilon_high": 1.3}),
    "sapo": (IN_FLOAT32, {}),
    # TRL compares with the sampler only under vLLM.
    "vespo": (PRESETS["vespo"].replace(ratio_anchor="old", kl={"anchor": "old"}), {}),
    "luspo": (PRESETS["luspo"], {"epsilon": 2e-3, "epsilon_high": 2.5e-3, "importance_sampling_level": "sequence"}),
}
CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")


def at_level(loss, level):
    """A loss of the table at one of TRL's two ratio levels. VESPO's is the product of the sequence whatever is set."""
    objective, settings = LOSSES[loss]
    if loss != "vespo":
        objective = objective.replace(ratio_level={"token": "token", "sequence": "sequence_mean"}[level])
    if level == "sequence" and loss in CLIPPED:  # means of log-ratios are smaller: a clip that acts on some of them
        objective = objective.replace(epsilon=0.05, epsilon_high=0.08)
        settings = {**settings, "epsilon": 0.05, "epsilon_high": 0.08}
    return objective, {**settings, "loss_type": loss, "importance_sampling_level": level}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_at_both_ratio_levels(loss, level, seed):
    batch = random_batch(seed)
    objective, settings = at_level(loss, level)
    from_trl = trl_loss(batch, **settings)
    assert_same_loss(from_trl, cohort_loss(objective, batch))
    if loss in CLIPPED:  # else the clip was not compared
        assert (from_trl[1] == 0).any()
        assert (from_trl[1] != 0).any()


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_on_policy(loss):
    """TRL leaves the old log-probs out where they are the current ones."""
    batch = random_batch(0)
    objective, settings = LOSSES[loss]
    from_trl = trl_loss(batch, old=False, loss_type=loss, **settings)
    assert_same_loss(from_trl, cohort_loss(objective, batch, old=False))


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_with_a_completion_without_loss_tokens(loss):
    """It counts in the number of completions in both; nothing is divided by its length."""
    batch = random_batch(1, lengths=(3, 0, 7, 4), gaps=False)
    objective, settings = LOSSES[loss]
    assert_same_loss(trl_loss(batch, loss_type=loss, **settings), cohort_loss(objective, batch))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_with_a_kl(loss, corrected, seed):
    batch = random_batch(seed)
    objective, settings = at_level(loss, "token")
    from_trl = trl_loss(batch, beta=0.04, use_bias_correction_kl=corrected, **settings)
    objective = objective.replace(kl=CORRECTED if corrected else K3_AS_A_LOSS)
    assert_same_loss(from_trl, cohort_loss(objective, batch))


@pytest.mark.parametrize("loss", LOSSES)
def test_plain_k3_does_not_depend_on_the_ratio_level(loss):
    batch = random_batch(5)
    objective, settings = at_level(loss, "sequence")
    from_trl = trl_loss(batch, beta=0.04, use_bias_correction_kl=False, **settings)
    assert_same_loss(from_trl, cohort_loss(objective.replace(kl=K3_AS_A_LOSS), batch))


def test_the_presets_kl_is_trls_default():
    """Since 1.10 TRL corrects the KL unless told otherwise; the presets' REVERSE is the same gradient."""
    batch = random_batch(6)
    from_trl = trl_loss(batch, beta=0.1, loss_type="grpo")
    assert_same_loss(from_trl, cohort_loss(PRESETS["default"].replace(beta=0.1), batch))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("low", "high"), [(0.2, 0.28), (0.05, 0.4), (0.4, 0.05), (3e-4, 4e-4)])
def test_clip_with_two_bounds(low, high, seed):
    batch = random_batch(seed)
    from_trl = trl_loss(batch, loss_type="grpo", epsilon=low, epsilon_high=high)
    objective = PRESETS["default"].replace(epsilon=low, epsilon_high=high)
    assert_same_loss(from_trl, cohort_loss(objective, batch))


def test_an_epsilon_above_one_has_no_lower_bound():
    """DeepSeek-R1's 10: a ratio is never below 1 - 10, so 0 is the same bound."""
    batch = random_batch(2, spread=1.5)
    from_trl = trl_loss(batch, loss_type="grpo", epsilon=10.0, beta=0.001, use_bias_correction_kl=False)
    assert_same_loss(from_trl, cohort_loss(PRESETS["grpo_r1"], batch))


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("seed", SEEDS)
def test_two_sided_clip_is_the_dual_clip(seed, level):
    """delta above 1 + epsilon_high: the same rule as the dual clip, in value too."""
    batch = random_batch(seed, spread=1.0)
    delta, ratio_level = {"token": (1.7, "token"), "sequence": (1.22, "sequence_mean")}[level]
    settings = {"loss_type": "grpo", "importance_sampling_level": level}
    from_trl = trl_loss(batch, delta=delta, **settings)
    objective = PRESETS["default"].replace(trust_region=PPOClip(dual=delta), ratio_level=ratio_level)
    assert_same_loss(from_trl, cohort_loss(objective, batch))
    assert not torch.allclose(from_trl[1], trl_loss(batch, **settings)[1], rtol=1e-3)  # it acted


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("share", [0.2, 0.5])
def test_top_entropy_tokens(loss, share):
    """Where 1/share is whole both keep the same tokens; the KL term and the denominators keep all."""
    batch = random_batch(3)
    objective, settings = at_level(loss, "token")
    objective = objective.replace(top_entropy=share, kl=CORRECTED)
    from_trl = trl_loss(batch, top_entropy_quantile=share, beta=0.04, **settings)
    assert_same_loss(from_trl, cohort_loss(objective, batch))


@pytest.mark.parametrize("sampler", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("loss", LOSSES)
def test_off_policy_mask(loss, seed, sampler):
    """With the engine's log-probs TRL compares with those; without, with the old policy's."""
    batch = random_batch(seed, spread=0.6)
    # The longest is drawn as if from a policy that liked it better: with A < 0 it is dropped whatever the seed.
    batch = batch.replace(
        advantages_S=-batch.advantages_S.abs() * torch.tensor([1.0, 1, 1, -1] * 2),
        old_ST=batch.old_ST + 0.3 * (torch.arange(8) == 2)[:, None],
        sampler_ST=batch.sampler_ST + 0.3 * (torch.arange(8) == 2)[:, None],
    )
    if not sampler:
        batch = batch.replace(sampler_ST=batch.old_ST)
    objective, settings = at_level(loss, "token")
    from_trl = trl_loss(
        batch, sampler=sampler, off_policy_mask_threshold=0.05, beta=0.04, use_bias_correction_kl=False, **settings
    )
    objective = objective.replace(mismatch=(OffPolicyMask(threshold=0.05),), kl=K3_AS_A_LOSS)
    assert_same_loss(from_trl, cohort_loss(objective, batch))
    without = cohort_loss(objective.replace(mismatch=()), batch)
    assert not torch.allclose(from_trl[1], without[1], rtol=1e-3)  # it acted


def test_off_policy_mask_with_unknown_sampler_logps():
    """A token that the engine could not score says nothing about its sequence."""
    batch = random_batch(1, spread=0.6)
    batch.sampler_ST[:, 0] = torch.nan
    batch = batch.replace(advantages_S=-batch.advantages_S.abs())
    from_trl = trl_loss(batch, sampler=True, loss_type="grpo", off_policy_mask_threshold=0.05)
    objective = PRESETS["default"].replace(mismatch=(OffPolicyMask(threshold=0.05),))
    assert_same_loss(from_trl, cohort_loss(objective, batch))


@pytest.mark.parametrize("loss", [loss for loss in LOSSES if loss != "bnpo"])
def test_gradient_accumulation(loss):
    """Two equal microbatches of one update, one window per generation batch: they add up to the minibatch. TRL's bnpo
    does not, see the differences."""
    batch = random_batch(4)
    objective, settings = LOSSES[loss]
    tokens = int(batch.mask_ST.sum())
    halves = [
        trl_loss(part, items=tokens, loss_type=loss, gradient_accumulation_steps=2, steps_per_generation=2, **settings)
        for part in (batch.rows(0, 4), batch.rows(4, 8))
    ]
    summed = halves[0][0] + halves[1][0], torch.cat([halves[0][1], halves[1][1]])
    assert_same_loss(summed, cohort_loss(objective, batch))


def test_sapo_with_other_temperatures():
    batch = random_batch(2)
    from_trl = trl_loss(batch, loss_type="sapo", sapo_temperature_pos=0.5, sapo_temperature_neg=3.0)
    objective = PRESETS["sapo"].replace(trust_region={"tau_positive": 0.5, "tau_negative": 3.0})
    assert_same_loss(from_trl, cohort_loss(objective, batch))


def test_vespo_with_other_numbers():
    batch = random_batch(2)
    numbers = {"vespo_k_pos": 1.0, "vespo_lambda_pos": 0.5, "vespo_k_neg": 2.0, "vespo_lambda_neg": 4.0}
    rule = {"k_positive": 1.0, "lambda_positive": 0.5, "k_negative": 2.0, "lambda_negative": 4.0}
    objective = LOSSES["vespo"][0].replace(trust_region=rule)
    assert_same_loss(trl_loss(batch, loss_type="vespo", **numbers), cohort_loss(objective, batch))


@pytest.mark.parametrize("log_ratio", [math.log(0.8), math.log(1.2)])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_ratio_next_to_a_bound(log_ratio, advantage):
    for nudge in (-1e-9, 1e-9):
        batch = single_token(log_ratio + nudge, advantage)
        assert_same_loss(trl_loss(batch, loss_type="grpo"), cohort_loss(PRESETS["default"], batch))


@pytest.mark.parametrize("seed", SEEDS)
def test_everything_at_once(seed):
    """Parts multiply in the same order: which term sees which mask is where implementations part."""
    batch = random_batch(seed, spread=0.8)
    trl_parts = {"delta": 2.0, "top_entropy_quantile": 0.5, "off_policy_mask_threshold": 0.1, "beta": 0.04}
    from_trl = trl_loss(batch, sampler=True, loss_type="dapo", epsilon=0.2, epsilon_high=0.28, **trl_parts)
    objective = PRESETS["dapo"].replace(
        trust_region=PPOClip(low=0.8, high=1.28, dual=2.0),
        top_entropy=0.5,
        mismatch=(OffPolicyMask(threshold=0.1),),
        kl=CORRECTED,
    )
    assert_same_loss(from_trl, cohort_loss(objective, batch))


def test_intellect2_as_a_preset():
    batch = random_batch(7, spread=1.2)
    from_trl = trl_loss(batch, loss_type="bnpo", delta=4.0, beta=0.001, use_bias_correction_kl=False)
    assert_same_loss(from_trl, cohort_loss(PRESETS["intellect2"], batch))


def test_gspo_as_a_preset():
    batch = random_batch(7, spread=1e-3)
    from_trl = trl_loss(batch, loss_type="grpo", importance_sampling_level="sequence", epsilon=3e-4, epsilon_high=4e-4)
    assert_same_loss(from_trl, cohort_loss(PRESETS["gspo"], batch))
    assert (from_trl[1] == 0).any()


def test_grpo_as_a_preset():
    batch = random_batch(7)
    from_trl = trl_loss(batch, loss_type="grpo", beta=0.04, use_bias_correction_kl=False)
    assert_same_loss(from_trl, cohort_loss(PRESETS["grpo"], batch))


def test_adaptive_entropy_bonus():
    """The weight that each update's bonus has, and how it follows the target: the two controllers are one."""
    entropies = [0.1, 0.15, 0.5, 0.3, 0.2, 0.1, 0.1]
    settings = {"entropy_coef": 0.01, "entropy_target": 0.2, "entropy_coef_delta": 0.008}
    trainer = trl_trainer(loss_type="grpo", use_adaptive_entropy=True, **settings)
    bonus, coefficient, measured = EntropyBonus(coefficient=0.01, target=0.2, step=0.008), 0.01, None
    for entropy in entropies:
        batch = single_token(0.0, 0.0)
        batch = batch.replace(entropy_ST=torch.full_like(batch.entropy_ST, entropy))
        value = run_trl(trainer, batch, trl_inputs(batch))[0].item()  # A = 0 and no KL: the bonus alone
        assert value == pytest.approx(-applied_entropy_coefficient(bonus, coefficient, measured) * entropy, abs=1e-15)
        coefficient, measured = next_entropy_coefficient(bonus, coefficient, entropy), entropy
        assert trainer.entropy_coef == pytest.approx(coefficient, abs=1e-15)
