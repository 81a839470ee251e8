"""Terms over the vocabulary, the choice of tokens by entropy, and sums over sequences."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.objective import entropy, segment_mean, segment_sum, top_entropy_tokens, vocabulary_kl
from cohort.objective.segments import prefix_sums, suffix_sums
from tests.conftest import each
from tests.objective.batches import doubles

INF = math.inf


# Entropy ------------------------------------------------------------------------------------------------------------


def test_entropy_by_hand():
    rows = torch.stack([doubles(0.5, 0.25, 0.25).log(), doubles(0.0, 0.0, 1.0).log()])
    assert entropy(rows).tolist() == pytest.approx([1.5 * math.log(2), 0.0], abs=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tokens_that_cannot_occur_add_nothing_and_have_no_gradient(dtype):
    logits = torch.tensor([[0.3, -INF, 1.2, -INF]], dtype=dtype, requires_grad=True)
    rest = logits.detach()[:, [0, 2]].requires_grad_()
    values = []
    for leaf in (logits, rest):
        value = entropy(leaf.log_softmax(-1))
        value.sum().backward()
        values.append(value.item())
    assert values[0] == pytest.approx(values[1], rel=1e-6)
    torch.testing.assert_close(logits.grad[:, [0, 2]], rest.grad)
    assert logits.grad[:, [1, 3]].tolist() == [[0.0, 0.0]]


# KL -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("direction", "value"), [("reverse", 0.510826), ("forward", 0.368064)])
def test_kl_by_hand(direction, value):
    p, q = doubles(0.5, 0.5).log()[None], doubles(0.9, 0.1).log()[None]
    assert vocabulary_kl(p, q, direction).item() == pytest.approx(value, abs=5e-7)


def test_the_top_k_with_a_bucket_by_hand():
    p, q = doubles(0.5, 0.3, 0.2), doubles(0.1, 0.3, 0.6)
    reverse = 0.5 * math.log(5) + 0.5 * math.log(0.5 / 0.9)  # the policy's likeliest, and the rest
    forward = 0.6 * math.log(3) + 0.4 * math.log(0.4 / 0.8)  # the reference's likeliest, and the rest
    assert vocabulary_kl(p.log()[None], q.log()[None], "reverse", top_k=1).item() == pytest.approx(reverse, rel=1e-14)
    assert vocabulary_kl(p.log()[None], q.log()[None], "forward", top_k=1).item() == pytest.approx(forward, rel=1e-14)


@each("direction", ["reverse", "forward"])
@each(
    ("logits", "ref", "top_k"),
    [
        ([0.3, 0.5, 1.2, -INF], [1.0, -1.0, 0.2, -INF], None),
        ([0.3, 0.5, 1.2, -INF], [1.0, -1.0, 0.2, -INF], 2),
        ([0.3, 0.5, -INF, -INF], [1.0, 0.6, -2.0, -3.0], 2),  # the bucket of the rest has no mass
    ],
)
def test_tokens_that_cannot_be_drawn_make_no_nan(direction, logits, ref, top_k):
    logits, ref = doubles(*logits)[None].requires_grad_(), doubles(*ref)[None].log_softmax(-1)
    value = vocabulary_kl(logits.log_softmax(-1), ref, direction, top_k=top_k)
    value.sum().backward()
    assert torch.isfinite(value).all()
    assert torch.isfinite(logits.grad).all()


def test_an_unknown_direction():
    with pytest.raises(ValueError, match="reverse"):
        vocabulary_kl(torch.zeros(1, 2), torch.zeros(1, 2), "sideways")


# Tokens of high entropy ---------------------------------------------------------------------------------------------


@each(("share", "kept"), [(0.2, 1), (0.21, 2), (0.4, 2), (0.6, 3), (0.61, 4), (0.8, 4), (1.0, 5), (1e-9, 1)])
def test_the_share_of_highest_entropy(share, kept):
    values = doubles(0.1, 2.0, 0.5, 1.0, 0.2)
    expected = values >= values.sort(descending=True).values[kept - 1]
    assert torch.equal(top_entropy_tokens(values, share), expected)


@each(("share", "count", "kept"), [(0.2, 15, 3), (0.1, 30, 3), (0.7, 10, 7), (0.55, 100, 55)])
def test_a_share_that_is_whole_but_for_a_rounding_is_whole(share, count, kept):
    # 0.2 * 15 is 3.0000000000000004 in binary; rounded up it would be 4.
    assert int(top_entropy_tokens(torch.arange(count).double(), share).sum()) == kept


def test_ties_with_the_threshold_are_kept():
    assert top_entropy_tokens(doubles(1.0, 2.0, 1.0, 0.5, 1.0), 0.4).tolist() == [True, True, True, False, True]
    assert top_entropy_tokens(torch.zeros(6), 0.2).all()


def test_tokens_that_do_not_count_are_neither_kept_nor_counted():
    values = doubles(9.0, 0.1, math.nan, 0.4, 0.2, 0.3, math.nan)
    counted = torch.tensor([False, True, False, True, True, True, False])
    got = top_entropy_tokens(values, 0.5, counted)
    assert got.tolist() == [False, False, False, True, False, True, False]  # two of four
    assert torch.equal(top_entropy_tokens(values, 1.0, counted), counted)
    assert not top_entropy_tokens(values, 0.5, torch.zeros(7, dtype=torch.bool)).any()


@pytest.mark.slow
def test_more_values_than_a_quantile_can_take():
    count = 2**24 + 5
    values = torch.arange(count, dtype=torch.float32).remainder_(1000)
    with pytest.raises(RuntimeError, match="too large"):
        torch.quantile(values, 0.9)
    got = top_entropy_tokens(values, 0.001)
    # 16778 of them are asked for; each value is there 16777 times, the first 221 once more: 999 alone is one too few.
    assert torch.equal(got, values >= 998)


# Sums over sequences ------------------------------------------------------------------------------------------------


def naive_sums(values, ids, *, discount=1.0, suffix=False):
    out = []
    for n, i in enumerate(ids):
        places = [k for k in range(len(ids)) if ids[k] == i]
        here = places.index(n)
        chosen = places[here:] if suffix else places[: here + 1]
        out.append(sum(discount**j * values[k] for j, k in enumerate(chosen)))
    return doubles(*out)


sequences = st.lists(st.tuples(st.integers(0, 4), st.floats(-10, 10)), min_size=0, max_size=24)


@settings(deadline=None)
@given(sequences, st.floats(0, 1))
def test_prefix_and_suffix_sums_against_loops(tokens, discount):
    ids, values = [i for i, _ in tokens], [v for _, v in tokens]
    values_N, index_N = doubles(*values), torch.tensor(ids, dtype=torch.long)
    # atol: at most 24 values of at most 10, in another order.
    torch.testing.assert_close(prefix_sums(values_N, index_N), naive_sums(values, ids), rtol=0, atol=1e-12)
    expected = naive_sums(values, ids, discount=discount, suffix=True)
    torch.testing.assert_close(suffix_sums(values_N, index_N, discount), expected, rtol=0, atol=1e-12)


@settings(deadline=None)
@given(sequences)
def test_segment_sums_and_means_against_loops(tokens):
    ids, values = [i for i, _ in tokens], [v for _, v in tokens]
    values_N, index_N = doubles(*values), torch.tensor(ids, dtype=torch.long)
    of = [[v for i, v in tokens if i == s] for s in range(5)]
    torch.testing.assert_close(segment_sum(values_N, index_N, 5), doubles(*map(sum, of)), rtol=0, atol=1e-12)
    means = doubles(*(sum(v) / len(v) if v else 0.0 for v in of))
    torch.testing.assert_close(segment_mean(values_N, index_N, 5), means, rtol=0, atol=1e-12)


def test_sums_with_interleaved_ids_by_hand():
    values, ids = doubles(1, 2, 4, 8, 16), torch.tensor([3, 0, 3, 0, 3])
    assert prefix_sums(values, ids).tolist() == [1, 2, 5, 10, 21]
    assert suffix_sums(values, ids).tolist() == [21, 10, 20, 8, 16]
    assert suffix_sums(values, ids, discount=0.5).tolist() == [1 + 2 + 4, 2 + 4, 4 + 8, 8, 16]
    assert suffix_sums(values, ids, discount=0.0).tolist() == values.tolist()


def test_a_huge_value_costs_other_sequences_no_digits():
    values, ids = doubles(1e30, 1.0, math.inf, 0.5), torch.tensor([0, 1, 0, 1])
    assert prefix_sums(values, ids)[[1, 3]].tolist() == [1.0, 1.5]
    assert suffix_sums(values, ids)[[1, 3]].tolist() == [1.5, 0.5]
