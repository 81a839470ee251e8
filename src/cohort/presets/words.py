"""The parts without numbers: the words that a setting may hold, each with its formula and what it cannot go with."""

from __future__ import annotations

from cohort.presets.base import Excludes, Needs, Word

_NO_SINGLE_REWARD = (
    Needs("credit", ("outcome",), "reward_aggregation {part!r} needs credit 'outcome'"),
    Excludes(
        "kl_in_reward",
        (True,),
        "with reward_aggregation {part!r} there is no single reward for the KL to be part of: set kl.place 'advantage' "
        "or 'loss'",
    ),
)
_REWARDS_PER_STEP = (
    Excludes("kl_in_reward", (True,), "the KL in the reward needs a completion's one reward; credit {part!r} has none"),
)
_PROCESS = "credit 'process' normalises all step rewards of a group together: set baseline 'group_mean' and scale "
_GIVEN = "credit 'given' uses the advantages as they are: set baseline 'none' and scale 'none'"
_ONE_RATIO = (
    Excludes(
        "token_advantages",
        (True,),
        "ratio_level {part!r} moves a completion as one, and needs one advantage for it: set ratio_level "
        "'sequence_mean_token' or 'prefix_product', or give outcome credit and a KL of scope 'sequence'",
    ),
    Needs(
        "token_weighting",
        (None,),
        "ratio_level {part!r} moves a completion as one, and {objective.token_weighting} single tokens: set "
        "ratio_level 'sequence_mean_token' or 'token'",
    ),
)

REWARD_AGGREGATION = {
    "sum_then_normalize": Word(""),
    "normalize_then_sum": Word("each reward's advantage in its group, then their weighted sum", _NO_SINGLE_REWARD),
    "normalize_sum_normalize": Word(
        "each reward's advantage in its group, their weighted sum, normalised over the batch", _NO_SINGLE_REWARD
    ),
}
BASELINE = {
    "none": Word("R_i"),
    "group_mean": Word("(R_i - mean(R_group))"),
    "leave_one_out": Word("(R_i - mean of the others of the group)"),
    "length_weighted": Word("(R_i - sum(|o_j| R_j) / sum(|o_j|) of the group)"),
    "batch_mean": Word("(R_i - mean(R of the batch))"),
    "second_best": Word(
        "G (R_max - R_second) for the best of the group, else 0",
        (
            Needs(
                "scale",
                (None, "group_std"),
                "baseline 'second_best' is an estimate of its own: set scale 'none' (or 'group_std')",
            ),
        ),
    ),
}
CREDIT = {
    "outcome": Word(""),
    "process": Word(
        "A_t = sum over the steps that end at t or later of (r - mean(r of the group's steps))",
        (
            Needs("baseline", ("group_mean",), _PROCESS + "'group_std' or 'none'"),
            Needs("scale", (None, "group_std"), _PROCESS + "'group_std' or 'none'"),
            *_REWARDS_PER_STEP,
        ),
    ),
    "return_to_go": Word("per token by returns to go, discount {objective.discount:g}"),
    "given": Word(
        "A_t as the reward function gives it, per token",
        (Needs("baseline", ("none",), _GIVEN), Needs("scale", (None,), _GIVEN), *_REWARDS_PER_STEP),
    ),
}
TRUNCATED = {
    "keep": Word(""),
    "mask": Word("cut completions leave every term, after the advantages of their whole group"),
    "zero": Word("cut completions have advantage 0, after the advantages of their whole group"),
    "penalize": Word("cut completions have {objective.truncated_penalty:g} subtracted from their advantage"),
}
RATIO_ANCHOR = {"self": Word("policy / itself"), "old": Word("policy / old"), "sampler": Word("policy / sampler")}
RATIO_LEVEL = {
    "token": Word("per token"),
    "sequence_mean": Word("per sequence, the geometric mean of its tokens' ratios", _ONE_RATIO),
    "sequence_mean_token": Word("the geometric mean over the sequence, with a gradient per token"),
    "sequence_product": Word("per sequence, the product of its tokens' ratios", _ONE_RATIO),
    "prefix_product": Word("per token, the product of the ratios up to it, those before it constant"),
}
AGGREGATION = {
    "seq_mean_token_mean": Word("over the tokens of a completion, then over completions: 1/(B |o|)"),
    "token_mean": Word("over all tokens of the minibatch: 1/sum |o|"),
    "prompt_mean": Word("over all tokens of a prompt's completions, then over prompts: 1/(P sum |o| of the group)"),
    "constant": Word(
        "sum over tokens, over a constant length, then mean over completions: 1/(B L), L = {objective.length_text}"
    ),
    "seq_sum": Word("sum over the tokens of a completion, mean over completions: 1/B"),
    "token_sum": Word("none: the sum over all tokens"),
}
DENOMINATOR = {"base": Word("still count in"), "after_masks": Word("are left out of")}
