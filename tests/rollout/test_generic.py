"""Models that the lean path does not know: which way they are sampled, and that it is right."""

import functools
import warnings

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from cohort.errors import ConfigError
from cohort.policy import Policy, Precision
from cohort.rollout import LocalEngine, RNGKey, Sampling
from cohort.rollout.capacity import Capacity
from cohort.rollout.generic import RecomputeBackend, RefillBackend, StaticBackend
from cohort.rollout.shared import SharedBackend
from tests.conftest import telling
from tests.families.configs import ATTENTION, OLDER, small_config
from tests.rollout.conftest import drawn_ids
from tests.rollout.test_local_engine import LetterTokenizer, prompts

FLOAT32 = Precision(torch.float32, torch.float32)

SHARED, REFILL, TURNS, EQUAL_TURNS, RECOMPUTE = (
    "prompts once per group",
    "transformers' cache, rows refilled",
    "static batches",
    "all prompts have one length",
    "without a cache",
)

# Small models of each architecture (tests/families/configs.py), and the way each is sampled.
FAMILIES = {
    # Absolute positions, rotations, ALiBi, biases, parallel blocks, experts: keys and values alone.
    **dict.fromkeys(["gpt2", "gpt_neox", "gpt_bigcode", "gptj", "gpt_neo", "phi", "opt", "bloom"], REFILL),
    **dict.fromkeys(["falcon", "falcon alibi", "mpt", "stablelm", "granitemoe"], REFILL),
    "deepseek_v3": SHARED,  # keys and values of different width
    # A window in some layers, or in all; with sinks.
    **dict.fromkeys(["starcoder2", "granite_swa"], TURNS),
    # States, which padding on the left does not enter.
    "jamba": TURNS,
    **dict.fromkeys(["qwen3_next", "lfm2_moe", "falcon_h1", "bamba", "granitemoehybrid", "mamba2"], SHARED),
    # Widths that differ from layer to layer, and time steps that cached decoding does not limit by itself.
    "gemma4_text": TURNS,
    "nemotron_h": SHARED,
    # Layers that choose their keys, by position in the batch.
    "glm_moe_dsa": EQUAL_TURNS,
    # A cache without a length, where every layer is a recurrence; caches that transformers does not pass on.
    **dict.fromkeys(["bailing_hybrid", "mamba", "recurrent_gemma", "rwkv", "xlstm"], RECOMPUTE),
}
PROMPTS = prompts((5, 9, 20), (7,), tuple(range(3, 30)), (2, 3), (8, 9, 4))
KINDS = {
    SHARED: SharedBackend,
    REFILL: RefillBackend,
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
    engine.backend.prefill = lambda texts: seen.append([len(text) for text in texts]) or prefill(texts)
    engine.max_batch_size = 1000
    completions(engine, samples=2)
    del engine.backend.prefill
    assert seen == [[27], [3, 3], [2], [1]]


def test_a_turn_may_end_in_the_middle_of_a_group():
    engine = engine_of("starcoder2")
    engine.max_batch_size = 4
    seen = []
    prefill = engine.backend.prefill
    engine.backend.prefill = lambda texts: seen.append([len(text) for text in texts]) or prefill(texts)
    completions(engine)
    del engine.backend.prefill
    # Three of each prompt, four at a time: the second prompt is computed in the first turn and in the second.
    assert seen == [[27, 3], [3, 3], [3, 2], [1]]


ADDED = ["gpt2", "bloom", "falcon alibi", "gpt_neo", "granite_swa", "lfm2_moe", "mamba"]


@pytest.mark.parametrize("family", telling(ADDED, "gpt2", "granite_swa", "lfm2_moe"))
def test_rows_may_be_added_and_removed_at_any_place(family):
    policy, backend = engine_of(family).policy, engine_of(family).backend
    texts = [prompt.token_ids for prompt in PROMPTS]
    owners = [0, 0, 4, 4, 0]
    tokens = torch.randint(37, (8, 20), generator=torch.Generator().manual_seed(0)).tolist()
    shared = [0, 4] if backend.refills is False else [3, 0, 1, 2, 4]
    backend.begin(Capacity(8, 5, 27, 20))
    rows = {row: list(texts[owner]) for row, owner in enumerate(owners)}
    held = list(shared)

    def check(logits_SV):
        expected = torch.stack([policy.model(torch.tensor([text])).logits[0, -1] for text in rows.values()])
        gap = (logits_SV - expected).abs() / expected.std(-1, keepdim=True)
        assert gap.max() < 3e-5  # float32

    def step(count):
        for _ in range(count):
            new = [tokens[row][len(text) % 20] for row, text in rows.items()]
            for text, token in zip(rows.values(), new, strict=True):
                text.append(token)
            check(backend.step(torch.tensor(new)))

    with torch.no_grad():
        backend.prefill([texts[place] for place in held])
        backend.add_rows([held.index(owner) for owner in owners])
        step(3)
        backend.remove_rows([1, 4])
        rows = {0: rows[0], 3: rows[3], 2: rows[2]}
        step(2)
        if backend.refills:
            backend.remove_prompts([held.index(3)])
            held = [held[-1], *held[1:-1]]
            backend.prefill([texts[3]])
            held.append(3)
            backend.add_rows([held.index(2), held.index(3), held.index(1)])
            rows |= {5: list(texts[2]), 6: list(texts[3]), 7: list(texts[1])}
            step(3)
            backend.remove_rows([3])  # the longest: its padding goes
            rows = {0: rows[0], 3: rows[3], 2: rows[2], 7: rows[7], 6: rows[6]}
            step(2)
            backend.remove_rows([4, 3, 2, 1, 0])
            backend.add_rows([held.index(1)])
            rows = {7: list(texts[1])}
            step(3)
        else:
            backend.remove_rows([0, 1, 2])
            backend.prefill([texts[3]])
            backend.add_rows([0, 0])
            rows = {5: list(texts[3]), 6: list(texts[3])}
            step(4)
    backend.end()


@pytest.mark.parametrize("family", ["gpt2", "starcoder2", "mamba"])
def test_nothing_is_held_afterwards(family):
    engine = engine_of(family)
    completions(engine)
    held = [value for value in vars(engine.backend).values() if isinstance(value, torch.Tensor) and value.numel()]
    lists = [value for value in vars(engine.backend).values() if isinstance(value, list) and value]
    caches = [value for value in vars(engine.backend).values() if hasattr(value, "layers")]
    assert (held, lists, caches) == ([], [], [])


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
    assert engine.backend.description.count("off by") == 3
    assert "rows refilled: off by" in engine.backend.description
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


def test_cached_decoding_limits_time_steps():
    """Without the limits of its config the error is 1e-4 of the logits after 20 tokens here."""
    policy = engine_of("nemotron_h").policy
    backend = StaticBackend(policy, mixed_lengths=True)
    texts, tokens = [list(range(3, 30)), [7]], torch.randint(37, (20, 2), generator=torch.Generator().manual_seed(0))
    backend.begin(Capacity(2, 2, 27, 20))
    with torch.no_grad():
        backend.prefill(texts)
        backend.add_rows([0, 1])
        for new in tokens:
            logits_SV = backend.step(new)
            texts = [[*text, int(token)] for text, token in zip(texts, new, strict=True)]
        expected = torch.stack([policy.model(torch.tensor([text])).logits[0, -1] for text in texts])
    assert ((logits_SV - expected).norm(dim=-1) / expected.norm(dim=-1)).max() < 1e-5


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
    for family in ("gpt2", "granite_swa", "lfm2_moe"):
        engine = LocalEngine(engine_of(family).policy, LetterTokenizer(), (1,), cache_tokens=10)
        with pytest.raises(ConfigError, match="cache_tokens"):
            completions(engine)
    assert engine_of("mamba").backend.token_bytes == 0
