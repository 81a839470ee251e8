# Two commands on a fresh clone: `make demo` and `make test`. Both create .venv from pinned constraints.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test slow check format model clean

demo: .venv/demo.stamp
	$(BIN)/cohort demo

test: .venv/dev.stamp
	$(BIN)/python -m pytest -q

slow: .venv/dev.stamp
	$(BIN)/python -m pytest -q -m "slow and not gpu"

check: .venv/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python scripts/check_limits.py
	$(BIN)/python scripts/check_docs.py
	$(BIN)/python scripts/check_metrics.py

format: .venv/dev.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

model: .venv/demo.stamp
	$(BIN)/python scripts/build_demo_model.py

clean:
	rm -rf .venv

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/demo.stamp: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e .
	touch $@

.venv/dev.stamp: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@ .venv/demo.stamp
