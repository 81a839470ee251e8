"""Which run is better: numbers by hand, and words that claim no more than the data."""

import itertools
import json
import math
import random
from contextlib import suppress
from dataclasses import asdict, replace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from cohort.errors import CohortError
from cohort.report.plot import Look, figure, save
from cohort.report.series import Group, curve, grouped, over_seeds
from cohort.report.verdict import common_metrics, conclusions, evaluated_at, per_prompt, value_at, verdict, verdicts
from cohort.runs.reader import AXES, Run
from tests.report.made import history, rewards

KEY = "eval/reward/mean"


def group(label, runs):
    return Group(label, tuple(runs), {})


def one_run(label, lines, **parts):
    return group(label, [history(lines, **parts)])


def evaluated(values, **more):
    """Steps with an evaluation after each, ``values`` their rewards."""
    return [line | {KEY: value} for line, value in zip(rewards(values, **more), values, strict=True)]


def ended(label, values, **more):
    """A group of runs, one per seed, that end at these evaluation rewards after ten steps."""
    return group(label, [history(evaluated([0.0] * 9 + [one], **more), seed=seed) for seed, one in enumerate(values)])


def test_paired_over_three_seeds():
    found = verdict(ended("A", [0.5, 0.6, 0.7]), ended("B", [0.55, 0.64, 0.73]), "updates")
    assert (found.metric, found.budget, found.over, found.count, found.paired) == (KEY, 10, "seeds", 3, True)
    half = 4.302653 * 0.01 / math.sqrt(3)  # differences 0.05, 0.04, 0.03
    assert [found.difference, found.low, found.high] == pytest.approx([0.04, 0.04 - half, 0.04 + half])
    assert found.p_value == pytest.approx(0.0202, abs=1e-4)  # t = 6.93 with 2 degrees of freedom
    assert found.better == "B"
    assert found.text == (
        "B is better than A by 0.04 evaluation reward (95%: 0.0152 to 0.0648) at equal optimizer updates (10); "
        "3 paired seeds"
    )
    assert found.caveat == ""


def test_the_better_one_comes_first_in_words():
    found = verdict(ended("A", [0.55, 0.64, 0.73]), ended("B", [0.5, 0.6, 0.7]), "updates")
    assert (found.difference, found.better) == (pytest.approx(-0.04), "A")
    assert found.text.startswith("A is better than B by 0.04 evaluation reward (95%: 0.0152 to 0.0648)")
    found = verdict(ended("A", [0.5, 0.6]), ended("B", [0.55, 0.68]), "updates")
    assert (found.better, found.caveat) == (
        None,
        "With two seeds only a very large difference can be shown: add seeds.",
    )
    assert found.text.startswith("no difference can be claimed: B minus A is 0.065 evaluation reward (95%: -0.126 to")


def test_other_seeds_are_not_paired():
    a, b = ended("A", [0.5, 0.6, 0.7]), ended("B", [0.9, 1.0])
    b = group("B", [history(run.rows, seed=seed) for seed, run in enumerate(b.runs, 7)])
    found = verdict(a, b, "updates")
    # Welch: variances of the means 0.01 / 3 and 0.005 / 2, degrees of freedom 2.88, rounded down.
    assert found.low == pytest.approx(0.35 - 4.302653 * math.sqrt(0.01 / 3 + 0.005 / 2))
    assert (found.paired, found.better) == (False, "B")
    assert found.text.endswith("3 and 2 seeds, not paired")


def test_equal_tokens_are_not_equal_updates():
    a = group("A", [history(evaluated([n / 10 for n in range(1, 11)], tokens=100), seed=n) for n in range(2)])
    b = group("B", [history(evaluated([n / 8 for n in range(1, 11)], tokens=200), seed=n) for n in range(2)])
    at_updates, at_tokens, at_seconds = verdicts([a, b])
    assert (at_updates.budget, at_tokens.budget, at_seconds.budget) == (10, 1000, 20)
    assert at_updates.difference == pytest.approx(10 / 8 - 1)
    assert at_tokens.difference == pytest.approx(5 / 8 - 1)  # B's evaluation after step 5
    assert at_tokens.low is None
    assert at_tokens.better is None  # equal differences of two seeds have no spread
    assert conclusions([at_updates, at_tokens]) == [
        "no difference between A and B can be claimed at equal updates and tokens"
    ]
    better = [replace(one, better="B") for one in (at_updates, at_seconds)]
    rest = [replace(at_tokens, better="A", over="prompts"), replace(at_tokens, a="C", difference=None)]
    assert conclusions([*better, *rest]) == [
        "B is better than A at equal updates and seconds; A is better than B at equal tokens (one run each)",
        "C and B cannot be compared at equal tokens",
    ]


def test_an_evaluation_far_from_the_budget_does_not_count():
    """With evaluations before and after training only, that of the one that spent less would be compared with none."""

    def run(tokens):
        lines = rewards([0.1 * n for n in range(10)], tokens=tokens)
        return [{"step": 0, KEY: 0.0}, *({"step": n, **line} for n, line in enumerate(lines, 1))]

    a, b = run(100), run(150)
    a[-1] |= {KEY: 0.7}
    b[-1] |= {KEY: 0.9}
    pair = one_run("A", a), one_run("B", b)
    assert verdict(*pair, "updates").metric == KEY
    found = verdict(*pair, "tokens")
    assert (found.metric, found.over, found.budget) == ("reward/mean", "blocks of steps", 1000)
    assert evaluated_at(pair[1].runs[0], KEY, "tokens", 1000) is None
    assert value_at(pair[1].runs[0], "reward/mean", "tokens", 1000) == pytest.approx(0.5)  # step 6, at 900


def test_an_earlier_budget_at_which_all_were_evaluated():
    """A at 8, 16, ... 40 seconds and B at 18, 36 and 54: both were evaluated near none of 40, 36 and 32."""
    a, b = (rewards([0.0] * count, seconds=seconds) for count, seconds in ((15, 8 / 3), (9, 6.0)))
    for lines in (a, b):
        for n in range(3, len(lines) + 1, 3):
            lines[n - 1][KEY] = n / 100
    assert verdict(one_run("A", a), one_run("B", b), "seconds").metric == "reward/mean"
    a[12][KEY] = 0.5  # at 34.7 seconds, 3.7% before B's
    found = verdict(one_run("A", a), one_run("B", b), "seconds")
    assert (found.metric, found.budget, found.difference) == (KEY, 36, pytest.approx(0.06 - 0.5))


@pytest.fixture
def tables(tmp_path):
    """Two runs with stored evaluations of these rewards per prompt, two completions each."""

    def make(a, b, **columns):
        groups = []
        for label, values in (("A", a), ("B", b)):
            file = tmp_path / f"{label}.parquet"
            rows = [row for row in range(len(values)) for _ in range(2)]
            table = {"row": rows, "prompt": [f"prompt {row}" for row in rows], **columns}
            table["reward"] = pyarrow.array([values[row] for row in rows], pyarrow.float64())
            pyarrow.parquet.write_table(pyarrow.table(table), file)
            mean = sum(value or 0 for value in values) / len(values)
            lines = evaluated([0.0, mean])
            lines[-1] |= {"eval/reward/low": mean - 0.03, "eval/reward/high": mean + 0.03}
            groups.append(group(label, [history(lines, evaluations={(2, ""): file})]))
        return groups

    return make


def test_one_run_each_is_paired_over_prompts(tables):
    found = verdict(*tables([0.5] * 12, [0.5 + 0.01 * n for n in range(1, 13)]), "updates")
    assert (found.over, found.count, found.paired, found.better) == ("prompts", 12, True, "B")
    assert found.difference == pytest.approx(0.065)
    assert found.p_value == pytest.approx(2 / 2**12)
    assert "; one run each, paired over 12 evaluation prompts" in found.text
    assert found.caveat == "One run each: another seed may turn out otherwise."
    assert json.loads(json.dumps(asdict(found)))["better"] == "B"


def test_equal_differences_have_no_interval_and_the_test_decides(tables):
    found = verdict(*tables([0.25] * 12, [0.75] * 12), "updates")
    assert (found.difference, found.low, found.better) == (0.5, None, "B")


def test_three_prompts_show_nothing(tables):
    found = verdict(*tables([0.0] * 3, [0.1, 0.2, 0.3]), "updates")
    assert found.low > 0
    assert found.p_value == 0.25
    assert found.better is None
    assert found.text.startswith("no difference can be claimed: B minus A is 0.2 ")


def test_unscored_prompts_and_prompts_of_one_side_are_left_out(tables):
    a, b = tables([0.5, None, 0.5, 0.5], [0.6, 0.9, 0.8])
    found = verdict(a, b, "updates")
    assert found.difference == pytest.approx(0.2)
    values = per_prompt(a.runs[0], KEY, 1)
    assert values[0, "prompt 0"] == 0.5
    assert math.isnan(values[1, "prompt 1"])


def test_without_tables_the_logged_intervals_decide(tables):
    a, b = tables([0.5] * 4, [0.6] * 4)
    b.runs[0].evaluations[2, ""].write_bytes(b"PAR1 and nothing")
    found = verdict(a, b, "updates")
    half = math.sqrt(2) * 0.03
    assert [found.low, found.high] == pytest.approx([0.1 - half, 0.1 + half])
    assert (found.paired, found.better, found.p_value) == (False, "B", None)
    lines = [{key: value for key, value in row.items() if key != "eval/reward/low"} for row in b.runs[0].rows]
    found = verdict(a, one_run("B", lines), "updates")
    assert (found.difference, found.low, found.better) == (pytest.approx(0.1), None, None)
    assert "(no interval)" in found.text


def test_training_rewards_of_one_run_each_make_no_model_better():
    noise = [0.0, 0.1] * 50
    a, b = (rewards([0.5 + shift + one for one in noise]) for shift in (0, 0.2))
    b[85]["reward/mean"] += 0.2
    found = verdict(one_run("A", a), one_run("B", b), "updates")
    # The last 20 steps in 10 blocks of 2: nine differ by 0.2 and one by 0.3.
    half = 2.262157 * math.sqrt(0.1 * 0.1 * 0.9 / 9) / math.sqrt(10)
    assert [found.difference, found.low, found.high] == pytest.approx([0.21, 0.21 - half, 0.21 + half])
    assert (found.over, found.count, found.better) == ("blocks of steps", 10, None)
    assert found.text.startswith("B had more training reward than A by 0.21 (95%: ")
    assert "another seed may turn out otherwise" in found.caveat


def test_few_steps_have_no_interval():
    found = verdict(one_run("A", rewards([0.0] * 5)), one_run("B", rewards([0.5] * 5)), "updates")
    assert (found.difference, found.low, found.better) == (0.5, None, None)
    assert found.text.startswith("no difference can be claimed: B minus A is 0.5 training reward (no interval)")


def test_rewards_that_mean_different_things_are_not_compared():
    lines = [line | {"rewards/math": 0.5, "rewards/math/within_group_std": 0.1} for line in rewards([1.0] * 5)]
    runs = [
        history(lines, {"run": {"seed": 0}, "reward": {"functions": functions}})
        for functions in (["math"], ["math", "format"], ["math"])
    ]
    a, b, c = (group(label, [run]) for label, run in zip("ABC", runs, strict=True))
    assert common_metrics(a, c) == ["reward/mean"]
    assert common_metrics(a, b) == ["rewards/math"]
    other = group("D", [history(rewards([1.0]), {"reward": {"functions": ["other"]}})])
    found = verdict(a, other, "updates")
    assert (found.difference, found.better) == (None, None)
    assert found.text == (
        "A and D cannot be compared at equal optimizer updates: their reward functions or weights differ, and they "
        "have no single function in common"
    )


def test_a_metric_that_is_asked_for():
    a, b = (
        one_run(x, [line | {"entropy": value} for line in rewards([1.0] * 5)]) for x, value in (("A", 1.0), ("B", 0.5))
    )
    assert verdict(a, b, "tokens", metric="entropy").difference == -0.5
    assert verdict(a, b, "tokens", metric="none").text.endswith("none has no values there")
    assert verdict(one_run("A", [{"reward/mean": 1.0}]), one_run("B", []), "tokens").text == (
        "A and B cannot be compared at equal drawn tokens: the metrics of A and B do not have them"
    )


def test_seconds_on_other_machines_carry_a_warning():
    a, b = (one_run(x, rewards([1.0] * 5), starts=[{"facts": {"machine": x, "threads": "2"}}]) for x in "AB")
    assert verdict(a, b, "seconds").caveat.startswith("The runs were made on different machines (A, 2 threads; B, 2")
    assert "machines" not in verdict(a, b, "tokens").caveat


def test_all_pairs_of_a_few_groups_and_all_against_the_first_of_many():
    def made(count):
        settings = [{"run": {"seed": 0}, "optim": {"learning_rate": n}} for n in range(count)]
        return grouped([history(rewards([1.0] * 5), one) for one in settings])

    assert len(verdicts(made(3))) == 9
    assert len(verdicts(made(7))) == 18
    assert verdicts(made(1)) == []


def test_hostile_numbers(tmp_path):
    """Whatever numbers a stranger's metrics hold: values or Cohort's errors, and no warnings."""
    rng = random.Random(0)
    numbers = [0, -1, 3, 0.5, -0.0, 1e-320, 9e99, -9e99, 2**53, 1e17]
    numbers += ["NaN", "1e999", "null", '"x"', "true", "[1]", "10" * 70]
    names = ["reward/mean", "reward/std", "reward/within_group_std", "groups/sampled", "seconds/step", "updates"]
    names += ["tokens_per_second", "updates_skipped", "time", KEY, "eval/reward/low", "eval/reward/high"]
    for trial in range(12):
        runs = []
        for side in "ab":
            lines = []
            for step in sorted(rng.sample(range(2 ** rng.choice([3, 6, 52])), rng.randrange(1, 8))):
                pairs = ", ".join(f'"{name}": {rng.choice(numbers)}' for name in names if rng.random() < 0.9)
                lines.append(f'{{"step": {step}, {pairs}}}\n')
            folder = tmp_path / f"{side}{trial}"
            folder.mkdir()
            (folder / "metrics.jsonl").write_text("".join(lines))
            runs.append(Run.read(folder))
        groups = grouped(runs)
        json.dumps([asdict(one) for one in verdicts(groups)], allow_nan=False)
        for key, axis in itertools.product(["reward/mean", KEY], AXES):
            drawn = [curve(run, key, axis, window) for run in runs for window in (1, 3)]
            assert all(np.isfinite([*one.x, *one.line]).all() for one in [*drawn, over_seeds(drawn, "all")])
            if trial == 0 and axis == "tokens":
                with suppress(CohortError):
                    save(figure(runs, [key], Look(axis=axis, separate=True)), tmp_path / "a.png")


def sides(a, b, lines=rewards):
    """Two groups of three runs with these settings; the second has 0.6 more reward."""

    def made(settings, shift, seed):
        values = [0.1 + shift + 0.01 * seed * (1 + shift)] * 10
        return history(lines(values), {"run": {"seed": seed}} | settings)

    return [group(x, [made(s, shift, seed) for seed in range(3)]) for x, s, shift in (("A", a, 0.0), ("B", b, 0.6))]


def test_evaluations_on_different_prompts_or_with_other_sampling_are_not_compared():
    pair = sides({"data": {"eval": "hard.jsonl"}}, {"data": {"eval": "easy.jsonl"}}, lines=evaluated)
    found = verdict(*pair, "updates", metric=KEY)
    assert (found.difference, found.better) == (None, None)
    assert found.text.endswith("optimizer updates: evaluated on different prompts (data.eval)")
    found = verdict(*pair, "updates")  # the training, which was the same, decides
    assert (found.metric, found.better) == ("reward/mean", "B")
    assert found.caveat == "The evaluations cannot be compared: evaluated on different prompts (data.eval)."
    cold, same = {"rollout": {"temperature": 0.3}}, {"eval": {"temperature_eval": 1.0}}
    assert "different sampling (temperature)" in verdict(*sides(cold, {}, lines=evaluated), "updates", metric=KEY).text
    assert verdict(*sides(cold | same, {}, lines=evaluated), "updates").better == "B"  # both at 1.0
    sets = [{"data": {"eval": {"x": "a", **more}}} for more in ({}, {"y": "b"})]
    assert verdict(*sides(*sets, lines=lambda v: [{"eval/x/reward/mean": one} | r for one, r in zip(v, rewards(v), strict=True)]),
        "updates").metric == "eval/x/reward/mean"  # fmt: skip


def test_training_rewards_under_other_settings_make_no_model_better():
    pair = sides({"rollout": {"temperature": 1.0}}, {"rollout": {"temperature": 0.3}})
    found = verdict(*pair, "updates")
    assert (found.over, found.better) == ("seeds", None)
    assert found.text.startswith("B had more training reward than A by 0.6")
    assert "different settings (rollout.temperature): more reward is no better model." in found.caveat
    assert conclusions([found]) == ["neither of A and B can be called better at equal updates"]
    assert verdict(*sides({}, {"rollout": {"lag": 1}}), "updates").better == "B"


def test_stored_prompts_that_share_nothing_refuse(tables, tmp_path):
    a, b = tables([0.5] * 12, [0.9] * 12)
    table = pyarrow.parquet.read_table(tmp_path / "B.parquet")
    other = [f"other {text}" for text in table["prompt"].to_pylist()]
    pyarrow.parquet.write_table(table.set_column(1, "prompt", [other]), tmp_path / "B.parquet")
    assert verdict(a, b, "updates", metric=KEY).text.endswith("evaluated on different prompts")
    assert "not paired" not in verdict(a, b, "updates").text
