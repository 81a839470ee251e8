"""The engine over stand-in servers: its distribution, seeds, turns, weights, and servers that fail."""

import base64
import io
import threading
import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import MixtralConfig, MixtralForCausalLM

from cohort.errors import ConfigError, DataError, EngineError
from cohort.policy import Policy, Precision, named_weights
from cohort.rollout import Request, RNGKey, Sampling, ServedEngine, Watch
from cohort.rollout.served import fleet, protocol
from cohort.rollout.served.fleet import Servers
from cohort.rollout.served.protocol import ServerError
from cohort.rollout.served.vllm import VLLMServer
from cohort.rollout.served.weights import FolderSender
from cohort.types import FinishReason
from tests.conftest import each, tiny_llama
from tests.rollout.conftest import drawn_ids
from tests.rollout.served.stand_in import RefusedError, StandIn, slow
from tests.rollout.test_local_engine import LetterTokenizer, prompts

PROMPTS = prompts((5, 9, 20), (7,), (30, 31, 32, 33, 34, 35, 36), (2, 3))
KEY = RNGKey(0, 3)
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft asks for it


@pytest.fixture
def policy():
    return Policy(tiny_llama(), Precision(torch.float32, torch.float32))


@pytest.fixture
def start(monkeypatch, tmp_path):
    """Makes stand-ins and engines over them, and ends them after the test."""
    monkeypatch.setattr(fleet, "BACKOFF_SECONDS", 0.01)
    monkeypatch.setattr(fleet, "RECHECK_SECONDS", 1000.0)  # a test that wants it takes it back at once
    made = []

    def start(policy, servers=1, *, version=0, context=None, config=None, **settings):
        # Their own weights are others than the policy's, which they get by update_weights.
        stand_ins = [StandIn(tiny_llama(initializer_range=0.1), LetterTokenizer()) for _ in range(servers)]
        addresses, sender = [VLLMServer(one.url) for one in stand_ins], FolderSender(60.0, str(tmp_path / "weights"))
        for server, one in zip(addresses, stand_ins, strict=True):
            one.described.update(config or {})
            sender.check(server, server.describe())
            server.any_token = policy.vocab_size
        turns = Servers(policy, addresses, sender, **{"startup_timeout": 0.05} | settings)
        engine = ServedEngine(policy, LetterTokenizer(), (1,), turns, context=context)
        made.extend([*stand_ins, engine])
        if version is not None:
            engine.update_weights(version)
        return engine, *stand_ins

    yield start
    for one in made:
        one.close() if isinstance(one, ServedEngine) else one.die()


def labels(stand_in):
    """The labels of the weights that a server got."""
    return [body["new_version"] for path, body in stand_in.calls if path == "/update_weight_version"]


def completions_of(groups):
    return [completion for group in groups for completion in group.completions]


def trainer_logps(policy, groups, temperature=1.0):
    pairs = [(g.prompt.token_ids, c) for g in groups for c in g.completions]
    with torch.no_grad():
        return policy.logps(
            [ids for ids, _ in pairs],
            [c.segments[-1].token_ids.tolist() for _, c in pairs],
            temperature,
            drawn=[c.segments[-1].is_drawn.tolist() for _, c in pairs],
        ).logps_N.double()


def sampler_logps(groups):
    return torch.tensor(np.concatenate([c.sampler_logps for c in completions_of(groups)]))


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_sampler_and_trainer_log_probs_agree(policy, start, temperature):
    engine, _ = start(policy)
    groups = engine.generate(PROMPTS, 4, Sampling(12, temperature), KEY)
    assert [group.prompt.uid for group in groups] == [0, 1, 2, 3]
    # float32: two orders of summation.
    torch.testing.assert_close(sampler_logps(groups), trainer_logps(policy, groups, temperature), rtol=0, atol=1e-5)
    for completion in completions_of(groups):
        ended = drawn_ids(completion)[-1] == 1
        assert completion.finish_reason is (FinishReason.EOS if ended else FinishReason.LENGTH)
        assert ended or completion.num_tokens == 12
        assert completion.text == LetterTokenizer().decode(drawn_ids(completion))
        assert completion.full_logps is None
        assert completion.support is None
    assert {c.finish_reason for c in completions_of(groups)} == {FinishReason.EOS, FinishReason.LENGTH}


def test_a_draw_depends_on_its_key_alone(policy, start):
    engine, _ = start(policy)
    two, *_ = start(policy, 2, max_batch_size=2)
    groups = engine.generate(PROMPTS, 4, Sampling(12), KEY)
    assert two.generate(PROMPTS[::-1], 4, Sampling(12), KEY)[::-1] == groups
    later = engine.generate(PROMPTS, 4, Sampling(12), RNGKey(0, 4))
    # 16 completions: none should repeat by chance, but short ones may.
    assert sum(a == b for a, b in zip(completions_of(groups), completions_of(later), strict=True)) <= 2
    assert len({drawn_ids(c) for c in groups[0].completions}) > 1


def test_what_is_asked_for(policy, start):
    engine, server = start(policy)
    sampling = Sampling(
        9, 0.8, stop=("b",), top_p=0.9, min_completion_length=4, record_support=False, forced_ids=(8, 9)
    )
    engine.generate(PROMPTS[:1], 1, sampling, KEY)
    (body,) = server.requests()
    assert body["token_ids"] == [5, 9, 20, 8, 9]
    assert body["sampling_params"] == {
        "seed": KEY.request_seed(0, 0, 2),
        "temperature": 0.8,
        "top_k": 0,
        "top_p": 0.9,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "max_tokens": 7,
        "min_tokens": 2,
        "stop_token_ids": [1],
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": True,
        "stop": ["b"],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }


def test_stop_strings_and_forced_tokens(policy, start):
    engine, _ = start(policy)
    groups = engine.generate(PROMPTS, 8, Sampling(12, stop=("b", "h"), forced_ids=(4, 5)), KEY)
    stopped = [c for c in completions_of(groups) if c.finish_reason is FinishReason.STOP]
    assert stopped
    assert all(c.text[-1] in "bh" and c.text[:2] == "cd" for c in stopped)
    assert all(c.segments[0].token_ids[:2].tolist() == [4, 5] and c.num_tokens <= 10 for c in completions_of(groups))
    torch.testing.assert_close(sampler_logps(groups), trainer_logps(policy, groups), rtol=0, atol=1e-5)


def test_greedy_draws_are_certain(policy, start):
    engine, _ = start(policy)
    (group,) = engine.generate(PROMPTS[:1], 1, Sampling(8, 0.0, record_support=False), KEY)
    (completion,) = group.completions
    assert not completion.sampler_logps.any()
    full = trainer_logps(policy, [group])
    torch.testing.assert_close(torch.tensor(completion.full_logps), full, rtol=0, atol=1e-5)


@pytest.mark.parametrize("record_support", [True, False])
def test_greedy_draws_are_the_likeliest_tokens_where_masks_come_back(policy, start, record_support):
    """vLLM refuses a temperature of 0 there, so they are drawn from the likeliest token alone."""
    engine, _ = start(policy, config={"return_sampling_mask": True})
    groups = engine.generate(PROMPTS, 1, Sampling(8, 0.0, record_support=record_support), KEY)
    for group in groups:
        (completion,) = group.completions
        ids, drawn = group.prompt.token_ids, drawn_ids(completion)
        for n, token in enumerate(drawn):
            assert token == int(next_logits(policy, [*ids, *drawn[:n]], 1.0).argmax())
        assert not completion.sampler_logps.any()
        assert np.isnan(completion.full_logps).all()  # vLLM has told those of a draw from one token


def test_truncated_draws_have_no_full_log_probs(policy, start):
    engine, _ = start(policy)
    (group,) = engine.generate(PROMPTS[:1], 4, Sampling(8, top_k=2, record_support=False), KEY)
    assert all(np.isnan(c.full_logps).all() and (c.sampler_logps <= 0).all() for c in group.completions)


# What a draw could have given.


SELECTIONS = {
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.7},
    "min-p and top-k": {"min_p": 0.2, "top_k": 9},
    "top-p before a minimum length": {"top_p": 0.8, "min_completion_length": 4},
    "a minimum length": {"min_completion_length": 4},
    "greedy": {"temperature": 0.0},
}


@pytest.mark.parametrize("masks", [True, False], ids=["masks", "candidates"])
@pytest.mark.parametrize("name", SELECTIONS)
def test_what_a_draw_could_have_given_comes_back(policy, start, name, masks):
    """The log-probs of the update, over the tokens that came back, are those of the draws."""
    engine, _ = start(policy, config={"return_sampling_mask": masks, "max_logprobs": -1})
    sampling = Sampling(8, **{"temperature": 0.9, **SELECTIONS[name]})
    groups = engine.generate(PROMPTS, 4, sampling, KEY)
    temperature = sampling.temperature or 1.0
    pairs = [(g.prompt.token_ids, c) for g in groups for c in g.completions]
    for ids, completion in pairs:
        drawn = completion.segments[0].token_ids.tolist()
        with torch.no_grad():
            logits = policy.model(torch.tensor([[*ids, *drawn]])).logits[0, len(ids) - 1 : -1].float() / temperature
        allowed = allowed_of(completion, policy.vocab_size, len(drawn))
        logps = logits.masked_fill(~allowed, -torch.inf).log_softmax(-1)
        expected = logps.gather(-1, torch.tensor(drawn)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.sampler_logps), expected.double(), rtol=0, atol=1e-5)
        for n, row in enumerate(allowed):
            if "top_k" in SELECTIONS[name]:
                assert row.sum() <= sampling.top_k
            if n < sampling.min_completion_length:
                assert not row[1]
            if sampling.temperature == 0:
                assert row.nonzero()[:, 0].tolist() == [drawn[n]]


def allowed_of(completion, vocabulary, count):
    """Which tokens each draw could have given, [draws, tokens]."""
    allowed, support = torch.ones(count, vocabulary, dtype=torch.bool), completion.support
    if support is not None:
        parts = np.split(support.token_ids_U, np.cumsum(support.counts_N)[:-1])
        for row, ids, excluded in zip(allowed, parts, support.excluded_N, strict=True):
            row.fill_(bool(excluded))
            row[torch.tensor(ids, dtype=torch.long)] = not excluded
    return allowed


def next_logits(policy, ids, temperature):
    with torch.no_grad():
        return policy.model(torch.tensor([ids])).logits[0, -1].double() / temperature


def exact_distribution(logits, top_k=0, top_p=1.0, min_p=0.0):
    """Probabilities of the tokens that are kept, likeliest first: a share of the likeliest, then the first ``top_k``,
    then those before which less than ``top_p`` of what is left lies."""
    probabilities = dict(sorted(enumerate(logits.softmax(-1).tolist()), key=lambda item: -item[1]))
    kept = [token for token, p in probabilities.items() if p >= min_p * max(probabilities.values())]
    kept = kept[: top_k or None]
    total, before, nucleus = sum(probabilities[token] for token in kept), 0.0, []
    for token in kept:
        if before < top_p:
            nucleus.append(token)
        before += probabilities[token] / total
    total = sum(probabilities[token] for token in nucleus)
    return {token: probabilities[token] / total for token in nucleus}


TRUNCATIONS = [{"top_k": 6}, {"top_p": 0.7}, {"min_p": 0.3}, {"min_p": 0.1, "top_k": 9, "top_p": 0.8}]


@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
def test_draws_follow_the_truncated_distribution(policy, start, truncation):
    """Chi-square of 600 draws against the exact distribution over exactly the tokens that are kept."""
    engine, _ = start(policy, config={"return_sampling_mask": True})
    (group,) = engine.generate(PROMPTS[:1], 600, Sampling(1, 1.3, **truncation), KEY)
    exact = exact_distribution(next_logits(policy, PROMPTS[0].token_ids, 1.3), **truncation)
    assert 4 <= len(exact) < policy.vocab_size
    for completion in group.completions:
        (row,) = allowed_of(completion, policy.vocab_size, 1)
        assert row.nonzero()[:, 0].tolist() == sorted(exact)
    counts = Counter(drawn_ids(c)[0] for c in group.completions)
    assert counts.keys() <= exact.keys()
    statistic = sum((counts[token] - 600 * p) ** 2 / (600 * p) for token, p in exact.items())
    assert min(exact.values()) > 5 / 600  # so that the statistic has its distribution
    assert chi_square_tail(statistic, len(exact) - 1) > 1e-3  # missed by one seed of 1,000


def chi_square_tail(statistic, degrees):
    """The probability that a sum of ``degrees`` squared normals exceeds ``statistic``."""
    return float(torch.special.gammaincc(torch.tensor(degrees / 2.0), torch.tensor(statistic / 2.0)))


@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
def test_masks_and_candidates_give_the_same_supports(policy, start, truncation):
    """At every token of a completion, and they are exactly the tokens that are kept."""
    for masks in (True, False):
        engine, server = start(policy, config={"return_sampling_mask": masks, "max_logprobs": -1})
        (group,) = engine.generate(PROMPTS[:1], 4, Sampling(8, **truncation), KEY)
        assert {body["sampling_params"]["logprobs"] for body in server.requests()} == {0 if masks else -1}
        for completion in group.completions:
            drawn = drawn_ids(completion)
            for n, row in enumerate(allowed_of(completion, policy.vocab_size, len(drawn))):
                logits = next_logits(policy, [*PROMPTS[0].token_ids, *drawn[:n]], 1.0)
                assert row.nonzero()[:, 0].tolist() == sorted(exact_distribution(logits, **truncation))


def test_tokens_as_likely_as_the_kth_are_kept(policy, start, monkeypatch):
    """Five tokens are equally likely, and the limit lies between them: all five can be drawn, and the update knows."""
    monkeypatch.setattr(protocol, "SMALL_VOCABULARY", 10)  # so that top_k + TIES candidates are asked for
    with torch.no_grad():
        policy.model.lm_head.weight[10:15] = policy.model.lm_head.weight[10].clone()
    logits = next_logits(policy, PROMPTS[0].token_ids, 1.0)
    above = int((logits > logits[10]).sum())
    for config in ({"return_sampling_mask": True}, {"max_logprobs": 40}):
        engine, server = start(policy, config=config)
        (group,) = engine.generate(PROMPTS[:1], 4, Sampling(1, top_k=above + 2), KEY)
        if "max_logprobs" in config:
            asked = {body["sampling_params"]["logprobs"] for body in server.requests()}
            assert asked == {above + 2 + protocol.TIES}
        for completion in group.completions:
            (row,) = allowed_of(completion, policy.vocab_size, 1)
            assert row.sum() == above + 5
            assert row[10:15].all()
            expected = logits.masked_fill(~row, -torch.inf).log_softmax(-1)[drawn_ids(completion)[0]]
            assert completion.sampler_logps[0] == pytest.approx(float(expected), abs=1e-5)  # float32


SOUND = {
    "token_ids": [4],
    "finish_reason": "length",
    "stop_reason": None,
    "weight_versions": [{"version": "v"}],
    "sampling_mask": [[4, 5]],
    "routed_experts": None,
    "logprobs": {"content": [{"token_id": 4, "logprob": -0.5}]},
}
NONSENSE = [7, 1.5, True, "x", [None], [{}], ["a"], [2**40], [[2**70]], [[None]], [["a"]], [[[1]]], {"a": 1}]


@each("field", [name for name in SOUND if name != "stop_reason"])
def test_an_answer_of_any_shape_is_an_error_of_its_server(field, monkeypatch):
    """No other error, with which the run would end."""
    server, draw = VLLMServer("http://127.0.0.1:9"), protocol.Draw([1], Sampling(1, top_k=2), 0, 1, 0, (1,), 37)
    server.masks = True
    monkeypatch.setattr(server, "post", lambda *_, **__: {"choices": [answered]})
    answered = dict(SOUND)
    assert server.generate(draw, "v", 1.0).supports[0][0].tolist() == [4, 5]
    for nonsense in NONSENSE:
        answered = SOUND | {field: nonsense}
        with pytest.raises(ServerError) as error:
            server.generate(draw, "v", 1.0)
        assert error.value.is_failure
    answered = {name: value for name, value in SOUND.items() if name != field}
    if field != "routed_experts":
        with pytest.raises(ServerError):
            server.generate(draw, "v", 1.0)


@each(
    "candidate", [{"token_id": 4, "logprob": None}, {"token_id": "a", "logprob": -1.0}, {"token_id": 99, "logprob": 0}]
)
def test_candidates_of_any_shape_are_an_error_of_their_server(candidate, monkeypatch):
    server, draw = VLLMServer("http://127.0.0.1:9"), protocol.Draw([1], Sampling(1, top_k=2), 0, 1, 0, (1,), 37)
    content = {"token_id": 4, "logprob": -0.5, "top_logprobs": [candidate] * 37}
    answered = SOUND | {"sampling_mask": None, "logprobs": {"content": [content]}}
    monkeypatch.setattr(server, "post", lambda *_, **__: {"choices": [answered]})
    with pytest.raises(ServerError):
        server.generate(draw, "v", 1.0)


TIED = [{"token_id": token, "logprob": -2.0} for token in range(2, 15)]


def test_more_ties_than_candidates_are_an_error(policy, start, monkeypatch):
    """With more than ``TIES`` tokens as likely as the k-th, what came back may not be all that could have been drawn."""
    monkeypatch.setattr(protocol, "SMALL_VOCABULARY", 10)
    engine, server = start(policy)

    def ties(number, body, answer):
        assert body["sampling_params"]["logprobs"] == 5 + protocol.TIES
        for one in answer["choices"][0]["logprobs"]["content"]:
            one["top_logprobs"] = TIED
        return answer

    server.fault = ties
    with pytest.raises(EngineError, match="more tokens are as likely as the k-th than log-probs came back"):
        engine.generate(PROMPTS[:1], 1, Sampling(3, top_k=5), KEY)


def test_a_draw_outside_its_support_is_an_error(policy, start):
    engine, server = start(policy, config={"return_sampling_mask": True})

    def other(number, body, answer):
        answer["choices"][0]["sampling_mask"][0] = [36]
        return answer

    server.fault = other
    with pytest.raises(EngineError, match="a token was drawn that it could not have given"):
        engine.generate(PROMPTS[:1], 1, Sampling(3, top_k=2), KEY)


def found(**fields):
    return protocol.Description("", **fields)


@each(
    ("sampling", "server", "message"),
    [
        ({"top_p": 0.9}, {"candidates": -1}, r"does not return .* rollout.top_p or rollout.min_p: masks; or set roll"),
        ({"regex": "a+", "top_k": 4}, {"candidates": -1}, "does not return .* a grammar: masks$"),
        ({"top_k": 40}, {"candidates": 20}, "at most 20 log-probs for a draw, and 48 show .* --max-logprobs 48"),
    ],
)
def test_settings_whose_supports_cannot_come_back_are_refused(sampling, server, message):
    settings = Sampling(4, **sampling)
    with pytest.raises(ConfigError, match=message):
        protocol.check_support(settings, 100_000, found(**server), "it", "masks")
    for enough in ({"masks": True}, {"candidates": 48} if settings.top_k == 40 else {"masks": True}):
        protocol.check_support(settings, 100_000, found(**enough), "it", "masks")
    protocol.check_support(replace(settings, record_support=False), 100_000, found(), "it", "masks")
    protocol.check_support(settings, 4096, found(candidates=-1), "it", "masks")


# Experts.


def experts_of(count):
    """A server's answers name these experts for the tokens that were read, in two layers of three experts each."""
    every = np.arange(200 * 2 * 3, dtype=np.uint8).reshape(200, 2, 3) % 8

    def fault(number, body, answer):
        choice, buffer = answer["choices"][0], io.BytesIO()
        read = len(body["token_ids"]) + len(choice["token_ids"]) - 1
        assert body["sampling_params"]["routed_experts_prompt_start"] == 0
        np.save(buffer, every[: read - count])
        choice["routed_experts"] = base64.b64encode(buffer.getvalue()).decode()
        return answer

    return every, fault


def test_the_experts_of_each_token_are_recorded(policy, start):
    engine, server = start(policy)
    every, server.fault = experts_of(0)
    engine.routes = True
    for group in engine.generate(PROMPTS, 2, Sampling(6), KEY):
        for completion in group.completions:
            before = len(group.prompt.token_ids) - 1
            (segment,) = completion.segments
            np.testing.assert_array_equal(completion.prompt_routes, every[:before])
            np.testing.assert_array_equal(segment.routes, every[before : before + len(segment.token_ids)])


def test_experts_that_do_not_come_back_are_an_error(policy, start):
    engine, server = start(policy)
    engine.routes = True
    with pytest.raises(EngineError, match="the experts of its tokens did not come back"):
        engine.generate(PROMPTS[:1], 1, Sampling(3), KEY)
    _, server.fault = experts_of(1)
    engine.turns.fleet.recheck(now=True)
    with pytest.raises(EngineError, match=r"experts of shape \(\d, 2, 3\) for \d tokens"):
        engine.generate(PROMPTS[:1], 1, Sampling(3), KEY)


# Adapters.


@pytest.fixture
def adapted():
    return adapted_policy()


def adapted_policy(vocabulary=37, **settings):
    peft = pytest.importorskip("peft")
    config = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
    torch.manual_seed(0)
    model = peft.get_peft_model(tiny_llama(vocabulary), peft.LoraConfig(**config | settings))
    return Policy(model, Precision(torch.float32, torch.float32))


LORA = {"max_lora_rank": 8}


def loads(stand_in):
    return [path for path, _ in stand_in.calls if path in ("/collective_rpc", "/v1/load_lora_adapter")]


def test_the_base_goes_once_and_the_adapter_after_each_update(adapted, start):
    engine, server = start(adapted, version=None, max_lora_rank=8)
    server.config["lora_config"] = LORA
    for version in range(2):
        engine.update_weights(version)
        groups = engine.generate(PROMPTS, 2, Sampling(8), KEY)
        torch.testing.assert_close(sampler_logps(groups), trainer_logps(adapted, groups), rtol=0, atol=1e-5)
        with torch.no_grad():
            for name, parameter in adapted.model.named_parameters():
                if "lora_" in name:
                    parameter.mul_(1.5)
    assert (sampler_logps(groups) - trainer_logps(adapted, groups)).abs().max() > 1e-3
    assert loads(server) == ["/collective_rpc", "/v1/load_lora_adapter", "/v1/load_lora_adapter"]
    assert not any("lora" in name or "base_layer" in name for name in server.received)
    assert server.received.keys() == dict(named_weights(Policy(tiny_llama(), adapted.precision))).keys()
    assert len(server.adapters) == 1


def test_a_server_that_was_started_again_gets_the_base_again(adapted, start):
    engine, first, second = start(adapted, 2, version=None, max_lora_rank=8)
    first.config["lora_config"] = second.config["lora_config"] = LORA
    engine.update_weights(0)
    first.label, first.adapters = "default", {}
    engine.turns.fleet.leave_out(engine.turns.fleet.servers[0], "it was away")
    engine.update_weights(1)
    assert loads(first) == ["/collective_rpc", "/v1/load_lora_adapter"] * 2
    assert loads(second) == ["/collective_rpc", "/v1/load_lora_adapter", "/v1/load_lora_adapter"]
    assert len(engine.turns.fleet.live) == 2


def test_a_server_that_has_slept_gets_the_base_again(adapted, start):
    """It has lost its weights; the adapter is loaded after them."""
    engine, server = start(adapted, version=None, max_lora_rank=8, sleeps=True)
    server.config["lora_config"] = LORA
    for version in range(2):
        engine.update_weights(version)
        groups = engine.generate(PROMPTS, 2, Sampling(8), KEY)
        torch.testing.assert_close(sampler_logps(groups), trainer_logps(adapted, groups), rtol=0, atol=1e-5)
        engine.sleep()
        server.load({name: torch.zeros_like(tensor) for name, tensor in server.model.state_dict().items()})
        assert not server.awake
    assert loads(server) == ["/collective_rpc", "/v1/load_lora_adapter"] * 2


@pytest.mark.parametrize("settings", [{"use_dora": True}, {"modules_to_save": ["lm_head"]}, {"bias": "all"}], ids=str)
def test_adapters_that_vllm_does_not_load_are_merged(settings, start):
    policy = adapted_policy(**settings)
    engine, server = start(policy, max_lora_rank=8)
    groups = engine.generate(PROMPTS, 2, Sampling(8), KEY)
    torch.testing.assert_close(sampler_logps(groups), trainer_logps(policy, groups), rtol=0, atol=1e-5)
    assert loads(server) == ["/collective_rpc"]


def test_a_server_without_the_route_for_adapters_says_so(adapted, start):
    with pytest.raises(EngineError, match="it loads no adapters: set VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its env"):
        start(adapted, max_lora_rank=8)


def test_without_adapters_in_the_servers_they_are_merged(adapted, start):
    engine, server = start(adapted)
    groups = engine.generate(PROMPTS, 2, Sampling(8), KEY)
    torch.testing.assert_close(sampler_logps(groups), trainer_logps(adapted, groups), rtol=0, atol=1e-5)
    assert loads(server) == ["/collective_rpc"]


def play(engine, replies, rewrite=False, samples=3, watch=None, prompts=PROMPTS):
    """After turn n of each trajectory comes ``replies[n]``. Returns the last turn of each, by number."""
    sampling = Sampling(60, max_turn_length=5)
    submitted = engine.submit(
        [Request(p, n, sampling, KEY, i, True) for i, p in enumerate(prompts) for n in range(samples)]
    )
    turns, ended = dict.fromkeys(submitted, 0), {}
    for turn in engine.stream(watch):
        ended[turn.trajectory] = turn
        if turns[turn.trajectory] < len(replies):
            engine.extend(turn.trajectory, replies[turns[turn.trajectory]], rewrite=rewrite)
            turns[turn.trajectory] += 1
        else:
            engine.release(turn.trajectory)
    assert engine.unfinished == 0
    return [ended[number] for number in submitted]


def test_turns_continue_after_given_tokens(policy, start):
    engine, server = start(policy, max_batch_size=5)
    turns = play(engine, [[9, 1, 14], [6]])
    completions = [turn.completion for turn in turns]
    for turn in turns:
        (segment,) = turn.completion.segments
        assert (~segment.is_drawn).sum() == 4
        assert turn.num_drawn <= 5
    logps = trainer_logps(
        policy, [type("G", (), {"prompt": t.request.prompt, "completions": (t.completion,)}) for t in turns]
    )
    mine = torch.tensor(np.concatenate([c.sampler_logps for c in completions]))
    torch.testing.assert_close(mine, logps, rtol=0, atol=1e-5)
    seeds = [body["sampling_params"]["seed"] for body in server.requests()]
    assert len(set(seeds)) == len(seeds) == 3 * len(turns)  # a seed for each turn of each trajectory


def test_a_rewrite_begins_a_segment_after_the_prompt(policy, start):
    engine, server = start(policy)
    turns = play(engine, [[9, 14]], rewrite=True, samples=1)
    for turn in turns:
        first, second = turn.completion.segments
        assert first.drawn is None
        assert second.token_ids[:2].tolist() == [9, 14]
    rewritten = [body["token_ids"] for body in server.requests()[len(PROMPTS) :]]
    assert sorted(rewritten) == sorted([*prompt.token_ids, 9, 14] for prompt in PROMPTS)


def test_extend_and_submit_refuse_what_cannot_be(policy, start):
    engine, _ = start(policy)
    number, *_ = engine.submit([Request(PROMPTS[0], 0, Sampling(8, max_turn_length=2), KEY, continues=True)])
    with pytest.raises(ConfigError, match="not parked"):
        engine.extend(number, [3])
    list(engine.stream())
    with pytest.raises(DataError, match="room"):
        engine.extend(number, [3] * 6)
    with pytest.raises(DataError, match="37 tokens"):
        engine.extend(number, [40])
    with pytest.raises(ConfigError, match="unfinished"):
        engine.update_weights(1)
    engine.reset()
    with pytest.raises(DataError, match="context holds 128"):
        engine.generate(PROMPTS, 1, Sampling(126), KEY)
    with pytest.raises(ConfigError, match=r"0\.01"):
        engine.generate(PROMPTS, 1, Sampling(5, 0.001), KEY)
    with pytest.raises(ConfigError, match="temperature is 2.5: vLLM refuses more than 2"):
        engine.generate(PROMPTS, 1, Sampling(5, 2.5), KEY)


def test_a_server_with_a_shorter_context_limits_prompts(policy, start):
    engine, _ = start(policy, context=10)
    with pytest.raises(DataError, match="context holds 10"):
        engine.generate(PROMPTS, 1, Sampling(8), KEY)


def test_completions_are_handed_over_as_they_end(policy, start):
    engine, server = start(policy)
    others, ended = threading.Event(), []

    def waits(number, body, answer):
        assert number != 1 or others.wait(60)
        return answer

    def on_completion(prompt, sample, completion):
        ended.append(prompt)
        if len(ended) == 3:
            others.set()

    server.fault = waits
    engine.generate(PROMPTS, 1, Sampling(4), KEY, Watch(on_completion=on_completion))
    assert sorted(ended) == [0, 1, 2, 3]
    assert engine.metrics()["server/failures"] == 0


def test_tokens_are_reported_when_their_turn_ends(policy, start):
    engine, _ = start(policy)
    events = {}
    watch = Watch(on_token=lambda e: events.setdefault((e.prompt_index, e.sample), []).append(e))
    groups = engine.generate(PROMPTS, 2, Sampling(6), KEY, watch)
    for p, group in enumerate(groups):
        for g, completion in enumerate(group.completions):
            own = events[p, g]
            assert [e.token_id for e in own] == list(drawn_ids(completion))
            assert [e.logp for e in own] == completion.sampler_logps.tolist()
            assert [e.position for e in own] == list(range(len(own)))
            assert [e.finish_reason for e in own] == [None] * (len(own) - 1) + [completion.finish_reason]


def test_cancelled_requests_are_aborted(policy, start):
    engine, server = start(policy)
    server.fault = slow(60, number=2)
    started = time.monotonic()
    seen = []
    watch = Watch(cancelled=lambda: bool(seen), on_completion=lambda *_: seen.append(1))
    groups = engine.generate(PROMPTS[:2], 1, Sampling(4), KEY, watch)
    assert time.monotonic() - started < 40
    assert sorted(c.finish_reason.value for c in completions_of(groups))[0] == "cancelled"
    server.fault = slow(0)
    assert engine.turns.fleet.left_out == {}  # the server is not to blame
    assert engine.generate(PROMPTS[:1], 1, Sampling(4), KEY)[0].completions[0].num_tokens


def test_answers_to_aborted_requests_are_dropped(policy, start):
    """They are there when the rest is cancelled, and belong to nothing that is asked for later."""
    engine, server = start(policy)
    seen = []

    def on_completion(*_):
        if not seen:
            wait_until(lambda: engine.turns._outcomes.qsize() == 3)
        seen.append(1)

    watch = Watch(cancelled=lambda: bool(seen), on_completion=on_completion)
    groups = engine.generate(PROMPTS, 1, Sampling(4), KEY, watch)
    assert [c.finish_reason.value for c in completions_of(groups)].count("cancelled") == 3
    again = engine.generate(PROMPTS, 1, Sampling(4), KEY)
    assert again == start(policy)[0].generate(PROMPTS, 1, Sampling(4), KEY)
    assert len(server.requests()) == 8


def wait_until(holds, seconds=60):
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_an_error_in_a_callback_ends_the_requests(policy, start):
    engine, _ = start(policy)

    def broken(*_):
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        engine.generate(PROMPTS, 2, Sampling(4), KEY, Watch(on_completion=broken))
    assert engine.unfinished == 0
    assert len(engine.generate(PROMPTS, 1, Sampling(4), KEY)) == 4


def changed(**fields):
    """A fault: the first answer's choice with other fields."""

    def fault(number, body, answer):
        if number == 1:
            answer["choices"][0] |= fields
        return answer

    return fault


def refused(status):
    def fault(number, body, answer):
        if number == 1:
            raise RefusedError(status, "out of order")
        return answer

    return fault


FAULTS = {
    "status 500": (refused(500), "status 500: out of order"),
    "busy": (refused(503), "status 503"),
    "not JSON": (lambda n, b, a: b"{" if n == 1 else a, "not JSON"),
    "another shape": (lambda n, b, a: {"choices": []} if n == 1 else a, "unexpected answer"),
    "no log-probs": (changed(logprobs=None), "unexpected answer"),
    "other tokens": (changed(logprobs={"content": [{"token_id": 3, "logprob": -1.0}] * 99}), "other tokens"),
    "aborted": (changed(finish_reason="abort"), "ended with 'abort'"),
    "cut early": (
        lambda n, b, a: changed(
            finish_reason="length", token_ids=[4], logprobs={"content": [{"token_id": 4, "logprob": -1.0}]}
        )(n, b, a),
        "cut after 1 of 6 tokens",
    ),
    "unknown tokens": (changed(token_ids=[99]), "outside the vocabulary"),
    "weights": (changed(weight_versions=[{"version": "other", "start": 0, "end": 9}]), "sampled with weights 'other'"),
    "no weights": (changed(weight_versions=None), "without a version"),
    "late": (slow(30), "no answer within 0.5 s"),
}


def hurry(server, given, seconds):
    """The server's requests with this limit get another one."""
    post = server.post
    server.post = lambda *args, timeout=60.0, **query: post(
        *args, timeout=seconds if timeout == given else timeout, **query
    )


def test_a_server_that_fails_is_left_out_and_its_requests_are_repeated(policy, start):
    sound, _ = start(policy)
    expected = sound.generate(PROMPTS, 1, Sampling(6), KEY)
    for name, (fault, reason) in FAULTS.items():
        engine, first, _ = start(policy, 2, request_timeout=60)
        first.fault = fault
        if name == "late":  # the other server may be slow on a busy machine
            hurry(engine.turns.fleet.servers[0], 60, 0.5)
        groups = engine.generate(PROMPTS, 1, Sampling(6), KEY)
        assert groups == expected, name  # same seeds, same weights: the same bits here
        assert reason in engine.turns.fleet.left_out[first.url]
        assert engine.turns.fleet.live == [engine.turns.fleet.servers[1]]
        metrics = engine.metrics()
        assert metrics["server/servers"] == 1
        assert metrics["server/failures"] >= 1


def test_a_server_that_dies_in_the_middle(policy, start):
    sound, _ = start(policy)
    engine, first, second = start(policy, 2, max_batch_size=2)

    def dies(number, body, answer):
        if number == 3:
            threading.Thread(target=first.die).start()
            time.sleep(0.2)
        return answer

    first.fault = dies
    groups = engine.generate(PROMPTS, 2, Sampling(6), KEY)
    assert groups == sound.generate(PROMPTS, 2, Sampling(6), KEY)
    assert list(engine.turns.fleet.left_out) == [first.url]
    engine.update_weights(1)  # goes on with the other
    assert engine.generate(PROMPTS, 1, Sampling(3), KEY)[0].completions[0].weights_version == 1
    second.die()
    with pytest.raises(EngineError, match=f"within 0.05 s .*:\n  {first.url}: .*\n  {second.url}: "):
        engine.generate(PROMPTS, 1, Sampling(3), KEY)
    assert engine.unfinished == 0
    with pytest.raises(EngineError, match="no server has taken the weights"):
        engine.update_weights(2)


def test_a_refused_request_is_not_repeated(policy, start):
    engine, first, second = start(policy, 2)
    first.fault = second.fault = refused(400)
    with pytest.raises(EngineError, match="status 400: out of order. The server refuses what the settings ask for"):
        engine.generate(PROMPTS, 1, Sampling(3), KEY)
    assert len(engine.turns.fleet.live) == 2


def test_a_single_server_is_asked_again(policy, start):
    engine, server = start(policy)
    server.fault = refused(500)
    assert engine.generate(PROMPTS, 1, Sampling(3), KEY)
    assert engine.metrics()["server/failures"] == 1


def test_requests_are_given_up_when_a_server_always_fails(policy, start):
    engine, server = start(policy)
    server.fault = lambda number, body, answer: b"nonsense"
    with pytest.raises(EngineError, match="given up after 3 attempts"):
        engine.generate(PROMPTS[:1], 1, Sampling(3), KEY)


def test_a_server_is_taken_back_with_the_right_weights_only(policy, start, monkeypatch):
    monkeypatch.setattr(fleet, "RECHECK_SECONDS", 0.0)
    engine, first, second = start(policy, 2)
    server = engine.turns.fleet.servers[0]
    engine.turns.fleet.leave_out(server, "lost its cable")
    engine.generate(PROMPTS, 1, Sampling(2), KEY)
    assert len(engine.turns.fleet.live) == 2  # it answers again
    engine.turns.fleet.leave_out(server, "lost its cable")
    first.label = "default"  # it was started again
    engine.generate(PROMPTS, 4, Sampling(2), KEY)
    assert "it answers again, with weights 'default'" in engine.turns.fleet.left_out[first.url]
    sent = len(labels(first)), len(labels(second))
    engine.update_weights(0)  # the same weights, to the server that has lost them
    assert labels(first)[sent[0] :] == [engine.turns.fleet.version]
    assert len(labels(second)) == sent[1]
    assert len(engine.turns.fleet.live) == 2


def test_a_server_with_other_weights_is_sent_the_present_ones(policy, start):
    """It may say that it has them: it is not taken back by that alone."""
    engine, first, second = start(policy, 2)
    first.fault = changed(weight_versions=[{"version": "other", "start": 0, "end": 9}])
    engine.generate(PROMPTS, 1, Sampling(4), KEY)
    assert first.label == engine.turns.fleet.version
    engine.turns.fleet.recheck(now=True)
    assert list(engine.turns.fleet.left_out) == [first.url]
    engine.update_weights(0)
    assert (len(labels(first)), len(labels(second))) == (2, 1)
    assert engine.turns.fleet.left_out == {}


def test_nan_ends_a_completion(policy, start):
    engine, server = start(policy)

    def nan(number, body, answer):
        answer["choices"][0]["logprobs"]["content"][1]["logprob"] = -9999.0
        return answer

    server.fault = nan
    (group,) = engine.generate(PROMPTS[:1], 1, Sampling(8, min_completion_length=5, record_support=False), KEY)
    assert group.completions[0].finish_reason is FinishReason.ERROR
    assert group.completions[0].num_tokens == 1


def test_weights_are_sent_once_per_version(policy, start):
    engine, server = start(policy, version=None)
    with pytest.raises(ConfigError, match="update_weights"):
        engine.generate(PROMPTS, 1, Sampling(3), KEY)
    engine.update_weights(0)
    engine.update_weights(0)
    assert len(labels(server)) == 1
    before = engine.generate(PROMPTS, 2, Sampling(12), KEY)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.1)
    engine.update_weights(1)
    after = engine.generate(PROMPTS, 2, Sampling(12), KEY)
    torch.testing.assert_close(sampler_logps(after), trainer_logps(policy, after), rtol=0, atol=1e-5)
    assert (sampler_logps(before) - trainer_logps(policy, before)).abs().max() > 0.01
    assert {c.weights_version for c in completions_of(after)} == {1}
    paths = [path for path, _ in server.calls if path != "/inference/v1/generate"]
    one = ["/pause", "/collective_rpc", "/update_weight_version", "/reset_prefix_cache", "/resume"]
    assert paths == one * 2
    metrics = engine.metrics()
    asked = {"server/seconds_generate", "server/seconds_generate_max"}
    assert set(metrics) == {"seconds/weights", "server/servers", "server/failures", *asked}
    assert 0 < metrics["server/seconds_generate"] <= metrics["server/seconds_generate_max"]
    assert "seconds/weights" not in engine.metrics()


def test_a_server_that_cannot_load_is_left_out(policy, start):
    engine, first, _ = start(policy, 2, version=None)

    def refuse():
        raise RefusedError(500, "no space left")

    first.update_fault = refuse
    engine.update_weights(0)
    assert "status 500: no space left" in engine.turns.fleet.left_out[first.url]
    first.update_fault = lambda: None
    engine.update_weights(1)
    assert engine.turns.fleet.left_out == {}


def test_the_probe_sees_each_loaded_server(policy, start):
    engine, first, second = start(policy, 2, version=None)
    probed = []

    def probe(server):
        probed.append(server.url)
        return {"server/probe_gap": 0.5 / len(probed)}

    engine.turns.probe = probe
    engine.update_weights(0)
    assert probed == [first.url, second.url]
    assert engine.metrics()["server/probe_gap"] == 0.5


def test_a_server_that_fails_in_the_probe_is_left_out(policy, start):
    engine, first, _ = start(policy, 2, version=None)

    def probe(server):
        if server.url == first.url:
            raise ServerError(first.url, "/probe", "does not answer")
        return {"server/probe_gap": 0.25}

    engine.turns.probe = probe
    engine.update_weights(0)
    assert list(engine.turns.fleet.left_out) == [first.url]
    assert engine.metrics()["server/probe_gap"] == 0.25


def test_requests_wait_while_no_server_answers(policy, start, monkeypatch):
    """All servers fail at once, with requests under way, queued and yet to come: each is drawn when they are back."""
    monkeypatch.setattr(fleet, "BACKOFF_SECONDS", 0.1)
    sound, _ = start(policy)
    engine, *stand_ins = start(policy, 2, max_batch_size=2, startup_timeout=60.0)
    expected, checks = sound.generate(PROMPTS, 3, Sampling(6), KEY), []

    def down(*_):
        raise RefusedError(503, "out of order")

    describe, sound_ = engine.turns.fleet.servers[0].describe, stand_ins[0].fault

    def late():
        checks.append(time.monotonic())
        if len({round(one - checks[0], 1) for one in checks}) > 3:
            for one in stand_ins:
                one.fault = sound_
            return describe()
        raise ServerError("it", "/weight_info", "no connection")

    for stand_in, server in zip(stand_ins, engine.turns.fleet.servers, strict=True):
        stand_in.fault, server.describe = down, late
    assert engine.generate(PROMPTS, 3, Sampling(6), KEY) == expected
    assert checks[-1] - checks[0] > 0.2  # they wait 0.1 and 0.2 s at least


def test_requests_end_when_no_server_comes_back(policy, start):
    """The error names the limit and its setting; servers that were started again are not waited for."""
    engine, *stand_ins = start(policy, 2, startup_timeout=0.3)
    for one in stand_ins:
        one.die()
    begun = time.monotonic()
    with pytest.raises(EngineError, match=r"none came back within 0.3 s \(server.startup_timeout\)"):
        engine.generate(PROMPTS, 1, Sampling(3), KEY)
    assert time.monotonic() - begun > 0.3
    engine, first = start(policy, startup_timeout=600.0)
    first.fault = lambda number, body, answer: changed(weight_versions=[{"version": "x"}])(1, body, answer)
    with pytest.raises(EngineError, match="no server is left:.*\n.*sampled with weights 'x'"):
        engine.generate(PROMPTS, 1, Sampling(3), KEY)


def test_weights_are_those_that_are_saved(tmp_path):
    config = {"num_local_experts": 2, "num_experts_per_tok": 1} | tiny_llama().config.to_dict()
    config = {key: value for key, value in config.items() if key not in ("architectures", "model_type", "rope_scaling")}
    for model in (tiny_llama(tie_word_embeddings=True), MixtralForCausalLM(MixtralConfig(**config))):
        model.save_pretrained(tmp_path)
        saved = load_file(tmp_path / "model.safetensors")
        sent = dict(named_weights(Policy(model, Precision(torch.float32, torch.float32))))
        assert sent.keys() == saved.keys()
        assert all(torch.equal(sent[name], saved[name]) for name in saved)
