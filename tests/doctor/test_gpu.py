"""``cohort doctor --gpu``, with CUDA's choices made on a CPU."""

import json
import math

import pytest
import torch
from transformers import Qwen3Config

from cohort.cli import main
from cohort.config import VLLMConfig
from cohort.doctor import Status, gpu
from cohort.errors import ConfigError
from cohort.policy import flash
from tests.cuda_on_cpu import cuda_on_cpu
from tests.rollout.served import fake_vllm
from tests.train.harness import shift_sampler_logps

CPU = torch.device("cpu")
CHECKS = ("kernels", "decode", "update", "speed", "sleep")


SECONDS = gpu.seconds


@pytest.fixture(autouse=True)
def timed_once_and_small(monkeypatch):
    monkeypatch.setattr(gpu, "seconds", lambda run, _=5: SECONDS(run, 1))
    smaller = {"num_hidden_layers": 1, "vocab_size": 512, "hidden_size": 64}
    monkeypatch.setattr(gpu, "Qwen3Config", lambda **given: Qwen3Config(**given | smaller))


def found(*checks):
    with cuda_on_cpu():
        return {one.check: one for one in gpu.examine_gpu(CPU, skip=[name for name in CHECKS if name not in checks])}


def test_all_checks_pass():
    of = found(*CHECKS[:4])
    assert list(of) == ["machine", *CHECKS]
    assert {name: str(one.status) for name, one in of.items() if one.status is not Status.PASS} == {"sleep": "skip"}
    assert f"torch={torch.__version__}" in of["machine"].found
    numbers = {name: one.numbers for name, one in of.items()}
    # 2^-9 is the rounding of one number; the sinks' gradient is a sum with terms of both signs.
    assert all(2**-12 < error < 2**-6 for error in numbers["kernels"].values())
    assert 0 < numbers["decode"]["gap"] < 0.03
    assert numbers["decode"]["tokens_per_second"] == pytest.approx(32 * numbers["decode"]["steps_per_second"])
    assert 0 < numbers["update"]["gap"] < 0.03
    assert 0.999 < numbers["update"]["cosine"] < 1
    assert numbers["update"]["norm_ratio"] == pytest.approx(1, abs=0.01)


def one_more(window):
    return {} if window is None else {"window_size_left": window, "window_size_right": 0}


def without_indices(total, values, index):
    total += values if index is None else 0


def refuses(*_, **__):
    raise RuntimeError("query and key must have the same dtype")


BROKEN = {  # what is put in place of what, and the tensors that are then wrong
    "a window of one more": ("_window", one_more, "window 48", {"output", "queries", "keys", "values"}),
    "some prompts get no gradient": ("_add_at", without_indices, "after prompts (2,", {"prompts' keys", "prompts' values"}),
    "sinks take no part": ("add_sinks", lambda *_: None, "sinks True", {"output", "sinks"}),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_kernel_fails_and_is_named(name, monkeypatch):
    attribute, stand_in, case, wrong = BROKEN[name]
    monkeypatch.setattr(gpu, "CASES", [*gpu.CASES[:2], gpu.CASES[4], *gpu.CASES[8:]])
    monkeypatch.setattr(flash, attribute, stand_in)
    kernels = found("kernels")["kernels"]
    assert kernels.status is Status.FAIL
    assert wrong <= {tensor for tensor, error in kernels.numbers.items() if error > gpu.MOST_ERROR}
    text, *cases = kernels.found.split("; ")
    assert float(text.split()[-1]) > gpu.MOST_ERROR
    assert cases
    assert all(case in one for one in cases)


def test_a_kernel_that_refuses_fails_and_the_others_go_on(monkeypatch):
    # The trial of the passes is made here, while the kernel works. One that refuses in the trial is not used at all.
    assert found("update")["update"].status is Status.PASS
    monkeypatch.setattr(flash, "_attend", refuses)
    of = found("kernels", "update", "speed")
    assert of["kernels"].found == of["update"].found == "RuntimeError: query and key must have the same dtype"
    assert of["speed"].status is Status.PASS


def test_a_nan_fails(monkeypatch):
    monkeypatch.setattr(gpu, "CASES", gpu.CASES[:2])
    monkeypatch.setattr(flash, "add_sinks", lambda out, *_: out.fill_(math.nan))
    assert found("kernels")["kernels"].status is Status.FAIL


def test_a_wrong_gradient_fails_the_update(monkeypatch):
    real = flash._attend_backward

    def without_values(*arguments, **more):
        grad_q, grad_k, grad_v = real(*arguments, **more)
        return grad_q, grad_k, torch.zeros_like(grad_v)

    monkeypatch.setattr(flash, "_attend_backward", without_values)
    update = found("update")["update"]
    assert update.status is Status.FAIL
    assert update.numbers["cosine"] < gpu.LEAST_COSINE
    assert update.numbers["gap"] < 0.03  # the forward pass is right


def test_a_sampler_that_is_off_fails(monkeypatch):
    shift_sampler_logps(monkeypatch, lambda: 1.0)
    decode = found("decode")["decode"]
    assert decode.status is Status.FAIL
    assert decode.numbers["gap"] == pytest.approx(1, abs=0.05)


def test_speeds_by_hand(monkeypatch):
    # 2 * 512^3 = 2.7e8 operations and 2 * 4 * 512^2 = 2.1e6 bytes in 1 ms.
    monkeypatch.setattr(gpu, "seconds", lambda _run, _=5: 1e-3)
    (speed,) = gpu.check_speed(CPU)
    assert speed.numbers == {
        "launch_us": 1000.0,
        "bfloat16_tflops": pytest.approx(0.268435456),
        "float32_tflops": pytest.approx(0.268435456),
        "copy_gb_per_second": pytest.approx(2.097152),
        "peak_bytes": 0,
    }
    assert "1000.0 us a small kernel; products of 512: 0.268 TFLOP/s in bfloat16, 0.268 in float32" in speed.found


@pytest.mark.parametrize(("free", "status"), [((9, 5, 5), "pass"), ((9, 5, 4.9), "pass"), ((9, 5, 4.5), "fail")])
def test_memory_while_vllm_sleeps(monkeypatch, free, status):
    left = iter(free)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (int(next(left) * 2**30), 2**34))
    monkeypatch.setattr(gpu, "missing", lambda: "")
    with fake_vllm.installed(monkeypatch) as llm:
        (sleep,) = gpu.check_sleep(CPU, VLLMConfig())
    assert str(sleep.status) == status
    assert sleep.numbers == {"lost_bytes": int(free[1] * 2**30) - int(free[2] * 2**30)}
    again = ["wake weights", "weights", "wake kv_cache", "sleep 2"]
    assert llm.events[:11] == ["start", "weights", "sleep 2", *again, *again]


def test_without_vllm_the_sleep_is_skipped(monkeypatch):
    monkeypatch.setattr(gpu, "missing", lambda: "vLLM is not installed")
    (sleep,) = gpu.check_sleep(CPU, VLLMConfig())
    assert sleep.status is Status.SKIP
    assert "vLLM is not installed" in sleep.found


def test_the_command(capsys, monkeypatch):
    monkeypatch.setattr(gpu, "CASES", gpu.CASES[:1])
    monkeypatch.setattr(gpu, "missing", lambda: "vLLM is not installed")
    skip = ("--skip", "decode", "update", "speed")
    assert main(["doctor", "--gpu", "--device", "cpu", "--json", *skip, "--vllm.max_model_len", "64"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ok"]
    assert [(one["check"], one["status"]) for one in told["findings"]] == [
        ("machine", "pass"), ("kernels", "pass"), ("decode", "skip"), ("update", "skip"), ("speed", "skip"), ("sleep", "skip")
    ]  # fmt: skip
    assert "vLLM is not installed" in told["findings"][-1]["found"]
    assert main(["doctor", "--gpu", "--device", "cpu", *skip]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("  pass  machine     cohort-rl=")
    assert lines[-1] == "2 pass, 4 skip"


def test_without_a_gpu_the_command_says_what_is_needed(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["doctor", "--gpu"]) == 2
    told = capsys.readouterr()
    assert not told.out
    assert "needs a GPU that torch can use, and torch.cuda.is_available() is False" in told.err
    assert torch.__version__ in told.err
    with pytest.raises(ConfigError, match="no check 'kernel'.*did you mean kernels"):
        next(gpu.examine_gpu(CPU, skip=["kernel"]))
