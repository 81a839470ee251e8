"""``benchmarks/gpu.py``: what it makes of results, and its parts at tiny sizes on a CPU."""

import importlib.util
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks"


@pytest.fixture(scope="module")
def gpu():
    before = set(sys.modules)
    sys.path.insert(0, str(FOLDER))
    try:
        spec = importlib.util.spec_from_file_location("gpu_benchmark", FOLDER / "gpu.py")
        module = sys.modules["gpu_benchmark"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(FOLDER))
        for name in {"gpu_benchmark", "common", "rollout"} - before:
            sys.modules.pop(name, None)


def side(name, setting, seconds, rate, peak):
    return {"name": name, "setting": setting, "seconds": seconds, "tokens": 100, "rate": rate, "peak_mib": peak}


MADE = {
    "date": "2026-01-02",
    "device": "cuda",
    "tiny": False,
    "parts": {
        "machine": {
            "problem": "",
            "result": {
                "hardware": "Some GPU", "versions": {"python": "3.12.3", "torch": "2.11.0"}, "cuda": "13.0",
                "capability": "9.0", "memory_gib": 79.2,
            },
        },
        "tests": {"problem": "exit code 1: x", "summary": "1 failed, 90 passed in 61.0s", "failed": ["tests/gpu/a.py::b"]},
        "doctor": {
            "problem": "",
            "result": {"findings": [{"check": "machine", "status": "pass", "found": "one\ntwo"}]},
        },
        "decode qwen3-0.6b": {
            "problem": "",
            "result": {
                "unit": "tokens/s", "ratio": 2.5,
                "sides": [
                    side("cohort", "bfloat16 over float32 weights", [2.0, 1.0, 3.0], 16384.0, 12345),
                    side("generate", "bfloat16 autocast", [6.0, 6.0, 6.0], 5461.3, 20000),
                    side("generate", "bfloat16 weights", [5.0, 5.5, 4.0], 6553.6, None),
                ],
            },
        },
        "update qwen3-0.6b": {
            "problem": "",
            "result": {
                "unit": "drawn tokens/s", "ratio": 1.5,
                "sides": [
                    side("cohort", "bfloat16 over float32 weights", [1.0], 30000.0, 9000),
                    side("plain", "8 rows", [1.5], 20000.0, 30000),
                ],
                "unavailable": {"plain, 16 rows": "out of memory"},
            },
        },
        "update qwen3-1.7b": {"problem": "it had not ended after 60 s"},
    },
}  # fmt: skip

RENDERED = """\
2026-01-02, Some GPU, 79.2 GiB, capability 9.0, CUDA 13.0, python 3.12.3, torch 2.11.0.

| part | side | setting | seconds | rate | above the weights, MiB | ratio |
|---|---|---|---|---|---|---|
| decode qwen3-0.6b | cohort | bfloat16 over float32 weights | 2.000 [1.000 to 3.000] | 16,384 tokens/s | 12,345 |  |
| decode qwen3-0.6b | generate | bfloat16 autocast | 6.000 [6.000 to 6.000] | 5,461 tokens/s | 20,000 |  |
| decode qwen3-0.6b | generate | bfloat16 weights | 5.000 [4.000 to 5.500] | 6,554 tokens/s |  | 2.50 |
| update qwen3-0.6b | cohort | bfloat16 over float32 weights | 1.000 [1.000 to 1.000] | 30,000 drawn tokens/s | 9,000 |  |
| update qwen3-0.6b | plain | 8 rows | 1.500 [1.500 to 1.500] | 20,000 drawn tokens/s | 30,000 | 1.50 |
| update qwen3-0.6b | plain, 16 rows | out of memory | | | | |
| update qwen3-1.7b | not measured: it had not ended after 60 s | | | | | |

Tests (tests/gpu, tests/cuda_rules): 1 failed, 90 passed in 61.0s; exit code 1: x
- failed: `tests/gpu/a.py::b`

| `cohort doctor --gpu` | | |
|---|---|---|
| machine | pass | one; two |"""


def test_a_result_becomes_tables(gpu, tmp_path, capsys, monkeypatch):
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps(MADE))
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--render", str(path)])
    assert gpu.main() == 1  # a part has a problem
    assert capsys.readouterr().out == RENDERED + "\n"
    of_a_cpu = gpu.render(MADE | {"device": "cpu", "parts": {"machine": {"problem": "exit code 1: x"}}})
    assert "**Tiny, or on a CPU: these figures mean nothing.**" in of_a_cpu
    assert of_a_cpu.startswith("2026-01-02, unknown.")
    assert of_a_cpu.endswith("| | | not made:  |")


def test_a_part_that_takes_too_long_is_ended_with_what_it_started(gpu):
    child = (
        "import subprocess, sys, time; subprocess.Popen(['sleep', '60']); print('begun', flush=True); time.sleep(60)"
    )
    start = time.monotonic()
    found = gpu.run_part([sys.executable, "-c", child], 2)  # sleep holds the pipe until it ends
    assert time.monotonic() - start < 30
    assert (found["out"], found["problem"]) == ("begun\n", "it had not ended after 2 s")
    found = gpu.run_part([sys.executable, "-c", "raise SystemExit('no such thing')"], 60)
    assert found["problem"] == "exit code 1: no such thing"


def test_what_pytest_said(gpu):
    out = "tests/a.py::b PASSED\nFAILED tests/a.py::c[x] - AssertionError\n==== 1 failed, 1 passed in 3.21s ====\n"
    found = gpu.run_tests({"problem": "exit code 1: x", "out": out})
    assert found["summary"] == "1 failed, 1 passed in 3.21s"
    assert found["failed"] == ["tests/a.py::c[x] - AssertionError"]
    assert found["tail"] == out.splitlines()
    assert gpu.run_tests({"problem": "it had not ended", "out": ""})["summary"] == "no summary"


def test_the_packages_to_carry_have_versions():
    text = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    names = re.search(r"^WHEELED := (.*)$", text, re.MULTILINE)[1].split()
    pinned = {line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert "transformers" in names
    assert not [name for name in names if name.lower() not in pinned]


@pytest.mark.slow
def test_all_parts_on_a_cpu(gpu, tmp_path):
    path = tmp_path / "gpu.json"
    command = [sys.executable, FOLDER / "gpu.py", "--out", path, "--device", "cpu", "--tiny", "--rows", "4", "16"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    parts = json.loads(path.read_text())["parts"]
    assert {name: part["problem"] for name, part in parts.items()} == dict.fromkeys(parts, "")
    assert list(parts) == ["machine", "tests", "doctor", "decode tiny", "update tiny"]
    assert done.returncode == 0
    update = parts["update tiny"]["result"]
    # One gradient, computed in three ways: bfloat16 rounds each product.
    norms = list(update["grad_norms"].values())
    assert len(norms) == 3
    assert norms == pytest.approx([norms[0]] * 3, rel=0.02)
    assert len({one["tokens"] for one in update["sides"]}) == 1
    decode = parts["decode tiny"]["result"]
    assert [one["tokens"] for one in decode["sides"]] == [128] * 3  # 2 prompts, 8 completions of 8 tokens
    assert len(parts["doctor"]["result"]["findings"]) == 6
    assert "cohort" in gpu.render(json.loads(path.read_text()))
