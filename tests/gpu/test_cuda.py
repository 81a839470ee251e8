"""What must also hold on a CUDA device."""

import pytest
import torch

from cohort.policy import Policy, Precision
from cohort.rollout import LocalEngine, RNGKey, Sampling
from cohort.rollout.local.cached import LeanBody
from cohort.types import Prompt
from tests.conftest import tiny_llama
from tests.families.configs import small_model
from tests.rollout.test_local_engine import LetterTokenizer
from tests.train.harness import make_trainer, same_parameters, untimed_metrics_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("compute", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.3)])
def test_sampler_and_trainer_agree(compute, tolerance):
    # float32: TF32 is off by default, kernels differ by shape; bfloat16: 8 bits, and logits of a few units.
    policy = Policy(tiny_llama().cuda(), Precision(torch.float32, compute))
    prompts = [Prompt(i, i, ids, "", "", {}) for i, ids in enumerate([(5, 9, 20), (7,), (2, 3)])]
    groups = LocalEngine(policy, LetterTokenizer(), (1,)).generate(prompts, 4, Sampling(20), RNGKey(0, 0))
    pairs = [(g.prompt.token_ids, c) for g in groups for c in g.completions]
    with torch.no_grad():
        logps, *_ = policy.logps([p for p, _ in pairs], [c.token_ids for _, c in pairs], 1.0)
    sampled = torch.tensor([lp for _, c in pairs for lp in c.sampler_logps], dtype=torch.float32).cuda()
    torch.testing.assert_close(sampled, logps, rtol=0, atol=tolerance)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma2", "gemma3_text"])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_the_lean_path_is_right_for_its_families(family, compute):
    # An engine tries its path on the model and passes over one that is wrong: being lean is having passed.
    engine = LocalEngine(Policy(small_model(family).cuda(), Precision(torch.float32, compute)), LetterTokenizer(), (1,))
    assert isinstance(engine.backend.body, LeanBody)


def test_slots_and_budgets_change_no_greedy_completion():
    policy = Policy(tiny_llama().cuda(), Precision(torch.float32, torch.float32))
    prompts = [Prompt(i, i, ids, "", "", {}) for i, ids in enumerate([(5, 9, 20), (7,), (2, 3), (4,) * 30])]
    runs = [
        LocalEngine(policy, LetterTokenizer(), (1,), **limits).generate(prompts, 3, Sampling(20, 0.0), RNGKey(0, 0))
        for limits in ({}, {"max_batch_size": 2}, {"cache_tokens": 120})
    ]
    ids = [[c.token_ids.tolist() for g in groups for c in g.completions] for groups in runs]
    assert ids[0] == ids[1] == ids[2]


def test_a_deterministic_run_gives_the_same_bytes(demo_tokenizer, tmp_path):
    settings = {"device": "cuda", "precision": "bfloat16", "beta": 0.1, "max_steps": 3, "num_iterations": 2}
    runs = [make_trainer(demo_tokenizer, tmp_path / name, **settings, deterministic=True) for name in ("one", "two")]
    for trainer in runs:
        trainer.train()
    assert same_parameters(*runs)
    assert untimed_metrics_of(tmp_path / "one") == untimed_metrics_of(tmp_path / "two")


def test_a_run_on_the_device(demo_tokenizer, tmp_path):
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", device="cuda", precision="auto", beta=0.1, max_steps=2)
    metrics = list(trainer.steps())
    assert metrics[1]["grad_norm"] > 0
    assert metrics[1]["kl/k3"] > 0
