"""What is decoded beside a completion changes nothing about it: not the order of prompts, not how many rows there are, not
the memory they may take. In float64 to the last bits of a sum; in float32 and bfloat16 on a CPU, on the lean path, not at
all."""

import functools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.policy import Policy, Precision
from cohort.rollout import LocalEngine, RNGKey, Sampling
from cohort.rollout.local.cached import LeanBody
from cohort.rollout.local.capacity import Capacity, round_up
from cohort.types import Prompt
from tests.conftest import family_model, telling, tiny_llama
from tests.rollout import test_generic, test_lean
from tests.rollout.conftest import Way, cover, drawn_ids, each_way
from tests.rollout.test_local_engine import LetterTokenizer

FLOAT32 = Precision(torch.float32, torch.float32)
FLOAT64 = Precision(torch.float64, torch.float64)
BFLOAT16 = Precision(torch.float32, torch.bfloat16)


def engine_of(policy, **changes):
    return LocalEngine(policy, LetterTokenizer(), (1, 5), **changes)


@functools.cache
def in_float64(family):
    if family in test_lean.FAMILIES:
        return engine_of(test_lean.policy_of(family, FLOAT64))
    model = tiny_llama().double() if family == "tiny" else test_generic.made(family).double()
    return engine_of(Policy(model, FLOAT64))


def completions(engine, prompts, samples, sampling, max_batch_size=1000, cache_tokens=None):
    """By prompt number and sample."""
    engine.max_batch_size, engine.cache_tokens = max_batch_size, cache_tokens
    groups = engine.generate(prompts, samples, sampling, RNGKey(0, 7))
    return {(g.prompt.uid, place): c for g in groups for place, c in enumerate(g.completions)}


texts = st.lists(st.lists(st.integers(2, 30), min_size=1, max_size=20), min_size=1, max_size=6)
samplings = st.sampled_from(
    [
        Sampling(9),
        Sampling(5, temperature=0.6, top_p=0.9),
        Sampling(9, top_k=7, stop=("e", "zz")),
        Sampling(7, repetition_penalty=1.3, min_completion_length=3),
        Sampling(4, forced_ids=(8, 9)),
        Sampling(6, temperature=0.0),
    ]
)


ALONE = ["tiny", "gemma3", "mistral window, ratio 4", "gpt2", "starcoder2", "lfm2"]


@pytest.mark.parametrize("family", telling(ALONE, "tiny", "gemma3", "lfm2"))
@settings(max_examples=5, deadline=None, derandomize=True)
@given(
    texts=texts,
    own=st.lists(samplings, min_size=6, max_size=6),
    samples=st.integers(1, 5),
    max_batch_size=st.integers(1, 20),
    tokens=st.one_of(st.none(), st.integers(0, 120)),
    order=st.randoms(use_true_random=False),
)
def test_in_float64_a_completion_depends_on_nothing_else(family, texts, own, samples, max_batch_size, tokens, order):
    engine = in_float64(family)
    prompts = [Prompt(uid, uid, tuple(text), "", "", {}) for uid, text in enumerate(texts)]
    whole = completions(engine, prompts, samples, own[: len(prompts)])
    shuffled = list(zip(prompts, own, strict=False))
    order.shuffle(shuffled)
    longest = max(map(len, texts)), max(sampling.max_completion_length for _, sampling in shuffled)
    least = sum(round_up(length, engine.backend.token_multiple) for length in longest)
    other = completions(
        engine,
        [prompt for prompt, _ in shuffled],
        samples,
        [sampling for _, sampling in shuffled],
        max_batch_size,
        None if tokens is None else least + tokens,
    )
    apart = {}
    for prompt, sampling in shuffled[:2]:
        apart |= completions(engine, [prompt], max(1, samples - 1), sampling)
    assert other.keys() == whole.keys()
    for key, completion in [*other.items(), *apart.items()]:
        assert drawn_ids(completion) == drawn_ids(whole[key])
        assert completion.finish_reason is whole[key].finish_reason
        assert completion.support == whole[key].support
        # float64: sums of the same numbers in another order. Norms, which are float32's, round to the same number but
        # for one time in a hundred million.
        assert completion.sampler_logps == pytest.approx(whole[key].sampler_logps, abs=1e-9)
        assert completion.full_logps is None or completion.full_logps == pytest.approx(whole[key].full_logps, abs=1e-9)


SIZED = {
    "vocab_size": 500,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
}


def sized(hidden, heads, kv_heads, width, inner, **changes):
    named = {"hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": width}
    return SIZED | named | {"intermediate_size": inner} | changes


WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 20}
MODELS = {
    "hidden 64": ("llama", sized(64, 4, 2, 16, 128)),
    "hidden 64, ungrouped": ("llama", sized(64, 4, 4, 16, 176)),
    "hidden 256": ("llama", sized(256, 4, 1, 64, 688)),
    # Numbers of heads of which eight rows are no multiple of a vector: SmolLM has 9, Qwen2 0.5B has 14.
    "9 heads of 3": ("llama", sized(144, 9, 3, 16, 384)),
    "14 heads of 2": ("qwen2", sized(224, 14, 2, 16, 256)),
    "query-key norms, 6 heads of 2": ("qwen3", sized(64, 6, 2, 32, 160)),
    "windows": ("gemma3_text", sized(64, 4, 2, 32, 160, **WINDOWS)),
    "soft caps": ("gemma2", sized(64, 4, 1, 32, 160, **WINDOWS)),
}


def some_texts(lengths, seed=0):
    numbers = random.Random(seed)
    return [
        Prompt(uid, uid, tuple(numbers.randrange(2, 500) for _ in range(length)), "", "", {})
        for uid, length in enumerate(lengths)
    ]


CALLS = {
    "odd groups": (some_texts([9, 40, 12]), 5, 12),
    "lengths from 1 to 60": (some_texts([31, 1, 60, 44, 3, 2, 52, 7, 29, 5]), 2, 9),
    "groups of one": (some_texts([12, 55, 3, 30, 41, 7, 19, 60, 2]), 1, 9),
    "completions longer than 48 tokens": (some_texts([5, 20]), 3, 66),
}


def sized_engine(name, precision):
    return _sized_engine(name, precision, Way.native)


@functools.cache
def _sized_engine(name, precision, native):
    kind, changes = MODELS[name]
    torch.manual_seed(0)
    model = family_model(kind, **changes)
    policy = Policy(model, precision)
    ends = tuple(range(8))  # many, so that rows are refilled
    engine = LocalEngine(policy, LetterTokenizer(), ends, native_kernels=native)
    assert isinstance(engine.backend.body, LeanBody)
    assert "off by" not in engine.backend.description
    return engine


def all_at_once(name, precision, call):
    return _all_at_once(name, precision, call, Way.native)


@functools.cache
def _all_at_once(name, precision, call, native):
    prompts, samples, length = CALLS[call]
    return completions(sized_engine(name, precision), prompts, samples, Sampling(length))


SIZES = cover(list(MODELS), list(CALLS))
TELLING = ("hidden 64", "9 heads of 3", "query-key norms, 6 heads of 2", "windows")  # with each of the calls


@pytest.mark.parametrize(
    ("name", "call", "native"),
    each_way(telling(SIZES, *(case for case in SIZES if case[0] in TELLING))),
    indirect=["native"],
)
def test_in_float32_the_number_of_rows_changes_no_bit(name, call, native):
    prompts, samples, length = CALLS[call]
    whole = all_at_once(name, FLOAT32, call)
    for size in (2, 7) if call == "lengths from 1 to 60" else (7,):
        other = completions(sized_engine(name, FLOAT32), prompts, samples, Sampling(length), size)
        for key, completion in other.items():
            assert drawn_ids(completion) == drawn_ids(whole[key])
            assert completion.sampler_logps.tolist() == whole[key].sampler_logps.tolist()


@pytest.mark.parametrize("name", telling(["hidden 64", "9 heads of 3"], "9 heads of 3"))
@pytest.mark.parametrize("call", ["lengths from 1 to 60"])
def test_in_float32_alone_is_as_beside_others(name, call, native):
    prompts, samples, length = CALLS[call]
    whole = all_at_once(name, FLOAT32, call)
    engine = sized_engine(name, FLOAT32)
    for prompt in prompts:
        for key, completion in completions(engine, [prompt], samples - 1, Sampling(length)).items():
            assert drawn_ids(completion) == drawn_ids(whole[key])
            assert completion.sampler_logps.tolist() == whole[key].sampler_logps.tolist()


@pytest.mark.parametrize("name", telling(["hidden 256", "9 heads of 3", "14 heads of 2"], "9 heads of 3"))
@pytest.mark.parametrize("call", ["lengths from 1 to 60"])
def test_in_bfloat16_the_number_of_rows_changes_no_bit(name, call, native):
    prompts, samples, length = CALLS[call]
    whole = all_at_once(name, BFLOAT16, call)
    for size in (2, 7):
        other = completions(sized_engine(name, BFLOAT16), prompts, samples, Sampling(length), size)
        assert [drawn_ids(c) for c in other.values()] == [drawn_ids(c) for c in whole.values()]
        assert [c.sampler_logps.tolist() for c in other.values()] == [c.sampler_logps.tolist() for c in whole.values()]


@pytest.mark.parametrize("call", telling(["odd groups", "lengths from 1 to 60"], "odd groups"))
def test_in_float32_heads_too_small_for_it_keep_the_tokens(call):
    """Products of fewer than 400 multiplications are done by other code: rounding depends on the padding."""
    prompts, samples, length = CALLS[call]
    policy = Policy(tiny_llama(500, max_position_embeddings=512), FLOAT32)
    runs = [completions(engine_of(policy), prompts, samples, Sampling(length), size) for size in (1000, 3)]
    for run in runs[1:]:
        for key, completion in run.items():
            assert drawn_ids(completion) == drawn_ids(runs[0][key])
            assert completion.sampler_logps == pytest.approx(runs[0][key].sampler_logps, abs=1e-5)  # float32


def test_rows_that_wait_or_were_moved_change_no_bit(native):
    backend, texts = sized_engine("hidden 256", FLOAT32).backend, [p.token_ids for p in some_texts([12, 55, 3])]

    def steps(ended):
        backend.begin(Capacity(3, 3, 64, 12))
        backend.prefill([0, 1, 2], texts)
        backend.add_rows([0, 1, 2], [0, 1, 2])
        if ended:
            backend.release([0])  # row 2 takes its place
        logits = [backend.step([1, 2], torch.tensor([5 + n, 9 + n])) for n in range(3)]
        backend.end()
        return torch.stack(logits)

    assert torch.equal(steps(ended=True), steps(ended=False))
