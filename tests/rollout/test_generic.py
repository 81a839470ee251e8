"""Models that the lean path does not know: which way they are sampled, and that it is right."""

import functools
import warnings

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from cohort.errors import ConfigError
from cohort.policy import Policy, Precision
from cohort.rollout import LocalEngine, RNGKey, Sampling
from cohort.rollout.local.cached import CachedBackend
from cohort.rollout.local.capacity import Capacity
from cohort.rollout.local.fallback import RecomputeBackend, StaticBackend
from tests.conftest import telling
from tests.families.configs import ATTENTION, OLDER, small_config
from tests.rollout.conftest import drawn_ids
from tests.rollout.test_local_engine import LetterTokenizer, prompts

FLOAT32 = Precision(torch.float32, torch.float32)

SHARED, TURNS, EQUAL_TURNS, RECOMPUTE = (
    "prompts once per group",
    "static batches",
    "all prompts have one length",
    "without a cache",
)

# Small models of each architecture (tests/families/configs.py), and the way each is sampled.
FAMILIES = {
    # Absolute positions, rotations, biases, parallel blocks, experts: keys and values alone.
    **dict.fromkeys(["gpt2", "gpt_neox", "gpt_bigcode", "phi", "opt", "granitemoe"], SHARED),
    "deepseek_v3": SHARED,  # keys and values of different width
    # A window in some layers, or in all; with sinks. Widths that differ from layer to layer.
    **dict.fromkeys(["starcoder2", "granite_swa", "gemma4_text"], SHARED),
    **dict.fromkeys(["qwen3_next", "lfm2_moe", "falcon_h1", "bamba", "granitemoehybrid", "mamba2"], SHARED),
    "nemotron_h": SHARED,  # time steps that cached decoding of transformers does not limit
    # ALiBi, and attention of their own.
    **dict.fromkeys(["gptj", "gpt_neo", "bloom", "falcon", "falcon alibi", "mpt", "stablelm"], TURNS),
    # States, which padding on the left does not enter.
    "jamba": TURNS,
    # Layers that choose their keys, by position in the batch.
    "glm_moe_dsa": EQUAL_TURNS,
    # A cache without a length, where every layer is a recurrence; caches that transformers does not pass on.
    **dict.fromkeys(["bailing_hybrid", "mamba", "recurrent_gemma", "rwkv", "xlstm"], RECOMPUTE),
}
PROMPTS = prompts((5, 9, 20), (7,), tuple(range(3, 30)), (2, 3), (8, 9, 4))
KINDS = {
    SHARED: CachedBackend,
    TURNS: StaticBackend,
    EQUAL_TURNS: StaticBackend,
    RECOMPUTE: RecomputeBackend,
}


def made(family):
    torch.manual_seed(0)
    config = small_config(family.split()[0])
    if family == "falcon alibi":
        config.alibi = True
    if family == "glm_moe_dsa":
        config.index_topk = 64  # all: the padding token, whose embedding is 0, would like all keys equally
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # kernels that are not installed
        return AutoModelForCausalLM.from_config(config)


@functools.cache
def engine_of(family):
    return LocalEngine(Policy(made(family), FLOAT32), LetterTokenizer(), (1,))


def completions(engine, samples=3, length=12):
    groups = engine.generate(PROMPTS, samples, Sampling(length), RNGKey(0, 0))
    return [(g.prompt.token_ids, c) for g in groups for c in g.completions]


STATEFUL = {"jamba", "qwen3_next", "lfm2_moe", "falcon_h1", "bamba", "granitemoehybrid", "nemotron_h", "bailing_hybrid"}
# Each of the others is like one of these.
TELLING = (
    "gemma4_text",
    "nemotron_h",
    "gpt2",
    "gpt_neo",
    "falcon alibi",
    "deepseek_v3",
    "granitemoe",
    "granite_swa",
    "qwen3_next",
    "lfm2_moe",
    "mamba",
)


@pytest.mark.parametrize("family", telling(FAMILIES, *TELLING))
def test_sampler_and_trainer_agree_whatever_the_batch_size(family):
    engine, way = engine_of(family), FAMILIES[family]
    if OLDER and family == "lfm2_moe":
        pytest.skip("the installed transformers hands no arguments on to its convolutions")
    assert isinstance(engine.backend, KINDS[way])
    assert way in engine.backend.description
    unread = f"the code of {family.split()[0]!r} has not been read"
    why = "its layers have block_sparse_moe" if family == "granitemoehybrid" else unread
    assert f"not lean: {why}" in engine.backend.description
    runs = []
    for size in (1000, 3):
        engine.max_batch_size = size
        runs.append(completions(engine, samples=2, length=9 if way != RECOMPUTE else 5))
    assert len({drawn_ids(c) for _, c in runs[0]}) > 5
    with torch.no_grad():
        trained, *_ = engine.policy.logps([p for p, _ in runs[0]], [drawn_ids(c) for _, c in runs[0]], 1.0)
    for run in runs:
        assert [drawn_ids(c) for _, c in run] == [drawn_ids(c) for _, c in runs[0]]
        sampled = torch.tensor([lp for _, c in run for lp in c.sampler_logps])
        # float32. A recurrence in steps rounds elsewhere than one in chunks, and carries it on.
        torch.testing.assert_close(sampled, trained.double(), rtol=0, atol=3e-5 if family in STATEFUL else 1e-5)


def test_turns_of_equal_length_share_what_has_equal_length():
    engine = engine_of("glm_moe_dsa")
    assert not engine.backend.mixed_lengths
    seen = []
    prefill = engine.backend.prefill
    engine.backend.prefill = lambda slots, texts: seen.append([len(t) for t in texts]) or prefill(slots, texts)
    engine.max_batch_size = 1000
    completions(engine, samples=2)
    del engine.backend.prefill
    assert seen == [[27], [3, 3], [2], [1]]


def test_a_turn_may_end_in_the_middle_of_a_group():
    engine = engine_of("bloom")
    engine.max_batch_size = 4
    seen = []
    prefill = engine.backend.prefill
    engine.backend.prefill = lambda slots, texts: seen.append([len(t) for t in texts]) or prefill(slots, texts)
    completions(engine)
    del engine.backend.prefill
    # Three of each prompt, four at a time: the second prompt is computed in the first turn and in the second.
    assert seen == [[27, 3], [3, 3], [3, 2], [1]]


ADDED = ["gpt2", "bloom", "falcon alibi", "gpt_neo", "granite_swa", "gemma4_text", "lfm2_moe", "mamba2", "mamba"]


@pytest.mark.parametrize("family", telling(ADDED, "bloom", "gemma4_text", "lfm2_moe", "mamba2"))
def test_rows_may_begin_and_end_at_any_place(family):
    policy, backend = engine_of(family).policy, engine_of(family).backend
    texts = [prompt.token_ids for prompt in PROMPTS]
    tokens = torch.randint(37, (8, 20), generator=torch.Generator().manual_seed(0)).tolist()
    backend.begin(Capacity(6, 5, 27, 20))
    rows = {}  # by slot

    def check(logits_SV, slots):
        expected = torch.stack([policy.model(torch.tensor([rows[slot]])).logits[0, -1] for slot in slots])
        gap = (logits_SV - expected).abs() / expected.std(-1, keepdim=True)
        assert gap.max() < 3e-5  # float32

    def begin(slots, prompts):
        backend.add_rows(slots, prompts)
        rows.update({slot: list(held[prompt]) for slot, prompt in zip(slots, prompts, strict=True)})

    def step(count, *slots):
        slots = slots or tuple(rows)
        for _ in range(count):
            new = [tokens[slot][len(rows[slot]) % 20] for slot in slots]
            for slot, token in zip(slots, new, strict=True):
                rows[slot].append(token)
            check(backend.step(list(slots), torch.tensor(new)), slots)

    def end(*slots):
        backend.release(slots)
        for slot in slots:
            del rows[slot]

    with torch.no_grad():
        held = {3: texts[3], 0: texts[0], 1: texts[1], 4: texts[4]}
        backend.prefill(list(held), list(held.values()))
        begin([5, 0, 1, 2, 3], [0, 0, 4, 4, 0])
        step(3)
        end(5, 2)
        step(2)
        if backend.refills:
            held[2] = texts[2]
            backend.prefill([2], [texts[2]])
            begin([5, 2], [2, 1])
            step(3)
            if backend.keeps_rows:
                step(1, 5)  # the last place alone, while the others wait
                step(2, 0, 1, 2)  # three of five: the others must stay as they are
            step(2)
            end(*rows)
            backend.remove_prompts([3, 0, 4])
            begin([4], [1])
            step(3)
        else:
            end(*rows)
            held[0] = texts[3]
            backend.prefill([0], [texts[3]])
            begin([1, 0], [0, 0])
            step(4)
    backend.end()


@pytest.mark.parametrize("family", ["gpt2", "bloom", "mamba"])
def test_nothing_is_held_afterwards(family):
    engine = engine_of(family)
    completions(engine)
    held = [value for value in vars(engine.backend).values() if isinstance(value, torch.Tensor) and value.numel()]
    lists = [value for value in vars(engine.backend).values() if isinstance(value, list | dict) and value]
    assert (held, lists, getattr(engine.backend, "_cache", None)) == ([], [], None)


@pytest.mark.parametrize(
    "family", telling(["gpt2", "granite_swa", "lfm2_moe", "qwen3_next"], "granite_swa", "lfm2_moe")
)
def test_bfloat16(family):
    policy = Policy(made(family), Precision(torch.float32, torch.bfloat16))
    engine = LocalEngine(policy, LetterTokenizer(), (1,), max_batch_size=4)
    pairs = completions(engine)
    with torch.no_grad():
        trained, *_ = policy.logps([p for p, _ in pairs], [drawn_ids(c) for _, c in pairs], 1.0)
    sampled = torch.tensor([lp for _, c in pairs for lp in c.sampler_logps])
    assert trained.dtype == torch.float32
    # 8 bits of mantissa, two layers; logits of some units.
    assert (sampled - trained).abs().mean() < 0.03
    assert (sampled - trained).abs().max() < 0.3


def test_a_way_that_computes_something_else_is_passed_over_and_named():
    model = made("gpt2")
    original = model.forward

    def forward(input_ids=None, past_key_values=None, logits_to_keep=0, **arguments):
        output = original(
            input_ids=input_ids, past_key_values=past_key_values, logits_to_keep=logits_to_keep, **arguments
        )
        if past_key_values is not None:
            output.logits = output.logits.flip(-1)
        return output

    model.forward = forward
    engine = LocalEngine(Policy(model, FLOAT32), LetterTokenizer(), (1,))
    assert isinstance(engine.backend, RecomputeBackend)
    assert engine.backend.description.count("off by") == 2
    assert "static batches: off by" in engine.backend.description
    assert completions(engine)


def test_a_way_that_fails_is_passed_over():
    """MiniMax' cache calls its layers plain attention and leaves the keys of some of them empty."""
    torch.manual_seed(0)
    settings = ATTENTION | {
        "head_dim": 8,
        "num_local_experts": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "block_size": 4,
    }
    policy = Policy(AutoModelForCausalLM.from_config(AutoConfig.for_model("minimax", **settings)), FLOAT32)
    engine = LocalEngine(policy, LetterTokenizer(), (1,), max_batch_size=4)
    pairs = completions(engine)
    with torch.no_grad():
        trained, *_ = policy.logps([p for p, _ in pairs], [drawn_ids(c) for _, c in pairs], 1.0)
    sampled = torch.tensor([lp for _, c in pairs for lp in c.sampler_logps])
    torch.testing.assert_close(sampled, trained.double(), rtol=0, atol=3e-5)  # float32, a recurrence


def test_a_cache_without_a_length_is_passed_over():
    """Transformers asks its layers for a length, and none is attention."""
    description = engine_of("bailing_hybrid").backend.description
    assert description.startswith("without a cache")
    assert "transformers' cache: ValueError: `get_seq_length` can only be called on Attention layers" in description


def test_windows_longer_than_the_check_are_right_past_their_end():
    """The check's texts are 13 tokens long at most: it sees no window of 16."""
    torch.manual_seed(0)
    settings = ATTENTION | {"sliding_window": 16}
    policy = Policy(AutoModelForCausalLM.from_config(AutoConfig.for_model("starcoder2", **settings)), FLOAT32)
    pairs = completions(LocalEngine(policy, LetterTokenizer(), (1,)), length=24)
    with torch.no_grad():
        trained, *_ = policy.logps([p for p, _ in pairs], [drawn_ids(c) for _, c in pairs], 1.0)
    sampled = torch.tensor([lp for _, c in pairs for lp in c.sampler_logps])
    torch.testing.assert_close(sampled, trained.double(), rtol=0, atol=1e-5)  # float32


def test_a_budget_counts_every_way_but_the_one_without_a_cache():
    for family in ("gpt2", "bloom", "lfm2_moe"):
        engine = LocalEngine(engine_of(family).policy, LetterTokenizer(), (1,), cache_tokens=10)
        with pytest.raises(ConfigError, match="cache_tokens"):
            completions(engine)
    assert engine_of("mamba").backend.token_bytes == 0
