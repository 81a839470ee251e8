"""The loop with truncated sampling, whose supports the update replays, and with completions that failed."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from cohort.errors import NonFiniteError, PolicyMismatchError
from cohort.objective import PRESETS
from cohort.rewards import RewardRunner
from cohort.rewards.runner import Scores
from cohort.rollout import Capabilities, RNGKey, Sampling
from cohort.train import Rollout, assign_advantages, lay_out
from cohort.types import Completion, FinishReason, Group, Prompt, Support
from tests.policy.plain import plain_rows
from tests.policy.test_support import theirs
from tests.train.harness import ROWS, digits_reward, make_trainer, parameters, rows_of
from tests.train.updates import CPU, gradient, logps_of, shifted_policy

ERROR, CANCELLED, EOS = FinishReason.ERROR, FinishReason.CANCELLED, FinishReason.EOS


class PlainEngine:
    """An engine with a repetition penalty and top-k only, and a full forward pass for every token.

    ``broken`` returns the finish reason of a completion ``(uid, sample)`` that fails, or None.
    """

    capabilities = Capabilities(shared_weights=True)
    sleeps = together = False

    def __init__(self, policy, tokenizer, length=6, broken=lambda uid, sample: None):
        self.policy, self.tokenizer, self.length, self.broken = policy, tokenizer, length, broken

    def update_weights(self, version):
        pass

    def metrics(self):
        return {}

    @torch.no_grad()
    def generate(self, prompts, num_generations, sampling, key, watch=None, samples=None):
        return [Group(p, tuple(self.complete(p, i, sampling, key) for i in range(num_generations))) for p in prompts]

    def complete(self, prompt, sample, sampling, key):
        generator = torch.Generator().manual_seed(1000 * prompt.uid + 10 * sample + 7 * key.step)
        if reason := self.broken(prompt.uid, sample):
            return Completion.of_tokens((), (), reason, "", self.policy.version)
        ids, sampler, full, listed = [], [], [], []
        for _ in range(2 + (prompt.uid + sample) % (self.length - 1)):
            logits = plain_rows(self.policy, (*prompt.token_ids, *ids), (0,))
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            shaped = logits
            if sampling.repetition_penalty != 1:
                shaped = theirs(logits, (*prompt.token_ids, *ids), (0,), sampling.repetition_penalty)
            kept = shaped[0].topk(sampling.top_k or shaped.shape[1]).indices
            log_probs = torch.log_softmax(shaped[0, kept] / sampling.temperature, -1)
            drawn = int(torch.multinomial(log_probs.exp(), 1, generator=generator))
            ids.append(int(kept[drawn]))
            sampler.append(float(log_probs[drawn]))
            full.append(float(torch.log_softmax(logits[0] / sampling.temperature, -1)[ids[-1]]))
            listed.append(kept.numpy().astype(np.int32))
        support = None
        if sampling.record_support and sampling.top_k:
            counts = np.array([len(tokens) for tokens in listed], np.int32)
            support = Support(np.concatenate(listed), counts, np.zeros(len(ids), np.bool_))
        return Completion.of_tokens(
            ids,
            sampler,
            EOS,
            self.tokenizer.decode(ids),
            self.policy.version,
            full_logps=full if sampling.reweights else None,
            support=support,
        )


def replaying(tokenizer, folder, *, broken=lambda uid, sample: None, **settings):
    """A trainer that samples with the plain engine."""
    trainer = make_trainer(tokenizer, folder, **settings)
    trainer.engine = PlainEngine(trainer.policy, tokenizer, broken=broken)
    return trainer


# Replay ---------------------------------------------------------------------------------------------------------------


def test_the_ratio_of_the_first_update_is_one(demo_tokenizer, tmp_path):
    settings = {"top_k": 5, "repetition_penalty": 2.0, "temperature": 0.8, "num_iterations": 2}
    trainer = replaying(demo_tokenizer, tmp_path / "run", max_steps=1, **settings)
    (metrics,) = trainer.steps()
    assert metrics["sampler/max_gap"] < 1e-5  # float32
    assert metrics["sampler/mean_ratio"] == pytest.approx(1, abs=1e-6)
    assert abs(metrics["sampler/log_ratio_min"]) < 1e-5
    assert metrics["entropy"] <= math.log(5) + 1e-6
    assert metrics["grad_norm"] > 0


def test_without_replay_the_mean_ratio_is_the_kept_mass(demo_tokenizer, tmp_path):
    settings = {"max_steps": 1, "top_k": 5, "temperature": 0.8}
    trainer = replaying(demo_tokenizer, tmp_path / "run", replay_sampling=False, **settings)
    (metrics,) = trainer.steps()
    assert metrics["sampler/max_gap"] < 1e-5  # both over the whole vocabulary
    rows = rows_of(tmp_path / "run")
    # full - sampler is the log of the probability mass that top-k kept, whichever token was drawn.
    mass = [math.exp(f - s) for r in rows for f, s in zip(r["full_logps"], r["sampler_logps"], strict=True)]
    assert metrics["sampler/mean_ratio"] == pytest.approx(sum(mass) / len(mass), abs=1e-5)
    assert metrics["sampler/mean_ratio"] < 0.9
    assert -metrics["sampler/log_ratio_min"] > 0.1


@pytest.mark.parametrize(
    ("sampling", "replay"),
    [
        ({"top_p": 0.7}, True),
        ({"min_completion_length": 4, "min_p": 0.2, "temperature": 1.5}, True),
        ({"top_k": 6, "top_p": 0.9, "repetition_penalty": 1.3, "temperature": 0.7}, True),
        ({"repetition_penalty": 1.6}, False),
        ({"min_completion_length": 4, "min_p": 0.2}, False),
    ],
)
def test_the_engine_and_the_update_agree(demo_tokenizer, tmp_path, sampling, replay):
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", max_steps=1, replay_sampling=replay, **sampling)
    (metrics,) = trainer.steps()
    assert metrics["sampler/max_gap"] < 1e-5  # float32
    if replay:
        assert metrics["sampler/mean_ratio"] == pytest.approx(1, abs=1e-6)
    else:
        assert metrics["sampler/log_ratio_min"] < -1e-3


@pytest.mark.parametrize(
    "objective",
    [
        {"beta": 0.1, "kl": {"estimator": "full", "top_k": 3}, "entropy": {"coefficient": 2.0}},
        {"beta": 0.1, "kl": {"estimator": "full", "direction": "forward"}, "top_entropy": 0.5},
        {"ratio_anchor": "sampler"},
        {"mismatch": ["weight", "off_policy_mask"]},
    ],
)
def test_objectives_over_a_truncated_distribution(demo_tokenizer, tmp_path, objective):
    trainer = replaying(demo_tokenizer, tmp_path / "run", max_steps=1, top_k=3, num_iterations=2, **objective)
    (metrics,) = trainer.steps()
    assert all(math.isfinite(value) for value in metrics.values() if isinstance(value, float))
    assert 0 < metrics["entropy"] <= math.log(3) + 1e-6
    if objective.get("beta"):
        assert metrics["kl/k3"] > 0


def test_truncated_log_probs_without_full_ones_stop_the_run(demo_tokenizer, tmp_path):
    """Without replay, an engine that reports no full log-probs claims that it drew from the whole distribution."""
    trainer = replaying(demo_tokenizer, tmp_path / "run", max_steps=1, top_k=2, replay_sampling=False)
    complete = trainer.engine.complete
    trainer.engine.complete = lambda *arguments: dataclasses.replace(complete(*arguments), full_logps=None)
    with pytest.raises(PolicyMismatchError, match="nats from the trainer's"):
        trainer.train()


def replayed_batch(policy, objective):
    """Groups that another policy drew with top-k 4."""

    class Decoder:
        def decode(self, ids):
            return ""

    sampling = Sampling(8, top_k=4, temperature=1.0)
    prompts = [Prompt(p, p, tuple(range(2, 4 + p)), "", "", {}) for p in range(4)]
    groups = PlainEngine(shifted_policy(), Decoder()).generate(prompts, 3, sampling, RNGKey(0, 0))
    batch = lay_out(groups, CPU)
    old_N = logps_of(shifted_policy(), batch)
    torch.testing.assert_close(old_N, batch.sampler_logps_N, rtol=0, atol=1e-12)
    ref_N = logps_of(policy, batch)
    batch = dataclasses.replace(batch, old_logps_N=old_N, ref_logps_N=ref_N if objective.beta else None)
    rewards = torch.rand(12, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return assign_advantages(batch, Scores(rewards, rewards[:, None], ("r",)), objective, 8)


def test_microbatches_do_not_change_the_gradient_under_supports(float64_policy):
    objective = PRESETS["default"].replace(beta=0.1, kl={"estimator": "full"}, top_entropy=0.6)
    batch = replayed_batch(float64_policy, objective)
    more = {"reference": shifted_policy(), "entropy_coefficient": 0.01}
    uncut, uncut_result = gradient(float64_policy, batch, objective, 100_000, **more)
    parts, parts_result = gradient(float64_policy, batch, objective, 13, **more)
    assert uncut_result.grad_norm > 1e-3
    for one, other in zip(uncut, parts, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)  # float64, sums in another order
    assert parts_result.statistics.sums == pytest.approx(uncut_result.statistics.sums, rel=1e-9, abs=1e-12)


def test_full_log_probs_are_kept_only_when_nothing_is_replayed():
    full = Completion.of_tokens((3, 4), (-1.0, -1.0), EOS, full_logps=(-1.5, -2.0))
    plain = Completion.of_tokens((5,), (-0.5,), EOS)
    prompt = Prompt(0, 0, (1,), "", "", {})
    batch = lay_out([Group(prompt, (full, plain))], CPU)
    assert batch.full_logps_N.tolist() == [-1.5, -2.0, -0.5]
    assert batch.support is None
    assert lay_out([Group(prompt, (full, plain))], CPU, repetition_penalty=1.5).full_logps_N is None
    kept = Support(np.array([3, 4], np.int32), np.array([1, 1], np.int32), np.zeros(2, np.bool_))
    replayed = lay_out([Group(prompt, (dataclasses.replace(full, support=kept), plain))], CPU)
    assert replayed.full_logps_N is None
    assert replayed.support.counts_N.tolist() == [1, 1, 0]
    assert replayed.support.excluded_N.tolist() == [
        False,
        False,
        True,
    ]  # the last token was drawn from the whole vocabulary
    assert lay_out([Group(prompt, (plain, plain))], CPU).full_logps_N is None


# Completions that failed ----------------------------------------------------------------------------------------------


def test_failed_completions_are_left_out(demo_tokenizer, tmp_path):
    """uid 0 loses one completion, uid 1 all of them, uid 2 all but one."""
    lost = {(0, 1): ERROR, (2, 0): ERROR, (2, 1): CANCELLED, (2, 3): ERROR} | {(1, s): ERROR for s in range(4)}
    seen = []

    def reward(completions, completion_ids, **_):
        seen.append([len(ids) for ids in completion_ids])
        return digits_reward(completions)

    trainer = replaying(
        demo_tokenizer, tmp_path / "run", max_steps=1, top_k=5, rewards=reward, broken=lambda *key: lost.get(key)
    )
    seen.clear()
    (metrics,) = trainer.steps()
    assert [len(lengths) for lengths in seen] == [16 - 8]
    assert min(seen[0]) > 0
    assert metrics["completions/errors"] == 7
    assert metrics["reward/unscored"] == 8
    assert metrics["groups/sampled"] == 4
    assert metrics["groups/left_out"] == 1
    assert metrics["length/min"] >= 2
    assert metrics["grad_norm"] > 0
    rows = rows_of(tmp_path / "run")
    assert len(rows) == 16
    for row in rows:
        failed = row["finish_reason"] in ("error", "cancelled")
        assert failed == (row["reward"] is None) == (row["advantage"] is None) == (row["token_ids"] == [])
        assert len(row["full_logps"] or []) == len(row["token_ids"])
    by_group = {
        uid: [r["advantage"] for r in rows if r["group"] == uid and r["advantage"] is not None] for uid in (0, 2)
    }
    assert len(by_group[0]) == 3
    assert sum(by_group[0]) == pytest.approx(0, abs=1e-6)  # the baseline is the mean of the three
    assert by_group[2] == [0.0]  # no other completion to compare with


def test_a_step_of_errors_alone_stops_the_run(demo_tokenizer, tmp_path):
    trainer = replaying(demo_tokenizer, tmp_path / "run", max_steps=2, broken=lambda *_: ERROR)
    before = parameters(trainer)
    with pytest.raises(NonFiniteError, match="none of the step's 16 completions .* newest checkpoint"):
        trainer.train()
    assert all(torch.equal(value, before[name]) for name, value in parameters(trainer).items())


def test_dynamic_sampling_replaces_groups_that_failed(demo_tokenizer, tmp_path):
    trainer = replaying(
        demo_tokenizer,
        tmp_path / "run",
        max_steps=1,
        group_filter="dynamic_sampling",
        broken=lambda uid, _: ERROR if uid < 4 else None,
    )
    (metrics,) = trainer.steps()
    assert metrics["groups/rounds"] > 1
    assert metrics["completions/errors"] == 16
    assert metrics["updates"] == 1


def test_a_failed_completion_with_some_tokens_has_no_reward_per_token():
    complete = Completion.of_tokens((3, 4), (-1.0, -1.0), EOS, "ab")
    failed = Completion.of_tokens((5, 6, 7), (-1.0,) * 3, ERROR, "cde")
    groups = [Group(Prompt(0, 0, (1,), "", "", {}), (failed, complete))]
    scores = RewardRunner([lambda completion_ids, **_: [[1.0] * len(ids) for ids in completion_ids]], per_token=True)
    got = scores.score(groups)
    assert got.token_rewards_N.isnan().tolist() == [True] * 3 + [False] * 2
    rollout = Rollout.of(groups, got, PRESETS["default"])
    assert rollout.used_scores.token_rewards_N.tolist() == [1.0, 1.0]
    assert rollout.used_S == [1]
    assert rollout.used_groups == [Group(groups[0].prompt, (complete,))]


def test_a_failed_completion_is_unscored_in_an_evaluation(demo_tokenizer, tmp_path):
    lost = {(0, 0): ERROR, (1, 0): ERROR, (1, 1): ERROR}
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", eval_rows=ROWS[:3], num_generations_eval=2, top_k=5)
    trainer.engine = PlainEngine(trainer.policy, demo_tokenizer, broken=lambda *key: lost.get(key))
    evaluation = trainer.evaluations()[""]
    texts = [[], [], []]
    for one in evaluation.table.to_pylist():
        if one["finish_reason"] != ERROR:
            texts[one["row"]].append(one["completion"])
    means = [np.mean(digits_reward(of_prompt)) for of_prompt in texts if of_prompt]
    assert len(means) == 2
    assert evaluation.reward.mean == pytest.approx(np.mean(means))
    assert (evaluation.counts["unscored"], evaluation.counts["errors"]) == (3, 3)
    assert np.isnan(evaluation.values["length"]).tolist() == [not of_prompt for of_prompt in texts]


# The description ------------------------------------------------------------------------------------------------------


def test_the_description_has_every_sampling_setting(demo_tokenizer, tmp_path):
    settings = {"top_p": 0.9, "repetition_penalty": 1.1, "min_completion_length": 2, "regex": "[0-9]+"}
    text = make_trainer(demo_tokenizer, tmp_path / "run", **settings).describe()
    assert (
        "sampling: temperature 1, top-k off, top-p 0.9, min-p off, repetition penalty 1.1, regex '[0-9]+', "
        "stop strings none, 2 to 10 tokens, replayed in the update" in text
    )
    text = make_trainer(demo_tokenizer, tmp_path / "run", top_k=5, replay_sampling=False).describe()
    assert "top-k 5, top-p off" in text
    assert "not replayed in the update" in text
    assert "replayed" not in make_trainer(demo_tokenizer, tmp_path / "run").describe()
