"""What CUDA computes, on a CPU: formulas stand in for its kernels, and every choice is made as on CUDA."""

import pytest
import torch

from cohort.policy import flash
from tests.conftest import each, telling, tiny_llama
from tests.cuda_on_cpu import cuda_on_cpu
from tests.families.configs import ATTENTION
from tests.policy.plain import WINDOW, assert_plain, policy_of
from tests.policy.test_attention import LAYOUTS, WINDOWED, assert_same, made
from tests.train.harness import make_trainer, parameters, untimed_metrics_of

FAMILIES = {"llama": ATTENTION, "mistral": WINDOW, "gemma2": WINDOW | {"head_dim": 8}, "gpt_neox": ATTENTION}


@pytest.fixture
def any_dtype(monkeypatch):
    """The stand-ins also take float64 (not strict), which the kernel does not."""
    monkeypatch.setattr("cohort.policy.attention.can_flash", lambda q, k, v: True)


@pytest.mark.parametrize(("layout", "window"), telling(WINDOWED, *WINDOWED[::3]))
@pytest.mark.usefixtures("any_dtype")
def test_outputs_and_gradients(layout, window):
    tensors = made(LAYOUTS[layout][0], LAYOUTS[layout][2])
    with cuda_on_cpu(strict=False):
        assert_same(tensors, LAYOUTS[layout], 1e-13, scaling=0.4, window=window)


def test_a_pass_takes_two_calls_whatever_it_holds(monkeypatch):
    calls, attend = [], flash._attend
    monkeypatch.setattr(flash, "_attend", lambda *given, **named: calls.append(named) or attend(*given, **named))
    layout = LAYOUTS["a prefix's sequences apart"]
    with cuda_on_cpu():
        # bfloat16 has 8 bits; a gradient is a sum of up to 12 terms that are rounded twice.
        assert_same(made(layout[0], layout[2], width=8, dtype=torch.bfloat16), layout, 2**-5, scaling=0.4)
    assert len(calls) == 2


@pytest.mark.usefixtures("any_dtype")
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family):
    with cuda_on_cpu(strict=False):
        policy = policy_of(family, FAMILIES[family])
        assert policy.passes.shared
        assert "kernels" not in policy.passes.description
        assert_plain(policy)


@pytest.mark.usefixtures("any_dtype")
def test_a_run_makes_the_same_weights_as_on_a_cpu(demo_tokenizer, tmp_path):
    """Sampling, update, memory budget and metrics. float64: sums in another order, over two steps."""

    def trained(name):
        trainer = make_trainer(demo_tokenizer, tmp_path / name, precision="float64", beta=0.1, max_steps=2)
        list(trainer.steps())
        return parameters(trainer)

    on_cpu = trained("cpu")
    with cuda_on_cpu(strict=False):
        on_cuda = trained("cuda")
    for name, expected in on_cpu.items():
        torch.testing.assert_close(on_cuda[name], expected, rtol=1e-10, atol=1e-10)
    for one, other in zip(*(untimed_metrics_of(tmp_path / name) for name in ("cpu", "cuda")), strict=True):
        assert one["reward/mean"] == other["reward/mean"]


def test_a_run_in_bfloat16(demo_tokenizer, tmp_path):
    """Autocast and float32 weights as CUDA has them by default; the check of the sampler's log-probs is on."""
    model = tiny_llama(vocab_size=len(demo_tokenizer), hidden_size=32)
    with cuda_on_cpu():
        trainer = make_trainer(demo_tokenizer, tmp_path / "run", model, precision="bfloat16", max_steps=2)
        metrics = list(trainer.steps())
    assert metrics[1]["grad_norm"] > 0


@each(
    ("dtype", "width", "taken"),
    [(torch.bfloat16, 64, True), (torch.float16, 256, True), (torch.float32, 64, False), (torch.bfloat16, 12, False),
     (torch.bfloat16, 264, False)],
)  # fmt: skip
def test_what_the_kernel_takes(dtype, width, taken):
    tensors = [torch.zeros(2, 3, width, dtype=dtype)] * 3
    assert flash.can_flash(*tensors) is taken
    assert not flash.can_flash(tensors[0], tensors[1], torch.zeros(2, 3, 8, dtype=dtype))
