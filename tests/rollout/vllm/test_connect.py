"""Servers that cannot be used are refused before a model is loaded, with what to do."""

import socket

import pytest

from cohort.config import VLLMConfig
from cohort.errors import ConfigError, EngineError
from cohort.rollout.vllm.connect import check_servers, servers_of
from cohort.rollout.vllm.server import Server, ServerError
from tests.conftest import each, tiny_llama
from tests.rollout.vllm.stand_in import RefusedError, StandIn

VOCABULARY = 37


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


@pytest.fixture
def stand_in(model):
    server = StandIn(model)
    yield server
    server.die()


def settings(*servers, **changes):
    return VLLMConfig(url=tuple(getattr(one, "url", one) for one in servers), **{"startup_timeout": 0.2} | changes)


def check(stand_in, longest=20, **changes):
    config = settings(stand_in, **changes)
    return check_servers(servers_of(config), config, VOCABULARY, longest)


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def test_a_server_that_can_be_used(stand_in):
    assert check(stand_in) == 128
    stand_in.paused = True  # by a run that was killed
    assert check(stand_in) == 128
    assert not stand_in.paused


WRONG = {
    "too old": ({"version": "0.19.1"}, r"runs vLLM 0\.19\.1: 0\.32 or newer"),
    "no weight routes": ({"missing": {"/weight_info"}}, "VLLM_SERVER_DEV_MODE=1"),
    "no token route": ({"missing": {"/inference/v1/generate"}}, "--enable-scale-out"),
    "too short": ({"max_model_len": 19}, "at most 19 tokens.*has 20: start it with --max-model-len 20"),
    "raw log-probs": ({"raw_logprobs": True}, "--logprobs-mode processed_logprobs"),
    "no versions": (
        {"fault": lambda n, b, a: {"choices": [a["choices"][0] | {"weight_versions": None}]}},
        "does not say which weights",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_server_that_is_set_up_wrongly(stand_in, name):
    attributes, message = WRONG[name]
    for attribute, value in attributes.items():
        setattr(stand_in, attribute, value)
    with pytest.raises(ConfigError, match=message) as error:
        check(stand_in)
    assert stand_in.url in str(error.value)


def test_a_server_of_another_model(stand_in):
    config = settings(stand_in)
    with pytest.raises(ConfigError, match="serves a model with 37 tokens, and the policy has 40"):
        check_servers(servers_of(config), config, 40, 20)


def test_versions_built_from_source_are_taken(stand_in):
    stand_in.version = "0.1.dev12+gabc"
    assert check(stand_in)


@pytest.mark.parametrize("path", ["/version", "/v1/models", "/is_paused"])
def test_something_that_is_not_vllm(stand_in, path):
    stand_in.missing = {path}
    with pytest.raises(EngineError, match="A server is expected that was started with: VLLM_SERVER_DEV_MODE=1"):
        check(stand_in)


def test_no_server(stand_in):
    config, told = settings(stand_in, f"http://127.0.0.1:{free_port()}"), []
    with pytest.raises(EngineError, match=r"no vLLM server at .* within 0.2 s \(Connection refused\)"):
        check_servers(servers_of(config), config, VOCABULARY, 20, told.append)
    assert len(told) == 1
    assert "waiting for the vLLM server" in told[0]


def test_a_server_that_comes_up_late(model):
    port = free_port()
    config = settings(f"http://127.0.0.1:{port}", startup_timeout=30)
    started = []
    try:
        assert check_servers(
            servers_of(config), config, VOCABULARY, 20, lambda _: started.append(StandIn(model, port=port))
        )
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
        servers_of(settings(address))


def test_private_addresses():
    urls = ["http://127.0.0.1:8000", "10.1.2.3:8000", "http://192.168.0.9", "http://[::1]:8000", "http://100.64.0.1:1"]
    expected = ["http://127.0.0.1:8000", "http://10.1.2.3:8000", "http://192.168.0.9:80", "http://[::1]:8000"]
    assert [server.url for server in servers_of(settings(*urls))][:4] == expected
    assert settings().url == ()
    assert VLLMConfig(url="http://127.0.0.1:1").url == ("http://127.0.0.1:1",)
    with pytest.raises(ConfigError, match="set vllm.url"):
        servers_of(settings())
    with pytest.raises(ConfigError, match="twice"):
        servers_of(settings("http://127.0.0.1:8000", "127.0.0.1:8000"))


def test_what_a_server_answers_is_in_the_error(stand_in):
    server = Server(stand_in.url)

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
