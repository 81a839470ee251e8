"""The table: every preset as a row, with its paper, its numbers, and its difference from GRPO.

A row never changes. Other numbers are a new row with a higher version: ``preset = "dapo"`` then means the new one and
``"dapo@1"`` the old one; every run records which it used.
"""

from __future__ import annotations

import difflib

from cohort.errors import ConfigError
from cohort.presets.kl import KL
from cohort.presets.objective import Objective
from cohort.presets.parts import (
    BatchStd,
    DropDead,
    DynamicSampling,
    GroupMean,
    GroupStd,
    OffPolicyMask,
    SignWeights,
    SoftOverlong,
    TopK,
)
from cohort.presets.trust_regions import GMPO, SAPO, Cap, Gamma, KLMask, PPOClip, TVMask

COMMON = Objective(trust_region=PPOClip(low=0.8, high=1.2), kl=KL(direction="reverse", correction="token_ratio"))
"""The parts of a row where it names no others: group mean and std, PPO's clip, and a reverse KL of weight 0."""
REVERSE_TO_SAMPLER = KL(direction="reverse", correction="token_ratio", anchor="sampler")


def _row(name: str, source: str, summary: str, **parts: object) -> Objective:
    return Objective(**{**dict(COMMON), "name": name, "source": source, "summary": summary, **parts})


TABLE: tuple[Objective, ...] = (
    _row(
        "default",
        "DeepSeekMath, arXiv 2402.03300, without its KL term",
        "GRPO without a reference model; a KL, when beta is set, has the reverse KL's gradient",
    ),
    _row(
        "grpo",
        "DeepSeekMath, arXiv 2402.03300; its clip range is not printed, 0.2 is PPO's",
        "the original: group mean and std, per-token clip, k3 as a loss",
        kl=KL(beta=0.04, direction="forward"),
    ),
    _row(
        "grpo_r1",
        "DeepSeek-R1, arXiv 2501.12948",
        "a clip that hardly ever acts (epsilon 10) and a small KL; R1 also moved its reference every 400 steps",
        trust_region=PPOClip(low=0.0, high=11.0),
        kl=KL(beta=0.001, direction="forward"),
    ),
    _row(
        "grpo_v32",
        "DeepSeek-V3.2, arXiv 2512.02556; it prints neither beta nor threshold, those are ours",
        "no std; ratio and an unbiased KL against the sampler; off-policy sequences with A < 0 are dropped",
        scale=None,
        ratio_anchor="sampler",
        mismatch=(OffPolicyMask(threshold=0.5),),
        kl=KL(beta=0.001, direction="reverse", correction="token_ratio", anchor="sampler"),
    ),
    _row(
        "dr_grpo",
        "Understanding R1-Zero-Like Training, arXiv 2503.20783",
        "no std and a constant length in the denominator: neither difficulty nor length is weighed",
        scale=None,
        aggregation="constant",
    ),
    _row(
        "bnpo",
        "TRL's loss_type 'bnpo', its mean taken over the whole minibatch",
        "mean over all tokens; not Beta Normalization Policy Optimization (arXiv 2506.02864)",
        aggregation="token_mean",
    ),
    _row(
        "dapo",
        "DAPO, arXiv 2503.14476",
        "clip higher, mean over all tokens, dead groups sampled anew, cut completions masked, soft overlong",
        soft_overlong=SoftOverlong(cache_share=0.2),
        group_filter=DynamicSampling(max_rounds=4),
        truncated="mask",
        trust_region=PPOClip(low=0.8, high=1.28),
        aggregation="token_mean",
    ),
    _row(
        "lite_ppo",
        "Tricks or Traps (Lite PPO), arXiv 2508.08221",
        "group mean, but the std of all rewards of the batch; mean over all tokens",
        scale=BatchStd(of="raw"),
        aggregation="token_mean",
    ),
    _row(
        "rloo",
        "Back to Basics (RLOO), arXiv 2402.14740; beta as in TRL's RLOOTrainer",
        "leave-one-out baseline, no std, one ratio for the product of a sequence, the KL in the reward",
        baseline="leave_one_out",
        scale=None,
        ratio_level="sequence_product",
        kl=KL(beta=0.05, direction="reverse", scope="sequence", place="reward"),
        aggregation="seq_sum",
    ),
    _row(
        "reinforce_pp",
        "REINFORCE++, arXiv 2501.03262; beta 0.01 is ours",
        "no group: returns to go with a KL in the reward, whitened over all tokens of the batch",
        baseline="batch_mean",
        scale=BatchStd(of="centred", unit="token"),
        credit="return_to_go",
        kl=KL(beta=0.01, direction="reverse", scope="sequence", place="reward"),
        aggregation="token_mean",
    ),
    _row(
        "reinforce_pp_baseline",
        "REINFORCE++, arXiv 2501.03262, its baseline variant; beta 0.01 is ours",
        "group mean, the std of all centred rewards of the batch, and a k2 loss",
        scale=BatchStd(of="centred"),
        kl=KL(beta=0.01, direction="reverse"),
        aggregation="token_mean",
    ),
    _row(
        "gspo",
        "GSPO, arXiv 2507.18071; four minibatches per rollout",
        "one ratio per sequence, the geometric mean of its tokens', with a very narrow clip",
        ratio_level="sequence_mean",
        trust_region=PPOClip(low=1 - 3e-4, high=1 + 4e-4),
    ),
    _row(
        "gspo_token",
        "GSPO, arXiv 2507.18071, section 4.3",
        "GSPO's ratio, but each token has an advantage and a gradient of its own",
        ratio_level="sequence_mean_token",
        trust_region=PPOClip(low=1 - 3e-4, high=1 + 4e-4),
    ),
    _row(
        "luspo",
        "LUSPO, arXiv 2602.05261",
        "GSPO summed over a sequence's tokens instead of averaged: length is not divided out",
        ratio_level="sequence_mean",
        trust_region=PPOClip(low=1 - 2e-3, high=1 + 2.5e-3),
        aggregation="seq_sum",
    ),
    _row(
        "gmpo",
        "GMPO, arXiv 2507.20673",
        "tokens' ratios are clipped to e^-0.4..e^0.4 first, then their geometric mean is the sequence's ratio",
        ratio_level="sequence_mean",
        trust_region=GMPO(),
    ),
    _row(
        "cispo",
        "MiniMax-M1 (CISPO), arXiv 2506.13585; the cap of 5 is ScaleRL's",
        "the ratio is a capped weight: no token is ever silenced; mean over all tokens",
        trust_region=Cap(low=0.0, high=5.0),
        aggregation="token_mean",
    ),
    _row(
        "scalerl",
        "The Art of Scaling RL Compute (ScaleRL), arXiv 2510.13786",
        "CISPO with the batch's std, a mean per prompt, and dead groups left out",
        group_filter=DropDead(),
        scale=BatchStd(of="centred"),
        trust_region=Cap(low=0.0, high=5.0),
        aggregation="prompt_mean",
    ),
    _row(
        "sapo",
        "SAPO, arXiv 2511.20347",
        "a smooth gate in place of the clip, a little narrower where A < 0",
        trust_region=SAPO(tau_positive=1.0, tau_negative=1.05),
    ),
    _row(
        "vespo",
        "VESPO, arXiv 2602.10693",
        "the product of a sequence's ratios to the sampler, as a weight that falls off on both sides of 1",
        ratio_anchor="sampler",
        ratio_level="sequence_product",
        trust_region=Gamma(k_positive=2.0, lambda_positive=3.0, k_negative=3.0, lambda_negative=2.0),
        kl=REVERSE_TO_SAMPLER,
        aggregation="token_mean",
    ),
    _row(
        "dppo_tv",
        "DPPO, arXiv 2602.04879",
        "tokens are dropped by how far their probability moved from the sampler's, not their ratio; no std",
        scale=None,
        ratio_anchor="sampler",
        trust_region=TVMask(low=0.15, high=0.15),
        kl=REVERSE_TO_SAMPLER,
        aggregation="token_mean",
    ),
    _row(
        "dppo_kl",
        "DPPO, arXiv 2602.04879",
        "as dppo_tv, by the Bernoulli KL of the sampled token",
        scale=None,
        ratio_anchor="sampler",
        trust_region=KLMask(threshold=0.05),
        kl=REVERSE_TO_SAMPLER,
        aggregation="token_mean",
    ),
    _row(
        "maxrl",
        "MaxRL, arXiv 2602.02710",
        "divides by the group's mean reward: climbs log pass rate to order G - 1 instead of the pass rate",
        scale=GroupMean(),
        aggregation="seq_sum",
    ),
    _row(
        "intellect2",
        "INTELLECT-2, arXiv 2505.07291",
        "a two-sided clip: ratios above 4 are silenced where A < 0 too; mean over all tokens, a small k3 loss",
        trust_region=PPOClip(low=0.8, high=1.2, dual=4.0),
        kl=KL(beta=0.001, direction="forward"),
        aggregation="token_mean",
    ),
    _row(
        "gdpo",
        "GDPO, arXiv 2601.05242",
        "each reward normalised in its group, summed, and the sums normalised over the batch",
        reward_aggregation="normalize_sum_normalize",
        scale=GroupStd(epsilon=1e-4),
        aggregation="token_mean",
    ),
    _row(
        "mo_grpo",
        "MO-GRPO, arXiv 2509.22047",
        "each reward normalised in its group, then summed: no reward outweighs another by its scale",
        reward_aggregation="normalize_then_sum",
        aggregation="token_mean",
    ),
    _row(
        "gfpo",
        "GFPO, arXiv 2508.09726",
        "learns from the 8 shortest completions of a larger group; the others have advantage 0",
        group_filter=TopK(k=8, metric="shortest"),
        aggregation="token_mean",
    ),
    _row(
        "w_reinforce",
        "The Surprising Effectiveness of Negative Reinforcement, arXiv 2506.01347",
        "plain REINFORCE on right and wrong: right answers pull with 0.1, wrong ones push with 1",
        baseline=0.5,
        scale=None,
        sign_weights=SignWeights(positive=0.2, negative=2.0),
        aggregation="token_mean",
    ),
    _row(
        "passk",
        "Optimizing pass@k by policy gradients, arXiv 2503.19595",
        "only the best completion learns, by its lead over the second: the gradient of E[max reward of G]",
        baseline="second_best",
        scale=None,
        aggregation="seq_sum",
    ),
)
"""All rows, all versions."""

PRESETS: dict[str, Objective] = {row.name: row for row in sorted(TABLE, key=lambda row: row.version)}
"""The newest version of each, by name."""


def preset(name: str) -> Objective:
    """A row of the table by ``name`` (its newest version) or ``name@version``.

    Raises:
        ConfigError: there is no such preset; the nearest names are given.
    """
    plain, _, version = name.partition("@")
    if plain not in PRESETS:
        close = difflib.get_close_matches(plain.lower().replace("-", "_"), PRESETS, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}?" if close else "'cohort objective' lists all"
        raise ConfigError(f"unknown preset {plain!r}; {hint}")
    if not version:
        return PRESETS[plain]
    versions = {str(row.version): row for row in TABLE if row.name == plain}
    if version not in versions:
        raise ConfigError(f"preset {plain} has version {', '.join(versions)}, not {version!r}")
    return versions[version]
