"""The comparison of what samples with the trainer on a fixed text."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cohort.config import ModelConfig
from cohort.errors import PolicyMismatchError
from cohort.policy import load_policy
from cohort.rollout.served.connect import DRAWN_TOKENS, Probe
from cohort.rollout.served.protocol import Description, ServerError
from cohort.rollout.served.vllm import VLLMServer

from .stand_in import StandIn


def make_model(seed):
    torch.manual_seed(seed)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=34, initializer_range=0.3, max_position_embeddings=64, **shape))


@pytest.fixture
def policy():
    model = make_model(0)
    return load_policy(model, ModelConfig(precision="float32"), model.config)


@pytest.fixture
def stand_in(policy):
    one = StandIn(policy.model)
    yield one
    one.die()


@pytest.fixture
def server(stand_in):
    return VLLMServer(stand_in.url)


@pytest.fixture
def probe(policy):
    def probe(server, threshold=None, dtype="float32", context=64):
        return Probe(policy, threshold)(server, server.url, Description("", dtype=dtype, context=context))

    return probe


def test_the_same_weights_have_no_gap(policy, probe, server, stand_in):
    found = probe(server)
    assert found.keys() == {"server/probe_gap", "server/probe_gap_max"}
    assert 0 <= found["server/probe_gap"] <= found["server/probe_gap_max"] < 1e-5  # rounding in float32
    assert len(Probe(policy).token_ids) == 64 - DRAWN_TOKENS  # the model's context
    assert probe(server, context=20)["server/probe_gap_max"] < 1e-5
    assert [len(body["token_ids"]) for body in stand_in.requests()] == [56, 56, 12, 12]


def test_other_weights_stop_the_run_with_the_size_of_the_gap(probe, server, stand_in):
    stand_in.load(make_model(1).state_dict())
    with pytest.raises(PolicyMismatchError, match=rf"{server.url} does not compute the policy.* nats .*limit 0.001"):
        probe(server)


def test_a_stale_prefix_cache_stops_the_run(probe, server, stand_in):
    def stale(number, body, answer):
        if body["sampling_params"]["max_tokens"] == DRAWN_TOKENS:  # prompts that are scored read no cache
            for one in answer["choices"][0]["logprobs"]["content"]:
                one["logprob"] -= 0.5
        return answer

    stand_in.fault = stale
    with pytest.raises(PolicyMismatchError, match="0.5 nats"):
        probe(server)


def test_the_threshold_is_the_setting_or_of_the_coarser_dtype(policy, probe, server, stand_in):
    assert Probe(policy).threshold(torch.float32) == 1e-3
    assert Probe(policy).threshold(torch.bfloat16) == 0.1
    stand_in.load(make_model(1).state_dict())
    assert probe(server, 100.0)["server/probe_gap"] > 0.1
    with pytest.raises(PolicyMismatchError, match="limit 0.01"):
        probe(server, 0.01, "bfloat16")


def test_a_gap_that_is_no_number_stops_the_run(probe, server, stand_in):
    def broken(number, body, answer):
        answer["choices"][0]["logprobs"]["content"][0]["logprob"] = float("nan")
        return answer

    stand_in.fault = broken
    with pytest.raises(PolicyMismatchError, match="nan nats"):
        probe(server)


def test_an_answer_without_scores_is_an_error(probe, server, stand_in):
    stand_in.fault = lambda number, body, answer: {"choices": answer["choices"]}
    with pytest.raises(ServerError, match="unexpected answer"):
        probe(server)
