"""Two objectives side by side, with numbers worked out by hand."""

import math

import pytest
import torch

from cohort.errors import NonFiniteError
from cohort.objective import PRESETS
from cohort.replay import compare
from cohort.replay.command import from_sampler, sentence
from cohort.replay.compare import coefficients_of
from tests.replay.steps import made_up_step

DEFAULT = PRESETS["default"].replace(scale="none")


def pair_of(folder, other, run=DEFAULT, **columns):
    """The two completions of one token each under two objectives. Their log-probs are -1; what the policy spreads over
    other tokens is unknown, so E = (1 - p)^2 + 0."""
    stored = made_up_step(folder, {"token_ids": [[7], [8]], "reward": [1.0, 0.5], **columns})
    stored = stored.filled(from_sampler(stored))
    return compare.Pair(stored, *(coefficients_of(stored, one) for one in (run, other)))


def test_another_baseline_turns_a_sign(tmp_path):
    # Group mean: c = (1/8, -1/8). No baseline: c = (1/2, 1/4).
    pair = pair_of(tmp_path, DEFAULT.replace(baseline="none"))
    energy = (1 - math.exp(-1)) ** 2
    assert pair.energy_N.tolist() == pytest.approx([energy, energy])
    found = compare.gradients(pair)
    assert found["norm_run"] == pytest.approx(math.sqrt(2) / 8 * math.sqrt(energy))
    assert found["norm_replay"] == pytest.approx(math.sqrt(1 / 4 + 1 / 16) * math.sqrt(energy))
    assert found["ratio"] == pytest.approx(math.sqrt(10))
    assert found["cosine"] == pytest.approx((1 / 16 - 1 / 32) / (math.sqrt(2) / 8 * math.sqrt(5) / 4))
    assert found["terms"].keys() == {"policy"}
    counts = compare.token_counts(pair)
    assert (counts["total"], counts["sign"], counts["changed"], counts["lost"], counts["gained"]) == (2, 1, 2, 0, 0)
    first, second = compare.strongest(pair, decode=str)
    assert (first["row"], first["token_id"], first["change"]) == (1, 8, "sign")
    assert (first["text"], first["before"]) == ("[8]", "[]")
    assert (second["row"], second["change"]) == (0, "larger")  # 0.5 / sqrt(10) = 0.158 against 0.125


def test_a_common_factor_changes_no_token(tmp_path):
    pair = pair_of(tmp_path, DEFAULT.replace(aggregation="token_sum"))
    counts = compare.token_counts(pair)
    assert counts["changed"] == counts["sign"] == 0
    found = compare.gradients(pair)
    assert (found["ratio"], found["cosine"]) == (pytest.approx(2), pytest.approx(1))
    assert not compare.is_same(pair.run, pair.replay)


def test_shares_of_completions_groups_signs_and_causes(tmp_path):
    # Groups (1, 0.5) and (1, 1): the second is dead with a group's mean, and has c = 1/4 each without a baseline.
    columns = {"token_ids": [[7], [8], [7], [9]], "reward": [1.0, 0.5, 1.0, 1.0], "group": [4, 4, 6, 6]}
    pair = pair_of(tmp_path, DEFAULT.replace(baseline="none"), **columns)
    squares = [1, 1 / 4, 1, 1]
    by_row = {row["row"]: row for row in compare.completions(pair)}
    assert [by_row[row]["share_run"] for row in range(4)] == pytest.approx([0.5, 0.5, 0, 0])
    assert [by_row[row]["share_replay"] for row in range(4)] == pytest.approx([one / sum(squares) for one in squares])
    assert (by_row[1]["advantage_run"], by_row[1]["advantage_replay"]) == (-0.25, 0.5)
    by_group = {row["group"]: row for row in compare.groups(pair)}
    assert by_group[6]["share_run"] == 0
    assert by_group[6]["share_replay"] == pytest.approx(2 / sum(squares))
    assert by_group[4]["reward_mean"] == 0.75
    positive, negative, zero = compare.signs(pair)
    assert (positive["share_run"], negative["share_run"], zero["tokens_run"]) == (0.5, 0.5, 2)
    assert (positive["share_replay"], negative["tokens_replay"]) == (1.0, 0)
    kinds = {(row["run"], row["replay"]): row for row in compare.causes(pair)}
    assert kinds["no_advantage", "active"]["tokens"] == 2
    assert kinds["no_advantage", "active"]["share_replay"] == pytest.approx(2 / sum(squares))
    assert kinds["active", "active"]["tokens_share"] == 0.5


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ({"identical": True}, "Under dr_grpo nothing changes: all 1,200 coefficients are equal, bit for bit"),
        (
            {},
            "Under dr_grpo, 12% of the tokens change their coefficient by more than 10% of its root mean square "
            "(beyond the common factor 0.81), 0.3% change its sign; gradient norm 0.81x, cosine 0.97",
        ),
        (
            {"gradient": {"norm_run": 0.0, "norm_replay": 1.0}},
            "Under default@1 the gradient of this step is 0; there is nothing to compare it with",
        ),
    ],
)
def test_the_sentence(result, text):
    tokens = {"total": 1200, "changed_share": 0.12, "changed_means": 0.1, "factor": 0.81, "sign_share": 0.003}
    gradient = {"space": "parameters", "norm_run": 1.0, "norm_replay": 0.81, "ratio": 0.81, "cosine": 0.97}
    names = {"run": "default@1", "replay": "dr_grpo"}
    whole = {"identical": False, "tokens": tokens, "gradient": gradient, "objective": names} | result
    assert sentence(whole) == text


def test_an_empty_step_has_no_gradient(tmp_path):
    pair = pair_of(tmp_path, DEFAULT.replace(baseline="none"), reward=[None, None])
    assert compare.gradients(pair) == {"norm_run": 0.0, "norm_replay": 0.0, "ratio": None, "cosine": None, "terms": {}}
    assert compare.strongest(pair) == compare.completions(pair) == compare.groups(pair) == []


def test_a_gradient_that_is_not_finite_is_no_comparison():
    one = torch.ones(2)
    for other in (torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.inf])):
        with pytest.raises(NonFiniteError, match="is not finite"):
            compare.Products.of(one, other)
