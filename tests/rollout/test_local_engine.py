"""The local engine: its distribution, its ends, its log-probs, and that nothing depends on the batch."""

import math

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from cohort.policy import Policy, Precision
from cohort.rollout import LocalEngine, Purpose, RNGKey, Sampling
from cohort.rollout.sampling import RowSettings
from cohort.types import FinishReason, Prompt
from tests.conftest import tiny_llama
from tests.rollout.conftest import drawn_ids


class LetterTokenizer:
    """Token i is the i-th letter; 0 and 1 are special (pad, end) and decode to nothing."""

    def decode(self, ids, skip_special_tokens=True, clean_up_tokenization_spaces=False):
        return "".join(chr(95 + i) for i in ids if i > 1 or not skip_special_tokens)


def prompts(*ids, first_uid=0):
    return [Prompt(first_uid + n, n, tuple(p), "", "x", {}) for n, p in enumerate(ids)]


def engine(policy, ends=(1,), **settings):
    return LocalEngine(policy, LetterTokenizer(), ends, **settings)


def settings(sampling, rows=1):
    return RowSettings.of([sampling] * rows, torch.device("cpu"))


PROMPTS = prompts((5, 9, 20), (7,), (30, 31, 32, 33, 34, 35, 36), (2, 3))


def test_groups_come_back_in_the_prompts_order(float32_policy):
    groups = engine(float32_policy).generate(PROMPTS, 3, Sampling(12), RNGKey(0, 0))
    assert [group.prompt.uid for group in groups] == [0, 1, 2, 3]
    assert all(len(group.completions) == 3 for group in groups)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_sampler_and_trainer_log_probs_agree(float32_policy, temperature):
    groups = engine(float32_policy).generate(PROMPTS, 4, Sampling(20, temperature), RNGKey(0, 0))
    pairs = [(g.prompt.token_ids, c) for g in groups for c in g.completions]
    with torch.no_grad():
        logps, *_ = float32_policy.logps([p for p, _ in pairs], [drawn_ids(c) for _, c in pairs], temperature)
    sampled = torch.tensor([lp for _, c in pairs for lp in c.sampler_logps])
    # float32: two orders of summation, each up to 1.2e-5 from float64's at the lowest temperature.
    torch.testing.assert_close(sampled, logps.double(), rtol=0, atol=2e-5)


def test_an_end_token_ends_a_completion_and_belongs_to_it(float32_policy):
    groups = engine(float32_policy).generate(PROMPTS, 16, Sampling(30), RNGKey(1, 0))
    completions = [c for g in groups for c in g.completions]
    ended = [c for c in completions if c.finish_reason is FinishReason.EOS]
    cut = [c for c in completions if c.finish_reason is FinishReason.LENGTH]
    assert ended
    assert cut
    assert all(drawn_ids(c)[-1] == 1 and 1 not in drawn_ids(c)[:-1] for c in ended)
    assert all(len(drawn_ids(c)) == 30 and 1 not in drawn_ids(c) for c in cut)
    assert all(len(c.sampler_logps) == len(drawn_ids(c)) for c in completions)


def test_a_special_token_may_be_a_stop_string(float32_policy):
    letters = LetterTokenizer().decode([20], skip_special_tokens=False)
    groups = engine(float32_policy, ends=()).generate(PROMPTS, 8, Sampling(30, stop=("`", letters)), RNGKey(1, 0))
    last = {drawn_ids(c)[-1] for g in groups for c in g.completions if c.finish_reason is FinishReason.STOP}
    assert last == {1, 20}  # token 1 is special: it is no part of the text, and spells "`"
    assert all(1 not in drawn_ids(c)[:-1] for g in groups for c in g.completions)


def test_steps_purposes_and_seeds_draw_differently(float32_policy):
    def ids(draws):
        return [
            drawn_ids(c)
            for g in engine(float32_policy).generate(PROMPTS, 4, Sampling(15), draws)
            for c in g.completions
        ]

    runs = [ids(RNGKey(0, 0)), ids(RNGKey(0, 1)), ids(RNGKey(1, 0)), ids(RNGKey(0, 0, Purpose.EVAL))]
    assert ids(RNGKey(0, 0)) == runs[0]
    assert len({tuple(run) for run in runs}) == 4


def test_first_tokens_follow_the_models_distribution(float32_policy):
    (prompt,) = prompts((5, 9, 20))
    (group,) = engine(float32_policy, max_batch_size=4000).generate([prompt], 4000, Sampling(1, 1.3), RNGKey(0, 0))
    with torch.no_grad():
        logits = float32_policy.model(torch.tensor([prompt.token_ids])).logits[0, -1]
    expected = torch.softmax(logits.double() / 1.3, -1).numpy() * 4000
    counts = np.bincount([drawn_ids(c)[0] for c in group.completions], minlength=len(expected))
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    chi_square = ((observed - wanted) ** 2 / wanted).sum()
    df = len(wanted) - 1
    assert chi_square < df + 4 * math.sqrt(2 * df)  # four standard deviations; the draw is fixed


def test_the_models_own_generation_defaults_are_never_read(float32_policy):
    plain = engine(float32_policy).generate(PROMPTS, 4, Sampling(12), RNGKey(0, 0))
    float32_policy.model.generation_config = GenerationConfig(temperature=0.01, top_k=1, repetition_penalty=9.0)
    again = engine(float32_policy).generate(PROMPTS, 4, Sampling(12), RNGKey(0, 0))
    assert [g.completions for g in plain] == [g.completions for g in again]


def test_sampling_runs_without_dropout_and_leaves_evaluation_mode():
    policy = Policy(tiny_llama(attention_dropout=0.5), Precision(torch.float32, torch.float32), dropout=True)
    runs = [engine(policy).generate(PROMPTS, 4, Sampling(12), RNGKey(0, 0)) for _ in range(2)]
    assert [g.completions for g in runs[0]] == [g.completions for g in runs[1]]
    assert not policy.model.training


def test_completions_carry_the_version_of_the_weights(float32_policy):
    float32_policy.version = 17
    groups = engine(float32_policy).generate(PROMPTS[:1], 2, Sampling(3), RNGKey(0, 0))
    assert {c.weights_version for c in groups[0].completions} == {17}
