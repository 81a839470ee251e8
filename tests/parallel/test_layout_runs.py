"""Whole runs with a divided model, through the trainer."""

import json

import numpy as np
import pytest

from cohort.policy import load_tokenizer
from tests.conftest import DEMO_MODEL
from tests.parallel.launching import on_ranks
from tests.parallel.runs import digits, longest
from tests.parallel.under_layouts import gap
from tests.train.harness import ROWS, make_trainer

SETTINGS = {
    "precision": "float64",
    "beta": 0.05,
    "num_iterations": 2,
    "prompts_per_step": 4,
    "max_steps": 2,
    "save_steps": 1,
    "eval_steps": 1,
    "metric_for_best_model": "eval/reward/mean",
    "ref_model_sync_steps": 2,
    "sync_ref_model": True,
}


def run(folder, settings, resume=False):
    """The weights and the metrics of a run."""
    trainer = make_trainer(
        load_tokenizer(str(DEMO_MODEL)),
        folder,
        rewards=[digits, longest],
        eval_rows=ROWS[:3],
        **{**SETTINGS, **settings},
    )
    if trainer.world.is_main:
        trainer.describe()  # asks no other rank
    steps = list(trainer.steps(resume=resume))
    with trainer.layout.whole(trainer.policy.model):
        weights = {n: p.detach().clone().double().numpy() for n, p in trainer.policy.model.named_parameters()}
    trainer.world.close()
    return weights, steps


def assert_same_run(got, expected):
    """The numbers of runs in float64 differ by the order of sums alone."""
    assert gap(got[0], expected[0]) < 1e-9
    for mine, theirs in zip(got[1], expected[1], strict=True):
        for name, value in theirs.items():
            if isinstance(value, float) and not name.startswith(("seconds", "time", "tokens_per_second", "memory/")):
                assert np.isclose(mine[name], value, rtol=1e-7, atol=1e-8, equal_nan=True), name


@pytest.mark.ranks
@pytest.mark.parametrize("layout", ["optimizer", "full"])
def test_a_run_under_a_layout_is_the_run_of_one_process(tmp_path, layout):
    expected = run(tmp_path / "one", {})
    for got in on_ranks(2, run, tmp_path / "two", {"layout": layout}, timeout=600):
        assert_same_run(got, expected)
    (tmp_path / "two" / "checkpoints" / "step-2").rename(tmp_path / "moved")
    resumed = run(tmp_path / "two", {}, resume=True)  # by one process
    assert_same_run((resumed[0], resumed[1]), (expected[0], expected[1][1:]))
    assert json.loads((tmp_path / "two" / "best" / "best.json").read_text())


@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft asks for it
def test_adapters_under_full(tmp_path):
    """Trained, and resumed after the first step."""
    settings = {"lora": {"rank": 2}, "sync_ref_model": False, "ref_model_sync_steps": 512}
    expected = run(tmp_path / "one", settings)
    settings["layout"] = "full"
    for got in on_ranks(2, run, tmp_path / "two", settings, timeout=600):
        assert_same_run(got, expected)
    (tmp_path / "two" / "checkpoints" / "step-2").rename(tmp_path / "moved")
    for weights, steps in on_ranks(2, run, tmp_path / "two", settings, True, timeout=600):
        assert_same_run((weights, steps), (expected[0], expected[1][1:]))


@pytest.mark.ranks
def test_bfloat16_under_full_trains(tmp_path):
    settings = {"precision": "bfloat16", "gradient_checkpointing": True, "layout": "full"}
    for weights, steps in on_ranks(2, run, tmp_path / "two", settings, timeout=600):
        assert all(np.isfinite(step["update_kl"]) for step in steps)
        assert all(np.isfinite(values).all() for values in weights.values())
