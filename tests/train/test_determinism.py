"""The same seed, settings and machine give the same bytes on a CPU; durations do not depend on the time of day."""

import json
import time

import pytest
import torch

from cohort.policy.device import forced_kind, use_deterministic_algorithms
from tests.train.harness import break_after, make_trainer, untimed_metrics_of, untimed_rows_of


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_two_runs_write_the_same_bytes(demo_tokenizer, tmp_path, two_threads):
    for name in ("one", "two"):
        settings = {"max_steps": 2, "num_iterations": 2, "minibatches": 2, "beta": 0.1, "sync_ref_model": True}
        make_trainer(demo_tokenizer, tmp_path / name, ref_model_sync_steps=4, **settings).train()
        torch.rand(7)  # another state of the global generators, and of the allocator
    one, two = tmp_path / "one", tmp_path / "two"
    files = [path.relative_to(one) for path in one.rglob("*.safetensors")]
    assert len(files) == 3  # model, optimizer, reference
    assert [untimed_rows_of(one, n) for n in (1, 2)] == [untimed_rows_of(two, n) for n in (1, 2)]
    assert [path for path in files if (one / path).read_bytes() != (two / path).read_bytes()] == []
    assert untimed_metrics_of(one) == untimed_metrics_of(two)


def test_a_resumed_run_cuts_its_passes_as_before(demo_tokenizer, tmp_path, monkeypatch):
    """Whatever memory is free then: the order of sums stays."""
    before = make_trainer(demo_tokenizer, tmp_path / "run", max_steps=2, save_steps=1)
    break_after(before, 1)
    monkeypatch.setattr("cohort.train.memory.free_bytes", lambda device: 1)
    after = make_trainer(demo_tokenizer, tmp_path / "run", max_steps=2, save_steps=1)
    assert (before.budget.tokens, after.budget.tokens) == (4096, 256)
    after.train(resume=True)
    assert after.budget.tokens == 4096


def test_a_clock_that_goes_back_changes_no_duration(demo_tokenizer, tmp_path, monkeypatch):
    now = [2e9]

    def back():
        now[0] -= 3600
        return now[0]

    monkeypatch.setattr(time, "time", back)
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", max_steps=2)
    seconds = [value for step in trainer.steps() for key, value in step.items() if key.startswith("seconds/")]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert all(0 <= value < 60 for value in [*seconds, summary["seconds"], summary["seconds_to_first_update"]])


def test_the_deterministic_setting_is_for_cuda(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    device = torch.device("cpu")
    use_deterministic_algorithms(device)
    assert not torch.are_deterministic_algorithms_enabled()
    try:
        with forced_kind("cuda"):
            use_deterministic_algorithms(device)
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
