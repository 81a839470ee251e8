"""From a rollout's scores to one advantage per token, in five steps.

1 shape the rewards      soft overlong, unlikeliness; a KL in the reward
2 compare                baseline and scale, per completion (``advantages``), among the chosen of a group
3 assign credit          to all tokens alike, by turns, by process steps, by returns to go, or as given
4 weigh by sign, treat truncated completions
5 subtract the KL        of a KL in the advantage: after scaling, so that no spread divides beta
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cohort.errors import RewardError
from cohort.objective.advantages import batch_std, combined_advantages, group_statistics, outcome_advantages
from cohort.objective.segments import (
    by_sign,
    grouped_order,
    index_in_run,
    prefix_sums,
    segment_mean,
    segment_sum,
    suffix_sums,
)
from cohort.presets.objective import Objective
from cohort.presets.parts import BatchStd, GroupStd, Scale, TopK, Unlikeliness  # noqa: F401 (GroupStd: doctest)
from cohort.types import Turns


@dataclass(frozen=True, slots=True)
class Outcomes:
    """The inputs of the advantages. Axes: S completions, N tokens of the loss, K reward functions."""

    rewards_S: Tensor
    """Weighted sum of the functions' rewards; NaN: not scored."""
    group_S: Tensor
    sequence_N: Tensor
    """Which completion each token belongs to."""
    max_length: int
    """``max_completion_length``, in tokens."""
    by_function_SK: Tensor | None = None
    """For the reward aggregations that normalise each function's rewards."""
    weights_K: Tensor | None = None
    token_rewards_N: Tensor | None = None
    """For credit "process" (a reward at each step's last token, NaN elsewhere) and "given"."""
    truncated_S: Tensor | None = None
    """Which completions the length limit cut, boolean."""
    sampler_logps_N: Tensor | None = None
    """For ``unlikeliness``."""
    kl_N: Tensor | None = None
    """``old_logps - ref_logps``, for a KL in the reward or the advantage."""
    turns: Turns | None = None
    """For credit "turns": which part of ``rewards_S`` was earned in which turn. None: one turn each."""

    @property
    def lengths_S(self) -> Tensor:
        """Loss tokens per completion."""
        return torch.bincount(self.sequence_N, minlength=len(self.rewards_S))


def token_advantages(objective: Objective, outcomes: Outcomes) -> Tensor:
    """One advantage per token, float64, shape ``[N]``. The steps and their order are in the module's header.

    A completion without a score (NaN) has advantage 0 and no part in any statistic. Statistics are those of the whole
    group or batch, with truncated completions.

    Raises:
        ValueError: an input that the objective needs is None.
        RewardError: scale ``GroupMean`` with a negative reward.
    """
    sequence_N, kl = outcomes.sequence_N, objective.kl
    match objective.credit:
        case "given":
            advantages_N = _token_rewards(outcomes).nan_to_num(nan=0.0)
        case "process":
            advantages_N = process_advantages(_token_rewards(outcomes), outcomes.group_S, sequence_N, objective.scale)
        case "return_to_go":
            advantages_N = returns_to_go(objective, outcomes)
        case "turns":
            rewards_S = shaped_rewards(objective, outcomes)
            rewards_S = rewards_S.masked_fill(~_chosen(objective, outcomes, rewards_S), torch.nan)
            turns = outcomes.turns or one_turn_each(len(rewards_S), sequence_N)
            advantages_N = turn_advantages(rewards_S, outcomes.group_S, turns)[turns.turn_N]
        case _:
            advantages_N = completion_advantages(objective, outcomes)[sequence_N]
    if weights := objective.sign_weights:
        advantages_N = advantages_N * by_sign(advantages_N > 0, weights.positive, weights.negative, advantages_N)
    if objective.truncated in ("zero", "penalize") and outcomes.truncated_S is not None:
        less_N = advantages_N - objective.truncated_penalty if objective.truncated == "penalize" else 0.0
        advantages_N = torch.where(outcomes.truncated_S[sequence_N], less_N, advantages_N)
    if objective.beta and kl.place == "advantage":
        advantages_N = advantages_N - objective.beta * _kl_to_subtract(objective, outcomes)
    return torch.where(outcomes.rewards_S.isnan()[sequence_N], 0.0, advantages_N)


def completion_advantages(objective: Objective, outcomes: Outcomes) -> Tensor:
    """One advantage per completion, float64, shape ``[S]``: steps 1 and 2 of the module's header."""
    group_S, lengths_S = outcomes.group_S, outcomes.lengths_S
    baseline, scale = objective.baseline, objective.scale
    if objective.reward_aggregation != "sum_then_normalize":
        rewards_SK = _needed(outcomes.by_function_SK, "by_function_SK", objective.reward_aggregation)
        weights_K = rewards_SK.new_ones(rewards_SK.shape[1]) if outcomes.weights_K is None else outcomes.weights_K
        rewards_SK = rewards_SK.masked_fill(~_chosen(objective, outcomes, outcomes.rewards_S)[:, None], torch.nan)
        over_batch, weights_K = objective.reward_aggregation == "normalize_sum_normalize", weights_K.to(rewards_SK)
        return combined_advantages(
            rewards_SK, weights_K, group_S, over_batch=over_batch, baseline=baseline, scale=scale, lengths_S=lengths_S
        )
    rewards_S = shaped_rewards(objective, outcomes)
    if objective.kl_in_reward and objective.credit == "outcome":
        kl_N = _needed(outcomes.kl_N, "kl_N", "kl.place 'reward'").double()
        rewards_S = rewards_S - objective.beta * segment_sum(kl_N, outcomes.sequence_N, len(rewards_S))
    rewards_S = rewards_S.masked_fill(~_chosen(objective, outcomes, rewards_S), torch.nan)
    return outcome_advantages(rewards_S, group_S, baseline=baseline, scale=scale, lengths_S=lengths_S)


def shaped_rewards(objective: Objective, outcomes: Outcomes) -> Tensor:
    """Rewards with length and likelihood taken into account, float64, shape ``[S]``."""
    rewards_S = outcomes.rewards_S.double()
    if rare := objective.unlikeliness:
        logps_N = _needed(outcomes.sampler_logps_N, "sampler_logps_N", "unlikeliness").double()
        known_N = ~logps_N.isnan()  # an engine may not know a token's: the mean is over the others
        mean_S = segment_mean(logps_N[known_N], outcomes.sequence_N[known_N], len(rewards_S))
        rewards_S = unlikeliness(rare, rewards_S, mean_S, outcomes.group_S)
    if overlong := objective.soft_overlong:
        length = overlong.max_length or outcomes.max_length
        rewards_S = rewards_S + soft_overlong_punishment(outcomes.lengths_S, length, overlong.cache_share * length)
    return rewards_S


def process_advantages(token_rewards_N: Tensor, group_S: Tensor, sequence_N: Tensor, scale: Scale | None) -> Tensor:
    """Process supervision: ``A_t = sum over the steps that end at t or later of r~``, shape ``[N]``.

        r~ = (r - mean) / (std + epsilon)     over all step rewards of all completions of the group (scale None: no std)

    Args:
        token_rewards_N: a step's reward at its last token, NaN elsewhere.
        group_S, sequence_N: group of each completion, completion of each token.
        scale: ``GroupStd`` or None.

    0 after a completion's last step, and in a group whose step rewards are all equal.

    Source: DeepSeekMath (arXiv 2402.03300) 4.1.3.

    >>> steps = torch.tensor([torch.nan, 1.0, 0.0, torch.nan])
    >>> process_advantages(steps, torch.tensor([0, 0]), torch.tensor([0, 0, 1, 1]), GroupStd(epsilon=0.0))
    tensor([ 0.7071,  0.7071, -0.7071,  0.0000], dtype=torch.float64)
    """
    is_step_N = ~torch.isnan(token_rewards_N)
    normal_N = torch.zeros(token_rewards_N.shape, dtype=torch.float64, device=token_rewards_N.device)
    groups = group_S[sequence_N[is_step_N]]
    normal_N[is_step_N] = outcome_advantages(token_rewards_N[is_step_N], groups, scale=scale)
    return suffix_sums(normal_N, sequence_N)


def turn_advantages(rewards_S: Tensor, group_S: Tensor, turns: Turns) -> Tensor:
    """``A_ik = G_ik - mean of G_jk over the others j of the group that reached turn k``, shape ``[Y]``.

        G_ik = R_i - (rewards of turns 0..k-1 of trajectory i)          the return from turn k on

    Where no other scored trajectory of the group reached turn k, ``A_ik = G_ik``.

    Args:
        rewards_S: the return of each whole trajectory, the rewards of its turns included; NaN: not scored, A = 0.
        group_S: group of each trajectory.
        turns: the turns and the rewards earned in them. What is left of ``rewards_S`` is earned in the last turn.

    The gradient is unbiased: which others reached a turn, and their returns, do not depend on trajectory i. It is
    biased when rewards are centred turn by turn before they are summed, because a trajectory then chooses its baseline
    by ending (verl#7244), and when the mean includes i itself.

    The first trajectory ends with turn 0; the second reaches turn 1 alone:

    >>> turns = Turns(torch.tensor([0, 1, 1]), torch.tensor([0, 1, 2]), torch.tensor([0.0, 1.0, 0.0]))
    >>> turn_advantages(torch.tensor([2.0, 5.0]), torch.tensor([0, 0]), turns)
    tensor([-3.,  3.,  4.], dtype=torch.float64)
    """
    earned_Y = turns.rewards_Y.double()
    returns_Y = rewards_S.double()[turns.sequence_Y] - (prefix_sums(earned_Y, turns.sequence_Y) - earned_Y)
    places_E2 = torch.stack([group_S[turns.sequence_Y], index_in_run(turns.sequence_Y)], dim=1)
    position_Y = torch.unique(places_E2, dim=0, return_inverse=True)[1]
    alone_Y = torch.bincount(position_Y[~returns_Y.isnan()], minlength=len(position_Y))[position_Y] == 1
    compared_Y = outcome_advantages(returns_Y, position_Y, baseline="leave_one_out", scale=None)
    return torch.where(alone_Y, returns_Y.nan_to_num(nan=0.0), compared_Y)


def one_turn_each(num_sequences: int, sequence_N: Tensor) -> Turns:
    """The turns of sequences that have one turn each."""
    return Turns(torch.arange(num_sequences), sequence_N, torch.zeros(num_sequences, dtype=torch.float64))


def returns_to_go(objective: Objective, outcomes: Outcomes) -> Tensor:
    """``A_t = sum_{k >= t} discount^(k - t) r_k``, with the completion's advantage as the reward of its last token and,
    where the KL is in the reward, ``-beta log(old/ref)`` at every token. Shape ``[N]``.

    With scale ``BatchStd(unit="token")`` the returns are centred and scaled: see ``whitened_returns``.
    """
    scale = objective.scale
    if isinstance(scale, BatchStd) and scale.unit == "token":
        return whitened_returns(objective, scale, outcomes)
    scored_N = _compared(objective, outcomes)[outcomes.sequence_N]
    return torch.where(scored_N, _returns(objective, outcomes, completion_advantages(objective, outcomes)), 0.0)


def whitened_returns(objective: Objective, scale: BatchStd, outcomes: Outcomes) -> Tensor:
    """REINFORCE++: returns to go of the rewards as they are, less their mean over all tokens (baseline "batch_mean"),
    divided by their standard deviation over all tokens. Shape ``[N]``.

    Where the rewards, less a baseline of the group, are all equal, only the KL in the reward is left. It is centred but
    not divided: divided by its own spread, noise of any size would become as large as a signal.

    Source: REINFORCE++ (arXiv 2501.03262).
    """
    compared_S = _compared(objective, outcomes)
    compared_N = compared_S[outcomes.sequence_N]
    if not bool(compared_N.any()):
        return torch.zeros(compared_N.shape, dtype=torch.float64, device=compared_N.device)
    whole = objective.baseline == "batch_mean"
    unchanged = objective.model_copy(update={"baseline": "none", "scale": None})
    undivided = unchanged if whole else objective.model_copy(update={"scale": None})
    rewards_S = completion_advantages(undivided, outcomes)
    equal = batch_std(rewards_S[compared_S], 0) is None
    returns_N = _returns(objective, outcomes, torch.zeros_like(rewards_S) if equal else rewards_S)
    spread_of_N = returns_N
    if scale.of == "raw" and not whole:
        spread_of_N = _returns(objective, outcomes, completion_advantages(unchanged, outcomes))
    spread = None if equal else batch_std(spread_of_N[compared_N], scale.ddof)
    centred_N = returns_N - (returns_N[compared_N].mean() if whole else 0.0)
    return torch.where(compared_N, centred_N if spread is None else centred_N / (spread + scale.epsilon), 0.0)


def _returns(objective: Objective, outcomes: Outcomes, rewards_S: Tensor) -> Tensor:
    """Discounted returns of a reward at each completion's last token and of a KL in the reward at every token."""
    sequence_N = outcomes.sequence_N
    rewards_N = torch.zeros(sequence_N.shape, dtype=torch.float64, device=sequence_N.device)
    position_N = torch.arange(len(sequence_N), device=sequence_N.device)
    last_S = torch.full_like(rewards_S, -1, dtype=torch.long).scatter_reduce(0, sequence_N, position_N, "amax")
    rewards_N[last_S[last_S >= 0]] = rewards_S[last_S >= 0]
    if objective.kl_in_reward:
        rewards_N = rewards_N - objective.beta * _needed(outcomes.kl_N, "kl_N", "kl.place 'reward'").double()
    return suffix_sums(rewards_N, sequence_N, objective.discount)


def _compared(objective: Objective, outcomes: Outcomes) -> Tensor:
    """Which completions have a score and something to be compared with, and are among the chosen of their group."""
    compared_S = ~outcomes.rewards_S.isnan() & _chosen(objective, outcomes, shaped_rewards(objective, outcomes))
    if objective.baseline == "leave_one_out":
        statistics = group_statistics(outcomes.rewards_S.masked_fill(~compared_S, torch.nan), outcomes.group_S)
        compared_S = compared_S & (statistics.count_P >= 2)[statistics.index_S]
    return compared_S


def _chosen(objective: Objective, outcomes: Outcomes, rewards_S: Tensor) -> Tensor:
    if not isinstance(objective.group_filter, TopK):
        return torch.ones_like(rewards_S, dtype=torch.bool)
    return top_k_of_group(objective.group_filter, rewards_S, outcomes.lengths_S, outcomes.group_S)


def _kl_to_subtract(objective: Objective, outcomes: Outcomes) -> Tensor:
    kl_N = _needed(outcomes.kl_N, "kl_N", "kl.place 'advantage'").double()
    if objective.kl.scope == "token":
        return kl_N
    if objective.credit == "return_to_go":
        return suffix_sums(kl_N, outcomes.sequence_N, objective.discount)
    return segment_sum(kl_N, outcomes.sequence_N, len(outcomes.rewards_S))[outcomes.sequence_N]


def _token_rewards(outcomes: Outcomes) -> Tensor:
    return _needed(outcomes.token_rewards_N, "token_rewards_N", "credit per token").double()


def _needed(value: Tensor | None, name: str, why: str) -> Tensor:
    if value is None:
        raise ValueError(f"{name} is needed for {why}")
    return value


# Step 1 ---------------------------------------------------------------------------------------------------------------


def soft_overlong_punishment(lengths_S: Tensor, max_length: int, cache_length: float) -> Tensor:
    """DAPO's length penalty, to be added to the reward, float64, shape ``[S]``.

        0                                       |o| <= L_max - L_cache
        ((L_max - L_cache) - |o|) / L_cache     in between
        -1                                      |o| > L_max

    Args:
        lengths_S: tokens per completion.
        max_length, cache_length: L_max and L_cache, in tokens; ``0 < cache_length <= max_length``.

    Source: DAPO (arXiv 2503.14476) eq. 13.

    >>> soft_overlong_punishment(torch.tensor([80, 90, 100, 101]), max_length=100, cache_length=20)
    tensor([ 0.0000, -0.5000, -1.0000, -1.0000], dtype=torch.float64)
    """
    if not 0 < cache_length <= max_length:
        raise ValueError(f"expected 0 < cache_length <= max_length, got {cache_length} and {max_length}")
    return (((max_length - cache_length) - lengths_S.double()) / cache_length).clamp(-1, 0) + 0.0


def unlikeliness(rule: Unlikeliness, rewards_S: Tensor, mean_logps_S: Tensor, group_S: Tensor) -> Tensor:
    """``R_i (1 - strength * rank_i / G)``, shape ``[S]``: rank_i is how many of the group are less likely than i.

    Args:
        rule: the strength; 0 changes nothing.
        rewards_S: NaN stays NaN. A reward of 0 stays 0, so wrong answers are not touched.
        mean_logps_S: each completion's mean log-prob per token under the sampler.
        group_S: group ids; G is the group's size.

    Raises:
        RewardError: a reward is negative; a likely completion would then have a smaller penalty.

    Equal likelihoods share the lower rank, so the order of completions does not matter.

    Source: "Rewarding the Unlikely" (arXiv 2506.02355).

    >>> lp, one_group = torch.tensor([-0.5, -2.0]), torch.zeros(2, dtype=torch.long)
    >>> unlikeliness(Unlikeliness(strength=0.25), torch.ones(2), mean_logps_S=lp, group_S=one_group)
    tensor([0.8750, 1.0000], dtype=torch.float64)
    """
    if bool((rewards_S < 0).any()):
        raise RewardError(
            "unlikeliness needs rewards that are not negative: it would reduce the penalty of likely completions"
        )
    _, index_S, count_P = torch.unique(group_S, return_inverse=True, return_counts=True)
    order_S = grouped_order(mean_logps_S, index_S)
    rank_in_group_S = index_in_run(index_S[order_S])
    # Completions of equal likelihood share the rank of the first of them.
    index_in_tie_S = index_in_run(torch.stack([index_S[order_S].to(mean_logps_S), mean_logps_S[order_S]], dim=1))
    rank_S = torch.empty_like(rank_in_group_S).scatter_(0, order_S, rank_in_group_S - index_in_tie_S)
    kept_S: Tensor = 1 - rule.strength * rank_S.double() / count_P[index_S]
    return rewards_S.double() * kept_S


def top_k_of_group(rule: TopK, rewards_S: Tensor, lengths_S: Tensor, group_S: Tensor) -> Tensor:
    """Which completions are the ``k`` best scored ones of their group, boolean, shape ``[S]``; of equal ones, the
    earlier. A group with fewer scored members keeps them all.

    Source: GFPO (arXiv 2508.09726).

    >>> lengths, one_group = torch.tensor([9, 3, 5]), torch.zeros(3, dtype=torch.long)
    >>> top_k_of_group(TopK(k=2), torch.ones(3), lengths, one_group)
    tensor([False,  True,  True])
    """
    lengths_S = lengths_S.double()
    better_S = -lengths_S if rule.metric == "shortest" else rewards_S.double() / lengths_S.clamp(min=1)
    better_S = better_S.masked_fill(torch.isnan(rewards_S), -torch.inf)
    order_S = grouped_order(better_S, group_S, descending=True)
    rank_in_group_S = index_in_run(group_S[order_S])
    chosen_S = torch.empty_like(rank_in_group_S, dtype=torch.bool).scatter_(0, order_S, rank_in_group_S < rule.k)
    return chosen_S & ~torch.isnan(rewards_S)
