"""Each check on a run that is made to have exactly its illness: the illness is named, and no other.

The runs train a table of logits (``table_run``) through the real rewards, advantages, updates and metrics; only a gap
of the evaluation, which takes many steps to come about, is made of numbers.
"""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from cohort import GRPOConfig
from cohort.objective import PRESETS
from cohort.report.diagnosis import NAMES, Diagnosis, Level
from cohort.report.progress import Progress
from cohort.train.layout import part_of
from cohort.train.sweep import policy_logps
from cohort.types import FinishReason
from tests.report.diagnosis.table_run import PROMPTS, WORDS, Table, right, sample, train


def findings_of(run):
    lines, config = run
    diagnosis = Diagnosis(config.model_dump())
    for line in lines:
        diagnosis.step(line)
    return diagnosis.findings


def named(run):
    """The checks that warn or raise an alarm, with their worst level."""
    return {one.check: str(one.level) for one in findings_of(run) if one.level is not Level.NOTE}


def constant(value):
    def reward(completion_ids, **_):
        return [value] * len(completion_ids)

    return reward


def some_fail(completion_ids, **_):
    return [float("nan") if ids[0] < 4 else float(ids[0] < 8) for ids in completion_ids]


def by_prompt(completion_ids, prompts, **_):
    return [float(int(prompt) % 2) for prompt in prompts]


def text_hash(completion_ids, **_):
    return [(sum(i * token for i, token in enumerate(ids, 1)) % 97) / 97 for ids in completion_ids]


def longer(completion_ids, prompts, **_):
    """Longer is better, but the mean of each group is 0."""
    lengths = torch.tensor([float(len(ids)) for ids in completion_ids]).view(-1, 8)
    return (lengths - lengths.mean(1, keepdim=True)).flatten().tolist()


def noise():
    random = torch.Generator().manual_seed(0)

    def reward(completion_ids, **_):
        return torch.rand(len(completion_ids), generator=random).tolist()

    return reward


def length_penalty(completion_ids, **_):
    return [-10.0 * len(ids) for ids in completion_ids]


def rarely(completion_ids, **_):
    return [float(ids[0] == 3 and len(ids) == 4) for ids in completion_ids]


def length_in_words(completion_ids, **_):
    return [float(len(ids) % 2) for ids in completion_ids]


def repeating(completion_ids, **_):
    return [sum(a == b for a, b in pairwise(ids)) / len(ids) for ids in completion_ids]


def one_word(completion_ids, prompts, finish_reasons, **_):
    """Word 1 is right for two prompts of three, word 2 for the others."""
    pairs = zip(completion_ids, prompts, strict=True)
    return [float(ids[0] == 1 + (int(prompt) % 3 == 0)) for ids, prompt in pairs]


def outlier(completion_ids, prompts, **_):
    short = [n for n, ids in enumerate(completion_ids) if len(ids) == 2]
    return [1000.0 if short and n == short[0] else 0.01 * (ids[0] % 2) for n, ids in enumerate(completion_ids)]


class OneRow(Table):
    """A model that does not read its prompt."""

    def rows(self):
        return self.table[torch.arange(len(self.table)).clamp(max=WORDS)]


def with_errors(policy, config, step):
    groups = sample(policy, config, step)
    broken = [replace(one, finish_reason=FinishReason.ERROR) for one in groups[0].completions[:2]]
    return [replace(groups[0], completions=(*broken, *groups[0].completions[2:])), *groups[1:]]


def one_text(policy, config, step):
    groups = sample(policy, config, step)
    return [replace(group, completions=(group.completions[0],) * len(group.completions)) for group in groups]


def hotter(policy, config, step):
    return sample(policy, config, step, temperature=1.6)


def zero_advantages(_, batch):
    return replace(batch, advantages_N=torch.zeros_like(batch.advantages_N))


def nan_advantages(context, batch):
    return replace(batch, advantages_N=batch.advantages_N * torch.nan) if context.policy.version % 3 == 1 else batch


def recomputed_old(context, batch):
    part = part_of(batch, range(batch.num_sequences))
    return replace(batch, old_logps_N=policy_logps(context, context.policy, batch, part))


def peaked(by):
    """A table in which each token has one likely successor."""
    table = Table(end=-1.0)
    for token in range(WORDS + PROMPTS):
        table.table.data[token, 1 + token % (WORDS - 1)] = by
    return table


FIXED = {"min_completion_length": 20, "max_completion_length": 20}
ILL = {
    "sampling_errors": lambda: train(sampler=with_errors, max_steps=6),
    "nonfinite": lambda: train(each_update=nan_advantages, max_steps=6),
    "failing_rewards": lambda: train(some_fail, max_steps=6),
    "unscored": lambda: train(constant(None), max_steps=6),
    "all_right": lambda: train(constant(1.0), max_steps=12),
    "identical": lambda: train(sampler=one_text, max_steps=12),
    "all_wrong": lambda: train(constant(0.0), max_steps=12),
    "dead_groups": lambda: train(by_prompt, max_steps=12),
    "zero_gradient": lambda: train(each_update=zero_advantages, max_steps=6),
    "sampler_mismatch": lambda: train(sampler=hotter, table=Table(end=2.0, known=3.0), max_steps=6),
    "stale_logps": lambda: train(each_update=recomputed_old, num_iterations=2, max_steps=6),
    "learning_rate_high": lambda: train(learning_rate=0.6, max_steps=8),
    "learning_rate_low": lambda: train(learning_rate=1e-7, max_steps=12),
    "kl_fast": lambda: train(learning_rate=0.4, beta=1e-3, max_steps=12),
    "clipped": lambda: train(learning_rate=0.1, num_iterations=6, epsilon=0.01, max_steps=8),
    "few_tokens": lambda: train(outlier, scale="none", max_steps=8),
    "entropy_collapse": lambda: train(one_word, table=OneRow(), learning_rate=0.25, max_steps=30),
    "entropy_explosion": lambda: train(
        noise(), table=peaked(5.0), **FIXED, entropy={"coefficient": 1.0}, learning_rate=0.1, max_steps=18
    ),
    "end_token": lambda: train(text_hash, table=Table(end=-20.0), max_steps=6),
    "truncation": lambda: train(text_hash, table=Table(end=-0.3), max_steps=8),
    "length_drift": lambda: train(longer, learning_rate=0.07, max_completion_length=60, max_steps=22),
    "duplicates": lambda: train(noise(), table=peaked(8.0), **FIXED, max_steps=8),
    "repetition": lambda: train(repeating, table=Table(end=-20.0), **FIXED, learning_rate=0.3, max_steps=24),
    "drowned_reward": lambda: train([right, length_penalty], max_steps=20),
}


def falling(evaluations):
    """Thirty steps of a rising reward, with evaluations of mean and half the width of its interval, by step."""
    lines = [{"step": 0, **evaluated(*evaluations[0])}]
    for step in range(1, 31):
        line = {"step": step, "updates": 1, "updates_skipped": 0, "groups/sampled": 8, "groups/dead_share": 0.2}
        line["reward/mean"] = 0.3 + 0.015 * step
        lines.append(line | (evaluated(*evaluations[step]) if step in evaluations else {}))
    return lines, GRPOConfig()


def evaluated(mean, half):
    return {f"eval/reward/{end}": value for end, value in (("mean", mean), ("low", mean - half), ("high", mean + half))}


@pytest.mark.parametrize("name", ILL)
def test_an_illness_is_named_and_no_other(name):
    assert set(named(ILL[name]())) == {name}


def test_an_evaluation_that_falls_while_the_reward_rises():
    """By numbers: a run would have to evaluate a few hundred prompts before two intervals part."""
    low, best = (0.28, 0.05), (0.42, 0.05)
    assert named(falling({0: (0.30, 0.05), 15: best, 28: low, 30: low})) == {"evaluation_falls": "alarm"}
    assert named(falling({0: (0.30, 0.05), 15: best, 30: low})) == {}  # once can be chance
    assert named(falling({0: (0.30, 0.05), 15: best, 28: (0.35, 0.05), 30: (0.35, 0.05)})) == {}  # within intervals
    assert named(falling({0: (0.30, 0.05), 5: best, 15: low, 20: low})).keys() == {"evaluation_falls"}
    (recovered,) = findings_of(falling({0: (0.3, 0.05), 10: best, 15: low, 20: low, 25: (0.4, 0.05)}))
    assert (recovered.begin, recovered.end) == (20, 25)


def test_an_evaluation_that_falls_while_the_reward_stays_is_not_called_a_game():
    lines, config = falling({0: (0.30, 0.05), 15: (0.42, 0.05), 28: (0.28, 0.05), 30: (0.28, 0.05)})
    flat = [line | {"reward/mean": 0.5 + 0.01 * (n % 3)} for n, line in enumerate(lines)]
    (finding,) = [one for one in findings_of((flat, config)) if one.check == "evaluation_falls"]
    assert (finding.level, "games" in finding.found) == (Level.WARNING, False)


def test_a_rare_reward_is_not_a_drowned_one():
    lines, config = train([rarely, length_in_words], max_steps=20, num_generations=8)
    spreads = [lines[-1][f"rewards/{name}/within_group_std"] for name in ("rarely", "length_in_words")]
    assert spreads[0] < 0.1 * spreads[1]
    assert named((lines, config)) == {}


def test_every_check_has_an_illness():
    assert {*ILL, "evaluation_falls", "reward_falls", "value_zero"} == set(NAMES)


def test_a_healthy_run_is_only_told_why_its_value_is_zero():
    findings = findings_of(run := train())
    assert [(one.check, one.level, one.step) for one in findings] == [("value_zero", Level.NOTE, 1)]
    assert "normal" in findings[0].found
    state, lines = Progress(), run[0]
    assert [text for line in lines for text in state.add(line)] == []  # nothing is said of it while the run goes on


@pytest.mark.parametrize(("preset", "several"), [("dapo", {}), ("gspo", {"num_iterations": 2, "minibatches": 3})])
def test_healthy_runs_are_not_called_ill(preset, several):
    assert named(train(preset=preset, max_steps=12, **several)) == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    "several", [{"minibatches": 1}, {"num_iterations": 2, "minibatches": 3}], ids=["one_update", "six_updates"]
)
@pytest.mark.parametrize("preset", PRESETS)
def test_a_healthy_run_of_every_preset_is_not_called_ill(preset, several):
    run = train(preset=preset, num_generations=16 if preset == "gfpo" else 8, **several)
    assert named(run) == {}
    rewards = [line["reward/mean"] for line in run[0]]
    assert sum(rewards[-5:]) > 1.5 * sum(rewards[:5])  # it is healthy: it learns


def test_a_run_that_has_learned_its_prompts_is_told_so_and_is_not_ill():
    findings = findings_of(train(learning_rate=0.3, max_steps=30, table=Table(end=3.0)))
    assert {one.check for one in findings} == {"value_zero", "all_right"}
    assert {one.level for one in findings} == {Level.NOTE}
