# Two commands on a fresh clone: `make demo` and `make test`. Both create .venv from pinned constraints.
PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
BIN := .venv/bin
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check -c $(CONSTRAINTS)

.PHONY: demo quick test parity slow mutants check format model clean

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

clean:
	rm -rf .venv

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/demo.stamp: .venv/bin/python pyproject.toml $(CONSTRAINTS)
	$(PIP) -e .
	touch $@

.venv/dev.stamp: .venv/bin/python pyproject.toml $(CONSTRAINTS)
	$(PIP) -e '.[dev]'
	touch $@ .venv/demo.stamp

.venv/bench.stamp: .venv/dev.stamp
	$(PIP) -e '.[bench]'
	touch $@
