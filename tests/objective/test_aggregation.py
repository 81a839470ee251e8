"""Denominators by hand, empty completions, tokens that do not count, and exact counts."""

import pytest
import torch

from cohort.objective import token_weights
from tests.conftest import each

SEQUENCE = torch.tensor([0, 3, 0, 1, 3, 0, 3, 3])
"""Completions 0 to 3 have 3, 1, 0 and 4 tokens."""
GROUP = torch.tensor([9, 5, 5, 9])
"""Group 9 has completions 0 and 3 (7 tokens), group 5 has 1 and the empty 2 (1 token)."""


def weights(aggregation="seq_mean_token_mean", **changes):
    arguments = {"sequence_N": SEQUENCE, "num_sequences": 4, "group_S": GROUP, "length": 10, **changes}
    sequence_N, count = arguments.pop("sequence_N"), arguments.pop("num_sequences")
    return token_weights(sequence_N, count, aggregation=aggregation, **arguments)


def by_completion(of_0, of_1, of_3):
    return torch.tensor([{0: of_0, 1: of_1, 3: of_3}[s] for s in SEQUENCE.tolist()], dtype=torch.float64)


@each(
    ("aggregation", "expected"),
    [
        ("seq_mean_token_mean", (1 / 12, 1 / 4, 1 / 16)),
        ("token_mean", (1 / 8, 1 / 8, 1 / 8)),
        ("prompt_mean", (1 / 14, 1 / 2, 1 / 14)),
        ("constant", (1 / 40, 1 / 40, 1 / 40)),
        ("seq_sum", (1 / 4, 1 / 4, 1 / 4)),
        ("token_sum", (1.0, 1.0, 1.0)),
    ],
)
def test_denominators_by_hand(aggregation, expected):
    assert torch.equal(weights(aggregation), by_completion(*expected))


@each(
    ("aggregation", "expected"),
    [
        ("seq_mean_token_mean", (1 / 9, 1 / 3, 1 / 12)),
        ("token_mean", (1 / 8, 1 / 8, 1 / 8)),
        ("prompt_mean", (1 / 14, 1 / 2, 1 / 14)),
        ("constant", (1 / 30, 1 / 30, 1 / 30)),
        ("seq_sum", (1 / 3, 1 / 3, 1 / 3)),
        ("token_sum", (1.0, 1.0, 1.0)),
    ],
)
def test_an_empty_completion_need_not_count(aggregation, expected):
    assert torch.equal(weights(aggregation, count_empty=False), by_completion(*expected))


def test_a_group_without_a_token_counts_only_where_empty_ones_do():
    alone = torch.tensor([9, 9, 5, 9])  # group 5 is the empty completion's alone: 8 tokens in group 9
    assert torch.equal(weights("prompt_mean", group_S=alone), by_completion(1 / 16, 1 / 16, 1 / 16))
    assert torch.equal(weights("prompt_mean", group_S=alone, count_empty=False), by_completion(1 / 8, 1 / 8, 1 / 8))


COUNTED = torch.tensor([True, True, False, False, True, True, False, True])
"""Completions 0, 1 and 3 have 2, 0 and 3 tokens that count."""


@each(
    ("aggregation", "count_empty", "expected"),
    [
        ("seq_mean_token_mean", True, (1 / 8, 0, 1 / 12)),
        ("seq_mean_token_mean", False, (1 / 4, 0, 1 / 6)),
        ("token_mean", True, (1 / 5, 0, 1 / 5)),
        ("prompt_mean", True, (1 / 10, 0, 1 / 10)),
        ("prompt_mean", False, (1 / 5, 0, 1 / 5)),
        ("constant", True, (1 / 40, 0, 1 / 40)),
        ("constant", False, (1 / 20, 0, 1 / 20)),
        ("seq_sum", True, (1 / 4, 0, 1 / 4)),
        ("seq_sum", False, (1 / 2, 0, 1 / 2)),
        ("token_sum", True, (1.0, 0, 1.0)),
    ],
)
def test_tokens_that_do_not_count(aggregation, count_empty, expected):
    got = weights(aggregation, counted_N=COUNTED, count_empty=count_empty)
    assert torch.equal(got, by_completion(*expected) * COUNTED)


ALL = ["seq_mean_token_mean", "token_mean", "prompt_mean", "constant", "seq_sum", "token_sum"]


@each(("aggregation", "count_empty"), list(zip(ALL, [True, False] * 3, strict=True)))
def test_a_minibatch_without_a_token_that_counts_has_weights_of_zero(aggregation, count_empty):
    none = torch.zeros(8, dtype=torch.bool)
    assert weights(aggregation, counted_N=none, count_empty=count_empty).tolist() == [0.0] * 8
    nothing = torch.zeros(0, dtype=torch.long)
    assert weights(aggregation, sequence_N=nothing, count_empty=count_empty).tolist() == []


def test_what_an_aggregation_needs():
    with pytest.raises(ValueError, match="group_S"):
        weights("prompt_mean", group_S=None)
    with pytest.raises(ValueError, match="length"):
        weights("constant", length=None)
    with pytest.raises(ValueError, match="unknown aggregation"):
        weights("mean")


def test_counts_are_exact_above_two_to_the_24():
    # float32 would make 16777219 of it 16777220.
    count = 2**24 + 3
    sequence_N = torch.zeros(count, dtype=torch.long)
    assert token_weights(sequence_N, 1, aggregation="token_mean")[0].item() == 1 / count
