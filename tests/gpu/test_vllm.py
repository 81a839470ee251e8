"""A vLLM server on the trainer's own GPU. ``COHORT_VLLM_PYTHON`` names the interpreter of an environment with vLLM."""

import time

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from cohort.config import ModelConfig, VLLMConfig
from cohort.policy import load_policy, named_weights
from cohort.rollout import VLLMEngine
from cohort.rollout.vllm.connect import ServerProbe
from cohort.rollout.vllm.own_server import OwnServer
from cohort.rollout.vllm.plugin import describe_server
from cohort.rollout.vllm.transports import transport_of
from tests.rollout.test_local_engine import LetterTokenizer
from tests.rollout.vllm.test_real import PYTHON

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not PYTHON.exists(), reason="no environment with vLLM: set COHORT_VLLM_PYTHON"),
]

LARGE = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16}
SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}


@pytest.fixture
def start(tmp_path):
    """Makes a policy, a server of its model that can sleep, and an engine."""
    made = []

    def start(shape):
        torch.manual_seed(0)
        heads = {"num_key_value_heads": shape["num_attention_heads"] // 2, "head_dim": 128}
        config = Qwen3Config(
            vocab_size=151936, **shape, **heads, tie_word_embeddings=True, max_position_embeddings=1024
        )
        model = Qwen3ForCausalLM(config).bfloat16()
        model.save_pretrained(tmp_path)
        policy = load_policy(model, ModelConfig(precision="bfloat16", device="cuda"), config)
        arguments = ("--max-model-len", "1024", "--gpu-memory-utilization", "0.3", "--skip-tokenizer-init")
        settings = VLLMConfig(start=True, python=str(PYTHON), arguments=arguments, sleep=True)
        own = OwnServer(settings, str(tmp_path), dtype="bfloat16")
        made.append(own)
        own.wait(600)
        transport = transport_of(settings, policy.device)
        dtypes = {server: found.dtype for server, found in transport.check([own.server]).items()}
        probe = ServerProbe(policy, None, dtypes)
        engine = VLLMEngine(policy, LetterTokenizer(), (1,), [own.server], transport, probe=probe, sleeps=True)
        made.append(engine)
        return policy, own.server, engine

    yield start
    for one in reversed(made):
        one.close()


def test_a_tied_model_in_bfloat16_agrees_before_and_after_updates(start):
    policy, server, engine = start(SMALL)
    assert describe_server(server).device == "cuda"
    for number in range(3):
        engine.update_weights(policy.version)
        found = engine.metrics()
        # 8 bits of mantissa; other trainers measured 0.031 between these engines (Fast-LLM#525).
        assert found["vllm/probe_gap"] < 0.05
        perturb_cuda(policy, number)


def test_20_cycles_of_sleep_leave_the_memory_flat(start):
    policy, _, engine = start(SMALL)
    free = []
    for number in range(20):
        engine.update_weights(policy.version)
        engine.sleep()
        free.append(torch.cuda.mem_get_info()[0])
        perturb_cuda(policy, number)
    assert max(free[1:]) - min(free[1:]) < 200 * 2**20


def test_an_update_of_1_7_billion_parameters_takes_at_most_3_seconds(start):
    policy, _, engine = start(LARGE)
    assert sum(tensor.numel() for _, tensor in named_weights(policy)) == pytest.approx(1.72e9, rel=0.03)
    engine.update_weights(0)
    perturb_cuda(policy, 0)
    begun = time.perf_counter()
    engine.update_weights(policy.version)
    print(f"{time.perf_counter() - begun:.2f} s, of which {engine.metrics()['seconds/weights']:.2f} s paused")
    assert time.perf_counter() - begun < 3


def perturb_cuda(policy, seed):
    """An update of a size that the probe sees."""
    generator = torch.Generator(device=policy.device).manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.003 * torch.randn(parameter.shape, generator=generator, device=policy.device))
    policy.version += 1
