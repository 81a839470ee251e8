"""``update_kl``: measured on few prompts, against a log-prob pass over all of them."""

import pytest
import torch

from cohort.objective import PRESETS, TokenStatistics, k3
from cohort.policy import Policy
from cohort.train import UpdateResult
from cohort.train.metrics import policy_movement
from tests.conftest import tiny_llama
from tests.train.test_layout import make_batch
from tests.train.updates import DOUBLE, context_for, logps_of


def moved(groups, completions, unknown=()):
    """The measure, which completions it looked at, and each completion's k3."""
    lengths = [[3] * size for size in groups]
    batch = make_batch(lengths, [float(i) for i in range(sum(groups))], prompt_lengths=range(1, len(groups) + 1))
    policy = Policy(tiny_llama(vocab_size=256).double(), DOUBLE)
    before_N = logps_of(policy, batch, budget=64)
    for s in unknown:
        before_N[batch.sequence_N == s] = torch.nan
    with torch.no_grad():
        policy.model.lm_head.weight += 0.1
        policy.model.lm_head.weight[4] += 0.5
    result = UpdateResult(TokenStatistics.of_idle(0), before_N, 1.0, 0.1, 0.0)
    seen = []
    hidden = policy.passes.hidden

    def look(prefixes, rows):
        seen.extend(prefixes.prompt_ids[p] for p in rows.prompt_B.tolist())
        return hidden(prefixes, rows)

    policy.passes.hidden = look
    found = policy_movement(context_for(policy, PRESETS["default"], 64), batch, [result], completions)
    gaps_N = k3(before_N, logps_of(policy, batch, budget=64))
    return found, seen[: completions or None], gaps_N.view(-1, 3).mean(1)


def test_four_completions_each_of_prompts_far_apart():
    found, seen, gaps_S = moved([8] * 8, 8)
    assert len(set(seen)) == 2
    chosen = [*range(4), *range(32, 36)]  # of the first prompt and of the fifth
    assert found["update_kl"] == pytest.approx(float(gaps_S[chosen].mean()), rel=1e-12)
    assert found["update_kl"] > 1e-4


def test_where_there_are_few_prompts_more_of_each():
    found, _, gaps_S = moved([8], 8)
    assert found["update_kl"] == pytest.approx(float(gaps_S.mean()), rel=1e-12)
    found, _, gaps_S = moved([2, 3], 100)
    assert found["update_kl"] == pytest.approx(float(gaps_S.mean()), rel=1e-12)


def test_of_those_that_had_a_pass():
    found, _, gaps_S = moved([2, 2], 4, unknown=(0, 3))
    assert found["update_kl"] == pytest.approx(float(gaps_S[[1, 2]].mean()), rel=1e-12)


def test_none_asked_for():
    assert moved([2, 2], 0)[0] == {}
