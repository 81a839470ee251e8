"""The parts without numbers: the words that a setting may hold, each with its formula."""

from __future__ import annotations

from collections.abc import Mapping

WORDS: Mapping[str, Mapping[str, str]] = {
    "reward_aggregation": {
        "sum_then_normalize": "",
        "normalize_then_sum": "each reward's advantage in its group, then their weighted sum",
        "normalize_sum_normalize": "each reward's advantage in its group, their weighted sum, normalised over all",
    },
    "baseline": {
        "none": "R_i",
        "group_mean": "(R_i - mean(R_group))",
        "leave_one_out": "(R_i - mean of the others of the group)",
        "length_weighted": "(R_i - sum(|o_j| R_j) / sum(|o_j|) of the group)",
        "batch_mean": "(R_i - mean(R of the batch))",
        "second_best": "G (R_max - R_second) for the best of the group, else 0",
    },
    "credit": {
        "outcome": "",
        "process": "A_t = sum over the steps that end at t or later of (r - mean(r of the group's steps))",
        "turns": "A_i of a turn = (R_i from the turn on - mean of others of the group that reached it; 0 if none did)",
        "return_to_go": "per token by returns to go, discount {objective.discount:g}",
        "given": "A_t as the reward function gives it, per token",
    },
    "truncated": {
        "keep": "",
        "mask": "cut completions leave every term, after the advantages of their whole group",
        "zero": "cut completions have advantage 0, after the advantages of their whole group",
        "penalize": "cut completions have {objective.truncated_penalty:g} subtracted from their advantage",
    },
    "ratio_anchor": {"self": "policy / itself", "old": "policy / old", "sampler": "policy / sampler"},
    "ratio_level": {
        "token": "per token",
        "sequence_mean": "per sequence, the geometric mean of its tokens' ratios",
        "sequence_mean_token": "the geometric mean over the sequence, with a gradient per token",
        "sequence_product": "per sequence, the product of its tokens' ratios",
        "prefix_product": "per token, the product of the ratios up to it, those before it constant",
    },
    "aggregation": {
        "seq_mean_token_mean": "over the tokens of a completion, then over completions: 1/(B |o|)",
        "token_mean": "over all tokens of the minibatch: 1/sum |o|",
        "prompt_mean": "over all tokens of a prompt's completions, then over prompts: 1/(P sum |o| of the group)",
        "constant": "sum over tokens, over a constant length, then mean over completions: 1/(B L), L = {length}",
        "seq_sum": "sum over the tokens of a completion, mean over completions: 1/B",
        "token_sum": "none: the sum over all tokens",
    },
    "denominator": {"base": "still count in", "after_masks": "are left out of"},
}
"""By the name of the setting. The formulas are format strings over ``objective`` and L, ``length``."""
