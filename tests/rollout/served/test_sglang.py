"""SGLang servers, over a stand-in with the wire of 0.5.23. Log-probs are compared with the model's own."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from cohort import GRPOConfig
from cohort.errors import ConfigError
from cohort.rollout.served import sglang
from cohort.rollout.served.connect import Probe, check_servers, servers_of
from cohort.rollout.served.protocol import Draw, ServerError, WrongWeightsError
from cohort.rollout.served.sglang import SGLangServer
from cohort.rollout.served.weights import FolderSender, GroupSender
from cohort.rollout.settings import Sampling
from cohort.types import FinishReason
from tests.conftest import tiny_llama
from tests.train.harness import make_trainer, metrics_of

from .stand_in import RefusedError, slow
from .stand_in_sglang import SGLangStandIn

VOCABULARY = 37
TOLERANCE = 2e-5
"""The same float32 logits, with another length of the text in one forward pass."""


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


class Letters:
    """Token n is the n-th character from "A"."""

    def decode(self, tokens):
        return "".join(chr(65 + token) for token in tokens)


@pytest.fixture
def stand_in(model):
    made = SGLangStandIn(model, Letters())
    yield made
    made.die()


@pytest.fixture
def server(stand_in):
    made = SGLangServer(stand_in.url)
    made.describe()
    return made


def draw_of(ends=(), most=12, least=0, seed=3, **sampling):
    return Draw([1, 2, 3], Sampling(64, **sampling), seed, most, least, tuple(ends), VOCABULARY)


def drawn(server, draw, version="default"):
    return server.generate(draw, version, 20.0)


@torch.no_grad()
def logits_of(model, draw, tokens):
    """The logits before each token of a turn."""
    ids = torch.tensor([[*draw.token_ids, *tokens]])
    return model(ids).logits[0, len(draw.token_ids) - 1 : -1].double()


def close(logps, expected):
    assert torch.allclose(torch.tensor(logps, dtype=torch.float64), expected.double(), rtol=0, atol=TOLERANCE)


def of(logps, tokens):
    return logps[torch.arange(len(tokens)), torch.tensor(tokens)]


def settings(stand_in, rollout=None, **server):
    given = {"kind": "sglang", "url": (stand_in.url,), "startup_timeout": 0.2} | server
    return GRPOConfig(rollout={"engine": "server"} | (rollout or {}), server=given)


def check(stand_in, vocabulary=VOCABULARY, longest=20, **rollout):
    config = settings(stand_in, rollout)
    return next(iter(check_servers(servers_of(config.server), config, vocabulary, longest).values()))


# ---------------------------------------- turns


def test_log_probs_are_of_the_temperature_that_was_drawn_at(server, model):
    draw = draw_of(temperature=0.7)
    turn = drawn(server, draw)
    assert (len(turn.token_ids), turn.finish_reason, turn.supports) == (12, FinishReason.LENGTH, None)
    close(turn.logps, of((logits_of(model, draw, turn.token_ids) / 0.7).log_softmax(-1), turn.token_ids))


def test_an_end_token_ends_a_turn_and_is_part_of_it(server, stand_in):
    free = drawn(server, draw_of())
    end = free.token_ids[4]
    turn = drawn(server, draw_of([end]))
    first = free.token_ids.index(end)
    assert (turn.token_ids, turn.finish_reason) == (free.token_ids[: first + 1], FinishReason.EOS)
    assert stand_in.requests()[-1]["sampling_params"]["ignore_eos"] is False


def test_an_end_token_of_the_server_alone_is_an_error(server, stand_in):
    other = drawn(server, draw_of()).token_ids[4]
    stand_in.eos = {other}
    assert drawn(server, draw_of()).finish_reason is FinishReason.LENGTH  # no end token: none counts
    with pytest.raises(ServerError, match=f"stopped after token {other}, which is no end token"):
        drawn(server, draw_of([(other + 1) % VOCABULARY], seed=3))


def test_a_stop_string_ends_a_turn(server):
    text = Letters().decode(free := drawn(server, draw_of()).token_ids)
    turn = drawn(server, draw_of(stop=(text[5:7],)))
    length = text.index(text[5:7]) + 2
    assert (turn.token_ids, turn.finish_reason) == (free[:length], FinishReason.STOP)


def test_no_end_token_is_drawn_before_the_minimum_length(server, model):
    ends = tuple(range(0, VOCABULARY, 2))
    draw = draw_of(ends, least=5, min_completion_length=5)
    turn = drawn(server, draw)
    assert len(turn.token_ids) > 5
    assert not set(turn.token_ids[:5]) & set(ends)
    logits = logits_of(model, draw, turn.token_ids)
    logits[:5, list(ends)] = -torch.inf
    close(turn.logps, of(logits.log_softmax(-1), turn.token_ids))
    assert [(kept.tolist(), excluded) for kept, excluded in turn.supports[4:6]] == [(list(ends), True), ([], True)]


def test_greedy_draws_have_the_log_probs_of_the_full_softmax(server, model):
    draw = draw_of(temperature=0.0)
    turn = drawn(server, draw)
    logits = logits_of(model, draw, turn.token_ids)
    assert turn.token_ids == logits.argmax(-1).tolist()
    close(turn.logps, of(logits.log_softmax(-1), turn.token_ids))
    assert [kept.tolist() for kept, _ in turn.supports] == [[token] for token in turn.token_ids]


def kept_ids(support):
    ids, excluded = support
    return set(range(VOCABULARY)) - set(ids.tolist()) if excluded else set(ids.tolist())


@pytest.mark.parametrize(
    "sampling", [{"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.2}, {"top_k": 9, "top_p": 0.9, "temperature": 0.6}]
)
def test_supports_and_log_probs_of_draws_that_leave_tokens_out(server, model, sampling):
    draw = draw_of(**sampling)
    turn = drawn(server, draw)
    logits = logits_of(model, draw, turn.token_ids) / sampling.get("temperature", 1.0)
    for n, (row, support) in enumerate(zip(logits, turn.supports, strict=True)):
        values, order = row.sort(descending=True)
        left = values.softmax(-1)
        most = sampling.get("top_k", VOCABULARY)
        p = values[:most].softmax(-1)
        enough = (p.cumsum(-1) - p) < sampling.get("top_p", 1.0)
        likely = left[:most] >= sampling.get("min_p", 0.0) * left[0]
        assert kept_ids(support) == set(order[:most][enough & likely].tolist())
        among = row[sorted(kept_ids(support))].logsumexp(-1)
        assert abs(turn.logps[n] - float(row[turn.token_ids[n]] - among)) < TOLERANCE
    assert min(len(kept_ids(one)) for one in turn.supports) < VOCABULARY


def test_log_probs_of_a_truncated_draw_without_supports_are_renormalised_too(server):
    replayed = drawn(server, draw_of(top_p=0.8))
    turn = drawn(server, draw_of(top_p=0.8, record_support=False))
    assert (turn.token_ids, turn.logps, turn.supports) == (replayed.token_ids, replayed.logps, None)


def test_what_it_cannot_draw_exactly_is_refused(server, stand_in):
    stand_in.info["sampling_mask_max_tokens"] = 20
    server.describe()
    before = len(stand_in.requests())
    with pytest.raises(ServerError, match="at most 20 tokens .* start it with --sampling-mask-max-tokens 37") as error:
        drawn(server, draw_of(top_p=0.9))
    assert not error.value.is_failure
    with pytest.raises(ServerError, match="repetition_penalty: SGLang does not count the prompt's tokens"):
        drawn(server, draw_of(repetition_penalty=1.2))
    assert len(stand_in.requests()) == before
    assert drawn(server, draw_of(top_p=0.9, top_k=20)).supports


# ---------------------------------------- errors


def changed(change):
    def fault(number, body, answer):
        change(answer)
        return answer

    return fault


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda answer: answer.pop("meta_info"), "unexpected answer"),
        (lambda answer: answer["meta_info"].pop("output_token_logprobs"), "unexpected answer"),
        (lambda answer: answer["meta_info"]["output_token_sampling_logprobs"].pop(), "11 log-probs of 12 tokens"),
        (lambda answer: answer["meta_info"]["output_token_sampling_mask"].pop(), "for 11 of 12"),
        (lambda answer: answer["meta_info"].update(output_token_sampling_mask=None), "for 0 of 12"),
        (lambda answer: answer["output_ids"].pop(), "of other tokens"),
        (lambda answer: answer["meta_info"]["output_token_logprobs"].append([]), "12 log-probs of 13"),
        (lambda answer: answer["meta_info"].update(finish_reason={"type": "abort", "message": "a"}), "with 'abort'"),
        (lambda answer: answer["meta_info"].update(weight_versions=None), "unexpected answer"),
    ],
)
def test_answers_that_are_not_whole(server, stand_in, change, problem):
    stand_in.fault = changed(change)
    with pytest.raises(ServerError, match=problem) as error:
        drawn(server, draw_of(top_k=5))
    assert error.value.is_failure


def test_errors_of_requests(server, stand_in):
    stand_in.fault = lambda *_: b"<html>"
    with pytest.raises(ServerError, match="not JSON"):
        drawn(server, draw_of())

    def refuse(status):
        def fault(*_):
            raise RefusedError(status, "no room")

        return fault

    for status in (400, 500, 503):
        stand_in.fault = refuse(status)
        with pytest.raises(ServerError, match=f"/generate: status {status}: no room") as error:
            drawn(server, draw_of())
        assert error.value.is_failure is (status >= 500)
    stand_in.missing = {"/generate"}
    with pytest.raises(ServerError, match="status 404"):
        drawn(server, draw_of())


def test_a_turn_of_other_weights_is_refused(server, stand_in):
    with pytest.raises(WrongWeightsError, match="it sampled with weights 'default', expected 'run-1'"):
        drawn(server, draw_of(), "run-1")
    spans = [{"version": "old", "start": 0, "end": 3}, {"version": "default", "start": 3, "end": 12}]
    stand_in.fault = changed(lambda answer: answer["meta_info"].update(weight_versions=spans))
    with pytest.raises(WrongWeightsError, match="'default', 'old'"):
        drawn(server, draw_of())


def test_a_log_prob_that_is_not_a_number_ends_the_completion_there(server, stand_in):
    stand_in.fault = changed(lambda answer: answer["meta_info"]["output_token_logprobs"][3].__setitem__(0, None))
    turn = drawn(server, draw_of())
    assert (len(turn.token_ids), turn.finish_reason) == (3, FinishReason.ERROR)


def test_disconnect_ends_requests_under_way(server, stand_in):
    stand_in.fault = slow(5.0)
    errors = []

    def ask():
        try:
            drawn(server, draw_of())
        except ServerError as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    while not stand_in.requests():
        time.sleep(0.01)
    time.sleep(0.1)
    server.disconnect()
    thread.join(3.0)
    assert not thread.is_alive()
    assert errors


# ---------------------------------------- what it says of itself


def test_a_server_that_can_be_used(stand_in):
    stand_in.paused = stand_in.session = True  # by a run that was killed
    found = check(stand_in)
    assert not stand_in.paused
    assert (found.weights, found.dtype, found.device, found.workers, found.context) == (
        *("default", "float32", "cpu"),
        *(1, 122),
    )
    assert (found.masks, found.can_sleep, found.can_broadcast, found.has_tokenizer) == (True, True, True, True)
    assert (found.adapters, found.routes) == (0, False)


def test_a_server_that_a_killed_run_left_asleep_is_not_touched_before_its_weights(stand_in, server):
    server.sleep()
    stand_in.calls.clear()
    assert check(stand_in).weights == sglang.ASLEEP
    assert not stand_in.calls


@pytest.mark.parametrize(
    ("info", "rollout", "problem"),
    [
        ({"version": "0.5.9"}, {}, "runs SGLang 0.5.9: 0.5.23 or newer"),
        ({"dtype": "auto"}, {}, "start it with --dtype bfloat16"),
        ({"quantization": "fp8"}, {}, "quantizes the weights"),
        ({"enable_memory_saver": False}, {"sleep": True}, "cannot sleep: start it with --enable-memory-saver"),
        ({"max_req_input_len": 19}, {}, "--context-length 20"),
        ({"skip_tokenizer_init": True}, {"stop": ("x",)}, "has no tokenizer"),
        ({"sampling_mask_max_tokens": 36}, {"top_p": 0.9}, "--sampling-mask-max-tokens 37"),
        ({}, {"repetition_penalty": 1.1}, "does not count the prompt's tokens"),
        ({}, {"stop": ("x",), "min_completion_length": 4}, "before rollout.min_completion_length"),
        ({}, {"replay_routing": True}, "does not return the experts of each token: use vLLM"),
    ],
)
def test_what_does_not_suit_the_settings_is_refused_at_the_start(stand_in, info, rollout, problem):
    stand_in.info |= info
    with pytest.raises(ConfigError, match=problem):
        check(stand_in, **rollout)


def test_another_vocabulary_or_distribution_is_refused(stand_in):
    with pytest.raises(ConfigError, match="a model with 37 tokens, and the policy has 38"):
        check(stand_in, vocabulary=38)
    stand_in.original_logprobs = True
    with pytest.raises(ConfigError, match="start it without SGLANG_RETURN_ORIGINAL_LOGPROB"):
        check(stand_in)


def test_a_server_of_an_unknown_kind(stand_in, server):
    stand_in.info.pop("tp_size")
    with pytest.raises(ServerError, match="it describes itself in an unknown way"):
        server.describe()


def test_score_is_the_models_log_probs(server, stand_in, model, float32_policy):
    text = [1, 5, 9, 2, 30]
    logps, tokens, continued = server.score(text, 4)
    with torch.no_grad():
        own = model(torch.tensor([text + tokens])).logits[0].double().log_softmax(-1)
    close(logps, of(own[: len(text) - 1], text[1:]))
    close(continued, of(own[len(text) - 1 : -1], tokens))
    first, second = stand_in.requests()[-2:]
    assert (first["logprob_start_len"], second["logprob_start_len"]) == (0, -1)  # -1: the cached prefix is read
    gap = Probe(float32_policy)(server, stand_in.url, server.describe())["server/probe_gap"]
    assert gap < TOLERANCE


# ---------------------------------------- weights


@pytest.fixture
def weights():
    return {name: tensor + 0.125 for name, tensor in tiny_llama().state_dict().items()}


@pytest.fixture(params=["folder", "group"])
def sender(request, tmp_path):
    made = GroupSender(20.0, torch.device("cpu")) if request.param == "group" else FolderSender(20.0, str(tmp_path))
    yield made
    made.close()


def paths(stand_in):
    return [path for path, _ in stand_in.calls]


def test_weights_get_there_bit_by_bit(server, stand_in, weights, sender):
    sender.check(server, server.describe())
    for version in ("1", "2"):
        sent = {name: tensor + float(version) for name, tensor in weights.items()}
        assert sender.send([server], sent.items(), version) == {}
        assert all(torch.equal(stand_in.received[name], tensor) for name, tensor in sent.items())
        assert (stand_in.label, stand_in.paused, stand_in.session) == (version, False, False)
    assert stand_in.flushed == 2
    assert paths(stand_in).count("/init_weights_update_group") == isinstance(sender, GroupSender)
    assert drawn(server, draw_of(), "2").token_ids


def test_a_server_that_sleeps_wakes_with_the_next_weights(server, stand_in, weights, sender):
    sender.check(server, server.describe())
    server.sleep()
    server.sleep()
    assert not stand_in.awake
    restarted = SGLangServer(stand_in.url)  # of a run that goes on after this one
    sender.check(restarted, restarted.describe())
    stand_in.calls.clear()
    assert sender.send([restarted], weights.items(), "1") == {}
    assert stand_in.awake == {"weights", "kv_cache", "cuda_graph"}
    loaded = max(n for n, path in enumerate(paths(stand_in)) if path.startswith("/update_weights"))
    woken = [body["tags"] for path, body in stand_in.calls[:loaded] if path == "/resume_memory_occupation"]
    assert woken == [["weights"]]  # the cache takes its memory when the weights are there
    assert drawn(restarted, draw_of(), "1").token_ids


def test_large_weights_are_received_in_parts(server, stand_in, weights, monkeypatch):
    monkeypatch.setattr(sglang, "PART", 2000)
    sender = GroupSender(20.0, torch.device("cpu"))
    sender.check(server, server.describe())
    assert sender.send([server], weights.items(), "1") == {}
    assert len(stand_in.receives) > 1
    assert [name for names in stand_in.receives for name in names] == list(weights)
    assert all(torch.equal(stand_in.received[name], tensor) for name, tensor in weights.items())
    sender.close()
    assert paths(stand_in)[-1] == "/destroy_weights_update_group"


def test_an_update_that_fails_is_reported_and_the_next_one_succeeds(server, stand_in, weights, sender):
    def refuse():
        raise RefusedError(400, "Failed to update weights: no such tensor")

    sender.check(server, server.describe())
    stand_in.update_fault = refuse
    start = time.perf_counter()
    failed = sender.send([server], weights.items(), "1")
    assert time.perf_counter() - start < 10  # and not the time limit
    assert "no such tensor" in str(failed[server])
    assert stand_in.label == "default"
    stand_in.update_fault = lambda: None
    assert sender.send([server], weights.items(), "2") == {}
    assert torch.equal(stand_in.received["model.norm.weight"], weights["model.norm.weight"])


def test_a_server_that_was_started_again_joins_again(server, stand_in, weights):
    sender = GroupSender(20.0, torch.device("cpu"))
    sender.check(server, server.describe())
    assert sender.send([server], weights.items(), "1") == {}
    stand_in.groups.clear()
    stand_in.session = False
    assert sender.send([server], weights.items(), "2") == {}
    assert paths(stand_in).count("/init_weights_update_group") == 2
    sender.close()


def test_a_server_that_cannot_join_says_so_at_once(server, stand_in, weights):
    def refuse():
        raise RefusedError(400, "Failed to initialize custom process group: no route")

    stand_in.update_fault_on_join = refuse
    sender = GroupSender(3.0, torch.device("cpu"))
    sender.check(server, server.describe())
    start = time.perf_counter()
    failed = sender.send([server], weights.items(), "1")
    assert time.perf_counter() - start < 2.5
    assert "Failed to initialize custom process group" in str(failed[server])


@pytest.mark.parametrize("change", [{"dp_size": 2}, {"pp_size": 2}])
def test_broadcasts_to_several_replicas_are_refused(server, stand_in, change):
    stand_in.info |= change
    with pytest.raises(ConfigError, match="--dp-size 1 --pp-size 1"):
        GroupSender(3.0, torch.device("cpu")).check(server, server.describe())


def test_a_server_with_another_label_after_an_update_is_reported(server, stand_in, weights, sender):
    stand_in.update_weight_version = lambda new_version: None
    sender.check(server, server.describe())
    failed = sender.send([server], weights.items(), "1")
    assert "it reports weights 'default', not '1'" in str(failed[server])


@pytest.mark.parametrize("transport", ["folder", "group"])
def test_a_run_trains_the_policy_that_the_server_samples_from(demo_tokenizer, tmp_path, transport):
    stand_in = SGLangStandIn(tiny_llama(len(demo_tokenizer), initializer_range=0.1), demo_tokenizer)
    sizes = {"max_steps": 2, "prompts_per_step": 2, "max_completion_length": 6, "top_p": 0.9, "sleep": True}
    served = {"engine": "server", "kind": "sglang", "url": (stand_in.url,), "transport": transport}
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", **served, **sizes)
    trainer.train()
    lines = [line for line in metrics_of(tmp_path / "run") if line["step"]]
    assert len(lines) == 2
    assert all(line["server/probe_gap"] < TOLERANCE for line in lines)
    assert paths(stand_in).count("/release_memory_occupation") >= 2
    assert all(body.get("return_sampling_mask") in (True, None) for body in stand_in.requests())
    stand_in.die()
