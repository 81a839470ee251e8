"""What is drawn from, exactly: kept sets, probabilities, draws and what is recorded, against enumeration and against
transformers' logits processors."""

import itertools
import math
import re

import numpy as np
import pytest
import torch
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from cohort.policy import Policy, Precision
from cohort.rollout import LocalEngine, RNGKey, Sampling
from cohort.rollout.sampling import (
    BLOCK,
    RowSettings,
    draw_tokens,
    invert,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    support_of,
)
from cohort.rollout.trajectory import joined_support
from cohort.types import FinishReason
from tests.conftest import each, telling, tiny_llama
from tests.policy.test_support import outside
from tests.rollout.conftest import cover, drawn_ids
from tests.rollout.test_grammar import words
from tests.rollout.test_local_engine import LetterTokenizer, prompts

CPU = torch.device("cpu")
LAST = 1 - 2**-53
"""The largest number that a draw can be decided by."""


def reference(logits, sampling, seen=(), forbidden=()):
    """``(log-probs drawn from, log-probs of the full softmax)`` of one row, the slow and plain way."""
    logits = np.asarray(logits, np.float64)
    temperature = sampling.temperature or 1.0
    full = log_softmax(logits / temperature)
    scores = logits.copy()
    for token in seen:
        scores[token] = (
            scores[token] * sampling.repetition_penalty
            if scores[token] < 0
            else (scores[token] / sampling.repetition_penalty)
        )
    scores[list(forbidden)] = -np.inf
    scores /= temperature
    if sampling.top_k:
        kth = np.sort(scores)[::-1][min(sampling.top_k, len(scores)) - 1]
        scores[scores < kth] = -np.inf
    if sampling.top_p < 1:
        probs, gone = np.exp(log_softmax(scores)), 0.0
        for token in sorted(range(len(scores)), key=lambda token: -scores[token]):
            if gone >= sampling.top_p:
                scores[token] = -np.inf
            gone += probs[token]
    if sampling.min_p:
        probs = np.exp(log_softmax(scores))
        scores[probs < sampling.min_p * probs.max()] = -np.inf
    if sampling.temperature == 0:
        best = int(scores.argmax())
        scores[np.arange(len(scores)) != best] = -np.inf
    return log_softmax(scores), full


def log_softmax(scores):
    top = scores.max()
    return scores - top - np.log(np.exp(scores - top).sum())


SETTINGS = {
    "plain": {},
    "cold": {"temperature": 0.4},
    "hot": {"temperature": 3.0},
    "greedy": {"temperature": 0.0},
    "top-k": {"top_k": 5},
    "top-k of more than there are": {"top_k": 10**6},
    "top-k of one": {"top_k": 1},
    "top-p": {"top_p": 0.7},
    "top-p of nearly nothing": {"top_p": 1e-9},
    "top-p of nearly all": {"top_p": 0.999},
    "min-p": {"min_p": 0.1},
    "min-p of one": {"min_p": 1.0},
    "penalty": {"repetition_penalty": 1.7},
    "reward": {"repetition_penalty": 0.6},
    "all": {"temperature": 1.4, "top_k": 20, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.3},
    "top-k and top-p": {"top_k": 6, "top_p": 0.6, "temperature": 0.8},
    "top-p and min-p": {"top_p": 0.95, "min_p": 0.2, "temperature": 2.0},
    "greedy with a penalty": {"temperature": 0.0, "repetition_penalty": 2.0},
}


def drawn_of(logits_SV, sampling, uniforms, **masks):
    """One row of logits, drawn from by each of the uniform numbers; or one row each."""
    u_S = torch.as_tensor(uniforms, dtype=torch.float64)
    logits_SV = torch.as_tensor(logits_SV)
    rows = len(u_S)
    logits_SV = logits_SV.expand(rows, -1) if logits_SV.ndim == 1 else logits_SV
    samplings = [sampling] * rows if isinstance(sampling, Sampling) else sampling
    return draw_tokens(logits_SV, u_S, RowSettings.of(samplings, CPU), **masks)


def some_logits(vocabulary, seed, dtype=torch.float64):
    return 2 * torch.randn(vocabulary, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize(("name", "vocabulary"), cover(list(SETTINGS), [37, 300, 2, 128]))
def test_every_token_has_its_share_of_the_numbers_in_0_to_1(name, vocabulary):
    sampling = Sampling(1, **SETTINGS[name])
    logits_V = some_logits(vocabulary, seed=vocabulary)
    seen = range(0, vocabulary, 3)
    seen_V = torch.zeros(vocabulary, dtype=torch.bool)
    seen_V[list(seen)] = True
    grid = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    drawn = drawn_of(logits_V, sampling, grid, seen_SV=seen_V.expand(4000, -1))
    wanted, full = reference(logits_V, sampling, seen if sampling.repetition_penalty != 1 else ())
    counts = np.bincount(drawn.tokens_S, minlength=vocabulary)
    # A token's numbers are one stretch as long as its probability: as many of the grid's as fit, give or take one.
    assert np.abs(counts - 4000 * np.exp(wanted)).max() <= 1 + 1e-6
    assert (np.diff(drawn.tokens_S) >= 0).all()
    tokens = drawn.tokens_S.numpy()
    # float64, but for the settings, which are held in float32 (6e-8 of a logit of up to 10).
    np.testing.assert_allclose(drawn.logps_S, wanted[tokens], rtol=0, atol=2e-6)
    np.testing.assert_allclose(drawn.full_logps_S, full[tokens], rtol=0, atol=1e-12)
    assert drawn.valid_S.all()
    kept = np.isfinite(wanted)
    if drawn.kept_SV is None:
        assert kept.all()
    else:
        assert (drawn.kept_SV.numpy() == kept).all()


def test_float64_is_exact_for_settings_that_float32_does_not_hold():
    logits_V = some_logits(37, 1)
    seen_V = torch.ones(37, dtype=torch.bool)
    sampling = Sampling(1, temperature=0.7, repetition_penalty=1.1)
    drawn = drawn_of(logits_V, sampling, [0.3], seen_SV=seen_V[None])
    wanted, full = reference(logits_V, sampling, range(37))
    token = int(drawn.tokens_S[0])
    assert float(drawn.logps_S[0]) == pytest.approx(wanted[token], abs=1e-12)
    assert float(drawn.full_logps_S[0]) == pytest.approx(full[token], abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_is_the_same_alone_and_beside_rows_of_other_settings(dtype):
    rows = [Sampling(1, **settings) for settings in SETTINGS.values()] + [Sampling(1, temperature=0.7)]
    logits_SV = torch.stack([some_logits(300, seed, dtype) for seed in range(len(rows))])
    seen_SV = torch.rand(logits_SV.shape, generator=torch.Generator().manual_seed(0)) < 0.3
    uniforms = torch.rand(len(rows), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    together = drawn_of(logits_SV, rows, uniforms, seen_SV=seen_SV)
    for row, sampling in enumerate(rows):
        alone = drawn_of(logits_SV[row], sampling, uniforms[row : row + 1], seen_SV=seen_SV[row : row + 1])
        assert alone.tokens_S[0] == together.tokens_S[row]
        kept_V = torch.ones(300, dtype=torch.bool) if alone.kept_SV is None else alone.kept_SV[0]
        assert (together.kept_SV[row] == kept_V).all()
        # float32: sums of 300 terms in another order. float64: exact settings, as those of a row alone are.
        bound = 1e-6 if dtype is torch.float32 else 1e-12
        torch.testing.assert_close(together.logps_S[row], alone.logps_S[0], rtol=0, atol=bound)
        torch.testing.assert_close(together.full_logps_S[row], alone.full_logps_S[0], rtol=0, atol=bound)


def test_forbidden_tokens_are_never_drawn():
    logits_V = some_logits(37, 4)
    forbidden_V = torch.arange(37) % 2 == 0
    grid = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    for settings in ({}, {"top_k": 4}, {"top_p": 0.5}, {"min_p": 0.3}, {"temperature": 0.0}):
        sampling = Sampling(1, **settings)
        drawn = drawn_of(logits_V, sampling, grid, forbidden_SV=forbidden_V.expand(1000, -1))
        wanted, full = reference(logits_V, sampling, forbidden=range(0, 37, 2))
        assert np.abs(np.bincount(drawn.tokens_S, minlength=37) - 1000 * np.exp(wanted)).max() <= 1 + 1e-6
        np.testing.assert_allclose(drawn.full_logps_S, full[drawn.tokens_S.numpy()], rtol=0, atol=1e-12)


# Parity with transformers


def processed(processor, logits_SV, input_ids=None):
    ids = torch.zeros(len(logits_SV), 1, dtype=torch.long) if input_ids is None else input_ids
    return processor(ids, logits_SV.clone())


def tied_logits(seed, rows=200, vocabulary=53):
    """Half of the rows have many equal logits."""
    logits_SV = 2 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    logits_SV[::2] = logits_SV[::2].round()
    return logits_SV


@each("k", [1, 7, 53, 60])
def test_top_k_is_transformers(k):
    logits_SV = tied_logits(k)
    assert torch.equal(keep_top_k(logits_SV, torch.full((200,), k)), processed(TopKLogitsWarper(k), logits_SV))


@pytest.mark.parametrize("p", [0.01, 0.5, 0.999])
def test_top_p_is_transformers(p):
    logits_SV = tied_logits(3)
    ours = keep_top_p(logits_SV, torch.full((200, 1), p))
    theirs = processed(TopPLogitsWarper(p), logits_SV)
    assert torch.equal(ours[1::2], theirs[1::2])
    # Among equals at the border each keeps as many, but not the same ones.
    assert torch.equal(ours.sort(-1).values, theirs.sort(-1).values)


@pytest.mark.parametrize("p", [0.001, 0.5, 1.0])
def test_min_p_is_transformers(p):
    logits_SV = tied_logits(4)
    assert torch.equal(
        keep_min_p(logits_SV, torch.full((200, 1), p, dtype=torch.float64)), processed(MinPLogitsWarper(p), logits_SV)
    )


@pytest.mark.parametrize("seed", range(2))
def test_all_settings_together_are_transformers_in_its_order(seed):
    generator = torch.Generator().manual_seed(seed)
    logits_SV = 3 * torch.randn(50, 53, generator=generator, dtype=torch.float64)
    ids = torch.randint(53, (50, 9), generator=generator)
    sampling = Sampling(
        9,
        temperature=[0.5, 1.0, 2.0][seed % 3],
        top_k=[0, 12][seed % 2],
        top_p=[1.0, 0.9, 0.6][seed % 3],
        min_p=[0.0, 0.125][seed // 3],
        repetition_penalty=[1.0, 1.5, 0.75][seed % 3],
        min_completion_length=4,
    )
    expected = logits_SV
    for processor in (
        RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty),
        MinNewTokensLengthLogitsProcessor(8, 4, [1, 20], device="cpu"),  # of 9 tokens 1 is new: too young for an end
        TemperatureLogitsWarper(sampling.temperature),
        *([TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []),
        *([TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []),
        *([MinPLogitsWarper(sampling.min_p)] if sampling.min_p else []),
    ):
        expected = processed(processor, expected, ids)
    ends_V = torch.zeros(53, dtype=torch.bool)
    ends_V[[1, 20]] = True
    seen_SV = torch.zeros(50, 53, dtype=torch.bool).scatter_(1, ids, True)
    uniforms = torch.rand(50, generator=generator, dtype=torch.float64)
    drawn = drawn_of(logits_SV, sampling, uniforms, forbidden_SV=ends_V.expand(50, -1), seen_SV=seen_SV)
    assert torch.equal(drawn.kept_SV, expected > -torch.inf)
    logps_S = torch.log_softmax(expected, -1).gather(-1, drawn.tokens_S[:, None])[:, 0]
    torch.testing.assert_close(drawn.logps_S, logps_S, rtol=0, atol=1e-6)  # settings are held in float32


def test_a_set_that_reaches_p_exactly_is_not_enlarged():
    for probs, p, kept in (
        ([0.5, 0.25, 0.25], 0.5, 1),
        ([0.5, 0.25, 0.25], 0.75, 2),
        ([0.1] * 10, 0.3, 3),
        ([0.1] * 10, 0.1, 1),
        ([0.2] * 5, 0.6, 3),
        ([0.4, 0.3, 0.2, 0.1], 0.7, 2),
        ([0.4, 0.3, 0.2, 0.1], 0.9, 3),
    ):
        for dtype in (torch.float32, torch.float64):
            scores = keep_top_p(torch.tensor([probs], dtype=dtype).log(), torch.tensor([[p]]))
            assert int((scores > -torch.inf).sum()) == kept, (probs, p, dtype)


# Draws


@pytest.mark.parametrize(
    ("vocabulary", "dtype"), cover([1, 2, 127, 128, 129, 256, 1000], [torch.float32, torch.float64])
)
def test_the_ends_of_0_to_1_draw_the_first_and_the_last_token_that_can_be_drawn(vocabulary, dtype):
    logits_V = some_logits(vocabulary, 8, dtype)
    ends = [0.0, 2**-53, LAST, 1 - 2**-52]
    for first, last in {(0, vocabulary - 1), (vocabulary // 3, vocabulary // 2)}:
        row_V = torch.full((vocabulary,), -torch.inf, dtype=dtype)
        row_V[first : last + 1] = logits_V[first : last + 1]
        for settings in ({}, {"top_k": vocabulary}, {"top_p": 0.9999999}):
            drawn = drawn_of(row_V, Sampling(1, **settings), ends)
            tokens = drawn.tokens_S.tolist()
            if not settings:
                assert tokens == [first, first, last, last]
            assert all(first <= token <= last for token in tokens)
            assert drawn.valid_S.all()
            assert drawn.logps_S.isfinite().all()


def test_tokens_of_probability_0_are_never_drawn():
    generator = torch.Generator().manual_seed(0)
    for vocabulary in (37, 300, 1000):
        logits_SV = 60 * torch.randn(3000, vocabulary, generator=generator)  # most probabilities underflow
        logits_SV[torch.rand(logits_SV.shape, generator=generator) < 0.5] = -torch.inf
        logits_SV[:, 3] = 0.0
        uniforms = torch.rand(3000, generator=generator, dtype=torch.float64)
        uniforms[:1000] = LAST
        uniforms[1000:1500] = 0
        drawn = drawn_of(logits_SV, Sampling(1), uniforms)
        probs_SV = torch.softmax(logits_SV, -1)
        picked_S = probs_SV.gather(-1, drawn.tokens_S[:, None])[:, 0]
        assert (picked_S > 0).all()
        assert drawn.valid_S.all()
        torch.testing.assert_close(drawn.logps_S, picked_S.log(), rtol=1e-6, atol=1e-6)  # float32


def test_borders_between_tokens_belong_to_the_next_one():
    weights = torch.tensor([[0.25, 0.0, 0.5, 0.25]], dtype=torch.float64)
    for u, token in ((0.25, 2), (0.25 - 2**-54, 0), (0.75, 3), (0.75 - 2**-53, 2)):
        assert invert(weights, torch.tensor([u], dtype=torch.float64))[0].tolist() == [token]


def test_weights_need_not_sum_to_1():
    weights = torch.tensor([[1.0, 0.0, 7.0]])
    tokens, logps, valid = invert(weights.repeat(2, 1), torch.tensor([0.1, 0.9], dtype=torch.float64))
    assert tokens.tolist() == [0, 2]
    assert logps.exp().tolist() == pytest.approx([1 / 8, 7 / 8])
    assert valid.all()


def test_a_large_vocabulary():
    vocabulary, rows = 151_936, 64
    assert vocabulary % BLOCK == 0
    logits_V = some_logits(vocabulary, 0, torch.float32)
    uniforms = torch.from_numpy(
        RNGKey(3, 0).uniforms(np.zeros(rows, np.uint64), np.arange(rows, dtype=np.uint64), 0, 1)
    )
    for size in (vocabulary, vocabulary - 1):
        drawn = drawn_of(logits_V[:size], Sampling(1), uniforms[:, 0])
        exact_V = torch.softmax(logits_V[:size].double(), -1)
        upto_V = exact_V.cumsum(0)
        # Where u falls in the exact sums: in the token's own stretch, give or take float32's rounding of 150,000 terms.
        ends_S, starts_S = upto_V[drawn.tokens_S], (upto_V - exact_V)[drawn.tokens_S]
        assert (starts_S - 1e-6 <= uniforms[:, 0]).all()
        assert (uniforms[:, 0] <= ends_S + 1e-6).all()
        torch.testing.assert_close(
            drawn.logps_S.double(), exact_V[drawn.tokens_S].log(), rtol=0, atol=2e-6
        )  # float32 softmax


def chi_square(counts, expected):
    """Cells that are expected fewer than five times go together. The statistic less its mean, in its deviations."""
    counts, expected = np.asarray(counts, float), np.asarray(expected, float)
    common = expected >= 5
    if (~common).any() and expected[~common].sum() > 0:
        counts = np.append(counts[common], counts[~common].sum())
        expected = np.append(expected[common], expected[~common].sum())
    else:
        counts, expected = counts[common], expected[common]
    degrees = max(len(counts) - 1, 1)
    return (((counts - expected) ** 2 / expected).sum() - degrees) / math.sqrt(2 * degrees)


# Every setting is held to a grid of numbers above, exactly.
@pytest.mark.parametrize("name", telling(SETTINGS, "plain", "greedy", "top-p", "min-p", "penalty", "all"))
def test_draws_are_as_frequent_as_they_should_be(name):
    sampling = Sampling(1, **SETTINGS[name])
    logits_V = some_logits(300, 21, torch.float32)
    seen = range(0, 300, 2)
    seen_V = torch.arange(300) % 2 == 0
    numbers = RNGKey(5, 2).uniforms(np.arange(200, dtype=np.uint64), np.zeros(200, np.uint64), 0, 100).reshape(-1)
    drawn = drawn_of(logits_V, sampling, numbers, seen_SV=seen_V.expand(len(numbers), -1))
    wanted, _ = reference(logits_V, sampling, seen if sampling.repetition_penalty != 1 else ())
    # Four deviations above the mean: the numbers are fixed, and a wrong distribution is off by hundreds.
    assert chi_square(np.bincount(drawn.tokens_S, minlength=300), len(numbers) * np.exp(wanted)) < 4


# What is no distribution


BAD_ROWS = {
    "NaN": lambda row_V: row_V.fill_(torch.nan),
    "one NaN": lambda row_V: row_V.__setitem__(2, torch.nan),
    "a NaN at the end": lambda row_V: row_V.__setitem__(-1, torch.nan),
    "+inf": lambda row_V: row_V.__setitem__(5, torch.inf),
    "all +inf": lambda row_V: row_V.fill_(torch.inf),
    "all -inf": lambda row_V: row_V.fill_(-torch.inf),
}


@each(("name", "vocabulary"), [("plain", 37), ("greedy", 128), ("top-p", 37), ("all", 128)])
def test_a_row_of_no_numbers_is_not_valid_and_harms_no_other(name, vocabulary):
    logits_SV = torch.stack([some_logits(vocabulary, seed, torch.float32) for seed in range(4)])
    seen_SV = torch.arange(vocabulary).expand(4, -1) % 3 == 0
    uniforms = torch.tensor([0.1, 0.0, LAST, 0.7], dtype=torch.float64)
    sampling = Sampling(1, **SETTINGS[name])
    good = drawn_of(logits_SV, sampling, uniforms, seen_SV=seen_SV)
    for row, spoil in itertools.product((0, 2), BAD_ROWS.values()):
        poisoned_SV = logits_SV.clone()
        spoil(poisoned_SV[row])
        drawn = drawn_of(poisoned_SV, sampling, uniforms, seen_SV=seen_SV)
        others = [other for other in range(4) if other != row]
        assert drawn.valid_S.tolist() == [other != row for other in range(4)]
        assert 0 <= int(drawn.tokens_S[row]) < vocabulary  # it is looked up and written down before the row ends
        assert torch.equal(drawn.tokens_S[others], good.tokens_S[others])
        assert torch.equal(drawn.logps_S[others], good.logps_S[others])
        assert torch.equal(drawn.full_logps_S[others], good.full_logps_S[others])


def test_a_row_that_may_draw_nothing_is_not_valid():
    forbidden_SV = torch.tensor([[True] * 37, [False] * 37])
    drawn = drawn_of(torch.stack([some_logits(37, 0)] * 2), Sampling(1), [0.5, 0.5], forbidden_SV=forbidden_SV)
    assert drawn.valid_S.tolist() == [False, True]
    assert 0 <= int(drawn.tokens_S[0]) < 37


# What is recorded


@pytest.mark.parametrize("vocabulary", [2, 37])
def test_support_lists_are_the_kept_sets(vocabulary):
    generator = torch.Generator().manual_seed(vocabulary)
    shares = torch.rand(64, 1, generator=generator)
    kept_SV = torch.rand(64, vocabulary, generator=generator) < shares
    kept_SV[0], kept_SV[1] = True, False
    steps = support_of(kept_SV)
    assert all(2 * len(ids) <= vocabulary for ids, _ in steps)  # the shorter list
    support = joined_support(steps)
    assert torch.equal(outside([support], [(0,) * 64], vocabulary), ~kept_SV)
    assert {support.token_ids_U.dtype, support.counts_N.dtype} == {np.dtype(np.int32)}


def test_no_support_where_everything_could_be_drawn():
    assert joined_support(support_of(torch.ones(3, 9, dtype=torch.bool))) is None


# Through the engine, over every completion there is

VOCABULARY, LENGTH, SAMPLES = 7, 3, 4000
PROMPT = (3, 5)
WORDS = words("a", "b", "c", "d")  # tokens 3 to 6; 0 is padding, 1 and 2 are ends


@pytest.fixture(scope="module")
def small():
    return Policy(tiny_llama(VOCABULARY), Precision(torch.float32, torch.float32))


@torch.no_grad()
def next_logits(policy, texts):
    """The logits after each text, from the model's own forward pass; texts of equal length."""
    return policy.model(torch.tensor(texts)).logits[:, -1].double().numpy()


def allowed_next(regex, text):
    """Which tokens may follow for a text that matches as a whole in the end, tried out."""
    matches = [
        "".join(letters) for n in range(6) for letters in itertools.product("abcd", repeat=n)
    ]  # longer than any test's completion by two
    matches = [match for match in matches if re.fullmatch(regex, match)]
    allowed = {token for token in range(3, 7) if any(match.startswith(text + "abcd"[token - 3]) for match in matches)}
    return allowed | ({1, 2} if text in matches else set())


def every_completion(policy, sampling):
    """Each completion that can be drawn: its probability, and its tokens' log-probs in both senses."""
    found = {}
    unfinished = [((), (), ())]
    while unfinished:
        logits = next_logits(policy, [(*PROMPT, *drawn) for drawn, _, _ in unfinished])
        following = []
        for (before, logps, fulls), logits_V in zip(unfinished, logits, strict=True):
            forbidden = {1, 2} if len(before) < sampling.min_completion_length else set()
            if sampling.regex:
                allowed = allowed_next(sampling.regex, "".join("abcd"[token - 3] for token in before))
                forbidden = set(range(7)) - (allowed - forbidden if allowed - forbidden else allowed)
            drawn, full = reference(logits_V, sampling, {*PROMPT, *before}, forbidden)
            if len(before) < len(sampling.forced_ids):
                drawn = np.where(np.arange(7) == sampling.forced_ids[len(before)], 0.0, -np.inf)
            for token in np.flatnonzero(np.isfinite(drawn)).tolist():
                longer = ((*before, token), (*logps, drawn[token]), (*fulls, full[token]))
                ends = token in (1, 2) or len(before) + 1 == sampling.max_completion_length
                if ends:
                    found[longer[0]] = longer[1:]
                else:
                    following.append(longer)
        unfinished = following
    return found


THROUGH = {name: SETTINGS[name] for name in ("plain", "hot", "greedy", "top-k", "top-p", "min-p", "penalty", "all")} | {
    "min length": {"min_completion_length": 2},
    "min length and top-k": {"min_completion_length": 2, "top_k": 3},
    "forced": {"forced_ids": (6, 4)},
    "forced and top-p": {"forced_ids": (6,), "top_p": 0.6},
    "forced and penalty": {"forced_ids": (6,), "repetition_penalty": 2.5},
    "regex": {"regex": "a(b|c)*d?"},
    "regex and top-k": {"regex": "a(b|c)*d?", "top_k": 2},
    "regex, min length, temperature": {"regex": "(a|bc|d)*", "min_completion_length": 2, "temperature": 1.7},
    "regex and forced": {"regex": "a(b|c)*d?", "forced_ids": (3, 5)},
    "regex that is complete before the minimum": {"regex": "ab?", "min_completion_length": 3},
    "all and min length": SETTINGS["all"] | {"min_completion_length": 1},
}


def text_of(completion):
    """Drawn and forced tokens."""
    (segment,) = completion.segments
    return tuple(segment.token_ids.tolist())


OFTEN = ("plain", "top-p", "all", "min length and top-k", "forced and penalty", "regex and top-k", "regex and forced")


@pytest.mark.parametrize("name", telling(THROUGH, *OFTEN))
def test_completions_are_as_frequent_as_they_should_be_and_carry_their_probabilities(small, name):
    sampling = Sampling(LENGTH, **THROUGH[name])
    engine = LocalEngine(small, WORDS, (1, 2), max_batch_size=1500)
    (group,) = engine.generate(prompts(PROMPT), SAMPLES, sampling, RNGKey(11, 0))
    wanted = every_completion(small, sampling)
    assert sum(math.exp(sum(logps)) for logps, _ in wanted.values()) == pytest.approx(1)
    counts = dict.fromkeys(wanted, 0)
    for completion in group.completions:
        counts[text_of(completion)] += 1
    expected = [SAMPLES * math.exp(sum(logps)) for logps, _ in wanted.values()]
    # Four deviations above the mean: the draws are fixed, and a wrong distribution is off by tens.
    assert chi_square(list(counts.values()), expected) < 4
    forced = len(sampling.forced_ids)
    for completion in {drawn_ids(c): c for c in group.completions}.values():
        logps, fulls = wanted[text_of(completion)]
        assert text_of(completion) == sampling.forced_ids + drawn_ids(completion)
        assert completion.sampler_logps == pytest.approx(logps[forced:], abs=1e-5)  # float32, sums in another order
        recorded = completion.sampler_logps if completion.full_logps is None else completion.full_logps
        assert recorded == pytest.approx(fulls[forced:], abs=1e-5)
        ended = drawn_ids(completion)[-1] in (1, 2)
        assert completion.finish_reason is (FinishReason.EOS if ended else FinishReason.LENGTH)


@pytest.mark.parametrize("name", telling(THROUGH, *OFTEN, "min length", "regex, min length, temperature"))
def test_the_recorded_support_gives_the_trainer_the_samplers_log_probs(small, name):
    sampling = Sampling(LENGTH + 3, **THROUGH[name])
    if sampling.temperature == 0:
        pytest.skip("a greedy draw has no log-probs to train on")
    engine = LocalEngine(small, WORDS, (1, 2), max_batch_size=5)  # rows of different age beside each other
    groups = engine.generate(prompts(PROMPT, (6, 6, 4), (4,)), 8, sampling, RNGKey(12, 0))
    pairs = [(g.prompt.token_ids, c) for g in groups for c in g.completions]
    for _, completion in pairs:
        if completion.support is not None:
            assert len(completion.support.counts_N) == len(drawn_ids(completion))
            assert len(completion.support.token_ids_U) == completion.support.counts_N.sum()
    with torch.no_grad():
        logps, *_ = small.logps(
            [p for p, _ in pairs],
            [text_of(c) for _, c in pairs],
            sampling.temperature,
            [c.support for _, c in pairs],
            sampling.repetition_penalty,
            [[n >= len(sampling.forced_ids) for n in range(len(text_of(c)))] for _, c in pairs],
        )
    sampled = torch.from_numpy(np.concatenate([c.sampler_logps for _, c in pairs]))
    torch.testing.assert_close(sampled, logps.double(), rtol=0, atol=1e-5)  # float32


def test_no_support_is_kept_where_it_is_not_asked_for(small):
    engine = LocalEngine(small, WORDS, (1, 2))
    sampling = Sampling(LENGTH, top_k=3, record_support=False)
    (group,) = engine.generate(prompts(PROMPT), 4, sampling, RNGKey(0, 0))
    assert all(c.support is None and c.full_logps is not None for c in group.completions)


def test_a_penalty_over_tokens_of_the_prompt_counts_them(small):
    engine = LocalEngine(small, LetterTokenizer(), ())
    (group,) = engine.generate(prompts(PROMPT), 400, Sampling(2, repetition_penalty=1e6), RNGKey(0, 0))
    logits_V = next_logits(small, [PROMPT])[0]
    wanted, _ = reference(logits_V, Sampling(2, repetition_penalty=1e6), PROMPT)
    counts = np.bincount([drawn_ids(c)[0] for c in group.completions], minlength=7)
    assert chi_square(counts, 400 * np.exp(wanted)) < 4  # four deviations; the draw is fixed
