"""Log-probs over what each token was drawn from, against loops over the kept tokens of an unpadded forward."""

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from cohort.objective import vocabulary_kl
from cohort.policy import PackedRows, chunked_terms
from cohort.types import Support
from tests.policy.plain import assert_near, distribution_of, gradients, plain_rows, random_supports, support_of

VOCABULARY = 37
PROMPTS = [(5, 9, 20), (7,), (30, 31, 5, 33, 34, 35, 36), (2, 3)]
COMPLETIONS = [(4, 6, 1), (8, 8, 7, 8, 8, 1), (1,), (12, 13)]


def outside(supports, completions, vocabulary):
    """Which tokens each completion token could not have been, boolean ``[N, V]``."""
    distribution = distribution_of([(0,)] * len(completions), completions, 1.0, supports)
    count = sum(map(len, completions))
    return distribution.scores(torch.zeros(count, vocabulary), 0)[0].isneginf()


def penalized(logits_NV, prompts, completions, penalty):
    """Logits after the repetition penalty alone."""
    return distribution_of(prompts, completions, penalty=penalty).scores(logits_NV.clone(), 0)[0]


def states_of(policy, temperature, supports):
    prefixes = policy.passes.read(PROMPTS, attached=True)
    return policy.states(prefixes, PackedRows.of(range(4), COMPLETIONS, supports), temperature)


def subset_log_probs(policy, kept, temperature):
    """log softmax over the kept tokens alone, without -inf, and the index of the drawn token among them."""
    for prompt, completion, rows in zip(PROMPTS, COMPLETIONS, kept, strict=True):
        logits = plain_rows(policy, prompt, completion)
        for row, token, tokens in zip(logits, completion, rows, strict=True):
            yield torch.log_softmax(row[tokens] / temperature, -1), tokens.index(token), tokens


def assert_same_gradients(policy, value, expected):
    # Sums over tokens in another order.
    assert_near(gradients(policy, value), gradients(policy, expected), 1e-11)


@pytest.mark.parametrize(
    ("direction", "top_k", "weight"),
    [("reverse", None, 1.0), ("reverse", 3, 1e3), ("forward", None, 1e3), ("forward", 1, 1.0), ("forward", 25, 1.0)],
)
def test_a_kl_over_the_vocabulary_is_over_the_support(float64_policy, direction, top_k, weight):
    kept, supports = random_supports(COMPLETIONS)
    reference = float64_policy.copy_frozen()
    with torch.no_grad():
        for index, parameter in enumerate(reference.model.parameters()):
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)))
        ref_states = states_of(reference, 1.0, supports)
    states = states_of(float64_policy, 1.0, supports)
    value = chunked_terms(
        lambda p, q, w: (w * vocabulary_kl(p, q, direction, top_k)).sum(),
        [states, ref_states],
        [torch.full((12,), weight, dtype=torch.float64)],
    )
    pairs = zip(subset_log_probs(float64_policy, kept, 1.0), subset_log_probs(reference, kept, 1.0), strict=True)
    alone = sum(vocabulary_kl(p[None], q.detach()[None], direction, top_k).sum() for (p, *_), (q, *_) in pairs)
    assert value.item() > 1e-4
    assert value.item() == pytest.approx(weight * alone.item(), rel=1e-11)
    assert_same_gradients(float64_policy, value, weight * alone)


def test_which_tokens_are_outside_by_hand():
    kept = Support(np.array([1, 3, 0], np.int32), np.array([2, 1], np.int32), np.array([False, True]))
    got = outside([None, kept, None], [(1,), (3, 2), (0,)], 5)
    assert [row.nonzero().flatten().tolist() for row in got] == [[], [0, 2, 4], [0], []]


def test_a_whole_vocabulary_changes_no_bit(float32_policy):
    whole = [support_of([range(VOCABULARY)] * len(c)) for c in COMPLETIONS]
    assert whole[0].counts_N.tolist() == [0, 0, 0]
    plain = float32_policy.logps(PROMPTS, COMPLETIONS, 1.0)
    for more in ([None] * 4, whole):
        for got, expected in zip(float32_policy.logps(PROMPTS, COMPLETIONS, 1.0, more), plain, strict=True):
            assert torch.equal(got, expected)


# Repetition penalty -------------------------------------------------------------------------------------------------


def theirs(rows, prompt, completion, penalty, seen=list):
    """transformers' own, a step at a time as in its generation. Its gradient is right for a ``set`` of tokens seen
    only: its scatter counts a repeated one's gradient as often as it stands there."""
    processor = RepetitionPenaltyLogitsProcessor(penalty)
    ids = [torch.tensor([list(seen([*prompt, *completion[:n]]))]) for n in range(len(completion))]
    return torch.cat([processor(ids[n], rows[n : n + 1]) for n in range(len(completion))])


@pytest.mark.parametrize("penalty", [0.7, 1.3])
def test_the_penalty_is_transformers(float32_policy, penalty):
    with torch.no_grad():
        rows = [plain_rows(float32_policy, p, c) for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
        got = penalized(torch.cat(rows), PROMPTS, COMPLETIONS, penalty)
        expected = [theirs(r, p, c, penalty) for r, p, c in zip(rows, PROMPTS, COMPLETIONS, strict=True)]
    assert torch.equal(got, torch.cat(expected))
    assert not torch.equal(got, torch.cat(rows))


def test_the_penalty_by_hand():
    logits = torch.tensor([[2.0, -2.0, 4.0, -4.0]]).repeat(3, 1)
    got = penalized(logits, [(0, 0)], [(3, 1, 3)], 2.0)
    assert got.tolist() == [[1.0, -2.0, 4.0, -4.0], [1.0, -2.0, 4.0, -8.0], [1.0, -4.0, 4.0, -8.0]]
    # An id beyond the head's vocabulary, as of an image, has no logit to penalize.
    assert torch.equal(penalized(logits, [(0, 9)], [(3, 1, 3)], 2.0), got)


# What a truncated draw is worth ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("top_k", "penalty"), [(3, 1.0), (4, 1.5)])
def test_the_mean_ratio_is_one_with_replay_and_the_kept_mass_without(float64_policy, top_k, penalty):
    """All completions of two tokens that top-k can draw, each with its probability, both ratios to the trainer."""
    prompt, temperature = (5, 9), 0.8

    def kept_tokens(so_far):
        """The k likeliest after some tokens, their log-probs, and the mass of the full distribution on them."""
        with torch.no_grad():
            (logits,) = plain_rows(float64_policy, (*prompt, *so_far), (0,))
        full = torch.softmax(logits / temperature, -1)
        drawn = theirs(logits[None], (*prompt, *so_far), (0,), penalty)[0] if penalty != 1 else logits
        kept = drawn.topk(top_k).indices
        return kept.tolist(), torch.log_softmax(drawn[kept] / temperature, -1).tolist(), full[kept].sum().item()

    completions, supports, sampler, mass = [], [], [], []
    first, first_logps, first_mass = kept_tokens(())
    for token, logp in zip(first, first_logps, strict=True):
        second, second_logps, second_mass = kept_tokens((token,))
        for other, other_logp in zip(second, second_logps, strict=True):
            completions.append((token, other))
            supports.append(support_of([first, second]))
            sampler.append((logp, other_logp))
            mass.append((first_mass, second_mass))
    sampler_SN, mass_SN = torch.tensor(sampler, dtype=torch.float64), torch.tensor(mass, dtype=torch.float64)
    probability_S = sampler_SN.sum(1).exp()
    assert probability_S.sum().item() == pytest.approx(1, abs=1e-13)
    prompts = [prompt] * len(completions)
    with torch.no_grad():
        replayed_SN = float64_policy.logps(prompts, completions, temperature, supports, penalty).logps_N.view(-1, 2)
        full_SN = float64_policy.logps(prompts, completions, temperature).logps_N.view(-1, 2)
    torch.testing.assert_close(replayed_SN, sampler_SN, rtol=0, atol=1e-12)

    def mean(values_SN):
        return (probability_S[:, None] * values_SN).sum(0).tolist()

    assert mean((replayed_SN - sampler_SN).exp()) == pytest.approx([1, 1], abs=1e-12)
    kept = mean(mass_SN)
    assert max(kept) < 0.95  # so that the two differ
    assert mean((full_SN - sampler_SN).exp()) == pytest.approx(kept, abs=1e-12)
