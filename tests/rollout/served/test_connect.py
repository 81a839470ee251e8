"""Servers that cannot be used are refused before a model is loaded, with what to do."""

import socket

import pytest

from cohort import GRPOConfig
from cohort.config import ServerConfig
from cohort.errors import ConfigError, EngineError
from cohort.rollout.served.connect import check_servers, servers_of
from cohort.rollout.served.protocol import ServerError
from cohort.rollout.served.vllm import VLLMServer
from tests.conftest import each, tiny_llama
from tests.rollout.served.stand_in import RefusedError, StandIn

VOCABULARY = 37


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


@pytest.fixture
def stand_in(model):
    server = StandIn(model)
    yield server
    server.die()


def settings(*servers, rollout=None, **changes):
    url = tuple(getattr(one, "url", one) for one in servers)
    server = {"url": url, "startup_timeout": 0.2} | changes
    return GRPOConfig(rollout={"engine": "server"} | (rollout or {}), server=server)


def check(stand_in, longest=20, vocabulary=VOCABULARY, announce=None, **changes):
    config = stand_in if isinstance(stand_in, GRPOConfig) else settings(stand_in, **changes)
    return list(check_servers(servers_of(config.server), config, vocabulary, longest, announce).values())


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def test_a_server_that_can_be_used(stand_in):
    (found,) = check(stand_in)
    assert (found.weights, found.context, found.dtype, found.device, found.workers) == (
        *("default", 128, "float32", "cpu"),
        1,
    )
    assert (found.masks, found.candidates, found.adapters, found.can_sleep, found.can_broadcast) == (
        *(False, 20, 0),
        *(True, True),
    )
    stand_in.paused = True  # by a run that was killed
    assert check(stand_in) == [found]
    assert not stand_in.paused


WRONG = {
    "too old": ({"version": "0.19.1"}, r"runs vLLM 0\.19\.1: 0\.32 or newer"),
    "no weight routes": ({"missing": {"/weight_info"}}, "VLLM_SERVER_DEV_MODE=1"),
    "no token route": ({"missing": {"/inference/v1/generate"}}, "--enable-scale-out"),
    "too short": (
        {"described": {"max_model_len": 19}},
        "at most 19 tokens.*has 20: start it with VLLM_SERVER_DEV_MODE=1 vllm serve MODEL .*--max-model-len 20",
    ),
    "quantized": ({"described": {"quantization": "fp8"}}, r"quantizes the weights \(fp8\)"),
    "raw log-probs": ({"raw_logprobs": True}, "--logprobs-mode processed_logprobs"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_server_that_is_set_up_wrongly(stand_in, name):
    attributes, message = WRONG[name]
    for attribute, value in attributes.items():
        stand_in.described.update(value) if attribute == "described" else setattr(stand_in, attribute, value)
    with pytest.raises(ConfigError, match=message) as error:
        check(stand_in)
    assert stand_in.url in str(error.value)


def test_a_server_of_another_model(stand_in):
    with pytest.raises(ConfigError, match="serves a model with 37 tokens, and the policy has 40"):
        check(stand_in, vocabulary=40)


def test_a_server_whose_draws_are_selected_needs_no_other_requests(stand_in):
    """vLLM refuses requests without a ``top_k`` where masks come back."""
    stand_in.described["return_sampling_mask"] = True
    (found,) = check(stand_in, rollout={"top_p": 0.9})
    assert found.masks


def test_settings_that_a_server_cannot_serve(stand_in):
    with pytest.raises(ConfigError, match="at most 20 log-probs for a draw, and 37 show .* --max-logprobs 37"):
        check(stand_in, rollout={"top_p": 0.9})
    with pytest.raises(ConfigError, match=r"does not return the experts .* --enable-return-routed-experts"):
        check(stand_in, rollout={"replay_routing": True})
    stand_in.described |= {"enable_sleep_mode": False, "skip_tokenizer_init": True}
    with pytest.raises(ConfigError, match=r"rollout.sleep: .* cannot sleep: start it with --enable-sleep-mode"):
        check(stand_in, rollout={"sleep": True})
    with pytest.raises(ConfigError, match="has no tokenizer to look for stop strings with"):
        check(stand_in, rollout={"stop": ["="]})


def test_a_large_vocabulary_without_masks_is_refused(stand_in, monkeypatch):
    """All log-probs of each draw would be too much to send."""
    monkeypatch.setattr("cohort.rollout.served.protocol.SMALL_VOCABULARY", VOCABULARY - 1)
    for selection in ({"top_p": 0.9}, {"min_p": 0.1}):
        with pytest.raises(
            ConfigError, match="does not return .* start it with --return-sampling-mask; or set"
        ) as error:
            check(stand_in, rollout=selection)
        assert stand_in.url in str(error.value)
        assert check(stand_in, rollout={"top_k": 12, **selection})  # 12 and 8 ties: as many as it returns
        with pytest.raises(ConfigError, match="at most 20 log-probs for a draw, and 21 show .* or lower rollout.top_k"):
            check(stand_in, rollout={"top_k": 13, **selection})
    stand_in.described["return_sampling_mask"] = True
    assert check(stand_in, rollout={"top_p": 0.9})


def test_versions_built_from_source_are_taken(stand_in):
    stand_in.version = "0.1.dev12+gabc"
    assert check(stand_in)


@pytest.mark.parametrize("path", ["/version", "/is_paused"])
def test_something_that_is_not_vllm(stand_in, path):
    stand_in.missing = {path}
    with pytest.raises(EngineError, match="A server is expected that was started with: VLLM_SERVER_DEV_MODE=1"):
        check(stand_in)


def test_no_server(stand_in):
    config, told = settings(stand_in, f"http://127.0.0.1:{free_port()}"), []
    with pytest.raises(EngineError, match=r"no server at .* within 0.2 s \(Connection refused\)"):
        check(config, announce=told.append)
    assert len(told) == 1
    assert "waiting for the server" in told[0]


def test_a_server_that_comes_up_late(model):
    port = free_port()
    config = settings(f"http://127.0.0.1:{port}", startup_timeout=30)
    started = []
    try:
        assert check(config, announce=lambda _: started.append(StandIn(model, port=port)))
    finally:
        started[0].die()


ADDRESSES = {
    "public": ("http://8.8.8.8:8000", r"is a public address \(8.8.8.8\).*ssh -L"),
    "public, version 6": ("http://[2001:4860:4860::8888]:8000", "is a public address"),
    "unknown": ("http://no-such-host.invalid:8000", "'no-such-host.invalid' is unknown"),
    "https": ("https://127.0.0.1:8000", "expected an address such as"),
    "with a path": ("http://127.0.0.1:8000/v1", "expected an address such as"),
    "no port": ("http://127.0.0.1:x", "expected an address such as"),
}


@each("name", ADDRESSES)
def test_addresses_that_are_refused(name):
    address, message = ADDRESSES[name]
    with pytest.raises(ConfigError, match=message):
        servers_of(settings(address).server)


def test_private_addresses():
    urls = ["http://127.0.0.1:8000", "10.1.2.3:8000", "http://192.168.0.9", "http://[::1]:8000", "http://100.64.0.1:1"]
    expected = ["http://127.0.0.1:8000", "http://10.1.2.3:8000", "http://192.168.0.9:80", "http://[::1]:8000"]
    assert [server.url for server in servers_of(settings(*urls).server)][:4] == expected
    assert settings().server.url == ()
    assert ServerConfig(url="http://127.0.0.1:1").url == ("http://127.0.0.1:1",)
    with pytest.raises(ConfigError, match="set server.url"):
        servers_of(settings().server)
    with pytest.raises(ConfigError, match="twice"):
        servers_of(settings("http://127.0.0.1:8000", "127.0.0.1:8000").server)


def test_what_a_server_answers_is_in_the_error(stand_in):
    server = VLLMServer(stand_in.url)

    def teapot(*_):
        raise RefusedError(418, "short and stout")

    stand_in.fault = teapot
    body = {"token_ids": [3], "sampling_params": {"seed": 0, "max_tokens": 1, "temperature": 1.0}}
    with pytest.raises(ServerError, match=f"{server.url}/inference/v1/generate: status 418: short and stout") as error:
        server.post("/inference/v1/generate", body)
    assert not error.value.is_failure
    stand_in.fault = lambda *_: b"<html>"
    with pytest.raises(ServerError, match="the answer is not JSON: b'<html>'") as error:
        server.post("/inference/v1/generate", body)
    assert error.value.is_failure
