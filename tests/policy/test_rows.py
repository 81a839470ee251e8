"""Rows whose tokens are partly given: log-probs, statistics and gradients of the drawn tokens alone."""

import numpy as np
import pytest
import torch

from cohort.policy import PackedRows, Policy
from cohort.policy.choose import find_head
from cohort.policy.custom_attention import CustomAttention
from cohort.policy.passes import PlainPasses, SharedPasses
from tests.conftest import tiny_llama
from tests.policy.plain import DOUBLE, assert_near, gradients, plain_rows, support_of

PROMPTS = [(5, 9, 20), (5, 9, 20), (7,), (30, 31, 5, 33)]
ROWS = [(4, 6, 11, 12, 8, 1), (8, 8, 7), (3, 9, 9, 3, 2), (1,)]
DRAWN = [(1, 1, 0, 0, 1, 1), (1, 0, 0), (0, 1, 0, 1, 1), (1,)]  # a row may begin or end with given tokens
TARGETS = [4, 6, 8, 1, 8, 9, 3, 2, 1]
KEPT = [{token, *range(3 * n, 3 * n + 6)} for n, token in enumerate(TARGETS)]
WEIGHTS = torch.linspace(-1, 2, len(TARGETS), dtype=torch.float64)


def supports():
    kept = iter(KEPT)
    return [support_of([next(kept) for _ in range(sum(drawn))]) for drawn in DRAWN]


def expected_logps(policy, temperature, supported, penalty):
    """From the model's own forward pass over each row, token by token."""
    found, kept = [], iter(KEPT)
    for prompt, ids, drawn in zip(PROMPTS, ROWS, DRAWN, strict=True):
        logits_TV = plain_rows(policy, prompt, ids)
        for position in np.flatnonzero(drawn):
            seen = torch.zeros(37, dtype=torch.bool)
            seen[[*prompt, *ids[:position]]] = True
            row = logits_TV[position]
            row = torch.where(seen, torch.where(row < 0, row * penalty, row / penalty), row) / temperature
            allowed = next(kept)
            if supported:
                outside = torch.tensor([v not in allowed for v in range(37)])
                row = row.masked_fill(outside, -torch.inf)
            found.append(torch.log_softmax(row, -1)[ids[position]])
    return torch.stack(found)


IMPLEMENTATIONS = {
    "lean": lambda policy: policy.passes,
    "custom attention": lambda policy: SharedPasses(policy, find_head(policy), CustomAttention(policy)),
    "padded": lambda policy: PlainPasses(policy, find_head(policy)),
}


@pytest.mark.parametrize(
    ("implementation", "supported", "penalty"),
    [
        ("lean", False, 1.0),
        ("lean", True, 1.4),
        ("custom attention", True, 1.0),
        ("custom attention", False, 1.4),
        ("padded", False, 1.0),
        ("padded", True, 1.4),
    ],
)
def test_only_drawn_tokens_have_log_probs(implementation, supported, penalty):
    policy = Policy(tiny_llama().double(), DOUBLE)
    policy.__dict__["passes"] = IMPLEMENTATIONS[implementation](policy)
    logps, entropy, collision = policy.logps(PROMPTS, ROWS, 0.7, supports() if supported else (), penalty, drawn=DRAWN)
    expected = expected_logps(policy, 0.7, supported, penalty)
    assert entropy.shape == collision.shape == logps.shape == (len(TARGETS),)
    torch.testing.assert_close(logps, expected, rtol=0, atol=1e-10)  # float64: sums in another order
    got, wanted = (gradients(policy, (values * WEIGHTS).sum()) for values in (logps, expected))
    assert_near(got, wanted, 1e-10)


def test_no_logits_are_computed_for_given_tokens():
    policy = Policy(tiny_llama().double(), DOUBLE)
    prefixes = policy.passes.read(PROMPTS)
    rows = PackedRows.of(range(4), ROWS, drawn=DRAWN)
    states = policy.states(prefixes, rows, 1.0)
    assert states.hidden_NH.shape == (len(TARGETS), 24)
    assert states.distribution.targets_N.tolist() == TARGETS
    assert len(rows.ids_T) == 13  # the given tokens after a row's last drawn token are not even read


def test_packing_by_hand():
    given = {"prompt_B": [0, 1], "ids_T": np.array([4, 6, 1, 8, 7, 9, 1, 2, 3]), "lengths_B": [3, 6]}
    rows = PackedRows.pack(**given, drawn_T=np.array([1, 1, 1, 1, 0, 0, 1, 0, 0], np.bool_))
    assert rows.lengths_B.tolist() == [3, 4]
    assert rows.starts_B.tolist() == [0, 3]
    assert rows.ids_T.tolist() == [4, 6, 1, 8, 7, 9, 1]
    assert rows.targets_N.tolist() == [4, 6, 1, 8, 1]
    assert rows.drawn_N.tolist() == [0, 1, 2, 3, 6]
    assert rows.inputs_T([(5, 9), (2,)]).tolist() == [9, 4, 6, 2, 8, 7, 9]
    assert [values.tolist() for values in rows.rows_and_positions] == [[0, 0, 0, 1, 1, 1, 1], [0, 1, 2, 0, 1, 2, 3]]
    assert PackedRows.pack(**given, drawn_T=[1] * 4 + [0] * 5).drawn_T is None  # what was given is cut


def test_rows_that_cannot_be():
    with pytest.raises(ValueError, match="row 1 has no drawn token"):
        PackedRows.of([0, 0], [(1, 2), (3,)], drawn=[(0, 1), (0,)])
    with pytest.raises(ValueError, match="row 0 has no drawn token"):
        PackedRows.of([0], [()])
    with pytest.raises(ValueError, match="rows of 3 tokens after 1 prompts were expected, got 2 tokens and 1 prompts"):
        PackedRows.pack([0], [1, 2], [3])
    with pytest.raises(ValueError, match="drawn_T has 1 entries for 2 tokens"):
        PackedRows.pack([0], [1, 2], [2], [True])
