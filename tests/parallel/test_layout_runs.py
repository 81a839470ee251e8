"""Whole runs with a divided model, through the trainer."""

import json
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.fsdp import CPUOffloadPolicy

from cohort import GRPOConfig
from cohort.errors import ConfigError
from cohort.policy import load_tokenizer
from cohort.train import ranks
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


def offloaded(folder, settings, resume=False):
    """``run`` with ``parallel.offload``, as if the CPU were a GPU, whose main memory cannot be pinned; and how many
    models are offloaded."""
    policies = []

    def policy():
        policies.append(CPUOffloadPolicy(pin_memory=False))
        return policies[-1]

    with (
        mock.patch("torch.distributed.fsdp.CPUOffloadPolicy", policy),
        mock.patch.object(ranks, "resolve_device", return_value=torch.device("cuda")),
    ):
        return run(folder, {**settings, "layout": "full", "offload": True}, resume), len(policies)


@pytest.mark.ranks
@pytest.mark.parametrize("size", [1, 2])
def test_an_offloaded_run_is_the_run_of_one_process(tmp_path, size):
    """Also with one rank, which has nothing to divide; and resumed after the first step."""
    expected = run(tmp_path / "one", {})
    for got, models in on_ranks(size, offloaded, tmp_path / "two", {}, timeout=600):
        assert_same_run(got, expected)
        assert models == 2  # the policy and its reference
    (tmp_path / "two" / "checkpoints" / "step-2").rename(tmp_path / "moved")
    for (weights, steps), _ in on_ranks(size, offloaded, tmp_path / "two", {}, True, timeout=600):
        assert_same_run((weights, steps), (expected[0], expected[1][1:]))


def test_offloading_needs_the_layout_full_and_cuda(tmp_path):
    for layout in ("replicate", "optimizer"):
        with pytest.raises(ConfigError, match=f"parallel.offload needs parallel.layout 'full', which is '{layout}'"):
            GRPOConfig(layout=layout, offload=True)
    with pytest.raises(ConfigError, match=r"parallel\.offload needs CUDA"):
        make_trainer(load_tokenizer(str(DEMO_MODEL)), tmp_path, layout="full", offload=True)


@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft asks for it
@pytest.mark.parametrize("more", [{}, {"modules_to_save": ["lm_head"]}], ids=["no copy", "a reference of its own"])
def test_adapters_under_full(tmp_path, more):
    """Trained, and resumed after the first step."""
    settings = {"lora": {"rank": 2, **more}, "sync_ref_model": False, "ref_model_sync_steps": 512}
    expected = run(tmp_path / "one", settings)
    settings["layout"] = "full"
    for got in on_ranks(2, run, tmp_path / "two", settings, timeout=600):
        assert_same_run(got, expected)
    (tmp_path / "two" / "checkpoints" / "step-2").rename(tmp_path / "moved")
    for weights, steps in on_ranks(2, run, tmp_path / "two", settings, True, timeout=600):
        assert_same_run((weights, steps), (expected[0], expected[1][1:]))


@pytest.mark.ranks
def test_bfloat16_under_full_trains(tmp_path):
    """And goes on from a checkpoint as if it had not stopped: weights in it are as they are trained, in float32."""
    settings = {"precision": "bfloat16", "gradient_checkpointing": True, "layout": "full"}
    whole = on_ranks(2, run, tmp_path / "two", settings, timeout=600)
    for weights, steps in whole:
        assert all(np.isfinite(step["update_kl"]) for step in steps)
        assert all(np.isfinite(values).all() for values in weights.values())
    stored = load_file(tmp_path / "two" / "checkpoints" / "step-2" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
    (tmp_path / "two" / "checkpoints" / "step-2").rename(tmp_path / "moved")
    for resumed, before in zip(on_ranks(2, run, tmp_path / "two", settings, True, timeout=600), whole, strict=True):
        assert gap(resumed[0], before[0]) == 0
        assert resumed[1][-1]["update_kl"] == before[1][-1]["update_kl"]
