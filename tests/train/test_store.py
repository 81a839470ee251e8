"""The store: what the updates saw of each token, against a hand-run update, and with the cause of no gradient."""

import json

import numpy as np
import pyarrow.parquet
import pytest
import torch

from cohort.columns import STORE_VERSION, VERSION_KEY
from cohort.objective import PRESETS, Objective, coefficients
from cohort.report.rollouts import CHECKS, PREFIXES, StoredStep
from cohort.train.layout import numbers
from cohort.train.store import chosen_groups
from cohort.types import Group, Prompt
from tests.conftest import each, tiny_llama
from tests.replay.steps import stored_step
from tests.train.harness import digits_reward, make_trainer

KL = {"minibatches": 2, "num_iterations": 2, "beta": 0.05, "max_steps": 1}


def stored(folder, step=1):
    return StoredStep.read(folder / "rollouts" / f"step-{step}.parquet")


def flat(step, name, rows=None):
    """A column's values of all rows that have them, end to end."""
    pieces = [piece for row, piece in enumerate(step.arrays(name)) if rows is None or row in rows]
    return torch.from_numpy(np.concatenate([piece for piece in pieces if piece is not None]))


def same_coefficients(step, rows):
    """Compute the coefficients of a minibatch from the stored columns and the stored objective: the stored ones, bit
    for bit."""
    lengths = [len(step.values("sampler_logps")[row]) for row in rows]
    advantages = [np.full(n, step.values("advantage")[row]) for n, row in zip(lengths, rows, strict=True)]
    found = coefficients(
        Objective(**step.facts["objective"]),
        flat(step, "logps", rows),
        torch.from_numpy(np.concatenate(advantages)),
        flat(step, "weight", rows),
        sequence_N=numbers(torch.tensor(lengths)),
        old_logps_N=flat(step, "old_logps", rows) if "old_logps" in step else None,
        sampler_logps_N=flat(step, "sampler_logps", rows),
        ref_logps_N=flat(step, "ref_logps", rows) if "ref_logps" in step else None,
        base_weights_N=flat(step, "kl_weight" if "kl_weight" in step else "weight", rows),
    )
    kl_N = flat(step, "kl_coefficient", rows) if "kl_coefficient" in step else torch.zeros_like(found.kl_N)
    assert torch.equal(found.policy_N, flat(step, "policy_coefficient", rows))
    return torch.equal(found.kl_N, kl_N)


@pytest.fixture(scope="module")
def of_kl(tmp_path_factory):
    """A step of four updates with a KL, and the model before it."""
    from cohort.policy import load_tokenizer
    from tests.conftest import DEMO_MODEL

    tokenizer, folder = load_tokenizer(str(DEMO_MODEL)), tmp_path_factory.mktemp("store") / "run"
    trainer = make_trainer(tokenizer, folder, tiny_llama(vocab_size=len(tokenizer)), **KL)
    before = trainer.policy.reference(moves=False)  # a copy
    trainer.train()
    return before, stored(folder)


def test_numbers_are_those_of_a_hand_run_update(of_kl):
    """Log-probs before the step are those of the model before it; each token is of its minibatch's first update."""
    before, step = of_kl
    minibatch = np.array(step.values("minibatch"))
    assert minibatch.tolist() == [0] * 8 + [1] * 8 == step.values("update")
    ids = step.values("token_ids")
    at_start = before.logps(step.values("prompt_ids"), ids, 1.0).logps_N
    old, logps, ratio = (flat(step, name) for name in ("old_logps", "logps", "ratio"))
    first = torch.from_numpy(np.repeat(minibatch, [len(some) for some in ids])) == 0
    assert old.dtype == logps.dtype == torch.float32  # as the update computed them
    torch.testing.assert_close(old, at_start, rtol=0, atol=1e-5)  # float32, in passes of another size
    torch.testing.assert_close(flat(step, "ref_logps"), at_start, rtol=0, atol=1e-5)
    torch.testing.assert_close(logps[first], at_start[first], rtol=0, atol=1e-5)
    assert (logps - at_start)[~first].abs().max() > 1e-3  # after an update
    torch.testing.assert_close(ratio, (logps - old).exp(), rtol=1e-6, atol=0)
    torch.testing.assert_close(flat(step, "sampler_logps").float(), at_start, rtol=0, atol=1e-5)
    assert (flat(step, "entropy") > 0).all()


def test_coefficients_are_the_gradient_of_the_update(of_kl):
    """The gradient of minus the sum of coefficient times log-prob has the norm that the first update had."""
    before, step = of_kl
    rows = [row for row, number in enumerate(step.values("minibatch")) if number == 0]
    model = before.model.requires_grad_(True)
    prompts, ids = ([step.values(name)[row] for row in rows] for name in ("prompt_ids", "token_ids"))
    logps_N = before.logps(prompts, ids, 1.0).logps_N
    total_N = flat(step, "policy_coefficient", rows) + flat(step, "kl_coefficient", rows)
    (-(total_N * logps_N).sum()).backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    assert float(norm) == pytest.approx(step.facts["updates"][0]["grad_norm"], rel=1e-4)  # float32
    model.requires_grad_(False)


def test_coefficients_follow_from_the_stored_columns_bit_for_bit(of_kl):
    _, step = of_kl
    for index in range(2):
        assert same_coefficients(step, [row for row, of in enumerate(step.values("minibatch")) if of == index])


def test_facts_of_the_step(of_kl):
    facts = of_kl[1].facts
    assert [one["minibatch"] for one in facts["updates"]] == [0, 1, 0, 1]
    assert (facts["minibatches"], facts["groups"], facts["groups_stored"], facts["version_before"]) == (2, 4, 4, 0)
    assert facts["reward_weights"] == {"digits_reward": 1.0}
    metadata = pyarrow.parquet.read_schema(of_kl[1].path).metadata
    assert metadata[VERSION_KEY.encode()] == str(STORE_VERSION).encode()


def first_group_is_dead(completions, prompts, **_):
    scores = digits_reward(completions)
    return [0.5 if prompt == prompts[0] else score for prompt, score in zip(prompts, scores, strict=True)]


def test_tokens_without_a_pass_have_a_cause(demo_tokenizer, tmp_path):
    """A dead group and masked completions need no forward pass: their log-probs are null."""
    make_trainer(demo_tokenizer, tmp_path / "run", rewards=first_group_is_dead, truncated="mask", max_steps=1).train()
    step = stored(tmp_path / "run")
    causes, reasons = step.values("no_gradient"), step.values("finish_reason")
    assert {"length", "eos"} <= set(reasons)
    assert {"old_logps", "ref_logps", "kl_coefficient"}.isdisjoint(step.names)
    for row, reason in enumerate(reasons):
        if reason == "length":
            assert set(causes[row]) == {"masked"}
        elif row < 4:
            assert set(causes[row]) == {"no_advantage"}
        assert (step.values("logps")[row] is None) == (reason == "length" or row < 4)
        assert step.values("update")[row] == 0
    passed = [row for row, logps in enumerate(step.values("logps")) if logps is not None]
    assert passed
    assert same_coefficients(step, passed)


def test_causes_of_tokens_and_of_updates(demo_tokenizer, tmp_path):
    """A narrow trust region, the entropy's choice of tokens, and an objective whose terms have different weights."""
    settings = KL | {"num_iterations": 1, "top_entropy": 0.5, "denominator": "after_masks", "epsilon": 1e-4}
    make_trainer(demo_tokenizer, tmp_path / "run", learning_rate=0.1, **settings).train()
    step = stored(tmp_path / "run")
    causes = np.array([cause or "" for row in step.values("no_gradient") for cause in row])
    silent = (flat(step, "policy_coefficient") == 0).numpy()
    assert {"", "low_entropy", "clipped_low", "clipped_high"} <= set(causes)
    assert (silent == (causes != "")).all()
    assert ((flat(step, "weight") == 0).numpy() == (causes == "low_entropy")).all()
    rows = [row for row, index in enumerate(step.values("minibatch")) if index == 1]
    assert same_coefficients(step, rows)


def test_a_kl_over_the_vocabulary_has_no_coefficient_of_drawn_tokens(demo_tokenizer, tmp_path):
    """The update computes the reference's log-probs itself."""
    full = {"beta": 0.05, "kl": {"estimator": "full"}, "minibatches": 2, "max_steps": 1}
    make_trainer(demo_tokenizer, tmp_path / "run", **full).train()
    step = stored(tmp_path / "run")
    assert "kl_coefficient" not in step.names
    first = [row for row, index in enumerate(step.values("minibatch")) if index == 0]
    torch.testing.assert_close(flat(step, "ref_logps", first), flat(step, "logps", first), rtol=0, atol=1e-5)  # float32
    assert (flat(step, "ref_logps") - flat(step, "logps")).abs().max() > 1e-3  # the second update's


def has_a_three(completions, **_):
    return [float("3" in text) for text in completions]


def test_what_no_update_used_is_null(demo_tokenizer, tmp_path):
    """Groups that dynamic sampling left out; and an update that was skipped."""
    settings = {"rewards": has_a_three, "group_filter": {"rule": "dynamic_sampling", "max_rounds": 2}}
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", **settings, max_steps=1, minibatches=2)
    trainer.train()
    step = stored(tmp_path / "run")
    names = ("advantage", "update", "logps", "ratio", "no_gradient", "weight")
    unused = [row for row, index in enumerate(step.values("minibatch")) if index is None]
    assert 0 < len(unused) < step.num_rows
    for name in names:
        assert [row for row, value in enumerate(step.values(name)) if value is None] == unused
    assert step.facts["groups"] == step.num_rows // 4 > 4


def test_some_steps_and_some_groups(demo_tokenizer, tmp_path):
    make_trainer(demo_tokenizer, tmp_path / "run", max_steps=4, store_steps=2, store_groups=2).train()
    assert sorted(path.name for path in (tmp_path / "run/rollouts").iterdir()) == ["step-2.parquet", "step-4.parquet"]
    step = stored(tmp_path / "run", 4)
    groups = [Group(Prompt(uid, 0, (1,), "", "", {}), ()) for uid in range(12, 16)]
    assert step.values("group") == [12 + p for p in chosen_groups(groups, 2, seed=0) for _ in range(4)]
    assert (step.facts["groups"], step.facts["groups_stored"]) == (4, 2)
    assert all(step.values("logps"))
    assert chosen_groups(groups, 0, 0) == chosen_groups(groups, 9, 0) == [0, 1, 2, 3]


@each("name", PRESETS)
def test_every_objective_can_be_read_back(name):
    objective = PRESETS[name].replace(beta=0.1) if PRESETS[name].kl else PRESETS[name]
    assert Objective(**json.loads(json.dumps(objective.model_dump()))) == objective


def test_every_column_has_a_type_in_the_reader(of_kl, tmp_path):
    known = set(CHECKS)
    for name in pyarrow.parquet.read_schema(of_kl[1].path).names:
        assert name in known or name.startswith(tuple(PREFIXES))


def test_secrets_of_the_objective_are_not_stored(tmp_path, float64_policy):
    name = "make(api_key='sk-abc')"
    (tmp_path / "mine.py").write_text(f'globals()["{name}"] = lambda rewards, group: rewards * 0')
    objective = PRESETS["default"].replace(baseline=f"{tmp_path}/mine.py:{name}")
    stored_step(tmp_path, float64_policy, objective)
    facts = stored(tmp_path).facts
    assert facts["objective"]["baseline"] == f"{tmp_path}/mine.py:make(api_key='***')"
    assert "sk-abc" not in json.dumps(facts)
