"""Where Cohort means to differ from TRL 1.16.0: each with numbers of both, so that neither can change unnoticed.

The docstrings are the source of the table in the user documentation.
"""

from __future__ import annotations

import math

import pytest
import torch

from cohort.errors import ConfigError
from cohort.objective import (
    PRESETS,
    Outcomes,
    combined_advantages,
    k1,
    k3,
    next_entropy_coefficient,
    outcome_advantages,
    soft_overlong_punishment,
    token_advantages,
    top_entropy_tokens,
)
from cohort.presets.parts import KL, EntropyBonus, GroupStd, MismatchWeight, OffPolicyMask
from cohort.presets.trust_regions import Cap, PPOClip

from .oracle import (
    TRL_DEFAULTS,
    assert_same,
    assert_same_loss,
    cohort_loss,
    get_soft_overlong_punishment,
    random_batch,
    run_trl,
    single_token,
    trl_inputs,
    trl_loss,
    trl_rollout,
    trl_trainer,
)

GRPO = PRESETS["default"]

REWARDS_SK = torch.tensor(
    [[1.0, 3.0], [0.0, 7.0], [0.0, -2.0], [1.0, 9.0], [0.0, 4.0], [0.0, 1.0], [1.0, 8.0], [0.0, 2.0]],
    dtype=torch.float64,
)
"""Two groups of four, two reward functions of different scale."""


def far_apart(first, second):
    return not torch.allclose(first, second, rtol=1e-3)


# Ratio and trust region ---------------------------------------------------------------------------------------------


def test_differs_cispo_with_the_default_bound():
    """TRL: loss "cispo" reads ``epsilon_high`` as the cap on the ratio itself, and its default is ``epsilon`` = 0.2:
    with the defaults every weight is at most 0.2, so that an on-policy gradient is a fifth of what it should be.

    Cohort: a cap is a bound on the ratio and must be at least 1, or it is refused; the preset's is 5.
    """
    batch = random_batch(0)
    defaults = trl_loss(batch, old=False, loss_type="cispo")[1]
    assert_same(defaults, 0.2 * cohort_loss(PRESETS["cispo"], batch, old=False)[1])
    with pytest.raises(ConfigError, match="must contain 1"):
        Cap(low=0.0, high=0.2)


def test_differs_delta_not_above_the_clip():
    """TRL: ``delta`` is compared with nothing. At or below 1 + epsilon_high it cuts the gradient of A > 0 from delta
    on, which is the clip's business, and does nothing for A < 0, which it is there for.

    Cohort: ``dual`` must be above ``high``, where it is the dual clip and the two-sided clip at once; else refused.
    """
    settings = {"loss_type": "grpo", "delta": 1.1, "epsilon_high": 0.2}
    between, above = math.log(1.15), math.log(1.25)
    assert trl_loss(single_token(between, 1.0), **settings)[1].item() == 0
    assert trl_loss(single_token(between, -1.0), **settings)[1].item() == pytest.approx(-1.15)
    assert trl_loss(single_token(above, -1.0), **settings)[1].item() == 0
    assert cohort_loss(GRPO, single_token(between, 1.0))[1].item() == pytest.approx(1.15)
    for dual in (1.1, 1.2):
        with pytest.raises(ConfigError, match="must be above high"):
            PPOClip(low=0.8, high=1.2, dual=dual)


def test_differs_ratios_are_held():
    """TRL: ``exp(log ratio)`` as it comes. A log-ratio of 30 is a weight of 1e13, and 100 is infinity in float32, which
    with an advantage of 0 is NaN and takes the whole batch with it.

    Cohort: log-ratios are held to +-20 (and counted in the log), and an advantage of 0 is a coefficient of 0.
    """
    far = single_token(30.0, -1.0)
    assert trl_loss(far, loss_type="grpo")[1].item() == pytest.approx(-math.exp(30))
    assert cohort_loss(GRPO, far)[1].item() == pytest.approx(-math.exp(20))
    dead = single_token(100.0, 0.0).to(torch.float32)
    assert trl_loss(dead, loss_type="grpo")[0].isnan()
    assert cohort_loss(GRPO, dead)[1].item() == 0


def test_differs_token_weights_under_a_sequence_ratio():
    """TRL: with ``importance_sampling_level="sequence"`` a token's mismatch weight multiplies a loss that all tokens of
    the sequence share, so every token's coefficient has the sequence's mean weight.

    Cohort: refused for a ratio level that moves a completion as one. With GSPO-token's level the coefficient of a token
    has that token's own weight; the sum over a sequence is the same.
    """
    with pytest.raises(ConfigError, match="set ratio_level 'sequence_mean_token'"):
        PRESETS["gspo"].replace(mismatch=(MismatchWeight(high=3.0),))
    batch = random_batch(2, gaps=False)
    settings = {"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate", "loss_type": "grpo"}
    settings |= {"importance_sampling_level": "sequence", "epsilon": 0.5}
    rollout = trl_rollout(REWARDS_SK[:, 1:], batch=batch, num_generations=4, **settings)
    batch = batch.replace(advantages_S=rollout["advantages"])
    from_trl = run_trl(trl_trainer(**settings), batch, rollout)
    objective = PRESETS["gspo_token"].replace(epsilon=0.5, epsilon_high=0.5, mismatch=(MismatchWeight(high=3.0),))
    from_cohort = cohort_loss(objective, batch)
    assert far_apart(from_trl[1], from_cohort[1])
    assert_same(from_cohort[0], from_trl[0])
    for row in range(8):
        in_row_N = batch.sequence_N == row
        assert_same(from_trl[1][in_row_N], from_cohort[1][in_row_N].mean().expand(int(in_row_N.sum())))


def test_differs_top_entropy_under_a_sequence_ratio():
    """TRL: the entropy mask multiplies a loss that all tokens of the sequence share, so tokens of low entropy get a
    gradient too: every token the same, in proportion to how many of the sequence were kept.

    Cohort: refused for a ratio level that moves a completion as one. With GSPO-token's level a token that
    ``top_entropy`` leaves out has no policy gradient; the sum over a sequence is the same.
    """
    with pytest.raises(ConfigError, match="set ratio_level 'sequence_mean_token'"):
        PRESETS["gspo"].replace(top_entropy=0.5)
    batch = random_batch(2)
    settings = {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.5}
    from_trl = trl_loss(batch, top_entropy_quantile=0.5, **settings)
    objective = PRESETS["gspo_token"].replace(epsilon=0.5, epsilon_high=0.5, top_entropy=0.5)
    from_cohort = cohort_loss(objective, batch)
    kept_N = top_entropy_tokens(batch.flat(batch.entropy_ST), 0.5)
    assert from_trl[1][~kept_N].any()
    assert not from_cohort[1][~kept_N].any()
    assert_same(from_cohort[0], from_trl[0])
    for row in range(8):
        in_row_N = batch.sequence_N == row
        assert_same(from_trl[1][in_row_N], from_cohort[1][in_row_N].mean().expand(int(in_row_N.sum())))


# KL -----------------------------------------------------------------------------------------------------------------


def test_differs_kl_correction_under_a_sequence_ratio():
    """TRL: ``use_bias_correction_kl`` multiplies k3 by the policy term's ratio, which at sequence level is the
    geometric mean of the sequence. A token's KL coefficient is then g ((1 - e^D) + the sequence's mean k3): the
    gradient of no KL, and not the token's k1 even on-policy.

    Cohort: the correction is the token's own ratio whatever the policy term's level, and the coefficient r k1.
    """
    batch = random_batch(3)
    batch = batch.replace(advantages_S=torch.zeros(8, dtype=torch.float64))  # only the KL is left
    settings = {"loss_type": "grpo", "importance_sampling_level": "sequence", "beta": 0.04}
    objective = PRESETS["gspo"].replace(beta=0.04)
    sequence_N, logps_N, ref_N = batch.sequence_N, batch.flat(batch.logps_ST), batch.flat(batch.ref_ST)
    lengths_N = torch.bincount(sequence_N)[sequence_N].double()

    def mean_N(values_N):
        return torch.bincount(sequence_N, values_N)[sequence_N] / lengths_N

    for old in (True, False):
        log_ratio_N = logps_N - batch.flat(batch.old_ST) if old else torch.zeros_like(logps_N)
        from_trl = trl_loss(batch, old=old, **settings)[1]
        from_cohort = cohort_loss(objective, batch, old=old)[1]
        per_token = -0.04 / (8 * lengths_N)
        in_trl = mean_N(log_ratio_N).exp() * ((1 - (ref_N - logps_N).exp()) + mean_N(k3(logps_N, ref_N)))
        assert_same(from_trl, per_token * in_trl)
        assert_same(from_cohort, per_token * log_ratio_N.exp() * k1(logps_N, ref_N))
        assert far_apart(from_trl, from_cohort)


def test_differs_kl_correction_under_vllm():
    """TRL: the KL is corrected with pi / pi_old even where vLLM drew the tokens and its log-probs are known; the
    mismatch weights do not touch the KL.

    Cohort: ``kl.anchor`` says which policy the tokens came from: "old" is what TRL does, and the default; "sampler" is
    the policy that really drew them, which preset "grpo_v32" asks for.
    """
    batch = random_batch(4, gaps=False)
    settings = {"use_vllm": True, "loss_type": "grpo", "beta": 0.04, "vllm_importance_sampling_clip_max": 100.0}
    rollout = trl_rollout(torch.ones(8, 1).double(), batch=batch, num_generations=4, **settings)
    batch = batch.replace(advantages_S=rollout["advantages"])  # equal rewards: only the KL is left
    from_trl = run_trl(trl_trainer(**settings), batch, rollout)
    of_old = GRPO.replace(kl=KL(beta=0.04, direction="reverse", correction="token_ratio", anchor="old"))
    of_sampler = GRPO.replace(kl=KL(beta=0.04, direction="reverse", correction="token_ratio", anchor="sampler"))
    assert_same_loss(from_trl, cohort_loss(of_old, batch))
    to_sampler_N = batch.flat((batch.logps_ST - batch.sampler_ST).exp())
    to_old_N = batch.flat((batch.logps_ST - batch.old_ST).exp())
    assert_same(cohort_loss(of_sampler, batch)[1], from_trl[1] * to_sampler_N / to_old_N)


def test_differs_k3_in_float32():
    """TRL: k3 as ``exp(D) - D - 1`` in float32, which has no digits left where |D| is about 1e-4 and can be negative.
    Only the value suffers, in the loss and in the logged ``kl``.

    Cohort: ``expm1(D) - D``, which is right to a part in a thousand there.
    """
    gap = 2.0**-13  # float32 holds -1, -1 + gap and their difference exactly
    true = math.expm1(gap) - gap
    batch = single_token(0.0, 0.0, ref_gap=gap).to(torch.float32)
    trainer = trl_trainer(loss_type="grpo", beta=1.0)
    value = run_trl(trainer, batch, trl_inputs(batch))[0].item()
    assert abs(value - true) > 0.5 * true
    assert trainer._metrics["train"]["kl"] == [value]
    assert k3(batch.logps_ST, batch.ref_ST).item() == pytest.approx(true, rel=1e-3)


def test_differs_logged_kl():
    """TRL: the logged ``kl`` is a mean over tokens of what is in the loss, so since 1.10 it is ratio times k3 by
    default, and the same step logs another number with the correction off.

    Cohort: logs plain k1 and k3 means over tokens; what the loss does with them is another matter.
    """
    batch = random_batch(5)
    k3_N = k3(batch.flat(batch.logps_ST), batch.flat(batch.ref_ST))
    ratio_N = batch.flat((batch.logps_ST - batch.old_ST).exp())
    logged = []
    for corrected in (True, False):
        trainer = trl_trainer(loss_type="grpo", beta=1.0, use_bias_correction_kl=corrected)
        run_trl(trainer, batch, trl_inputs(batch))
        logged += trainer._metrics["train"]["kl"]
    assert_same(logged, torch.stack([(ratio_N * k3_N).mean(), k3_N.mean()]))
    assert logged[0] != pytest.approx(logged[1], rel=0.01)


# Denominators and microbatches --------------------------------------------------------------------------------------


def halves_of(batch):
    return batch.rows(0, 4), batch.rows(4, 8)


def test_differs_bnpo_and_microbatches():
    """TRL: "bnpo" divides by the tokens of the microbatch, then by the number of microbatches: the same minibatch cut
    otherwise is another gradient.

    Cohort: the denominator is the whole minibatch's, computed before it is cut.
    """
    batch = random_batch(6, lengths=(1, 2, 1, 2, 7, 6, 7, 6))
    whole = trl_loss(batch, loss_type="bnpo")
    assert_same_loss(whole, cohort_loss(PRESETS["bnpo"], batch))
    cut = torch.cat([trl_loss(part, loss_type="bnpo", gradient_accumulation_steps=2)[1] for part in halves_of(batch)])
    tokens = [int(part.mask_ST.sum()) for part in halves_of(batch)]
    factor_N = sum(tokens) / (2 * torch.tensor(tokens).double())[(batch.sequence_N >= 4).long()]
    assert_same(cut, whole[1] * factor_N)
    assert far_apart(cut, whole[1])


def test_differs_top_entropy_and_microbatches():
    """TRL: the entropy threshold is a quantile of the microbatch's tokens, so each microbatch keeps the same share,
    however low its entropies are.

    Cohort: one threshold for the minibatch, found in a pass before the first microbatch.
    """
    batch = random_batch(7)
    scale_S = torch.tensor([1.0] * 4 + [0.001] * 4, dtype=torch.float64)[:, None]  # half of them know what they say
    batch = batch.replace(entropy_ST=batch.entropy_ST * scale_S)
    settings = {"loss_type": "sapo", "top_entropy_quantile": 0.2}
    whole = trl_loss(batch, **settings)
    objective = PRESETS["sapo"].replace(top_entropy=0.2, trust_region={"tau_negative": float(torch.tensor(1.05))})
    assert_same_loss(whole, cohort_loss(objective, batch))
    second_N = batch.sequence_N >= 4
    cut = torch.cat([trl_loss(part, gradient_accumulation_steps=2, **settings)[1] for part in halves_of(batch)])
    assert int((whole[1] != 0).sum()) == math.ceil(0.2 * len(second_N))
    assert not whole[1][second_N].any()
    assert int((cut[second_N] != 0).sum()) == math.ceil(0.2 * int(second_N.sum()))


def test_differs_top_entropy_threshold():
    """TRL: the threshold is ``torch.quantile``'s, interpolated between two entropies, and keeps floor(q (n - 1)) + 1
    tokens; the function fails above 2^24 of them.

    Cohort: the threshold is an entropy of the batch, and ceil(q n) tokens are kept (all ties), for any n. The two agree
    where 1/q is whole.
    """
    entropy_N = torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.float64)
    mask_SN = torch.ones(1, 4, dtype=torch.long)
    kept_by_trl = trl_trainer().get_high_entropy_mask(entropy_N[None], mask_SN, 1 - 0.3)[0]
    assert kept_by_trl.tolist() == [False, True, False, False]
    assert top_entropy_tokens(entropy_N, 0.3).tolist() == [False, True, False, True]
    for share, count in [(share, count) for share in (0.2, 0.25, 0.5) for count in range(1, 30)]:
        entropy_N = torch.rand(count, generator=torch.Generator().manual_seed(count)).double()
        by_trl = trl_trainer().get_high_entropy_mask(entropy_N[None], torch.ones(1, count), 1 - share)[0]
        assert top_entropy_tokens(entropy_N, share).tolist() == by_trl.tolist()


def test_differs_top_entropy_of_a_large_batch():
    """TRL: ``torch.quantile`` refuses more than 2^24 entropies (a microbatch gathered over all processes).

    Cohort: sorts, whatever the number.
    """
    entropy_N = torch.zeros(2**24 + 1)
    with pytest.raises(RuntimeError, match="too large"):
        trl_trainer().get_high_entropy_mask(entropy_N[None], torch.ones(1, len(entropy_N), dtype=torch.bool), 0.8)
    assert bool(top_entropy_tokens(entropy_N, 0.2).all())  # they are all equal


def test_differs_dapo_normaliser():
    """TRL: "dapo" (and "cispo", "vespo") divides by the tokens of the generation batch over the number of updates made
    from it: exact when there is one, else an update with longer completions weighs more.

    Cohort: the mean over the tokens of this update's minibatch.
    """
    batch = random_batch(8, lengths=(1, 2, 1, 2, 7, 6, 7, 6))
    tokens = int(batch.mask_ST.sum())
    objective = PRESETS["dapo"].replace(epsilon=0.2, epsilon_high=0.2)
    for window in halves_of(batch):  # two updates of one microbatch each from a rollout
        from_trl = trl_loss(window, items=tokens, loss_type="dapo", steps_per_generation=2)
        factor = int(window.mask_ST.sum()) / (tokens / 2)
        assert_same(from_trl[1], factor * cohort_loss(objective, window)[1])
        assert factor != pytest.approx(1, rel=0.2)
    assert_same_loss(trl_loss(batch, loss_type="dapo"), cohort_loss(objective, batch))


def test_differs_values_outside_of_the_loss():
    """TRL: masks by multiplying with 0, so a log-prob that is infinite or NaN at a tool's token or padding makes the
    loss NaN.

    Cohort: tokens outside of the loss are taken out before anything is computed; they may be anything.
    """
    batch = random_batch(9)
    expected = cohort_loss(GRPO, batch)
    batch.old_ST[batch.mask_ST == 0] = torch.nan
    batch.logps_ST[batch.mask_ST == 0] = -torch.inf
    assert trl_loss(batch, loss_type="grpo")[0].isnan()
    assert_same_loss(expected, cohort_loss(GRPO, batch))


# Sampler ------------------------------------------------------------------------------------------------------------


def test_differs_vespo_with_bounds():
    """TRL: under vLLM "vespo" multiplies pi / old by the truncated or masked token weights. Truncated, the ratio is not
    to the policy that drew the tokens; a masked token counts as 1e-8 and takes its whole sequence to 0.

    Cohort: the ratio is to the sampler itself, and a mismatch weight on top of that is refused.
    """
    batch = single_token(0.0, 1.0)
    batch = batch.replace(sampler_ST=batch.old_ST - math.log(4.0))  # rho = 4
    settings = {"use_vllm": True, "loss_type": "vespo", "vllm_importance_sampling_clip_max": 2.0}

    def phi(ratio):
        return ratio**2 * math.exp(3 * (1 - ratio))

    def in_trl(mode):
        every = {**settings, "vllm_importance_sampling_mode": mode}
        pair = type(batch)(*(torch.cat([value, value]) for value in vars(batch).values()))
        rollout = trl_rollout(torch.tensor([[1.0], [0.0]]).double(), batch=pair, num_generations=2, **every)
        inputs = {**trl_inputs(batch), "importance_sampling_ratio": rollout["importance_sampling_ratio"][:1]}
        return run_trl(trl_trainer(**every), batch, inputs)[1].item()

    assert in_trl("token_truncate") == pytest.approx(phi(2.0))
    assert in_trl("token_mask") == pytest.approx(phi(1e-8))
    assert cohort_loss(PRESETS["vespo"], batch)[1].item() == pytest.approx(phi(4.0))
    with pytest.raises(ConfigError, match="mismatch"):
        PRESETS["vespo"].replace(mismatch=(MismatchWeight(),))


def test_differs_vespo_without_vllm():
    """TRL: without vLLM the ratio is to the old policy, in the trainer's numerics.

    Cohort: the paper's: to the policy that drew the tokens, whichever engine it was; ``ratio_anchor = "old"`` is TRL's.
    """
    batch = random_batch(3)
    from_trl = trl_loss(batch, loss_type="vespo")
    assert far_apart(from_trl[1], cohort_loss(PRESETS["vespo"], batch)[1])
    assert_same_loss(from_trl, cohort_loss(PRESETS["vespo"].replace(ratio_anchor="old"), batch))


def test_differs_off_policy_mask_without_vllm():
    """TRL: the off-policy mask compares with the old policy unless vLLM drew the tokens.

    Cohort: always with the log-probs that the engine drew from, whichever engine it is.
    """
    batch = single_token(0.0, -1.0)
    batch = batch.replace(sampler_ST=batch.logps_ST + 1.0)  # the engine thought it e times likelier
    objective = GRPO.replace(mismatch=(OffPolicyMask(threshold=0.5),))
    assert trl_loss(batch, loss_type="grpo", off_policy_mask_threshold=0.5)[1].item() == -1
    assert trl_loss(batch, sampler=True, loss_type="grpo", off_policy_mask_threshold=0.5)[1].item() == 0
    assert cohort_loss(objective, batch)[1].item() == 0


def test_differs_mismatch_by_default():
    """TRL: with vLLM, sequences whose product of pi_old / pi_vllm is above 3 are dropped, and the others weighted by
    it, unless told otherwise. The product of a long sequence is mostly rounding noise: 0.02 per token over 4096 tokens
    is a standard deviation of 1.3 in its log.

    Cohort: an objective does what its row says; no preset has a weight, and ``mismatch`` adds one.
    """
    defaults = {name: TRL_DEFAULTS[f"vllm_importance_sampling_{name}"] for name in ("correction", "mode", "clip_max")}
    assert defaults == {"correction": True, "mode": "sequence_mask", "clip_max": 3.0}
    assert not any(isinstance(rule, MismatchWeight) for row in PRESETS.values() for rule in row.mismatch)
    batch = random_batch(0, lengths=(4096, 4096), spread=0.0, gaps=False)
    noise_ST = 0.02 * torch.randn((2, 4096), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    noise_ST[0] += 1.2 / 4096 - noise_ST[0].mean()  # just above 3: log 3 = 1.0986
    noise_ST[1] += 1.0 / 4096 - noise_ST[1].mean()  # just below
    batch = batch.replace(sampler_ST=batch.old_ST - noise_ST)
    rollout = trl_rollout(torch.tensor([[1.0], [0.0]]).double(), batch=batch, num_generations=2, use_vllm=True)
    assert_same(rollout["importance_sampling_ratio"].flatten(), [0.0, math.e])


# Advantages ---------------------------------------------------------------------------------------------------------


def outcomes_of(rewards_SK, size):
    return Outcomes(
        rewards_S=rewards_SK.sum(dim=1),
        group_S=torch.arange(len(rewards_SK)) // size,
        sequence_N=torch.arange(len(rewards_SK)),
        max_length=256,
        by_function_SK=rewards_SK,
    )


def trl_advantages(rewards_SK, size=4, **settings):
    return trl_rollout(rewards_SK, num_generations=size, **settings)["advantages"]


def test_differs_dr_grpo_keeps_the_std():
    """TRL: ``loss_type="dr_grpo"`` changes the denominator only; rewards are still divided by their group's std unless
    ``scale_rewards="none"`` is set as well.

    Cohort: the preset is the algorithm: no std.
    """
    rewards_SK = REWARDS_SK[:, 1:]
    outcomes = outcomes_of(rewards_SK, 4)
    by_the_preset = token_advantages(PRESETS["dr_grpo"], outcomes)
    from_trl = trl_advantages(rewards_SK, loss_type="dr_grpo")
    std_S = rewards_SK.view(2, 4).std(dim=1).repeat_interleave(4)
    assert_same(from_trl, by_the_preset / (std_S + 1e-4))
    assert_same(trl_advantages(rewards_SK, loss_type="dr_grpo", scale_rewards="none"), by_the_preset)


def test_differs_epsilon_of_the_std():
    """TRL: divides by std + 1e-4, which cannot be set: rewards of a small scale are held back.

    Cohort: 1e-6, a setting of the scale (``scale.epsilon``).
    """
    rewards_SK = 1e-4 * torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64)[:, None]
    group_S = torch.zeros(4, dtype=torch.long)
    from_trl, from_cohort = trl_advantages(rewards_SK), outcome_advantages(rewards_SK[:, 0], group_S)
    assert from_trl[0].item() == pytest.approx(0.5e-4 / (1e-4 / math.sqrt(3) + 1e-4))
    assert from_cohort[0].item() == pytest.approx(0.5e-4 / (1e-4 / math.sqrt(3) + 1e-6))
    assert_same(outcome_advantages(rewards_SK[:, 0], group_S, scale=GroupStd(epsilon=1e-4)), from_trl)


def test_differs_equal_rewards():
    """TRL: statistics in float32, and dead groups found by a small std for the log only. Eight rewards of 0.1 have a
    mean that is not 0.1, so their advantages are not 0; "normalize_then_sum" then divides by the batch's std, also
    tiny, and makes advantages of the size of real ones.

    Cohort: statistics in float64, and a group whose rewards are equal (max == min) has advantages of exactly 0.
    """
    rewards_SK = torch.full((8, 1), 0.1)
    assert 0 < trl_advantages(rewards_SK, size=8).abs().max() < 1e-3
    two_SK = torch.cat([rewards_SK, torch.full((8, 1), 0.5)])
    assert trl_advantages(two_SK, size=8, multi_objective_aggregation="normalize_then_sum").abs().max() > 0.1
    group_S = torch.arange(16) // 8
    assert outcome_advantages(two_SK[:, 0], group_S).tolist() == [0.0] * 16
    summed = combined_advantages(two_SK, torch.ones(1), group_S, over_batch=True, scale=GroupStd(epsilon=1e-4))
    assert summed.tolist() == [0.0] * 16


def test_differs_normalize_then_sum():
    """TRL: "normalize_then_sum" is GDPO: after the sum it normalises over the batch. With a single reward it is
    therefore not GRPO.

    Cohort: "normalize_then_sum" is what it says (MO-GRPO; with a single reward exactly GRPO), and
    "normalize_sum_normalize" is GDPO.
    """
    scale = GroupStd(epsilon=1e-4)
    for columns in (slice(0, 2), slice(1, 2)):
        rewards_SK = REWARDS_SK[:, columns]
        weights_K, group_S = torch.ones(rewards_SK.shape[1]), torch.arange(8) // 4
        from_trl = trl_advantages(rewards_SK, multi_objective_aggregation="normalize_then_sum")
        summed = combined_advantages(rewards_SK, weights_K, group_S, over_batch=False, scale=scale)
        assert far_apart(summed, from_trl)
        assert_same(from_trl, summed / (summed.std() + 1e-4))  # its mean is 0 here: whole groups
    single = combined_advantages(REWARDS_SK[:, 1:], torch.ones(1), group_S, over_batch=False, scale=scale)
    assert_same(single, trl_advantages(REWARDS_SK[:, 1:]))


def test_differs_normalize_then_sum_and_scale_rewards():
    """TRL: ``scale_rewards`` is not read with "normalize_then_sum": "none" divides by the std all the same.

    Cohort: ``scale`` is each reward's, so "none" centres only; the batch's std, which cannot be meant there, is
    refused.
    """
    settings = {"multi_objective_aggregation": "normalize_then_sum"}
    grouped = trl_advantages(REWARDS_SK, scale_rewards="group", **settings)
    assert_same(trl_advantages(REWARDS_SK, scale_rewards="none", **settings), grouped)
    assert_same(trl_advantages(REWARDS_SK, scale_rewards="batch", **settings), grouped)
    unscaled = PRESETS["mo_grpo"].replace(scale="none")
    centred_SK = REWARDS_SK - REWARDS_SK.view(2, 4, 2).mean(dim=1).repeat_interleave(4, dim=0)
    assert_same(token_advantages(unscaled, outcomes_of(REWARDS_SK, 4)), centred_SK.sum(dim=1))
    with pytest.raises(ConfigError, match="normalises each reward"):
        PRESETS["mo_grpo"].replace(scale="batch_std")


def test_differs_soft_overlong_without_a_cache():
    """TRL: ``soft_punish_cache=0`` is a step from 0 to -1 at the limit.

    Cohort: refused: the rule is a ramp; a reward function can be a step.
    """
    assert get_soft_overlong_punishment(10, 0)([[1] * 10, [1] * 11]) == [0.0, -1.0]
    with pytest.raises(ValueError, match="0 < cache_length"):
        soft_overlong_punishment(torch.tensor([10, 11]), max_length=10, cache_length=0)


# Defaults -----------------------------------------------------------------------------------------------------------


def test_differs_default_loss():
    """TRL: the default ``loss_type`` is "dapo": a mean over tokens.

    Cohort: the default is GRPO's: a mean over each completion's tokens, then over completions.
    """
    batch = random_batch(1)
    from_trl = trl_loss(batch)
    assert_same_loss(from_trl, cohort_loss(PRESETS["bnpo"], batch))
    assert far_apart(from_trl[1], cohort_loss(GRPO, batch)[1])


def test_differs_grpo_and_its_kl():
    """TRL: ``loss_type="grpo"`` with a beta has the corrected KL, whose gradient is the reverse KL's, unless
    ``use_bias_correction_kl=False``.

    Cohort: preset "grpo" is DeepSeekMath's: k3 as a loss, whose gradient is the forward KL's. The "default" preset has
    the reverse KL's, as TRL since 1.10.
    """
    batch = random_batch(4)
    from_trl = trl_loss(batch, loss_type="grpo", beta=0.04)
    assert far_apart(from_trl[1], cohort_loss(PRESETS["grpo"], batch)[1])
    assert_same_loss(from_trl, cohort_loss(GRPO.replace(beta=0.04), batch))
    plain = trl_loss(batch, loss_type="grpo", beta=0.04, use_bias_correction_kl=False)
    assert_same_loss(plain, cohort_loss(PRESETS["grpo"], batch))


def test_differs_dapo_is_its_mean():
    """TRL: ``loss_type="dapo"`` is DAPO's mean over tokens and nothing else: the clip stays at 0.2 on both sides,
    truncated completions stay in, there is no overlong punishment and no dynamic sampling.

    Cohort: the preset is the paper: clip to 1.28, truncated completions masked, soft overlong, dead groups sampled
    anew.
    """
    batch = single_token(math.log(1.25), 1.0)
    assert trl_loss(batch, loss_type="dapo")[1].item() == 0
    assert cohort_loss(PRESETS["dapo"], batch)[1].item() == pytest.approx(1.25)
    assert TRL_DEFAULTS["epsilon_high"] is None
    assert TRL_DEFAULTS["mask_truncated_completions"] is False
    assert PRESETS["dapo"].truncated == "mask"
    assert PRESETS["dapo"].soft_overlong is not None
    assert PRESETS["dapo"].group_filter is not None


def test_differs_luspo_is_its_sum():
    """TRL: ``loss_type="luspo"`` sums over tokens, but the ratio stays a token's and the clip 0.2 unless
    ``importance_sampling_level`` and ``epsilon`` are set too (it warns of the first).

    Cohort: the preset is the paper: a sequence's ratio and its narrow clip.
    """
    batch = random_batch(2)
    from_trl = trl_loss(batch, loss_type="luspo")
    assert far_apart(from_trl[1], cohort_loss(PRESETS["luspo"], batch)[1])
    assert_same_loss(from_trl, cohort_loss(GRPO.replace(aggregation="seq_sum"), batch))


def test_differs_largest_entropy_coefficient():
    """TRL: the adaptive entropy coefficient stays in [``entropy_coef_min``, ``entropy_coef_max``], [0, 1] by default.

    Cohort: at least 0, with no upper bound; the log shows it. Up to there the two move alike.
    """
    batch = single_token(0.0, 0.0)
    bonus = EntropyBonus(coefficient=0.9, target=0.2, step=0.08)
    settings = {"entropy_coef": 0.9, "entropy_target": 0.2, "entropy_coef_delta": 0.08, "use_adaptive_entropy": True}
    trainer = trl_trainer(loss_type="grpo", **settings)
    in_cohort = [0.9]
    for entropy in (0.1, 0.3, 0.2, 0.1):
        low = batch.replace(entropy_ST=torch.full_like(batch.entropy_ST, entropy))
        run_trl(trainer, low, trl_inputs(low))
        in_cohort.append(next_entropy_coefficient(bonus, in_cohort[-1], entropy))
    assert trainer._metrics["train"]["entropy_coef"] == pytest.approx([0.98, 0.90, 0.98, 1.0])
    assert in_cohort[1:] == pytest.approx([0.98, 0.90, 0.98, 1.06])
