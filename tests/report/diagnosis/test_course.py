"""The course of a run, from made-up metrics: rewards that fall, findings that get milder, causes that hide."""

from itertools import pairwise
from random import Random

import pytest

from cohort.report.diagnosis import CHECKS, NAMES, Diagnosis, Finding, Level, health_line, not_run, why_no_gradient
from tests.conftest import each

STEP = {"updates": 1, "updates_skipped": 0, "groups/sampled": 32, "groups/dead_share": 0.2}
DEAD = {"updates": 1, "updates_skipped": 1, "groups/sampled": 32, "groups/dead_share": 1.0, "reward/std": 0.0}


def fed(lines, **settings):
    diagnosis = Diagnosis(settings)
    for step, line in enumerate(lines, 1):
        diagnosis.step({"step": step, **line})
    return diagnosis


def ill(diagnosis):
    return {one.check: str(one.level) for one in diagnosis.standing if one.level is not Level.NOTE}


def course(*knots, steps=40, key="reward/mean", noise=0.02):
    """Numbers that go from knot to knot in as many steps."""
    random = Random(0)
    pairs = [(a, b, n) for a, b in pairwise(knots) for n in range(steps)]
    return [{key: a + (b - a) * n / steps + random.gauss(0, noise)} for a, b, n in pairs]


def test_a_run_that_learns_and_collapses_is_unhealthy():
    rewards, entropy = course(0.2, 0.7, 0.26), course(0.5, 0.5, 5.0, key="entropy")
    lengths = course(100, 100, 400, key="length/mean")
    lines = [{**STEP, **a, **b, **c} for a, b, c in zip(rewards, entropy, lengths, strict=True)]
    diagnosis = fed(lines)
    assert ill(diagnosis) == {"reward_falls": "alarm", "entropy_explosion": "alarm", "length_drift": "warning"}
    (fall,) = [one for one in diagnosis.findings if one.check == "reward_falls"]
    assert 40 <= fall.numbers["best_step"] <= 50
    assert fall.begin < 75
    assert ill(fed([STEP | line for line in rewards])) == {"reward_falls": "alarm"}
    assert ill(fed([STEP | line for line in course(0.7, 0.2)])) == {"reward_falls": "alarm"}
    assert ill(fed(lines[:40])) == {}


def test_a_reward_that_no_longer_rises_excuses_no_drift():
    lines = zip(course(0.2, 0.7, 0.7), course(100, 100, 300, key="length/mean"), strict=True)
    assert ill(fed([{**STEP, **a, **b} for a, b in lines])) == {"length_drift": "warning"}


def test_a_plateau_is_no_fall():
    random = Random(1)
    rewards = [sum(random.random() < 0.5 for _ in range(32)) / 32 for _ in range(400)]
    assert fed([STEP | {"reward/mean": reward} for reward in rewards]).findings == []


@each(
    ("rewards", "check", "words"),
    [
        ([0.1] * 12, "dead_groups", "0.1 is the best possible reward"),
        ([-0.02, -0.01, 0.0, 0.0] + [0.0] * 12, "dead_groups", "0 is the best possible reward"),
        ([1.0] * 12, "all_right", "harder prompts"),
        ([0.0] * 12, "all_wrong", "ease the prompts"),
    ],
)
def test_what_equal_rewards_mean(rewards, check, words):
    diagnosis = fed([DEAD | {"reward/mean": reward} for reward in rewards])
    (finding,) = [one for one in diagnosis.findings if one.check in ("all_right", "all_wrong", "dead_groups")]
    assert finding.check == check
    assert words in finding.advice
    assert ("right" in finding.found) == (check != "dead_groups")


def test_a_finding_gets_milder():
    lines = [STEP | {"length/cut_share": 0.97}] * 29 + [STEP | {"length/cut_share": 0.45}] * 170
    diagnosis = fed(lines)
    (finding,) = diagnosis.findings
    assert (finding.level, finding.begin, finding.numbers["cut_share"]) == (Level.WARNING, 5, pytest.approx(0.45))
    assert finding.worst is not None
    assert finding.worst.level is Level.ALARM
    assert "(worst: alarm at step " in finding.show()
    assert health_line(lines[-1], diagnosis.findings).startswith("warning (truncation)")
    again = fed([*lines, *[STEP | {"length/cut_share": 0.97}] * 20]).findings[0]
    assert (again.level, again.worst) == (Level.ALARM, None)


def test_a_consequence_waits_while_its_cause_is_ill():
    fast = [STEP | {"kl/k3": 0.2 * step, "update_kl": 0.001} for step in range(12)]
    hidden = [STEP | {"kl/k3": 2.4, "update_kl": 0.1}] * 20
    diagnosis = fed(fast + hidden)
    assert ill(diagnosis) == {"kl_fast": "warning", "learning_rate_high": "warning"}
    assert ill(fed(fast + hidden + [STEP | {"kl/k3": 2.4, "update_kl": 0.001}] * 20)) == {}


def test_the_health_line_without_a_comparison_of_groups_and_before_a_verdict():
    same = STEP | {"groups/dead_share": 1.0}
    diagnosis = fed([same] * 8, objective={"preset": "reinforce_pp"})
    assert health_line({"step": 8} | same, diagnosis.findings, groups_compared=diagnosis.groups_compared) == "healthy"
    assert health_line({"step": 1} | DEAD) == "no verdict before step 5: 0% of groups teach"


def test_ratios_of_1_by_definition_are_not_stale():
    line = STEP | {"updates": 4, "ratio/log_min": 0.0, "ratio/log_max": 0.0, "update_kl": 1e-3}
    several = {"num_iterations": 2, "minibatches": 2}
    assert ill(fed([line] * 6, objective=several)) == {"stale_logps": "alarm"}
    own = several | {"ratio_anchor": "self", "trust_region": "none"}
    assert ill(fed([line] * 6, objective=own)) == {}


def test_evaluations_of_a_plateau_are_not_called_a_fall():
    random, lines = Random(2), []
    for step in range(50):
        share = sum(random.random() < 0.5 for _ in range(200)) / 200
        evaluated = {"eval/reward/mean": share, "eval/reward/low": share - 0.07, "eval/reward/high": share + 0.07}
        lines.append(STEP | {"reward/mean": 0.5 + 0.001 * step} | evaluated)
    assert fed(lines).findings == []


@each("sampling", [{"min_p": 0.05}, {"regex": "a+"}, {"json_schema": "{}"}, {"min_completion_length": 4}, {"top_k": 5}])
def test_truncated_sampling_is_named_as_the_cause_of_a_bias(sampling):
    line = STEP | {"sampler/gap": 1e-6, "sampler/mean_ratio": 0.9, "sampler/mean_ratio_se": 0.001}
    (finding,) = fed([line] * 6, rollout=sampling | {"replay_sampling": False}).findings
    assert "sampling leaves out 10% of the probability" in finding.found
    (finding,) = fed([line] * 6, rollout={"replay_sampling": False}).findings
    assert "leaves out" not in finding.found
    above = line | {"sampler/mean_ratio": 1.03}
    assert "-3%" not in fed([above] * 6, rollout=sampling | {"replay_sampling": False}).findings[0].found


def test_a_gap_that_grows_is_named_below_the_threshold():
    lines = [STEP | {"sampler/gap": 1e-6}] * 5 + [STEP | {"sampler/gap": 0.008}] * 5
    (finding,) = fed(lines).findings
    assert "differ by 0.008 nats per token for the same weights, and by 1e-06 at the start" in finding.found
    assert ill(fed(lines[:-1])) == {}  # in each of 5 steps
    assert ill(fed([line | {"sampler/version_lag_mean": 1.0} for line in lines])) == {}  # of older weights
    assert ill(fed([STEP | {"sampler/gap": 0.008}] * 10)) == {}  # as bfloat16 has it from the start on
    assert ill(fed([STEP | {"sampler/gap": 1e-6}] * 5 + [STEP | {"sampler/gap": 1e-4}] * 5)) == {}  # rounding


def test_shorter_completions_are_no_drift_when_nothing_is_left_to_gain():
    shorter = course(190, 110, key="length/mean")
    known = {"groups/mean_reward_q10": 0.1, "groups/mean_reward_q90": 1.0}
    assert ill(fed([STEP | known | {"reward/mean": 0.97} | line for line in shorter])) == {}
    assert ill(fed([STEP | known | {"reward/mean": 0.5} | line for line in shorter])) == {"length_drift": "warning"}


def test_no_gradient_of_the_reward_is_found_beside_a_kl_term():
    line = STEP | {"tokens/active_share": 0.0, "tokens/masked_share": 1.0, "grad_norm": 0.1}
    (finding,) = fed([line] * 4).findings
    assert (finding.check, finding.level) == ("zero_gradient", Level.ALARM)
    assert "only of the KL or entropy term" in finding.found
    assert fed([line | {"tokens/active_share": 0.1}] * 4).findings == []


def test_why_nothing_was_scored():
    nothing = {"updates": 1, "reward/mean": None}
    assert why_no_gradient(nothing).endswith("no completion was scored (reward/unscored)")
    assert why_no_gradient(nothing | {"completions/errors": 4}).endswith("4 could not be sampled")


def test_a_finding_fits_the_terminal():
    finding = Finding("learning_rate_high", Level.ALARM, 12, "word " * 40, "do " * 40)
    for width in (60, 80, 119):
        assert width / 2 < max(map(len, finding.show(width).splitlines())) <= width


def test_checks_name_metrics_and_those_without_are_listed():
    assert not_run([]) == NAMES
    lacking = set(not_run(["reward/mean", "entropy", "eval/easy/reward/mean"]))
    assert {"learning_rate_high", "learning_rate_low", "stale_logps"} <= lacking
    assert not {"reward_falls", "entropy_explosion", "evaluation_falls"} & lacking
    assert all(check.metrics for check in CHECKS)
    assert fed([STEP | {"length/cut_share": 0.97}] * 8).findings[0].metrics == ("length/cut_share",)


def test_one_step_that_destroys_the_model_is_named():
    """Nothing moves any more afterwards, so the median of the steps is 0."""
    before = {**STEP, "update_kl": 6.5, "learning_rate": 0.05, "length/cut_share": 0.0, "length/ended_share": 1.0}
    after = {**before, "update_kl": 0.0, "length/cut_share": 1.0, "length/ended_share": 0.0}
    found = {one.check: one for one in fed([before, *[after] * 8]).standing}
    assert found["learning_rate_high"].level is Level.ALARM
    assert found["learning_rate_high"].found.startswith("step 1 moved the policy by 6.5 nats per token")
    assert found["end_token"].found.startswith("no end token is drawn any more")
