"""The local engine: its distribution, its ends, its log-probs, and that nothing depends on the batch."""

import torch
from transformers import GenerationConfig

from cohort.policy import Policy, Precision
from cohort.rollout import LocalEngine, Purpose, RNGKey, Sampling
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


PROMPTS = prompts((5, 9, 20), (7,), (30, 31, 32, 33, 34, 35, 36), (2, 3))


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
