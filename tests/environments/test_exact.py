"""Token truth: what was sampled is what is trained, over 24 turns."""

import functools
import itertools
from dataclasses import replace

import pytest
import torch

from cohort.objective import PRESETS
from cohort.policy import Policy, Precision
from cohort.rewards.runner import Scores
from cohort.rollout import LocalEngine, RNGKey, Sampling
from cohort.train import assign_advantages, lay_out
from cohort.types import Segment
from tests.conftest import telling
from tests.environments.games import LetterHost, completions_of, sampler
from tests.policy.plain import plain_rows
from tests.rollout import test_generic, test_lean
from tests.rollout.test_local_engine import LetterTokenizer, prompts
from tests.train.updates import gradient, logps_of

TURNS = 24
PROMPTS = prompts((5, 9, 20), (7,), (30, 31, 32, 33))
STOPS = tuple(chr(95 + token) for token in range(4, 60))
"""Most letters end a turn, so that episodes of random models have many short turns."""
SAMPLING = Sampling(120, temperature=0.9, stop=STOPS)
FAMILIES = ["llama", "qwen3 ratio 3", "gemma3", "mistral window, ratio 4", "gpt2"]
FLOAT32, FLOAT64 = (Precision(dtype, dtype) for dtype in (torch.float32, torch.float64))


@functools.cache
def policy_of(family, precision):
    if family in test_lean.FAMILIES:
        return test_lean.policy_of(family, precision)
    return Policy(test_generic.made(family).to(precision.master), precision)


def engine_of(policy, **settings):
    return LocalEngine(policy, LetterTokenizer(), (1,), **settings)


def play(engine, prompts=PROMPTS, samples=3, sampling=SAMPLING, **host):
    episodes = sampler(engine, LetterHost(**{"turns": TURNS, "length": 1} | host))
    return episodes.generate(prompts, samples, sampling, RNGKey(0, 3))


AGREEING = list(itertools.product(FAMILIES, [FLOAT32, FLOAT64]))


@pytest.mark.parametrize(("family", "precision"), telling(AGREEING, *AGREEING[::4], *AGREEING[3::4]))
def test_sampler_and_trainer_agree_on_drawn_tokens(family, precision):
    policy = policy_of(family, precision)
    engine = engine_of(policy)
    assert engine.backend.keeps_rows
    groups = play(engine)
    assert all(len(completion.episode.turns) == TURNS for completion in completions_of(groups))
    batch = lay_out(groups, torch.device("cpu"))
    assert batch.num_tokens < len(batch.ids_T)
    found = logps_of(policy, batch, temperature=SAMPLING.temperature)
    # float32: rounding of sums over a few dozen terms. GPT-2's norms are float32 in transformers whatever the precision.
    bound = 1e-5 if precision is FLOAT32 or family == "gpt2" else 1e-10
    assert (found - batch.sampler_logps_N).abs().max() < bound


@pytest.mark.parametrize(
    ("limit", "samples", "turns", "latency"),
    [
        (8, 12, 6, 0.05),
        *(pytest.param(limit, 30, TURNS, 1.0, marks=pytest.mark.slow) for limit in (8, 64, 256)),
    ],
)
def test_latency_and_batch_limits_change_no_bit(limit, samples, turns, latency):
    def drawn(max_batch_size, latency):
        groups = play(engine_of(policy, max_batch_size=max_batch_size), samples=samples, turns=turns, latency=latency)
        return [(*c.segments[0].token_ids.tolist(), *c.sampler_logps.tolist()) for c in completions_of(groups)]

    policy = policy_of("llama", FLOAT32)
    assert drawn(limit, latency) == drawn(3 * samples, 0.0)


def test_latency_changes_no_token_on_the_generic_path():
    """There, padding changes the rounding of a row, as it does without turns."""
    policy = policy_of("gpt2", FLOAT32)
    runs = [
        completions_of(play(engine_of(policy, max_batch_size=size), turns=4, latency=latency))
        for size, latency in ((4, 0.05), (256, 0.0))
    ]
    for one, other in zip(*runs, strict=True):
        assert one.segments == other.segments
        assert one.sampler_logps == pytest.approx(other.sampler_logps, abs=1e-5)


def cut(completion, pieces):
    """The same trajectory in several segments: each has all tokens so far, those of earlier segments as given ones."""
    (whole,) = completion.segments
    bounds = [round(n * len(whole.token_ids) / pieces) for n in range(1, pieces + 1)]
    segments, start = [], 0
    for end in bounds:
        drawn = whole.drawn[:end].copy()
        drawn[:start] = False
        segments.append(Segment(whole.token_ids[:end], drawn))
        start = end
    return replace(completion, segments=tuple(segments))


CUTS = [(family, pieces) for family in ("llama", "gpt2") for pieces in (1, 2, 7)]


@pytest.mark.parametrize(("family", "pieces"), telling(CUTS, ("llama", 1), ("gpt2", 2), ("llama", 7)))
def test_the_gradient_is_that_of_transformers_with_observations_masked(family, pieces):
    policy = policy_of(family, FLOAT64)
    groups = play(engine_of(policy), turns=8)
    objective = PRESETS["default"].replace(beta=0.0, aggregation="token_mean")
    scores_S = torch.arange(9, dtype=torch.float64) ** 2
    groups = [replace(g, completions=tuple(cut(c, pieces) for c in g.completions)) for g in groups]
    batch = lay_out(groups, torch.device("cpu"))
    batch = assign_advantages(batch, Scores(scores_S, scores_S[:, None], ("r",)), objective, 120)
    got, _ = gradient(policy, batch, objective, 200, temperature=0.9)
    policy.model.zero_grad()
    total, start = 0.0, 0
    for group in groups:
        for completion in group.completions:
            segment = completion.segments[-1]
            ids = segment.token_ids.tolist()
            logits = plain_rows(policy, group.prompt.token_ids, ids)
            logps_T = torch.log_softmax(logits / 0.9, -1).gather(1, torch.tensor(ids)[:, None])[:, 0]
            is_drawn = torch.zeros(len(segment.token_ids), dtype=torch.bool)
            for one in completion.segments:
                is_drawn[: len(one.drawn)] |= torch.from_numpy(one.drawn)
            logps_N = logps_T[is_drawn]
            total = total - (batch.advantages_N[start : start + len(logps_N)] * logps_N).sum()
            start += len(logps_N)
    (total / batch.num_tokens).backward()
    for one, parameter in zip(got, policy.model.parameters(), strict=True):
        torch.testing.assert_close(one, parameter.grad, rtol=0, atol=1e-10 if family == "llama" else 1e-6)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_every_token_goes_through_the_sampler_once(family):
    engine = engine_of(policy_of(family, FLOAT32))
    backend, read = engine.backend, []
    prefill, extend, step = backend.prefill, backend.extend, backend.step
    backend.prefill = lambda slots, texts: (read.extend(map(len, texts)), prefill(slots, texts))[1]
    backend.extend = lambda slots, texts: (read.extend(map(len, texts)), extend(slots, texts))[1]
    backend.step = lambda slots, tokens: (read.append(len(slots)), step(slots, tokens))[1]
    groups = play(engine, latency=0.01)
    texts = sum(len(c.segments[0].token_ids) - 1 for c in completions_of(groups))  # the last one is not read
    assert sum(read) == sum(len(prompt.token_ids) for prompt in PROMPTS) + texts
    assert engine.metrics() == {"episodes/tokens_read_again": 0}
    assert engine.metrics() == {}


def test_tokens_that_are_read_again_are_counted():
    engine = engine_of(policy_of("llama", FLOAT32))
    engine.backend.keeps_rows = False
    (group,) = play(engine, PROMPTS[:1], samples=1, turns=3)
    (completion,) = group.completions
    drawn, given = completion.token_ids, completion.segments[0].drawn
    starts = [n for n in range(1, len(given)) if given[n] and not given[n - 1]]  # of the second and third turn
    answers = [int((~given[:start]).sum()) for start in starts]
    news = [answers[0] + 1, answers[1] - answers[0] + 1]  # the answer, and the last drawn token before it
    expected = sum(len(PROMPTS[0].token_ids) + start - new for start, new in zip(starts, news, strict=True))
    assert len(drawn) > 3 or len(starts) == 2
    assert engine.metrics() == {"episodes/tokens_read_again": expected}
