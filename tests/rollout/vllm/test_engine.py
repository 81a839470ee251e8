"""The vLLM engine over stand-in servers: its distribution, seeds, turns, weights, and servers that fail."""

import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import MixtralConfig, MixtralForCausalLM

from cohort.errors import ConfigError, DataError, EngineError
from cohort.policy import Policy, Precision, named_weights
from cohort.rollout import Request, RNGKey, Sampling, VLLMEngine, Watch
from cohort.rollout.vllm import engine as vllm
from cohort.rollout.vllm import fleet
from cohort.rollout.vllm.server import Server, ServerError
from cohort.types import FinishReason
from tests.conftest import tiny_llama
from tests.rollout.conftest import drawn_ids
from tests.rollout.test_local_engine import LetterTokenizer, prompts
from tests.rollout.vllm.stand_in import DirectTransport, RefusedError, StandIn, slow

PROMPTS = prompts((5, 9, 20), (7,), (30, 31, 32, 33, 34, 35, 36), (2, 3))
KEY = RNGKey(0, 3)


@pytest.fixture
def policy():
    return Policy(tiny_llama(), Precision(torch.float32, torch.float32))


@pytest.fixture
def start(monkeypatch):
    """Makes stand-ins and engines over them, and ends them after the test."""
    monkeypatch.setattr(vllm, "BACKOFF_SECONDS", 0.01)
    monkeypatch.setattr(fleet, "RECHECK_SECONDS", 1000.0)  # a test that wants it takes it back at once
    made = []

    def start(policy, servers=1, *, version=0, **settings):
        # Their own weights are others than the policy's, which they get by update_weights.
        stand_ins = [StandIn(tiny_llama(initializer_range=0.1), LetterTokenizer()) for _ in range(servers)]
        transport = DirectTransport(*stand_ins)
        addresses = [Server(one.url) for one in stand_ins]
        engine = VLLMEngine(policy, LetterTokenizer(), (1,), addresses, transport, **settings)
        made.extend([*stand_ins, engine])
        if version is not None:
            engine.update_weights(version)
        return engine, *stand_ins

    yield start
    for one in made:
        one.close() if isinstance(one, VLLMEngine) else one.die()


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


def test_truncated_draws_have_no_full_log_probs(policy, start):
    engine, _ = start(policy)
    (group,) = engine.generate(PROMPTS[:1], 4, Sampling(8, top_k=2, record_support=False), KEY)
    assert all(np.isnan(c.full_logps).all() and (c.sampler_logps <= 0).all() for c in group.completions)


def play(engine, replies, rewrite=False, samples=3, watch=None):
    """After turn n of each trajectory comes ``replies[n]``. Returns the last turn of each, by number."""
    sampling = Sampling(60, max_turn_length=5)
    submitted = engine.submit(
        [Request(p, n, sampling, KEY, i, True) for i, p in enumerate(PROMPTS) for n in range(samples)]
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
    with pytest.raises(ConfigError, match="grammar"):
        engine.generate(PROMPTS, 1, Sampling(5, regex="a"), KEY)
    with pytest.raises(ConfigError, match="penalty"):
        engine.generate(PROMPTS, 1, Sampling(5, repetition_penalty=1.1), KEY)
    with pytest.raises(ConfigError, match=r"0\.01"):
        engine.generate(PROMPTS, 1, Sampling(5, 0.001), KEY)


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
    assert engine.metrics()["vllm/failures"] == 0


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
    assert engine.fleet.left_out == {}  # the server is not to blame
    assert engine.generate(PROMPTS[:1], 1, Sampling(4), KEY)[0].completions[0].num_tokens


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
    server.post = lambda *args, timeout, **query: post(*args, timeout=seconds if timeout == given else timeout, **query)


def test_a_server_that_fails_is_left_out_and_its_requests_are_repeated(policy, start):
    sound, _ = start(policy)
    expected = sound.generate(PROMPTS, 1, Sampling(6), KEY)
    for name, (fault, reason) in FAULTS.items():
        engine, first, _ = start(policy, 2, request_timeout=60)
        first.fault = fault
        if name == "late":  # the other server may be slow on a busy machine
            hurry(engine.fleet.servers[0], 60, 0.5)
        groups = engine.generate(PROMPTS, 1, Sampling(6), KEY)
        assert groups == expected, name  # same seeds, same weights: the same bits here
        assert reason in engine.fleet.left_out[first.url]
        assert engine.fleet.live == [engine.fleet.servers[1]]
        metrics = engine.metrics()
        assert metrics["vllm/servers"] == 1
        assert metrics["vllm/failures"] >= 1


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
    assert list(engine.fleet.left_out) == [first.url]
    engine.update_weights(1)  # goes on with the other
    assert engine.generate(PROMPTS, 1, Sampling(3), KEY)[0].completions[0].weights_version == 1
    second.die()
    with pytest.raises(EngineError, match=f"no vLLM server is left:\n  {first.url}: .*\n  {second.url}: "):
        engine.generate(PROMPTS, 1, Sampling(3), KEY)
    assert engine.unfinished == 0
    with pytest.raises(EngineError, match="no vLLM server has taken the weights"):
        engine.update_weights(2)


def test_a_refused_request_is_not_repeated(policy, start):
    engine, first, second = start(policy, 2)
    first.fault = second.fault = refused(400)
    with pytest.raises(EngineError, match="status 400: out of order. The server refuses what the settings ask for"):
        engine.generate(PROMPTS, 1, Sampling(3), KEY)
    assert len(engine.fleet.live) == 2


def test_a_single_server_is_asked_again(policy, start):
    engine, server = start(policy)
    server.fault = refused(500)
    assert engine.generate(PROMPTS, 1, Sampling(3), KEY)
    assert engine.metrics()["vllm/failures"] == 1


def test_requests_are_given_up_when_a_server_always_fails(policy, start):
    engine, server = start(policy)
    server.fault = lambda number, body, answer: b"nonsense"
    with pytest.raises(EngineError, match="given up after 3 attempts|no vLLM server is left"):
        engine.generate(PROMPTS[:1], 1, Sampling(3), KEY)


def test_a_server_is_taken_back_with_the_right_weights_only(policy, start, monkeypatch):
    monkeypatch.setattr(fleet, "RECHECK_SECONDS", 0.0)
    engine, first, _ = start(policy, 2)
    server = engine.fleet.servers[0]
    engine.fleet.leave_out(server, "lost its cable")
    engine.generate(PROMPTS, 1, Sampling(2), KEY)
    assert len(engine.fleet.live) == 2  # it answers again
    engine.fleet.leave_out(server, "lost its cable")
    first.label = "default"  # it was started again
    engine.generate(PROMPTS, 4, Sampling(2), KEY)
    assert "it answers again, with weights 'default'" in engine.fleet.left_out[first.url]
    sent = len(engine.transport.sent)
    engine.update_weights(0)  # the same weights, to the server that has lost them
    assert engine.transport.sent[sent:] == [(engine.fleet.version, [first.url])]
    assert len(engine.fleet.live) == 2


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
    assert len(engine.transport.sent) == 1
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
    one = ["/pause", "/update_weight_version", "/reset_prefix_cache", "/resume"]
    assert paths == one * 2
    assert set(engine.metrics()) == {"seconds/weights", "vllm/servers", "vllm/failures"}
    assert "seconds/weights" not in engine.metrics()


def test_a_server_that_cannot_load_is_left_out(policy, start):
    engine, first, _ = start(policy, 2, version=None)
    engine.transport.failing[first.url] = EngineError("no space left")
    engine.update_weights(0)
    assert engine.fleet.left_out == {first.url: "no space left"}
    del engine.transport.failing[first.url]
    engine.update_weights(1)
    assert engine.fleet.left_out == {}


def test_the_probe_sees_each_loaded_server(policy, start):
    engine, first, second = start(policy, 2, version=None)
    probed = []

    def probe(server):
        probed.append(server.url)
        return {"vllm/probe_gap": 0.5 / len(probed)}

    engine.probe = probe
    engine.update_weights(0)
    assert probed == [first.url, second.url]
    assert engine.metrics()["vllm/probe_gap"] == 0.5


def test_a_server_that_fails_in_the_probe_is_left_out(policy, start):
    engine, first, _ = start(policy, 2, version=None)

    def probe(server):
        if server.url == first.url:
            raise ServerError(first.url, "/probe", "does not answer")
        return {"vllm/probe_gap": 0.25}

    engine.probe = probe
    engine.update_weights(0)
    assert list(engine.fleet.left_out) == [first.url]
    assert engine.metrics()["vllm/probe_gap"] == 0.25


def test_requests_wait_while_no_server_answers(policy, start, monkeypatch):
    """All servers are gone for a moment: the wait doubles, and they are asked again."""
    monkeypatch.setattr(vllm, "BACKOFF_SECONDS", 0.2)
    engine, _ = start(policy)
    expected = engine.generate(PROMPTS, 2, Sampling(6), KEY)
    checks = []
    recheck = engine.fleet.recheck

    def late(now=False):
        if now:
            checks.append(time.monotonic())
        if not now or len(checks) > 2:
            recheck(now=now)

    engine.fleet.recheck = late
    engine.fleet.fail(engine.fleet.servers[0], "a hiccup")
    assert engine.generate(PROMPTS[:1], 1, Sampling(6), KEY) == [
        replace(expected[0], completions=expected[0].completions[:1])
    ]
    assert len(checks) == 3


def test_weights_are_those_that_are_saved(tmp_path):
    config = {"num_local_experts": 2, "num_experts_per_tok": 1} | tiny_llama().config.to_dict()
    config = {key: value for key, value in config.items() if key not in ("architectures", "model_type", "rope_scaling")}
    for model in (tiny_llama(tie_word_embeddings=True), MixtralForCausalLM(MixtralConfig(**config))):
        model.save_pretrained(tmp_path)
        saved = load_file(tmp_path / "model.safetensors")
        sent = dict(named_weights(Policy(model, Precision(torch.float32, torch.float32))))
        assert sent.keys() == saved.keys()
        assert all(torch.equal(sent[name], saved[name]) for name in saved)
