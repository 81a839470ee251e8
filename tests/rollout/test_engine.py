"""The engine's behaviour: greedy text as transformers writes it, every kind of end, wrong inputs, who watches, what goes
wrong in one row only."""

import functools
import itertools

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import GenerationConfig, PreTrainedTokenizerFast

from cohort.errors import ConfigError, DataError
from cohort.policy import Policy, Precision
from cohort.rollout import LocalEngine, RNGKey, Sampling, Watch
from cohort.rollout.grammar import _byte_letters
from cohort.rollout.local.backend import Backend
from cohort.rollout.local.capacity import round_up
from cohort.rollout.local.fallback import RecomputeBackend, StaticBackend
from cohort.types import FinishReason, Prompt
from tests.conftest import each, telling, tiny_llama
from tests.rollout import test_generic, test_lean
from tests.rollout.conftest import cover, drawn_ids
from tests.rollout.test_local_engine import LetterTokenizer, prompts

FLOAT32 = Precision(torch.float32, torch.float32)
FLOAT64 = Precision(torch.float64, torch.float64)
PROMPTS = prompts((5, 9, 20), (7,), (30, 31, 32, 33, 34, 35, 36), (2, 3))
WAYS = ["lean", "refilled", "static", "equal lengths", "no cache"]
SOME_WAYS = telling(WAYS, "lean", "refilled")


@functools.cache
def of_way(way, dtype=torch.float32):
    """A small policy that is sampled in each way. No test changes its weights."""
    family = {"refilled": "gpt2", "static": "bloom", "equal lengths": "lfm2_moe", "no cache": "gpt2"}.get(way)
    model = tiny_llama() if way == "lean" else test_generic.made(family)
    policy = Policy(model.to(dtype), Precision(dtype, dtype))
    _WAYS[policy] = way
    return policy


def read_as_nan(policy, token):
    """The model reads NaN for a token, and draws it as before. Its head has weights of its own from then on."""
    embedding, head = policy.model.get_input_embeddings(), policy.model.get_output_embeddings()
    if embedding.weight is head.weight:
        embedding.weight = torch.nn.Parameter(embedding.weight.detach().clone())
    with torch.no_grad():
        embedding.weight[token] = torch.nan


def engine_of(policy, ends=(1,), **settings):
    """A new engine; over a policy of ``of_way`` one that is used again."""
    engine = _engine(policy, frozenset(ends)) if policy in _WAYS else LocalEngine(policy, LetterTokenizer(), ends)
    engine.max_batch_size = settings.pop("max_batch_size", 256)
    engine.cache_tokens = settings.pop("cache_tokens", None)
    assert not settings
    return engine


@functools.cache
def _engine(policy, ends):
    engine = LocalEngine(policy, LetterTokenizer(), ends)
    if _WAYS[policy] == "no cache":
        engine.backend = RecomputeBackend(policy)
    if _WAYS[policy] == "equal lengths":  # what sparse models need, whose choices of keys would depend on rounding
        engine.backend = StaticBackend(policy, mixed_lengths=False)
    return engine


_WAYS = {}


def flat(groups):
    return [completion for group in groups for completion in group.completions]


def of_texts(texts):
    return [Prompt(uid, uid, tuple(ids), "", "", {}) for uid, ids in enumerate(texts)]


# Greedy


GREEDY = {
    "plain": ({}, {}),
    "penalty and minimum": (
        {"repetition_penalty": 1.8, "min_completion_length": 12},
        {"repetition_penalty": 1.8, "min_new_tokens": 12},
    ),
}
GREEDY_FAMILIES = ["llama", "mistral window, ratio 4", "gemma3", "qwen2", "gpt2", "starcoder2", "qwen3_next"]


CASES = cover(GREEDY_FAMILIES, list(GREEDY))
GREEDILY = ("llama", "mistral window, ratio 4", "gpt2", "starcoder2")


@pytest.mark.parametrize(("family", "kind"), telling(CASES, *(case for case in CASES if case[0] in GREEDILY)))
def test_greedy_is_transformers_generate_token_for_token(family, kind):
    lean = family in test_lean.FAMILIES
    policy, engine = test_lean.in_float32(family) if lean else (None, test_generic.engine_of(family))
    policy = policy or engine.policy
    ours, theirs = GREEDY[kind]
    texts = [(7,), tuple(range(3, 25)), (30, 31, 2)]
    ends = (1, 6)
    engine = LocalEngine(policy, LetterTokenizer(), ends, max_batch_size=3)
    completions = flat(engine.generate(of_texts(texts), 1, Sampling(16, temperature=0.0, **ours), RNGKey(0, 0)))
    for text, completion in zip(texts, completions, strict=True):
        settings = GenerationConfig(
            do_sample=False, max_new_tokens=16, eos_token_id=list(ends), pad_token_id=0, use_cache=False, **theirs
        )
        ids = torch.tensor([text])
        out = policy.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        assert drawn_ids(completion) == tuple(out[0, len(text) :].tolist())
        assert not completion.sampler_logps.any()
    assert len({drawn_ids(completion) for completion in completions}) > 1


# Ends


PIECES = ["a", "b", "c", "ab", "bc", "abc", "ca", " a", "é", "€", "aé"]
SPECIAL = ["<pad>", "<end>"]


@pytest.fixture(scope="module")
def byte_level():
    """All bytes, and pieces of one to three characters, some of several bytes; no merges are needed to decode."""
    shown = {byte: letter for letter, byte in _byte_letters().items()}
    spelled = ["".join(shown[byte] for byte in piece.encode()) for piece in PIECES]
    vocabulary = dict.fromkeys([*SPECIAL, *spelled, *(shown[byte] for byte in range(256))])
    backend = Tokenizer(models.WordLevel({token: place for place, token in enumerate(vocabulary)}, unk_token="<pad>"))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<end>")
    ids = {spelled: tokenizer.convert_tokens_to_ids(spelled) for spelled in vocabulary}
    by_bytes = {bytes(_byte_letters()[letter] for letter in spelled): ids[spelled] for spelled in list(vocabulary)[2:]}
    return tokenizer, by_bytes


class Scripted(Backend):
    """Its logits leave only the token that is written down for the row, whatever was before."""

    refills, mixed_lengths, token_bytes, description = True, True, 8, "scripted"

    def __init__(self, vocabulary, scripts):
        self.vocabulary, self.scripts = vocabulary, scripts
        self.held, self.rows = {}, {}

    def _logits(self, rows):
        logits = torch.full((len(rows), self.vocabulary), -torch.inf)
        for place, (script, done) in enumerate(rows):
            logits[place, self.scripts[script][min(done, len(self.scripts[script]) - 1)]] = 0.0
        return logits

    def prefill(self, slots, texts):
        self.held |= {slot: text[0] for slot, text in zip(slots, texts, strict=True)}  # the number of a script
        return self._logits([(self.held[slot], 0) for slot in slots])

    def add_rows(self, slots, prompts):
        self.rows |= {slot: [self.held[prompt], 0] for slot, prompt in zip(slots, prompts, strict=True)}

    def step(self, slots, tokens_S):
        assert len(tokens_S) == len(slots)
        for slot in slots:
            self.rows[slot][1] += 1
        return self._logits([self.rows[slot] for slot in slots])


def scripted(tokenizer, vocabulary, scripts, ends=(1,), **settings):
    vocabulary = max(vocabulary, len(scripts))  # a script's number is the token of its prompt
    policy = Policy(tiny_llama(vocabulary, max_position_embeddings=4096), FLOAT32)
    engine = LocalEngine(policy, tokenizer, ends, **settings)
    engine.backend = Scripted(vocabulary, scripts)
    return engine


def test_a_stop_string_ends_at_the_first_token_whose_text_completes_it(byte_level):
    tokenizer, by_bytes = byte_level
    ids = {piece: by_bytes[piece.encode()] for piece in PIECES}
    letters = [by_bytes[byte.to_bytes()] for byte in b"x\xc3\xa9\xe2\x82\xac"]  # é and € byte by byte
    alphabet = [*ids.values(), *letters]
    scripts = [list(script) for script in itertools.product(alphabet, repeat=3)][::11]
    scripts += [[letters[0]] * 9 + script for script in scripts[::7]]  # after more text than is looked at again
    stops = ["a", "b", "é", "€", "ab", "bc", "ca", "a ", " a", "éa", "aé", "€€", "abc", "cab", "bca", "a a", "é€a"]
    engine = scripted(tokenizer, len(tokenizer), scripts, ends=())
    texts = [Prompt(n, n, (n,), "", "", {}) for n in range(len(scripts))]
    for stop in stops:
        samplings = [Sampling(len(script), stop=(stop,)) for script in scripts]
        for script, completion in zip(scripts, flat(engine.generate(texts, 1, samplings, RNGKey(0, 0))), strict=True):
            upto = [tokenizer.decode(script[: n + 1]) for n in range(len(script))]
            first = next((n for n, text in enumerate(upto) if stop in text), None)
            wanted = script if first is None else script[: first + 1]
            assert drawn_ids(completion) == tuple(wanted), (stop, upto)
            assert completion.finish_reason is (FinishReason.LENGTH if first is None else FinishReason.STOP)


def test_of_several_stop_strings_the_first_completed_ends(byte_level):
    tokenizer, by_bytes = byte_level
    script = [by_bytes[piece.encode()] for piece in ("c", "é", "ab", "c", "€")]
    for stops, length in (
        (("€", "bc"), 4),
        (("bc", "€"), 4),
        (("é", "€"), 2),
        (("x", "€"), 5),
        (("éa", "abc"), 3),
        (("x", "y"), 5),
    ):
        engine = scripted(tokenizer, len(tokenizer), [script], ends=())
        (completion,) = flat(engine.generate(of_texts([(0,)]), 1, Sampling(5, stop=stops), RNGKey(0, 0)))
        assert len(drawn_ids(completion)) == length, stops


def test_a_stop_string_that_is_complete_before_the_minimum_ends_nothing(byte_level):
    tokenizer, by_bytes = byte_level
    script = [by_bytes[piece.encode()] for piece in ("a", "b", "c", "b", "c", "a", "b", "a")]
    engine = scripted(tokenizer, len(tokenizer), [script], ends=())
    # "ab" is complete at token 2, before 4 tokens are; the next one at token 7. Token 4 brings a "b" that completes
    # nothing.
    sampling = Sampling(8, stop=("ab",), min_completion_length=4)
    (completion,) = flat(engine.generate(of_texts([(0,)]), 1, sampling, RNGKey(0, 0)))
    assert len(drawn_ids(completion)) == 7
    assert completion.finish_reason is FinishReason.STOP


def test_an_end_token_goes_before_a_stop_string_and_before_the_limit(byte_level):
    tokenizer, by_bytes = byte_level
    a = by_bytes[b"a"]
    engine = scripted(tokenizer, len(tokenizer), [[a, a, 1], [a, a, a], [a, 0, a]], ends=(1, 0))
    completions = flat(
        engine.generate(of_texts([(0,), (1,), (2,)]), 1, Sampling(3, stop=("aaa", "<end>")), RNGKey(0, 0))
    )
    assert [c.finish_reason for c in completions] == [FinishReason.EOS, FinishReason.STOP, FinishReason.EOS]
    assert [drawn_ids(c) for c in completions] == [(a, a, 1), (a, a, a), (a, 0)]
    assert [c.text for c in completions] == ["aa", "aaa", "a"]


@pytest.mark.parametrize("way", SOME_WAYS)
def test_several_end_tokens_and_ends_at_the_limit(way):
    policy = of_way(way)
    free = flat(engine_of(policy, ends=()).generate(PROMPTS, 6, Sampling(12), RNGKey(3, 0)))
    ends = {1, 20, 21, 9, 5, 33}
    held = flat(engine_of(policy, ends=ends, max_batch_size=5).generate(PROMPTS, 6, Sampling(12), RNGKey(3, 0)))
    at_limit = 0
    for loose, ended in zip(free, held, strict=True):
        place = next((n for n, token in enumerate(drawn_ids(loose)) if token in ends), None)
        assert drawn_ids(ended) == (drawn_ids(loose) if place is None else drawn_ids(loose)[: place + 1])
        assert ended.finish_reason is (FinishReason.LENGTH if place is None else FinishReason.EOS)
        if place:
            limit = Sampling(place + 1)
            one = Prompt(free.index(loose) // 6, 0, PROMPTS[free.index(loose) // 6].token_ids, "", "", {})
            (group,) = engine_of(policy, ends=ends).generate([one], 6, limit, RNGKey(3, 0)) if at_limit < 2 else [None]
            if group is not None:
                assert group.completions[free.index(loose) % 6].finish_reason is FinishReason.EOS
                at_limit += 1
    assert at_limit


# Wrong inputs


def test_a_prompt_that_does_not_fit_is_named():
    engine = engine_of(of_way("lean"))
    long = [Prompt(41, 0, tuple([5] * 120), "the text of it", "", {})]
    with pytest.raises(
        DataError, match=r"prompt 41 \('the text of it'\) has 120 tokens.* may have 9 .*context holds 128"
    ):
        engine.generate([*PROMPTS, *long], 2, Sampling(9), RNGKey(0, 0))
    assert len(engine.generate(long, 2, Sampling(8), RNGKey(0, 0))) == 1
    # Each prompt's own limit counts.
    mixed = engine.generate([*PROMPTS[:1], *long], 1, [Sampling(100), Sampling(8)], RNGKey(0, 0))
    assert len(mixed[0].completions[0].token_ids) > 8 or mixed[0].completions[0].finish_reason is FinishReason.EOS


def test_an_empty_prompt_is_named():
    with pytest.raises(DataError, match="prompt 1 has no tokens"):
        engine_of(of_way("lean")).generate(of_texts([(3,), ()]), 2, Sampling(9), RNGKey(0, 0))


@pytest.mark.parametrize("way", SOME_WAYS[:4])
def test_a_budget_that_holds_no_completion_is_an_error_and_one_that_holds_one_is_enough(way):
    policy = of_way(way)
    plain = flat(engine_of(policy).generate(PROMPTS, 2, Sampling(9), RNGKey(0, 0)))
    multiple = engine_of(policy).backend.token_multiple
    least = round_up(7, multiple) + round_up(9, multiple)
    assert (multiple, least) in {(32, 64), (1, 16)}
    tight = flat(engine_of(policy, cache_tokens=least).generate(PROMPTS, 2, Sampling(9), RNGKey(0, 0)))
    assert [drawn_ids(c) for c in tight] == [drawn_ids(c) for c in plain]
    needs = rf"a prompt of 7 needs keys and values of {least} tokens.*cache_tokens is {least - 1}"
    with pytest.raises(ConfigError, match=needs):
        engine_of(policy, cache_tokens=least - 1).generate(PROMPTS, 2, Sampling(9), RNGKey(0, 0))


def test_no_completion_asked_for_and_a_token_that_the_model_has_not_are_errors():
    engine = engine_of(of_way("lean"))
    with pytest.raises(ConfigError, match="num_generations must be at least 1, got 0"):
        engine.generate(PROMPTS, 0, Sampling(4), RNGKey(0, 0))
    with pytest.raises(DataError, match="token ids from 3 to 37, and the model has 37 tokens"):
        engine.generate(of_texts([(3, 37)]), 1, Sampling(4), RNGKey(0, 0))


def test_an_engine_in_use_says_so():
    engine = engine_of(of_way("lean"))

    def again(*_):
        engine.generate(PROMPTS, 1, Sampling(2), RNGKey(0, 0))

    with pytest.raises(ConfigError, match="sampling already"):
        engine.generate(PROMPTS, 1, Sampling(4), RNGKey(0, 0), Watch(on_completion=again))
    assert len(engine.generate(PROMPTS, 1, Sampling(4), RNGKey(0, 0))) == len(PROMPTS)


@each(
    ("settings", "word"),
    [
        ({"stop": ("a", "")}, "stop"),
        ({"stop": "a"}, "stop"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.1}, "min_p"),
        ({"top_k": -1}, "top_k"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"min_completion_length": 10}, "min_completion_length"),
        ({"min_completion_length": -1}, "min_completion_length"),
        ({"forced_ids": (3,) * 10}, "forced_ids"),
        ({"forced_ids": (3, -1)}, "forced_ids"),
        ({"max_completion_length": 0}, "max_completion_length"),
        ({"regex": "a", "json_schema": "{}"}, "regex and json_schema"),
    ],
)
def test_settings_out_of_range_are_errors_by_name(settings, word):
    with pytest.raises(ConfigError, match=word):
        Sampling(**({"max_completion_length": 9} | settings))


def test_a_forced_token_that_the_model_has_not_is_an_error():
    with pytest.raises(ConfigError, match="forced_ids"):
        engine_of(of_way("lean")).generate(PROMPTS, 1, Sampling(4, forced_ids=(37,)), RNGKey(0, 0))


@pytest.mark.parametrize("count", [3, 5])
def test_as_many_settings_as_prompts(count):
    with pytest.raises(ConfigError, match=f"{count} sampling settings for 4 prompts"):
        engine_of(of_way("lean")).generate(PROMPTS, 1, [Sampling(4)] * count, RNGKey(0, 0))


def test_no_prompts_give_no_groups():
    assert engine_of(of_way("lean")).generate([], 3, Sampling(4), RNGKey(0, 0)) == []
    assert engine_of(of_way("lean")).generate([], 3, [], RNGKey(0, 0)) == []


# What goes wrong in one row


@pytest.mark.parametrize(
    ("way", "settings"),
    [(way, {"top_k": 20}) for way in ("lean", "refilled")]
    + [pytest.param(way, {"top_k": 20}, marks=pytest.mark.slow) for way in ("static", "equal lengths", "no cache")]
    + [("lean", {}), pytest.param("lean", {"repetition_penalty": 1.2, "stop": ("zz",)}, marks=pytest.mark.slow)],
)
def test_numbers_that_are_none_end_the_completions_they_are_in_and_no_other(way, settings):
    poison = 20
    policy = Policy(type(of_way(way).model)(of_way(way).model.config), FLOAT32)
    policy.model.load_state_dict(of_way(way).model.state_dict())
    read_as_nan(policy, poison)
    texts = [prompt for prompt in PROMPTS if poison not in prompt.token_ids]
    sampling = Sampling(16, **settings)
    free = flat(engine_of(of_way(way), max_batch_size=7).generate(texts, 12, sampling, RNGKey(0, 0)))
    engine = engine_of(policy, max_batch_size=7)
    if way == "no cache":
        engine.backend = RecomputeBackend(policy)
    if way == "equal lengths":
        engine.backend = StaticBackend(policy, mixed_lengths=False)
    assert type(engine.backend) is type(engine_of(of_way(way)).backend)
    poisoned = flat(engine.generate(texts, 12, sampling, RNGKey(0, 0)))
    errors = 0
    for loose, held in zip(free, poisoned, strict=True):
        place = drawn_ids(loose).index(poison) if poison in drawn_ids(loose)[:-1] else None
        if place is None:
            assert (drawn_ids(held), held.finish_reason) == (drawn_ids(loose), loose.finish_reason)
            assert held.sampler_logps == pytest.approx(loose.sampler_logps, abs=1e-5)  # float32
        else:
            errors += 1
            assert held.finish_reason is FinishReason.ERROR
            assert drawn_ids(held) == drawn_ids(loose)[: place + 1]
            assert len(held.sampler_logps) == place + 1
            assert held.support is None or len(held.support.counts_N) == place + 1
    assert 0 < errors < len(free)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # with kernels, and without
def test_what_a_failed_row_leaves_in_memory_reaches_no_row_after_it(dtype):
    policy, poisoned = (Policy(tiny_llama().to(dtype), Precision(dtype, dtype)) for _ in range(2))
    read_as_nan(poisoned, 20)
    texts = [prompt for prompt in PROMPTS if 20 not in prompt.token_ids]
    one_by_one = (
        engine_of(p, max_batch_size=1).generate(texts, 4, Sampling(16), RNGKey(0, 0)) for p in (policy, poisoned)
    )
    free, held = map(flat, one_by_one)
    fails = [20 in drawn_ids(one)[:-1] for one in free]
    assert [one.finish_reason is FinishReason.ERROR for one in held] == fails
    assert True in fails[:-1]
    for one, other, failed in zip(free, held, fails, strict=True):
        assert failed or drawn_ids(one) == drawn_ids(other)


def test_a_prompt_of_no_numbers_ends_its_group_and_no_other():
    policy = Policy(tiny_llama(), FLOAT32)
    engine = engine_of(policy)
    clean = flat(engine.generate(PROMPTS, 3, Sampling(8), RNGKey(0, 0)))
    read_as_nan(policy, 31)
    for size in (2, 256):
        engine.max_batch_size = size
        for group, wanted in zip(
            engine.generate(PROMPTS, 3, Sampling(8, stop=("\x7f",)), RNGKey(0, 0)),
            [clean[n : n + 3] for n in (0, 3, 6, 9)],
            strict=True,
        ):
            if 31 in group.prompt.token_ids:
                assert {c.finish_reason for c in group.completions} == {FinishReason.ERROR}
                assert {drawn_ids(c) for c in group.completions} == {()}
                assert {c.text for c in group.completions} == {""}
                assert group.usable.completions == ()
            elif not any(31 in drawn_ids(c) for c in wanted):
                assert [drawn_ids(c) for c in group.completions] == [drawn_ids(c) for c in wanted]


# Who watches


class Events:
    """Everything that is told, in order; and whether to call off."""

    def __init__(self, cancel_at=None):
        self.tokens, self.completions, self.asked, self.cancel_at = [], [], 0, cancel_at

    def watch(self):
        return Watch(
            self.tokens.append,
            lambda *told: self.completions.append(told),
            None if self.cancel_at is None else self._ask,
        )

    def _ask(self):
        self.asked += 1
        return self.asked > self.cancel_at


@pytest.mark.parametrize("way", SOME_WAYS)
def test_events_add_up_to_the_completions(way):
    events = Events()
    engine = engine_of(of_way(way), max_batch_size=5)
    sampling = [Sampling(9, stop=("e",)), Sampling(12), Sampling(4, top_k=9), Sampling(7, temperature=0.3)]
    plain = engine.generate(PROMPTS, 4, sampling, RNGKey(0, 0))
    groups = engine.generate(PROMPTS, 4, sampling, RNGKey(0, 0), events.watch())
    assert flat(groups) == flat(plain)  # watching changes no draw
    told = {}
    for event in events.tokens:
        key = (event.prompt_index, event.sample)
        assert event.position == len(told.setdefault(key, []))
        assert not told[key] or told[key][-1].finish_reason is None  # nothing after the last one
        told[key].append(event)
    for index, group in enumerate(groups):
        for sample, completion in enumerate(group.completions):
            mine = told.pop((index, sample))
            assert tuple(event.token_id for event in mine) == drawn_ids(completion)
            assert [event.logp for event in mine] == completion.sampler_logps.tolist()
            assert mine[-1].finish_reason is completion.finish_reason
    assert not told
    assert sorted((index, sample) for index, sample, _ in events.completions) == [
        (index, sample) for index in range(4) for sample in range(4)
    ]
    assert all(groups[index].completions[sample] == completion for index, sample, completion in events.completions)


STEPS = cover(WAYS, [4, 1, 14, 0])


@pytest.mark.parametrize(("way", "step"), telling(STEPS, *STEPS[:2], STEPS[3]))
def test_called_off_what_is_done_is_whole_and_the_rest_is_the_beginning_of_what_it_would_be(way, step):
    engine = engine_of(of_way(way), max_batch_size=5)
    whole = flat(engine.generate(PROMPTS, 4, Sampling(9), RNGKey(0, 0)))
    events = Events(cancel_at=step)
    groups = engine.generate(PROMPTS, 4, Sampling(9), RNGKey(0, 0), events.watch())
    cut = flat(groups)
    assert events.asked == step + 1
    assert all(len(group.completions) == 4 for group in groups)
    cancelled = [c for c in cut if c.finish_reason is FinishReason.CANCELLED]
    assert cancelled
    for one, other in zip(cut, whole, strict=True):
        if one.finish_reason is FinishReason.CANCELLED:
            assert drawn_ids(one) == drawn_ids(other)[: len(drawn_ids(one))]
            assert one.sampler_logps == pytest.approx(other.sampler_logps[: len(drawn_ids(one))], abs=1e-5)  # float32
            assert len(drawn_ids(one)) < len(drawn_ids(other))
            assert one.weights_version == other.weights_version
        else:
            assert drawn_ids(one) == drawn_ids(other)
            assert one.finish_reason is other.finish_reason
    assert sum(len(drawn_ids(c)) for c in cut) == len(events.tokens)
    assert max((len(drawn_ids(c)) for c in cancelled), default=0) <= step
    told = {(index, sample): completion for index, sample, completion in events.completions}
    assert len(told) == len(events.completions)  # once each
    assert all(groups[index].completions[sample] == completion for (index, sample), completion in told.items())
    begun = {(event.prompt_index, event.sample) for event in events.tokens}
    assert begun <= set(told)
    again = flat(engine.generate(PROMPTS, 4, Sampling(9), RNGKey(0, 0)))
    assert [drawn_ids(c) for c in again] == [drawn_ids(c) for c in whole]


FAILING = cover(WAYS, ["on_token", "on_completion", "cancelled"])


@pytest.mark.parametrize(("way", "kind"), telling(FAILING, *FAILING[:3]))
def test_an_exception_of_who_watches_leaves_the_engine_as_it_was(way, kind):
    engine = engine_of(of_way(way), max_batch_size=5)
    plain = flat(engine.generate(PROMPTS, 4, Sampling(9), RNGKey(0, 0)))
    calls = itertools.count()

    def fail(*_):
        if next(calls) == 7:
            raise RuntimeError("who watches")

    with pytest.raises(RuntimeError, match="who watches"):
        engine.generate(PROMPTS, 4, Sampling(9), RNGKey(0, 0), Watch(**{kind: fail}))
    again = flat(engine.generate(PROMPTS, 4, Sampling(9), RNGKey(0, 0)))
    assert [(drawn_ids(c), c.finish_reason) for c in again] == [(drawn_ids(c), c.finish_reason) for c in plain]


def test_who_watches_may_use_another_engine_over_the_same_policy():
    policy = of_way("lean")
    engine, other = engine_of(policy), LocalEngine(policy, LetterTokenizer(), (1,))
    plain = flat(engine.generate(PROMPTS, 2, Sampling(6), RNGKey(0, 0)))
    inner = []
    watch = Watch(
        on_completion=lambda *_: inner.append(flat(other.generate(PROMPTS[:1], 1, Sampling(3), RNGKey(1, 0))))
    )
    assert flat(engine.generate(PROMPTS, 2, Sampling(6), RNGKey(0, 0), watch)) == plain
    assert len({drawn_ids(completions[0]) for completions in inner}) == 1


# Settings of their own


OWN = [
    Sampling(9),
    Sampling(12, temperature=0.7, top_p=0.9),
    Sampling(4, temperature=0.0),
    Sampling(9, repetition_penalty=1.4, stop=("e", "zz")),
    Sampling(11, top_k=5, min_completion_length=6),
    Sampling(9, forced_ids=(9, 9, 4), min_p=0.05),
    Sampling(9, temperature=1.9, record_support=False, top_k=3),
    Sampling(10, min_completion_length=10),
]


DTYPES = [("lean", torch.float32), *cover(WAYS, [torch.float64])]


@pytest.mark.parametrize(("way", "dtype"), telling(DTYPES, DTYPES[0], DTYPES[2]))
def test_settings_of_each_prompt_are_those_it_would_have_alone(way, dtype):
    texts = of_texts([(5, 9, 20), (7,), (30, 31, 32, 33, 34, 35, 36), (2, 3), (9, 8), (3, 3), (8, 14, 20), (11,)])
    engine = engine_of(of_way(way, dtype), max_batch_size=7)
    together = engine.generate(texts, 3, OWN, RNGKey(4, 0))
    # float64: settings as exact as alone, but norms that are float32's.
    bound = 1e-5 if dtype is torch.float32 else 1e-7
    for text, sampling, group in zip(texts, OWN, together, strict=True):
        (alone,) = engine.generate([text], 3, sampling, RNGKey(4, 0))
        for one, other in zip(group.completions, alone.completions, strict=True):
            assert (drawn_ids(one), one.finish_reason, one.text) == (drawn_ids(other), other.finish_reason, other.text)
            assert one.support == other.support
            assert one.sampler_logps == pytest.approx(other.sampler_logps, abs=bound)
            assert (one.full_logps is None) == (other.full_logps is None)
            assert one.full_logps is None or one.full_logps == pytest.approx(other.full_logps, abs=bound)


def test_the_path_of_each_way_is_the_one_meant():
    words = ("lean", test_generic.SHARED, test_generic.TURNS, test_generic.EQUAL_TURNS, test_generic.RECOMPUTE)
    for way, word in zip(WAYS, words, strict=True):
        assert word in engine_of(of_way(way)).backend.description
