"""Recorded routes in a rollout: laid out, cut, kept by the journal, and replayed by the updates of a run."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from cohort.errors import ConfigError, ModelError, PolicyMismatchError
from cohort.objective import PRESETS
from cohort.policy import Policy
from cohort.policy.routing import replaying
from cohort.rewards.runner import Scores
from cohort.rollout import Sampling
from cohort.rollout.engine import Request, check_capabilities
from cohort.rollout.local.engine import LocalEngine
from cohort.rollout.philox import RNGKey
from cohort.rollout.trajectory import StopStrings, Trajectory
from cohort.runs.journal import StoredRollout, encode_rollout, load_rollout
from cohort.train import assign_advantages, lay_out
from cohort.train.layout import copies
from cohort.types import Completion, FinishReason, Group, Prompt, Segment, compact_routes, joined_routes
from tests.conftest import telling
from tests.policy.test_routing import DOUBLE, EXPERTS, LAYERS, drawn, mixture, perturbed, policy_of
from tests.train.harness import make_trainer, metrics_of, straight_and_resumed
from tests.train.updates import CPU, all_sequences, gradient, logps_of

OBJECTIVE, EOS = PRESETS["default"], FinishReason.EOS
PROMPTS = [(5, 9, 11, 3), (7, 2)]
CALLED = ([4, 8, 20, 21, 15], [1, 1, 0, 0, 1])  # a tool answered 20 and 21


def with_routes(sampler, prompt, segments):
    """A completion as an engine records it: routes of the prompt, and of every input of its segments."""
    found, before = [], None
    for ids, flags in segments:
        before, routes = drawn(sampler, prompt, ids)
        found.append(Segment(np.array(ids), None if flags is None else np.array(flags, bool), routes.numpy()))
    count = sum(int(one.is_drawn.sum()) for one in found)
    return Completion(tuple(found), np.full(count, -1.0), EOS, "", 0, prompt_routes=before.numpy())


def rollout(sampler):
    segments = [[([4, 8, 15, 16], None)], [CALLED], [([6, 13], None), ([22, 9, 30], [0, 1, 1])], [([33], None)]]
    groups = [
        Group(Prompt(p, p, prompt, "", "", {}), tuple(with_routes(sampler, prompt, one) for one in segments))
        for p, prompt in enumerate(PROMPTS)
    ]
    rewards_S = torch.arange(8, dtype=torch.float64).sin()
    return groups, Scores(rewards_S, rewards_S[:, None], ("r",))


def batch_of(sampler):
    groups, scores = rollout(sampler)
    return assign_advantages(lay_out(groups, CPU), scores, OBJECTIVE, 8)


def test_routes_are_as_small_as_they_can_be():
    low, high = np.array([[[127, 0]]], np.uint8), np.array([[[255, 0]]], np.uint16)
    assert (compact_routes(low).dtype, compact_routes(high).dtype) == (np.int8, np.int16)
    joined = joined_routes([(compact_routes(low), 1), (None, 2), (compact_routes(high), 1)])
    assert joined.tolist() == [[[127, 0]], [[-1, -1]], [[-1, -1]], [[255, 0]]]
    assert joined_routes([(None, 2)]) is None


def test_the_log_probs_are_those_of_the_models_own_forward_pass():
    """Prompts are read once with the routes of a group's first completion; segments are packed, with given tokens."""
    model = mixture().double()
    policy, sampler = policy_of(model), perturbed(model)
    batch = batch_of(sampler)
    whole = logps_of(policy, batch)
    expected = []
    for group in rollout(sampler)[0]:
        before = torch.from_numpy(group.completions[0].prompt_routes)
        for segment in (segment for one in group.completions for segment in one.segments):
            ids, prompt = torch.from_numpy(segment.token_ids), torch.tensor(group.prompt.token_ids)
            with torch.no_grad(), replaying(torch.cat([before, torch.from_numpy(segment.routes)])):
                logits = model(torch.cat([prompt, ids])[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
            expected.append(logits.log_softmax(-1).gather(1, ids[:, None])[segment.is_drawn, 0])
    torch.testing.assert_close(whole, torch.cat(expected), rtol=0, atol=1e-5)  # its norms and routers are in float32
    for part in ({"routes_T": None}, {"prompt_routes": {}}):  # both are needed
        assert float((whole - logps_of(policy, replace(batch, **part))).abs().max()) > 0.01
    free = logps_of(Policy(copy.deepcopy(model), DOUBLE), batch)  # a reference, for which nothing is replayed
    assert float((whole - free).abs().max()) > 0.01


def test_a_gradient_does_not_depend_on_the_cut_or_the_order():
    model = mixture().double()
    policy, batch = policy_of(model), batch_of(perturbed(model))
    uncut, _ = gradient(policy, batch, OBJECTIVE, 1000)
    for budget, order in ((5, None), (1000, [6, 1, 0, 7, 3, 2, 5, 4]), (9, [7, 6, 5, 4, 3, 2, 1, 0])):
        cut, _ = gradient(policy, batch, OBJECTIVE, budget, order=order)
        for one, two in zip(uncut, cut, strict=True):
            torch.testing.assert_close(one, two, rtol=0, atol=1e-7)  # routers compute in float32


def test_copies_have_the_same_routes():
    one = with_routes(mixture(), PROMPTS[0], [CALLED])
    (segment,) = one.segments
    other = replace(one, segments=(replace(segment, routes=(segment.routes + 1) % EXPERTS),))
    batch = lay_out([Group(Prompt(0, 0, PROMPTS[0], "", "", {}), (one, other, one))], CPU)
    assert copies(batch, all_sequences(batch)) == {2: 0}


def test_trailing_given_tokens_lose_their_routes_with_them():
    one = with_routes(mixture(), PROMPTS[0], [([4, 8, 20, 21], [1, 1, 0, 0])])
    batch = lay_out([Group(Prompt(0, 0, PROMPTS[0], "", "", {}), (one,))], CPU)
    assert torch.equal(batch.routes_T, torch.from_numpy(one.segments[0].routes[:2]))
    assert torch.equal(batch.prompt_routes[PROMPTS[0]], torch.from_numpy(one.prompt_routes))


def test_prompts_that_go_on_differently_take_their_routes_along():
    """The common beginning has the first routes; what follows it becomes given tokens with theirs."""
    sampler, row = mixture(), Prompt(0, 0, (1, 2, 7), "", "", {})
    pairs = [
        (replace(row, token_ids=ids), with_routes(sampler, ids, [([5, 6], None)])) for ids in [(1, 2, 7), (1, 2, 8, 9)]
    ]
    group = Group.of_starts(row, pairs)
    assert group.prompt.token_ids == (1, 2)
    for (prompt, before), after in zip(pairs, group.completions, strict=True):
        whole = np.concatenate([before.prompt_routes, before.segments[0].routes])
        assert np.array_equal(after.prompt_routes, whole[:1])
        assert np.array_equal(after.segments[0].routes, whole[1:])
        assert after.segments[0].token_ids.tolist() == [*prompt.token_ids[2:], 5, 6]


def test_a_trajectory_keeps_the_routes_that_its_draws_had():
    """Turns are read again; what an earlier turn was drawn with stays. A rewrite begins anew."""
    trajectory = Trajectory(
        0,
        Request(Prompt(0, 0, (5, 9, 11), "", "", {}), 0, Sampling(30), RNGKey(0, 1), continues=True),
        StopStrings(None, ()),
    )
    counted = np.arange(40 * LAYERS * 2).reshape(40, LAYERS, 2) % EXPERTS
    trajectory.tokens += [4, 8]
    trajectory.take_routes(counted[:4].astype(np.uint8))  # two tokens of the prompt, its last one and 4
    trajectory.extend([20], rewrite=False, vocab_size=37)
    trajectory.tokens += [15]
    trajectory.take_routes((counted[:6] + 1).astype(np.uint8))
    expected = np.concatenate([counted[2:4], counted[4:6] + 1])
    assert np.array_equal(trajectory._segment().routes, expected)
    trajectory.extend([22, 23], rewrite=True, vocab_size=37)
    trajectory.tokens += [9]
    trajectory.take_routes(counted[10:15].astype(np.uint8))
    assert np.array_equal(trajectory._segments[0].routes, expected)
    assert np.array_equal(trajectory._segment().routes, counted[12:15])
    assert np.array_equal(trajectory.prompt_routes, counted[:2])


def test_the_journal_holds_them(tmp_path):
    groups = rollout(mixture())[0]
    groups[1] = replace(groups[1], completions=tuple(replace(one, prompt_routes=None) for one in groups[1].completions))
    (tmp_path / "step").write_bytes(encode_rollout(StoredRollout(groups)))
    found = load_rollout(tmp_path / "step").groups
    assert found == groups
    assert found[0].completions[1].segments[0].routes.dtype == np.int8


# Runs ----------------------------------------------------------------------------------------------------------------


def record(monkeypatch, change=lambda routes: routes):
    """Let the local engine record the routes of the policy that it samples from, or others."""
    real = LocalEngine.generate

    def generate(self, *arguments, **named):
        found = []
        for group in real(self, *arguments, **named):
            completions = []
            for one in group.completions:
                with self.policy.compute():
                    before, routes = drawn(
                        self.policy.model, group.prompt.token_ids, one.segments[0].token_ids.tolist()
                    )
                segment = replace(one.segments[0], routes=change(routes).numpy())
                completions.append(replace(one, segments=(segment,), prompt_routes=change(before).numpy()))
            found.append(Group(group.prompt, tuple(completions)))
        return found

    monkeypatch.setattr(LocalEngine, "generate", generate)
    monkeypatch.setattr(LocalEngine, "capabilities", replace(LocalEngine.capabilities, routes=True))


def run_of(tokenizer, folder, **settings):
    settings = {"max_steps": 3, "prompts_per_step": 2, "num_generations": 3, "replay_routing": True} | settings
    return make_trainer(tokenizer, folder, mixture(vocab_size=len(tokenizer)), **settings)


@pytest.mark.parametrize("lag", telling([0, 1], 1))
def test_a_run_replays_them_and_resumes_exactly(monkeypatch, demo_tokenizer, tmp_path, lag):
    record(monkeypatch)
    straight_and_resumed(
        lambda folder: run_of(demo_tokenizer, folder, lag=lag, save_steps=1, num_iterations=2), tmp_path, 2
    )
    first = metrics_of(tmp_path / "straight")[0]
    assert first["sampler/gap"] < 1e-5  # float32, the same experts


def test_wrong_routes_show_in_the_gap(monkeypatch, demo_tokenizer, tmp_path):
    record(monkeypatch, lambda routes: (routes + 3) % EXPERTS)
    with pytest.raises(PolicyMismatchError, match="nats from the trainer's"):
        run_of(demo_tokenizer, tmp_path).train()


def test_a_kl_compares_with_a_reference_that_routes_freely(monkeypatch, demo_tokenizer, tmp_path):
    record(monkeypatch)
    run = run_of(demo_tokenizer, tmp_path, beta=0.1, max_steps=1)
    run.train()
    assert run.policy.routing is not None
    assert run.reference.routing is None
    assert abs(run.last_metrics["kl/k1"]) < 1e-5  # the recorded experts are those that equal weights choose freely


def test_engines_and_models_that_cannot_are_refused_early(monkeypatch, demo_tokenizer, tmp_path):
    with pytest.raises(ConfigError, match=r"LocalEngine lacks .* routes \(rollout.replay_routing is on\)"):
        run_of(demo_tokenizer, tmp_path / "a")
    record(monkeypatch)
    with pytest.raises(ModelError, match="rollout.replay_routing needs a mixture of experts, and 'llama' has no exp"):
        make_trainer(demo_tokenizer, tmp_path / "b", replay_routing=True)
    config = make_trainer(demo_tokenizer, tmp_path / "c").args
    check_capabilities(LocalEngine, config)
