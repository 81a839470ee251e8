"""Forward passes and sampling on CUDA tensors without data (``make fake-cuda``): mixed devices and hidden waits."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from cohort.policy import Policy, Precision
from cohort.rollout import LocalEngine, RNGKey, Sampling
from cohort.rollout.lean import LeanBackend
from cohort.types import Prompt
from tests.gpu.fake import fake_cuda
from tests.policy.plain import COMPLETIONS, GPT, PROMPTS, TEMPERATURE
from tests.rollout.test_families import FAMILIES
from tests.rollout.test_local_engine import LetterTokenizer

pytestmark = [
    pytest.mark.fake_cuda,
    pytest.mark.skipif(torch.version.cuda is None, reason="needs torch's CUDA build: make fake-cuda"),
    pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor"),
]

WIDE = {"hidden_size": 64, "head_dim": 16}
LEAN = ["llama", "qwen3", "mistral", "gemma2", "gemma3_text"]
HALF, SINGLE = Precision(torch.float32, torch.bfloat16), Precision(torch.float32, torch.float32)


def made(family, precision=HALF):
    settings = GPT if family == "gpt2" else FAMILIES[family] | WIDE
    with torch.device("cuda"):
        return Policy(AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings)), precision)


@pytest.mark.parametrize("family", [*LEAN, "gpt2"])
@pytest.mark.parametrize("precision", [HALF, SINGLE], ids=["bfloat16", "float32"])
def test_forward_passes(family, precision):
    with fake_cuda() as machine, torch.no_grad():
        policy = made(family, precision)
        assert policy.passes.shared
        machine.reads.clear(), machine.calls.clear()
        logps = policy.logps(PROMPTS, COMPLETIONS, TEMPERATURE)
    assert logps.logps_N.device.type == "cuda"
    assert logps.logps_N.shape == (sum(map(len, COMPLETIONS)),)
    assert not machine.reads  # nothing waits for the GPU
    if precision == HALF and family != "gemma2":  # which has soft caps
        layers = policy.model.config.num_hidden_layers
        calls = machine.calls["_flash_attention_forward"]
        # Prompts: one a layer; lean layers need none in the last. Completions: one with a window, two without.
        assert calls in range(2 * layers - 1, 3 * layers + 1)


@pytest.mark.parametrize("family", [*LEAN, "gpt2"])
def test_sampling_reads_the_device_once_a_step(family):
    prompts = [Prompt(0, 0, (5, 9, 20), "", "", {}), Prompt(1, 1, (5,), "", "", {})]
    with fake_cuda() as machine:
        engine = LocalEngine(made(family), LetterTokenizer(), (1,))
        assert isinstance(engine.backend, LeanBackend) is (family in LEAN)
        machine.reads.clear()
        machine.number = 2.0  # the token that is drawn
        groups = engine.generate(prompts, 3, Sampling(12), RNGKey(0, 0))
    assert all(len(completion.token_ids) == 12 for group in groups for completion in group.completions)
    assert machine.reads.pop("rollout/runner.py draw") == 12
    assert family not in LEAN or not machine.reads  # the generic path also reads masks when rows begin or end
