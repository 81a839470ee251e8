"""Weights on their way to servers."""

from __future__ import annotations

import re
import threading
import time

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from cohort.config import ServerConfig
from cohort.errors import ConfigError, EngineError
from cohort.rollout.served import weights as ways
from cohort.rollout.served.vllm import VLLMServer
from cohort.rollout.served.weights import FolderSender, GroupSender, sender_of

from .stand_in import RefusedError, StandIn


def make_model(seed):
    torch.manual_seed(seed)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=34, num_key_value_heads=1, tie_word_embeddings=True, **shape))


@pytest.fixture
def weights():
    return {name: tensor for name, tensor in make_model(1).state_dict().items() if name != "lm_head.weight"}


@pytest.fixture
def stand_ins():
    made = [StandIn(make_model(0)), StandIn(make_model(0))]
    yield made
    for one in made:
        one.die()


@pytest.fixture
def servers(stand_ins):
    return [VLLMServer(one.url) for one in stand_ins]


def check(sender, servers):
    for server in servers:
        sender.check(server, server.describe())


@pytest.fixture(params=["folder", "group"])
def sender(request, tmp_path):
    settings = ServerConfig(transport=request.param, folder=str(tmp_path / "weights"), update_timeout=20.0)
    made = sender_of(settings, torch.device("cpu"))
    yield made
    made.close()


def test_servers_get_the_same_bits(sender, servers, stand_ins, weights, tmp_path):
    check(sender, servers)
    for number in range(2):
        sent = {name: tensor + number for name, tensor in weights.items()}
        assert sender.send(servers, iter(sent.items()), str(number)) == {}
        for stand_in in stand_ins:
            assert stand_in.received.keys() == sent.keys()
            assert all(torch.equal(stand_in.received[name], tensor) for name, tensor in sent.items())
    assert not list(tmp_path.glob("weights/*"))


def test_weights_are_sent_in_the_dtype_of_the_server(sender, servers, stand_ins, weights):
    for stand_in in stand_ins:
        stand_in.described["dtype"] = "torch.bfloat16"
    check(sender, servers)
    assert sender.send(servers, weights.items(), "1") == {}
    name = "model.norm.weight"
    assert torch.equal(stand_ins[1].received[name], weights[name].bfloat16())
    assert {tensor.dtype for tensor in stand_ins[1].received.values()} == {torch.bfloat16}


def test_a_server_that_fails_is_reported_and_the_other_gets_the_weights(sender, servers, stand_ins, weights):
    def refuse():
        raise RefusedError(500, "no weights came for model.norm.weight")

    check(sender, servers)
    stand_ins[0].update_fault = refuse
    start = time.perf_counter()
    failed = sender.send(servers, weights.items(), "1")
    assert time.perf_counter() - start < 10  # and not the time limit
    assert list(failed) == [servers[0]]
    assert "no weights came for model.norm.weight" in str(failed[servers[0]])
    assert stand_ins[1].received.keys() == weights.keys()

    stand_ins[0].update_fault = lambda: None
    assert sender.send(servers, weights.items(), "2") == {}
    assert stand_ins[0].received.keys() == weights.keys()


def test_a_server_that_takes_too_long_is_reported(sender, servers, stand_ins, weights):
    check(sender, servers)
    sender.timeout = 1.0
    released = threading.Event()
    stand_ins[0].update_fault = lambda: released.wait(10)
    failed = sender.send(servers, weights.items(), "1")
    released.set()
    assert list(failed) == [servers[0]]
    assert re.search("within 1 s|did not get there", str(failed[servers[0]]))
    assert stand_ins[1].received.keys() == weights.keys()


def test_a_server_that_is_gone_is_reported(sender, servers, stand_ins, weights):
    check(sender, servers)
    stand_ins[0].die()
    failed = sender.send(servers, weights.items(), "1")
    assert list(failed) == [servers[0]]
    assert stand_ins[1].received.keys() == weights.keys()


def test_a_server_that_was_started_again_joins_again(servers, stand_ins, weights):
    sender = GroupSender(20.0, torch.device("cpu"))
    check(sender, servers)
    assert sender.send(servers, weights.items(), "1") == {}
    stand_ins[0].group = None
    assert sender.send(servers, weights.items(), "2") == {}
    joined = [path for path, _ in stand_ins[0].calls if path == "/init_weight_transfer_engine"]
    assert len(joined) == 2
    assert len([path for path, _ in stand_ins[1].calls if path == "/init_weight_transfer_engine"]) == 1
    sender.close()


def test_a_server_that_cannot_join_says_so_at_once(servers, stand_ins, weights, monkeypatch):
    def refuse(meeting):
        raise RefusedError(500, "cannot reach the trainer")

    stand_ins[0].join = refuse
    sender = GroupSender(3.0, torch.device("cpu"))
    check(sender, servers)
    start = time.perf_counter()
    failed = sender.send(servers, weights.items(), "1")
    assert time.perf_counter() - start < 2.5
    assert "cannot reach the trainer" in str(failed[servers[0]])
    assert list(failed) == [servers[0]]


def test_large_models_are_written_in_several_files(servers, stand_ins, weights, monkeypatch, tmp_path):
    monkeypatch.setattr(ways, "FILE_BYTES", 5000)
    sender = FolderSender(20.0, str(tmp_path))
    check(sender, servers)
    assert sender.send(servers, weights.items(), "1") == {}
    total = sum(tensor.nbytes for tensor in weights.values())
    assert 1 < stand_ins[0].parts <= total // 5000 + 1
    assert stand_ins[0].received.keys() == weights.keys()


def test_files_for_servers_of_several_dtypes_are_refused(servers, stand_ins, weights, tmp_path):
    stand_ins[1].described["dtype"] = "torch.bfloat16"
    sender = FolderSender(20.0, str(tmp_path))
    check(sender, servers)
    with pytest.raises(EngineError, match="different dtypes.*start all with one --dtype"):
        sender.send(servers, weights.items(), "1")


def test_files_need_no_plugin(servers, stand_ins, weights, tmp_path):
    stand_ins[0].config["parallel_config"]["worker_extension_cls"] = ""  # as vLLM says it
    sender = FolderSender(20.0, str(tmp_path))
    check(sender, servers)
    assert sender.send(servers, weights.items(), "1") == {}
    assert [one.received.keys() for one in stand_ins] == [weights.keys()] * 2
    assert stand_ins[0].label == stand_ins[1].label == "1"


def test_a_server_without_the_plugin_is_refused_for_groups(servers, stand_ins):
    stand_ins[1].config["weight_transfer_config"] = None
    with pytest.raises(ConfigError, match=r"cannot join the group.*--worker-extension-cls cohort_vllm.CohortWorker"):
        check(GroupSender(1.0, torch.device("cpu")), servers)


def test_files_for_a_server_on_another_machine_need_a_shared_folder(servers, monkeypatch, tmp_path):
    monkeypatch.setattr(ways, "_is_here", lambda host: False)
    check(sender_of(ServerConfig(), torch.device("cpu"), sends=False), servers)  # rank 0 sends from elsewhere
    with pytest.raises(ConfigError, match=r"another machine.*set server.folder"):
        check(FolderSender(1.0), servers)
    check(FolderSender(1.0, str(tmp_path)), servers)


def test_which_addresses_are_of_this_machine():
    assert ways._is_here("127.0.0.1")
    assert not ways._is_here("192.0.2.1")  # reserved for documentation


def test_a_folder_that_cannot_be_written_is_refused(servers, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"server.folder: cannot write to"):
        check(FolderSender(1.0, str(tmp_path / "file")), servers)


def test_a_full_disk_is_an_error_that_says_what_to_set(servers, weights, tmp_path, monkeypatch):
    def full(tensors, path):
        raise OSError(28, "No space left on device")

    sender = FolderSender(1.0, str(tmp_path))
    check(sender, servers)
    monkeypatch.setattr(ways, "save_file", full)
    with pytest.raises(EngineError, match=r"No space left on device.*set server.folder"):
        sender.send(servers, weights.items(), "1")
    assert not list(tmp_path.iterdir())
