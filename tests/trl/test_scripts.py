"""The scripts of examples/trl run with only the import changed (``benchmarks/trl_scripts.py`` runs TRL's side too)."""

import importlib.util
import sys

import pytest

from tests.conftest import ROOT

UPDATES = {"callbacks": 14, "countdown": 12, "gspo": 16, "reward_model": 8, "resume": 12, "tools": 5}
"""Updates of the scripts that do not make 10."""


@pytest.fixture(scope="module")
def benchmark():
    return loaded("trl_scripts")


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """Models with random weights, and data sets, under the names that the scripts know."""
    folder = tmp_path_factory.mktemp("hub")
    loaded("trl_hub").build(folder, steps=0)
    return folder


def loaded(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_only_imports_change(benchmark):
    files = sorted(benchmark.EXAMPLES.glob("*.py"))
    assert len(benchmark.SCRIPTS) == 12
    assert {file.name for file in files} == {
        words.split()[0] for words in benchmark.SCRIPTS.values() if not words.startswith("-")
    }
    for file in files:
        before = file.read_text(encoding="utf-8").splitlines()
        after = benchmark.with_import("\n".join(before), "cohort.trl").splitlines()
        changed = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
        assert changed
        assert all(new == old.replace("from trl", "from cohort.trl", 1) for old, new in changed)


@pytest.mark.slow
@pytest.mark.parametrize("name", loaded("trl_scripts").SCRIPTS)
def test_under_cohort(name, benchmark, hub):
    found = benchmark.measure("cohort", name, hub)
    assert "error" not in found, found["error"]
    assert found["steps"] == UPDATES.get(name, 10)
    logged = [entry for entry in found["history"] if "reward" in entry]
    assert logged
    for key in ("loss", "grad_norm", "learning_rate", "reward_std", "completions/mean_length", "num_tokens", "epoch"):
        assert key in logged[-1]
